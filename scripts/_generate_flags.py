"""The flags of generate.py, and which of them contradict each other."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import _cli

from mtp_jax.errors import UserError


def parse(description: str | None, argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags, none of which contradict each other; `rows` says whether the prompts are those of a .jsonl file."""
    parser = _cli.Parser(prog="generate.py", description=description)
    what = parser.add_argument_group("what is continued (one of the first three)")
    prompt = what.add_mutually_exclusive_group()  # whether one is there is seen below, after misspelt flags
    prompt.add_argument("--prompt", metavar="TEXT", help="this text")
    prompt.add_argument(
        "--prompt-file", type=_cli.path, metavar="FILE", help="the text of a UTF-8 file, or each row of a .jsonl file"
    )
    prompt.add_argument("--prompt-ids", metavar="IDS", help="these ids: 1,2,3; needs no tokenizer")
    what.add_argument("--chat", action="store_true", help="put texts as questions, in the chat template")
    what.add_argument(
        "--num-samples",
        type=_cli.positive,
        default=1,
        metavar="N",
        help="continuations of each prompt, each with noise of its own",
    )

    model = parser.add_argument_group("the model")
    _cli.add_checkpoint_flag(model)
    model.add_argument("--trunk-only", action="store_true", help="load it without its head, on purpose")
    _cli.add_dtype_flag(model)
    _cli.add_mesh_flag(model)

    end = parser.add_argument_group("where it ends")
    end.add_argument(
        "--max-new-tokens", type=_cli.count, default=128, metavar="N", help="never more new tokens than this"
    )
    end.add_argument(
        "--stop",
        action="append",
        type=_stop,
        default=[],
        metavar="TEXT",
        help="end before this text; may be repeated. A line end is $'\\n' in most shells",
    )
    end.add_argument("--ignore-eos", action="store_true", help="go on past end tokens, as if they were any others")
    end.add_argument(
        "--cache-length",
        type=_cli.count,
        metavar="N",
        help="room for prompt and new tokens together; a full cache ends the text (default: the smallest of 64, 128, "
        "256, ... that holds both, at most the model's max_position_embeddings)",
    )

    _cli.add_sampling_flags(parser)

    drafting = parser.add_argument_group("drafting")
    drafting.add_argument(
        "--num-draft-tokens",
        type=_draft_tokens,
        metavar="J",
        help="drafts a round; 0 decodes plainly; auto measures what is fastest, and tells (default: 3, or 0 without a "
        "head)",
    )
    drafting.add_argument(
        "--draft-vocab",
        type=_draft_vocabulary,
        metavar="N|FILE",
        help="draft over the N most frequent tokens only, of the checkpoint's draft_vocabulary.txt, or over the ids in "
        "a file; what is chosen is verified over all tokens",
    )

    out = parser.add_argument_group("output")
    _cli.add_json_flag(out)
    out.add_argument(
        "--output",
        type=_cli.path,
        metavar="FILE",
        help="write results of a .jsonl file here, one a line (default: to stdout, without keeping them for a rerun)",
    )
    out.add_argument(
        "--batch-size",
        type=_cli.positive,
        metavar="N",
        help="rows decoded at a time; no result depends on it (default: 8)",
    )
    out.add_argument("--report", type=_cli.writable, metavar="FILE", help="write a page that shows each token's origin")
    out.add_argument(
        "--logprobs",
        type=_cli.count,
        metavar="N",
        help="add each token's log-probability, and the N most probable tokens, to JSON and report",
    )
    out.add_argument(
        "--raw-logprobs", action="store_true", help="log-probabilities before penalties, temperature and the like"
    )
    _cli.add_marks_flag(out)

    args = parser.parse_args(argv)
    if args.prompt is None and args.prompt_file is None and args.prompt_ids is None:
        parser.error("one of the arguments --prompt --prompt-file --prompt-ids is required")
    args.rows = args.prompt_file is not None and args.prompt_file.suffix.lower() == ".jsonl"
    _check(args)
    return args


def _stop(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("expected at least one character")
    return text


def _draft_tokens(text: str) -> int | str:
    return text if text == "auto" else _cli.count(text)


def _draft_vocabulary(text: str) -> int | Path:
    return _cli.positive(text) if text.lstrip("-").isdigit() else _cli.path(text)


def _check(args: argparse.Namespace) -> None:
    """Refuses flags that contradict each other."""
    if args.trunk_only and args.num_draft_tokens:
        raise UserError(
            f"--trunk-only leaves out the head that --num-draft-tokens {args.num_draft_tokens} drafts with: "
            "drop one of the two"
        )
    if args.chat and args.prompt_ids is not None:
        raise UserError("--chat puts a text into a template: give --prompt or --prompt-file, not --prompt-ids")
    if args.output is not None and not args.rows:
        raise UserError("--output is for the rows of a .jsonl file: give one with --prompt-file, or use --json FILE")
    if args.json is not None and args.rows:
        raise UserError(
            "--json is one object, and a .jsonl file gives one a row: use --output FILE, or neither of them"
        )
    if args.batch_size is not None and not args.rows and args.num_samples == 1:
        raise UserError("--batch-size is for several rows: give a .jsonl file with --prompt-file, or --num-samples")
    if args.logprobs is not None and not (args.rows or args.json is not None or args.report is not None):
        raise UserError("--logprobs are not shown beside a text: add --json or --report FILE")
    if args.raw_logprobs and args.logprobs is None and args.report is None:
        raise UserError("--raw-logprobs says which log-probabilities: add --logprobs N or --report FILE")
    _cli.check_new_tokens(args.min_new_tokens, args.max_new_tokens)
    files = {"--prompt-file": args.prompt_file, "--output": args.output, "--report": args.report, "--json": args.json}
    seen: dict[Path, str] = {}
    for flag, name in files.items():
        if name is not None and name != "-":
            other = seen.setdefault(Path(name).resolve(), flag)
            if other != flag:
                raise UserError(f"{other} and {flag} are the same file, {name}: one would be lost")
