"""A head fitted to a trunk that moved without it."""

from train.experiment import Experiment


def realign() -> Experiment:
    """The head alone, towards what this trunk itself says at each place; the trunk is run forward only.

    Run: `python scripts/train.py --config realign --init DIR --workdir runs/head --data TEXTS`; with
    `--set head_loss=ce` towards the text's own next tokens.
    """
    return Experiment(
        steps=300,
        batch_size=8,
        sequence_length=512,
        gradient_mode="head_only",
        head_loss="kl",
        learning_rate=1e-4,
        warmup_steps=20,
        final_learning_rate=0.1,
        weight_decay=0.0,
        checkpoint_every=100,
        eval_every=100,
        mtp_weights=(1.0,),
        mtp_switch_tokens=(),
    )
