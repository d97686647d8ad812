"""The shipped model's run."""

from train.experiment import Experiment


def demo() -> Experiment:
    """Four hybrid layers on the standard library's sources.

    Run: `python scripts/train.py --config demo --workdir runs/demo`.
    """
    return Experiment(
        steps=7000,
        batch_size=8,
        sequence_length=256,
        learning_rate=3e-3,
        warmup_steps=100,
        log_every=10,
        checkpoint_every=500,
        eval_every=1000,
        mtp_weights=(0.3, 0.1),
        mtp_switch_tokens=(10_000_000,),
        stdlib_files=("*", "!encodings/*", "!pydoc_data/*", "!_sysconfigdata*", "!config-*"),
        held_out=("argparse.py", "csv.py", "heapq.py", "json/*", "shelve.py", "tarfile.py", "textwrap.py", "queue.py"),
    )
