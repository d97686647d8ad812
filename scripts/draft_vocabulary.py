"""Count a corpus's tokens, for generate.py --draft-vocab N: the head then drafts over the N most frequent only.

Writes a file of ids, one a line, most frequent first.

Example:
  python scripts/draft_vocabulary.py --checkpoint models/demo --data my_texts/ --out draft_vocabulary.txt
  python scripts/draft_vocabulary.py --checkpoint models/demo --config demo
"""

import argparse
import sys
from collections.abc import Sequence

import _cli

from configs import PRESETS
from mtp_jax.errors import UserError


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _cli.Parser(prog="draft_vocabulary.py", description=__doc__)
    _cli.add_checkpoint_flag(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--data",
        nargs="+",
        action="extend",
        type=_cli.path,
        metavar="PATH",
        help="files, folders and patterns to count, of the kinds that train.py reads",
    )
    source.add_argument("--config", choices=list(PRESETS), help="count what this training config trains on")
    parser.add_argument(
        "--out",
        type=_cli.path,
        metavar="FILE",
        help="file to write (default: draft_vocabulary.txt in the checkpoint's folder, where --draft-vocab N looks)",
    )
    _cli.add_json_flag(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    folder = _cli.existing_checkpoint(args.checkpoint)
    from infer.draft_vocabulary import FILE_NAME, most_frequent, write_ids
    from mtp_jax.text import Tokenizer
    from train.corpus import read_corpus
    from train.experiment import Experiment
    from train.progress import Progress

    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer is None:
        raise UserError(f"{folder}: expected a tokenizer.json, there is none; without it text has no ids to count")
    if args.config is not None:
        experiment, name = PRESETS[args.config](), f"config {args.config}"
    else:
        experiment, name = Experiment(data=tuple(map(str, args.data))), ", ".join(map(str, args.data))
    documents = read_corpus(experiment, Progress()).documents(held_out=False)
    ids, num_tokens = most_frequent((document.as_text(tokenizer) for document in documents), tokenizer)
    out = args.out if args.out is not None else folder / FILE_NAME
    comment = f"{len(ids)} ids, most frequent first, counted in {num_tokens} tokens: {name}"
    try:
        write_ids(out, ids, comment)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}") from error
    print(f"wrote {len(ids):,} ids, counted in {num_tokens:,} tokens, to {out}", file=sys.stderr)
    if args.json is not None:
        _cli.write_json({"out": str(out), "num_ids": len(ids), "num_tokens": num_tokens}, args.json)


if __name__ == "__main__":
    _cli.run(main)
