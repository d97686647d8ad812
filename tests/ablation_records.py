"""Records of runs made by hand: what a grid leaves, small enough to work out by hand what it says."""

import json
from pathlib import Path
from typing import Any


def record(
    schedule: str, seed: int, main_loss: float | None, varied: dict[str, Any] | None = None, **figures: float | None
) -> dict[str, Any]:
    """A run of a schedule like "0.3" or "0.3-then-0.1", of 2,000 tokens; a unigram model has a loss of 6."""
    weights = [float(weight) for weight in schedule.split("-then-")]
    varied = varied or {}
    label = " ".join([schedule, *(f"{key}={value}" for key, value in varied.items())])
    switches = [1000 + 100 * index for index in range(len(weights) - 1)]
    loss = 5.0 if main_loss is None else main_loss
    rows = [
        {"step": 1, "tokens": 500, "main_loss": loss + 1, "mtp_loss": loss + 2, "mtp_weight": weights[0]},
        {"step": 4, "tokens": 2000, "main_loss": loss, "mtp_loss": loss + 1, "mtp_weight": weights[-1]},
    ]
    for row, more in zip(rows, (0.5, 0.0), strict=True):
        row |= {"eval_main_loss": loss + more, "eval_mtp_loss": loss + 1 + more}
    return {
        "name": f"{label.replace(' ', '-')}-seed{seed}",
        "label": label,
        "schedule": schedule,
        "mtp_weights": weights,
        "mtp_switch_tokens": switches,
        "varied": varied,
        "seed": seed,
        "settings": {"steps": 4, "head_loss": "ce", "depths": 1, "seed": seed, "mtp_weights": weights, **varied},
        "parameters": 1000,
        "steps": 4,
        "tokens": 2000,
        "seconds": 1.0,
        "commit": "0123456789abcdef",
        "versions": {"python": "3.11.0", "jax": "0.10.2"},
        "unigram_loss": 6.0,
        "figures": {"step": 4, "tokens": 2000, "eval_main_loss": main_loss, **figures},
        "rows": rows,
    }


def three_seeds(schedule: str, losses: tuple[float, float, float], rounds: float, **rest: Any) -> list[dict[str, Any]]:
    """Runs of seeds 0 to 2; all figures but the main loss follow from `rounds`, the tokens per round."""
    return [
        record(
            schedule,
            seed,
            loss,
            eval_mtp_loss=5.0 - rounds,
            eval_mtp_agreement=0.3 * rounds,
            acceptance=rounds - 1 + 0.01 * seed,
            acceptance_control=0.02,
            acceptance_identical=1.0,
            tokens_per_round=rounds + 0.01 * seed,
            **rest,
        )
        for seed, loss in enumerate(losses)
    ]


def small_ablation() -> list[dict[str, Any]]:
    """Four arms. Main losses less those of 0 are -0.1 three times (0.1), 0.1, 0.2, 0.3 (0.3) and 0, 0.1, -0.1."""
    return [
        *three_seeds("0.3-then-0.1", (3.0, 3.3, 3.3), 1.7),
        *three_seeds("0.3", (3.1, 3.4, 3.7), 1.8),
        *three_seeds("0.1", (2.9, 3.1, 3.3), 1.6),
        *three_seeds("0", (3.0, 3.2, 3.4), 1.0),
    ]


def write_records(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path
