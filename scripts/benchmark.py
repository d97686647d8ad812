"""Measure this code beside transformers, and beside the limit of the machine, in one run.

Without a checkpoint of your own, the shipped model is measured, or one of a released shape, which is made of random
weights, written in the published format and loaded back. What is compared takes turns; figures are medians. Examples:

  python scripts/benchmark.py decode
  python scripts/benchmark.py train --shape 0.8b --vs transformers --json train.json

`benchmark.py MODE --help` has a mode's flags. --vs needs torch and transformers: pip install -e '.[peer]'.
"""

import argparse
import importlib
import os
from collections.abc import Sequence

import _cli

from scripts.benchmarks import flags


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _cli.Parser(prog="benchmark.py", description=__doc__)
    flags.add_modes(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    flags.check(args)
    # What jax would take of a GPU at once, what runs beside it could not have. Read when jax finds its devices.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    _cli.enable_compilation_cache()
    # The chosen mode alone: these imports take seconds.
    subject = importlib.import_module("scripts.benchmarks.subject")
    mode = importlib.import_module("scripts.benchmarks." + args.mode.replace("-", "_"))
    if hasattr(mode, "check"):
        mode.check(args, subject.config_of(args))  # before gigabytes are written or read
    with subject.checkpoint_folder(args) as folder:
        record = mode.measure(args, folder)
    if args.json is not None:
        _cli.write_json(record, args.json)
    if args.json != "-":
        mode.show(record)


if __name__ == "__main__":
    _cli.run(main)
