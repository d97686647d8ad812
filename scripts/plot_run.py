"""Draw a run's curves from its metrics.jsonl: losses, agreement, acceptance, and where lambda changes.

Examples:
  python scripts/plot_run.py --workdir runs/mine --out runs/mine/curves.png
  python scripts/plot_run.py --workdir runs/joint runs/detached --out compared.svg
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import _cli

from mtp_jax.errors import UserError


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _cli.Parser(prog="plot_run.py", description=__doc__)
    parser.add_argument(
        "--workdir",
        required=True,
        nargs="+",
        type=_cli.path,
        metavar="DIR",
        help="folders of runs, or metrics.jsonl files; several are drawn beside each other",
    )
    parser.add_argument("--out", required=True, type=_picture, metavar="FILE", help="a .png or .svg file to write")
    return parser.parse_args(argv)


def _picture(text: str) -> Path:
    path = _cli.path(text)
    if path.suffix.lower() not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"expected a name that ends in .png or .svg, got {text!r}")
    return path


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)

    from train.curves import draw, read_metrics

    runs = {}
    for workdir in args.workdir:
        path = workdir / "metrics.jsonl" if workdir.is_dir() else workdir
        if str(workdir) in runs:
            raise UserError(f"--workdir {workdir}: named twice")
        runs[str(workdir)] = read_metrics(path)
    draw(runs, args.out)
    print(f"{args.out}: {sum(map(len, runs.values()))} rows", file=sys.stderr)


if __name__ == "__main__":
    _cli.run(main)
