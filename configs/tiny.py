"""Seconds: for tests and first tries."""

from train.experiment import Experiment


def tiny() -> Experiment:
    """Two layers on a few standard library modules, 24 steps of 512 tokens.

    Run: `python scripts/train.py --config tiny --workdir runs/tiny`.
    """
    return Experiment(
        steps=24,
        batch_size=4,
        sequence_length=128,
        remat="none",  # small enough to keep all
        learning_rate=5e-3,
        warmup_steps=4,
        log_every=1,
        checkpoint_every=8,
        mtp_weights=(0.3, 0.1),
        mtp_switch_tokens=(6144,),
        stdlib_files=("json/*", "collections/*", "textwrap.py", "heapq.py", "bisect.py"),
        held_out=("bisect.py",),
        vocab_size=384,
        width=32,
        mlp_width=64,
        num_layers=2,
        full_attention_interval=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        rotary_dim=4,
        delta_v_heads=2,
        delta_k_heads=1,
        delta_head_k_dim=16,
        delta_head_v_dim=16,
    )
