"""Trains a model with its multi-token-prediction head, or continues a run that was stopped."""

import argparse
import os
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

On two machines, or twice on one, with 0 and 1 for I:
  python scripts/train.py --config demo --workdir runs/two --set mesh=fsdp:2 acceptance_every=0 \\
    --coordinator HOST:1234 --num-processes 2 --process-id I

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
    group = parser.add_argument_group("several processes", "the same command in each but for --process-id")
    group.add_argument(
        "--coordinator", type=_address, metavar="HOST:PORT", help="where the first process listens for the others"
    )
    group.add_argument("--num-processes", type=_cli.positive, metavar="N", help="how many there are")
    group.add_argument("--process-id", type=_cli.count, metavar="I", help="which of them this is, from 0")
    args = parser.parse_args(argv)
    _check_processes(args)
    experiment = _cli.experiment_from(presets[args.config], args)

    # here and not above: `--help` and mistakes in flags should not wait for JAX
    from train.allocator import keep_freed_memory
    from train.loop import train
    from train.processes import is_first, join
    from train.progress import Progress

    keep_freed_memory()
    if args.coordinator:
        # Gloo, by which processes on CPUs exchange what they have, writes on stdout.
        results = os.dup(1)
        os.dup2(2, 1)
        sys.stdout = os.fdopen(results, "w")
        join(args.coordinator, args.num_processes, args.process_id, experiment)
    try:
        row = train(experiment, args.workdir, Progress(quiet=not is_first()))
    except (MemoryError, RuntimeError) as error:
        if not _cli.is_out_of_memory(error):
            raise
        raise UserError(
            f"out of memory with batch_size {experiment.batch_size}, sequence_length {experiment.sequence_length} "
            f"({error}): raise accumulate_steps or lower these, in another work directory; scripts/step_memory.py says "
            "what a step takes"
        ) from error
    if not is_first():
        return
    if args.json:
        _cli.write_json(row, args.json)
    else:
        shown = ", ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
        )
        print(f"{args.workdir}: {shown}")
        print(f"next: python scripts/export_checkpoint.py --workdir {args.workdir} --out DIR", file=sys.stderr)


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got {text!r}")
    return text


def _check_processes(args: argparse.Namespace) -> None:
    given = {
        "--coordinator": args.coordinator,
        "--num-processes": args.num_processes,
        "--process-id": args.process_id,
    }
    missing = [flag for flag, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        raise UserError(f"{', '.join(given)} go together, missing: {', '.join(missing)}")
    if not missing and args.process_id >= args.num_processes:
        raise UserError(f"--process-id: expected less than --num-processes {args.num_processes}, got {args.process_id}")


if __name__ == "__main__":
    run(main)
