"""Cut prompts from the documents that a training config holds out, for compare_decoding.py --prompts.

Takes the data flags of train.py. A text gives whole lines, a conversation what comes before a turn of the assistant.

Examples:
  python scripts/held_out_prompts.py --config demo --out prompts.jsonl
  python scripts/held_out_prompts.py --config finetune --data chats.jsonl --set held_out_every=20 --out prompts.jsonl
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
    parser.add_argument("--lines", type=_cli.positive, default=12, metavar="N", help="lines a prompt of a text")
    parser.add_argument("--out", type=_cli.path, required=True, metavar="FILE", help="JSONL file to write")
    _cli.add_data_flags(parser, "change settings; train.py --help lists them")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    from train.corpus import read_corpus
    from train.held_out import cut_prompts
    from train.progress import Progress

    experiment = _cli.chosen_experiment(PRESETS[args.config](), args)
    rows = cut_prompts(read_corpus(experiment, Progress()).documents(held_out=True), args.count, args.lines)
    if not rows:
        raise UserError(
            f"nothing that a prompt can be cut from is held out (see held_out and held_out_every in train.py --help), "
            f"or no text of it has {args.lines} lines (--lines)"
        )
    try:
        write_text(args.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    except OSError as error:
        raise UserError(f"--out {args.out}: cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    _cli.run(main)
