"""Fine-tuning a published checkpoint, trunk and head together."""

from train.experiment import Experiment


def finetune() -> Experiment:
    """A few hundred small steps, so that the trunk learns the new text and the head follows it.

    Run: `python scripts/train.py --config finetune --init DIR --workdir runs/mine --data TEXTS`; with
    `--set lora_rank=16 learning_rate=2e-4` only adapters are trained.
    """
    return Experiment(
        steps=300,
        batch_size=8,
        sequence_length=512,
        learning_rate=2e-5,
        warmup_steps=20,
        final_learning_rate=0.1,
        # Weights that were trained for long have found their size.
        weight_decay=0.0,
        checkpoint_every=100,
        eval_every=100,
        mtp_weights=(0.3,),
        mtp_switch_tokens=(),
    )
