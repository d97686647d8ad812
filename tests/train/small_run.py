"""Settings of a run small enough to be trained several times in a test, and its rows."""

import json

SETTINGS = (
    "steps=6",
    "batch_size=2",
    "sequence_length=32",
    "log_every=1",
    "checkpoint_every=2",
    "keep_checkpoints=0",
    "warmup_steps=2",
    "mtp_weights=0.3,0.1",
    "mtp_switch_tokens=128",
    "held_out=b.txt",
    "vocab_size=320",
    "width=16",
    "mlp_width=24",
    "num_layers=2",
    "full_attention_interval=2",
    "num_heads=2",
    "num_kv_heads=1",
    "head_dim=8",
    "rotary_dim=4",
    "delta_v_heads=2",
    "delta_k_heads=1",
    "delta_head_k_dim=8",
    "delta_head_v_dim=8",
)


def read_rows(workdir):
    """The rows of metrics.jsonl without the one figure that differs from run to run."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row.pop("tokens_per_second") > 0
    return rows
