"""Draw what an ablation has measured: figures against the loss weight as PNG and SVG, and tables as Markdown.

Examples:
  python scripts/plot_ablation.py runs/weights
  python scripts/plot_ablation.py runs/weights --out docs/results/weights --reference 0.3
"""

import argparse
import sys
from collections.abc import Sequence

import _cli


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _cli.Parser(prog="plot_ablation.py", description=__doc__)
    parser.add_argument(
        "grid",
        type=_cli.path,
        metavar="DIR",
        help="folder of an ablation (ablate_loss_weight.py), or its records.jsonl",
    )
    parser.add_argument(
        "--out", type=_cli.path, metavar="FOLDER", help="folder to write to (default: figures, beside the records)"
    )
    parser.add_argument(
        "--reference",
        metavar="LABEL",
        help="arm that the others are compared with, by its name in the tables (default: for the main loss the "
        "smallest constant weight; for the head 0.1, or else the smallest constant weight above 0)",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)

    from train.ablation.document import write_document
    from train.ablation.table import number_of

    path, ablation = write_document(args.grid, args.out, args.reference)
    arms, runs = number_of(len(ablation.arms), "arm"), number_of(len(ablation.runs), "run")
    print(f"{path}: {arms}, {runs}; {len(ablation.left_out)} left out", file=sys.stderr)


if __name__ == "__main__":
    _cli.run(main)
