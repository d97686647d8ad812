"""The shipped model's run."""

from train.experiment import Experiment


def demo() -> Experiment:
    """Four hybrid layers on the standard library's sources.

    Run: `python scripts/train.py --config demo --workdir runs/demo`.

    Expect (4,682,892 parameters, Python 3.11.7's library, commit 3250db3): 12.3 M tokens, four epochs, in 58 minutes on
    2 cores that other work shared at first (about 4,500 tokens/s alone). Held-out modules, 1,000 steps apart: main
    loss 3.23, 2.73, 2.55, .. and 2.353 at the end, agreement 0.58, 0.67, 0.68, .. and 0.702, accuracy 0.503.
    """
    return Experiment(
        steps=6000,
        batch_size=4,
        sequence_length=512,
        remat="none",  # small enough to keep all
        learning_rate=3e-3,
        warmup_steps=150,
        log_every=10,
        checkpoint_every=300,
        eval_every=1000,
        beta2=0.98,
        mtp_weights=(0.5, 0.3),
        mtp_switch_tokens=(8_000_000,),
        width=256,
        mlp_width=704,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        rotary_dim=16,
        # Few wide heads: on a CPU the pairs of a chunk cost by the head.
        delta_v_heads=2,
        delta_k_heads=2,
        delta_head_k_dim=64,
        delta_head_v_dim=128,
        stdlib_files=("*", "!encodings/*", "!pydoc_data/*", "!_sysconfigdata*", "!config-*"),
        held_out=("argparse.py", "csv.py", "heapq.py", "json/*", "shelve.py", "tarfile.py", "textwrap.py", "queue.py"),
    )
