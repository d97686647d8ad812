"""Trains a model with its multi-token-prediction head, or continues a run that was stopped."""

import sys
from collections.abc import Sequence

import _cli
from _cli import run

from configs import PRESETS
from mtp_jax.errors import UserError
from train.experiment import setting_lines

EXAMPLES = """
examples:
  python scripts/train.py --config tiny --workdir runs/tiny
  python scripts/train.py --config demo --workdir runs/notes --data ~/notes README.md --set steps=2000 seed=1
  python scripts/train.py --config finetune --init models/demo --workdir runs/mine --data ~/notes
  python scripts/train.py --config demo --workdir runs/chat --data 'chats/*.jsonl.gz' prose/ --set data_weights=3,1

The same command on a work directory that has checkpoints resumes there. Other values are then accepted for steps
(upwards), log_every, checkpoint_every and mesh only.

settings for --set:
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, trains, and reports the last row of metrics."""
    presets = {name: make() for name, make in PRESETS.items()}
    parser = _cli.Parser(prog="train.py", description=__doc__, epilog=EXAMPLES + "\n".join(setting_lines(presets)))
    parser.add_argument(
        "--workdir", required=True, type=_cli.path, metavar="DIR", help="the run's folder; made if need be"
    )
    _cli.add_experiment_flags(parser, presets, "change settings, listed below")
    _cli.add_json_flag(parser)
    args = parser.parse_args(argv)
    experiment = _cli.experiment_from(presets[args.config], args)

    from train.loop import train  # here and not above: `--help` and mistakes in flags should not wait for JAX
    from train.progress import Progress

    try:
        row = train(experiment, args.workdir, Progress())
    except (MemoryError, RuntimeError) as error:
        if not _cli.is_out_of_memory(error):
            raise
        raise UserError(
            f"out of memory with batch_size {experiment.batch_size}, sequence_length {experiment.sequence_length} "
            f"({error}): raise accumulate_steps or lower these, in another work directory; scripts/step_memory.py says "
            "what a step takes"
        ) from error
    if args.json:
        _cli.write_json(row, args.json)
    else:
        shown = ", ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
        )
        print(f"{args.workdir}: {shown}")
        print(f"next: python scripts/export_checkpoint.py --workdir {args.workdir} --out DIR", file=sys.stderr)


if __name__ == "__main__":
    run(main)
