"""Cut prompts from the documents that a training config holds out, for compare_decoding.py --prompts.

Example:
  python scripts/held_out_prompts.py --config demo --out prompts.jsonl
"""

import argparse
import json
from collections.abc import Sequence

import _cli

from configs import PRESETS
from mtp_jax.errors import UserError
from mtp_jax.files import write_text


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _cli.Parser(prog="held_out_prompts.py", description=__doc__)
    parser.add_argument("--config", required=True, choices=list(PRESETS), help="the experiment that holds them out")
    parser.add_argument("--count", type=_cli.positive, default=24, metavar="N", help="prompts, evenly spaced")
    parser.add_argument("--lines", type=_cli.positive, default=12, metavar="N", help="lines a prompt")
    parser.add_argument("--out", type=_cli.path, required=True, metavar="FILE", help="JSONL file to write")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    from train.corpus import read_corpus
    from train.held_out import cut_prompts
    from train.progress import Progress

    documents = read_corpus(PRESETS[args.config](), Progress()).documents(held_out=True)
    rows = cut_prompts(documents, args.count, args.lines)
    if not rows:
        raise UserError(f"--lines {args.lines}: config {args.config} holds out no document with that many lines")
    try:
        write_text(args.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    except OSError as error:
        raise UserError(f"--out {args.out}: cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    _cli.run(main)
