"""Put the MTP head back on a checkpoint that lost it, without loading the model."""

import argparse
import sys
from collections.abc import Sequence

from _cli import Parser, path, run

DESCRIPTION = """\
Put a multi-token-prediction head on a trunk that has none.

Common fine-tuning tools drop the head when they load a checkpoint, and write one whose config still declares the
head. This takes the tensors from the base model, or from a file that export_checkpoint.py --head-only wrote, and
writes a folder in which every file of the trunk is as it was (weights as hard links where the file system has
them: copy before changing them in place), with one tensor file more.

The head still fits the trunk it was trained with; train.py --config realign fits it to this one.

Examples:
  python scripts/graft_head.py --trunk finetuned --head base --out whole
  python scripts/graft_head.py --trunk finetuned --head head.safetensors --out whole
"""


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    from mtp_jax.hf import graft_head  # after parsing: `--help` and mistakes in flags should not wait for jax

    names = graft_head(arguments.trunk, arguments.head, arguments.out)
    print(f"wrote {arguments.out}: the trunk of {arguments.trunk} and {len(names)} tensors of a head", file=sys.stderr)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=DESCRIPTION)
    parser.add_argument("--trunk", type=path, required=True, metavar="DIR", help="checkpoint without a head")
    parser.add_argument(
        "--head", type=path, required=True, metavar="PATH", help="checkpoint with one, or a .safetensors file"
    )
    parser.add_argument("--out", type=path, required=True, metavar="DIR", help="folder to write: new or empty")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run(main)
