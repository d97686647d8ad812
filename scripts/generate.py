"""Continue a prompt greedily, drafting with the model's own multi-token-prediction head.

The text is what plain greedy decoding gives; drafts that were accepted are marked. Examples:

  python scripts/generate.py --prompt "def read_lines(path):"
  python scripts/generate.py --checkpoint DIR --chat --prompt "Hello, how are you?"
  python scripts/generate.py --checkpoint DIR --prompt-ids 1,2,3 --json
"""

import argparse
from collections.abc import Sequence

import _cli

from mtp_jax.errors import UserError

DEFAULT_DRAFT_TOKENS = 3


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _cli.Parser(prog="generate.py", description=__doc__)
    _cli.add_checkpoint_flag(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="continue this text")
    prompt.add_argument("--prompt-file", type=_cli.path, metavar="FILE", help="continue the text of a UTF-8 file")
    prompt.add_argument("--prompt-ids", metavar="IDS", help="continue these ids: 1,2,3; needs no tokenizer")
    parser.add_argument("--chat", action="store_true", help="put the text as a question, in the chat template")
    parser.add_argument(
        "--max-new-tokens", type=_cli.count, default=128, metavar="N", help="never more new tokens than this"
    )
    parser.add_argument(
        "--num-draft-tokens",
        type=_cli.count,
        metavar="J",
        help=f"drafts a round; 0 decodes plainly (default: {DEFAULT_DRAFT_TOKENS}, or 0 without a head)",
    )
    parser.add_argument(
        "--cache-length",
        type=_cli.count,
        metavar="N",
        help="room for prompt and new tokens together; a full cache ends the text (default: the smallest of 64, 128, "
        "256, ... that holds both, at most the model's max_position_embeddings)",
    )
    parser.add_argument("--trunk-only", action="store_true", help="load the model without its head, on purpose")
    _cli.add_dtype_flag(parser)
    _cli.add_marks_flag(parser)
    _cli.add_json_flag(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.trunk_only and args.num_draft_tokens:
        raise UserError(
            f"--trunk-only leaves out the head that --num-draft-tokens {args.num_draft_tokens} drafts with: "
            "drop one of the two"
        )
    if args.chat and args.prompt_ids is not None:
        raise UserError("--chat puts a text into a template: give --prompt or --prompt-file, not --prompt-ids")
    folder = _cli.existing_checkpoint(args.checkpoint)

    _cli.enable_compilation_cache()
    from rich.console import Console  # after the flags are checked: these imports take seconds
    from rich.text import Text

    from infer.generator import Generator
    from infer.job import Job, check_jobs
    from infer.marked_text import marked_text, summary
    from infer.prompts import parse_ids, prompt_from_text
    from infer.settings import Settings
    from mtp_jax.files import read_text
    from mtp_jax.hf import read_config
    from mtp_jax.text import Tokenizer

    ids = parse_ids(args.prompt_ids) if args.prompt_ids is not None else None
    text = read_text(args.prompt_file) if args.prompt_file is not None else args.prompt
    config = read_config(folder, args.trunk_only)
    if ids is None:
        ids = prompt_from_text(text, Tokenizer.from_folder(folder), args.chat).ids
    settings = Settings(num_draft_tokens=args.num_draft_tokens, cache_length=args.cache_length)
    settings.check(config)
    jobs = [Job(ids, args.max_new_tokens)]
    check_jobs(config, jobs, settings.cache_length)

    progress = Console(stderr=True)
    with progress.status("loading"):
        generator = Generator.from_pretrained(folder, dtype=_cli.compute_dtype(args.dtype), trunk_only=args.trunk_only)
    with progress.status("compiling and decoding"):
        (generation,) = generator.generate(
            [ids],
            max_new_tokens=args.max_new_tokens,
            num_draft_tokens=args.num_draft_tokens,
            cache_length=args.cache_length,
        )
    if args.json is not None:
        _cli.write_json(generation.record(), args.json)
    if args.json != "-":
        console = Console(highlight=False, soft_wrap=True)
        if console.is_terminal:
            console.print(Text(text if text is not None else f"{args.prompt_ids} "), style="dim", end="")
        console.print(marked_text(generation, generator.tokenizer, console, args.marks))
        console.print(summary(generation), style="dim", markup=False)


if __name__ == "__main__":
    _cli.run(main)
