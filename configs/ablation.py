"""Small enough for dozens of runs: the loss-weight ablation's."""

from train.experiment import Experiment


def ablation() -> Experiment:
    """Four hybrid layers on the standard library's sources, measured at three depths at the end.

    Run: `python scripts/ablate_loss_weight.py --config ablation --weights 0,0.1,0.3 --seeds 3 --workdir runs/weights`.
    """
    return Experiment(
        steps=500,
        batch_size=4,
        sequence_length=256,
        remat="none",  # small enough to keep all
        learning_rate=4e-3,
        warmup_steps=50,
        log_every=10,
        checkpoint_every=250,
        keep_checkpoints=1,
        eval_every=0,
        measured_depths=3,
        acceptance_every=500,
        acceptance_prompts=32,
        acceptance_new_tokens=64,
        beta2=0.98,
        mtp_weights=(0.3, 0.1),
        mtp_switch_tokens=(256_000,),
        vocab_size=1024,
        width=128,
        mlp_width=320,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        rotary_dim=16,
        delta_v_heads=2,
        delta_k_heads=2,
        delta_head_k_dim=32,
        delta_head_v_dim=64,
        stdlib_files=("*", "!encodings/*", "!pydoc_data/*", "!_sysconfigdata*", "!config-*"),
        held_out=("csv.py", "heapq.py", "json/*", "shelve.py", "textwrap.py", "queue.py"),
    )
