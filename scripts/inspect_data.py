"""Show what a run would train on: packed rows, with what is trained on bright and what is only read dim.

Where there is no colour, what is trained on stands between ‹ and ›. Rows are shown as they are packed; training takes
them in another order each epoch.

Examples:
  python scripts/inspect_data.py --config tiny --row 1 2
  python scripts/inspect_data.py --config demo --checkpoint models/demo --data chats.jsonl --set sequence_length=256
"""

import argparse
from collections.abc import Sequence

import _cli

from configs import PRESETS
from mtp_jax.errors import UserError


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _cli.Parser(prog="inspect_data.py", description=__doc__)
    parser.add_argument("--config", required=True, choices=list(PRESETS), help="the experiment to start from")
    _cli.add_data_flags(parser, "change settings; train.py --help lists them")
    parser.add_argument(
        "--checkpoint",
        type=_cli.path,
        metavar="DIR",
        help="folder whose tokenizer and chat template to use (default: the setting init's, or one trained as train.py "
        "would)",
    )
    parser.add_argument("--row", type=_cli.positive, nargs="+", default=[1], metavar="N", help="rows, from 1")
    parser.add_argument("--held-out", action="store_true", help="rows of the evaluation instead of the training")
    parser.add_argument(
        "--marks", choices=["auto", "colour", "brackets"], default="auto", help="how what is trained on is shown"
    )
    _cli.add_json_flag(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    experiment = _cli.chosen_experiment(PRESETS[args.config](), args)
    from itertools import accumulate

    from rich.console import Console

    from mtp_jax.text import Tokenizer
    from train.corpus import new_tokenizer, packed_rows, read_corpus
    from train.progress import Progress
    from train.row_view import num_padding, row_text, segments

    progress = Progress()
    folder = args.checkpoint or experiment.init
    tokenizer = Tokenizer.from_folder(folder) if folder else None
    if folder and tokenizer is None:
        raise UserError(f"--checkpoint {folder}: expected a tokenizer.json, there is none")
    corpus = read_corpus(experiment, progress)
    if tokenizer is None:
        tokenizer = new_tokenizer(experiment, corpus, progress)
    packed = packed_rows(experiment, corpus, tokenizer, progress)
    chosen = packed.held_out if args.held_out else packed.training
    ends = list(accumulate(map(len, chosen), initial=0))
    record = {
        "rows": ends[-1],
        "row_length": experiment.sequence_length,
        "documents": packed.record["held_out_documents" if args.held_out else "training_documents"],
        "segments": sum(rows.num_pieces for rows in chosen),
        "tokens": sum(rows.num_tokens for rows in chosen),
        "targets": sum(rows.num_targets for rows in chosen),
        "padding": ends[-1] * experiment.sequence_length - sum(rows.num_tokens for rows in chosen),
        "shown": [],
    }
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    for number in args.row:
        if number > ends[-1]:
            raise UserError(f"--row {number}: there are {ends[-1]} rows")
        source = next(i for i, end in enumerate(ends[1:]) if number <= end)
        row = chosen[source][number - 1 - ends[source]]
        found = segments(row, tokenizer)
        counts = {
            "row": number,
            "tokens": sum(segment.num_tokens for segment in found),
            "targets": sum(segment.num_targets for segment in found),
            "padding": num_padding(row),
        }
        pieces = [{"tokens": s.num_tokens, "targets": s.num_targets, "runs": s.runs} for s in found]
        record["shown"].append({**counts, "segments": pieces})
        if args.json is None:
            shown = f"{counts['tokens']} tokens, {counts['targets']} trained on, {counts['padding']} padding"
            console.print(f"row {number}: {shown}")
            console.print(row_text(row, tokenizer, console, args.marks), end="")
    if args.json is not None:
        _cli.write_json(record, args.json)
    else:
        keys = ("documents", "segments", "tokens", "targets", "padding")
        totals = ", ".join(f"{key} {record[key]:,}" for key in keys)
        console.print(f"all {record['rows']:,} rows of {record['row_length']}: {totals}")


if __name__ == "__main__":
    _cli.run(main)
