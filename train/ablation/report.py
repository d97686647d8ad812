"""A grid in text: what it would run, and how its runs ended."""

from collections.abc import Container, Sequence
from typing import Any

from train.ablation.cores import num_cores
from train.ablation.estimate import all_seconds, duration, measured_speed, run_seconds, side_by_side, speed_of
from train.ablation.grid import Run
from train.ablation.records import Record
from train.experiment import shown

_FIGURES = {
    "eval_main_loss": "held-out main loss",
    "eval_mtp_agreement": "agreement",
    "acceptance": "acceptance",
    "tokens_per_round": "tokens a round",
}


def plan(runs: Sequence[Run], records: Sequence[Record], done: Container[str], processes: int) -> dict[str, Any]:
    """The runs with what sets them apart, their tokens and the seconds each will take: 0 of those that are done.

    Args:
      records: all of the folder, from which the speed is known.
    """
    speed = speed_of(records, num_cores()) or measured_speed()
    num_left = sum(run.name not in done for run in runs)
    processes = side_by_side(num_left, processes)
    planned = [
        {
            "name": run.name,
            "settings": {
                "mtp_weights": list(run.experiment.mtp_weights),
                "mtp_switch_tokens": list(run.experiment.mtp_switch_tokens),
                **run.varied,
                "seed": run.experiment.seed,
            },
            "tokens": run.tokens,
            "done": run.name in done,
            "seconds": 0.0 if run.name in done else run_seconds(run, speed, processes),
        }
        for run in runs
    ]
    left = all_seconds((run["seconds"] for run in planned if not run["done"]), processes)
    at_a_time = f", {processes} at a time" if processes > 1 else ""
    summary = (
        f"{len(runs)} run{'s' * (len(runs) != 1)}, {num_left} to do{at_a_time}: about {duration(left)} in all, "
        f"{duration(speed.overhead)} of each besides its steps; estimated from {speed.source}"
    )
    return {"runs": planned, "seconds": left, "estimated_from": speed.source, "summary": summary}


def plan_lines(planned: dict[str, Any]) -> list[str]:
    """A line a run."""
    rows = []
    for run in planned["runs"]:
        settings = {name: shown(tuple(v) if isinstance(v, list) else v) for name, v in run["settings"].items()}
        if not run["settings"]["mtp_switch_tokens"]:
            del settings["mtp_switch_tokens"]
        words = " ".join(f"{name}={value}" for name, value in settings.items())
        time = "done" if run["done"] else duration(run["seconds"])
        rows.append([run["name"], words, f"{run['tokens']:,} tokens", time])
    return _aligned(rows)


def table_lines(records: Sequence[Record]) -> list[str]:
    """The figures that runs are compared by, a line a run."""
    rows = [["run", *_FIGURES.values()]]
    for record in records:
        values = [record["figures"].get(key) for key in _FIGURES]
        rows.append([record["name"], *("-" if value is None else f"{value:.3f}" for value in values)])
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
