"""Compare plain decoding with speculative decoding, prompt by prompt, in one process.

For each prompt and each number of drafts J: are the tokens identical, how many rounds, how many drafts accepted, how
fast. Times are medians over repeats in which plain and speculative take turns; compiling is not counted. Greedy, or
with a temperature and one seed for all. The rejection verifier draws other tokens of the same distribution, so there
"identical" says nothing. Examples:

  python scripts/compare_decoding.py --show-text
  python scripts/compare_decoding.py --prompts models/demo/held_out_prompts.jsonl --num-draft-tokens 1,3 --json out.json
  python scripts/compare_decoding.py --checkpoint DIR --chat --num-draft-tokens 1
  python scripts/compare_decoding.py --num-draft-tokens 3 --control
  python scripts/compare_decoding.py --temperature 0.7 --verifier rejection --expected-acceptance
"""

import argparse
import dataclasses
from collections.abc import Sequence

import _cli

from mtp_jax.errors import UserError

PROMPTS = (
    'def read_lines(path):\n    """Return the lines of a text file."""\n',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\nimport sys\n\n\ndef main(argv=None):\n",
)
# The two questions of a published run of Qwen3.5-0.8B in PyTorch.
QUESTIONS = ("用一句话介绍一下 Transformer。", "写一段 200 字的短文，介绍长江。")


def draft_counts(text: str) -> list[int]:
    counts = [_cli.count(item) for item in text.split(",")]
    if len(set(counts)) < len(counts):
        raise argparse.ArgumentTypeError(f"expected different numbers, got {text!r}")
    return counts


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _cli.Parser(prog="compare_decoding.py", description=__doc__)
    _cli.add_checkpoint_flag(parser)
    parser.add_argument(
        "--prompts",
        type=_cli.path,
        metavar="FILE",
        help="one prompt a line or, in a .jsonl file, a row with prompt, prompt_ids or messages each "
        "(default: three beginnings of Python code; with --chat, two questions)",
    )
    parser.add_argument("--chat", action="store_true", help="put texts as questions, in the chat template")
    parser.add_argument(
        "--num-draft-tokens", type=draft_counts, default="1,2,3", metavar="J,J,...", help="drafts a round"
    )
    parser.add_argument("--max-new-tokens", type=_cli.positive, default=120, metavar="N", help="for each prompt")
    parser.add_argument("--repeats", type=_cli.positive, default=3, metavar="N", help="timed turns of each")
    parser.add_argument(
        "--expected-acceptance",
        action="store_true",
        help="read each text once more and say how often drafts should stand, from the distance of the two laws; "
        "needs a temperature above 0, and memory for all logits of a text",
    )
    parser.add_argument(
        "--control",
        action="store_true",
        help="decode once more with each draft replaced by the one meant for the place after, next to none of which "
        "should stand; and say what stood at each position",
    )
    parser.add_argument("--show-text", action="store_true", help="print the texts too, accepted drafts marked")
    _cli.add_sampling_flags(parser)
    _cli.add_head_reads_flag(parser)
    _cli.add_dtype_flag(parser)
    _cli.add_mesh_flag(parser)
    _cli.add_marks_flag(parser)
    _cli.add_json_flag(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    _cli.check_new_tokens(args.min_new_tokens, args.max_new_tokens)
    if args.expected_acceptance and not args.temperature:
        raise UserError("--expected-acceptance is of drawn tokens: it needs a --temperature above 0")
    if args.expected_acceptance and 0 in args.num_draft_tokens:
        raise UserError("--expected-acceptance is of drafts: drop the 0 from --num-draft-tokens")
    if args.control and 0 in args.num_draft_tokens:
        raise UserError("--control is of drafts: drop the 0 from --num-draft-tokens")
    folder = _cli.existing_checkpoint(args.checkpoint)
    if args.prompts is not None and not args.prompts.is_file():
        raise UserError(f"--prompts: expected a file, got {args.prompts}, which is not one")

    _cli.enable_compilation_cache()
    from rich.console import Console  # after the flags are checked: these imports take seconds
    from rich.text import Text

    from infer.comparison import compare, comparison_table, describe_acceptance, describe_control, totals
    from infer.generator import Generator
    from infer.job import Job, check_jobs
    from infer.marked_text import marked_text
    from infer.prompts import prompt_from_text
    from infer.requests import read_requests
    from infer.settings import Settings
    from mtp_jax.config import HeadReads
    from mtp_jax.hf import read_config
    from mtp_jax.text import Tokenizer, end_ids

    sampling = _cli.sampling_from(args)
    config, tokenizer = read_config(folder), Tokenizer.from_folder(folder)
    if args.prompts is not None:
        prompts = read_requests(args.prompts, tokenizer, config.vocab_size, args.chat)
        for request in prompts:
            if own := sorted({"max_new_tokens", "seed", "stop"} & request.row.keys()):
                raise UserError(
                    f"{request.where}: {', '.join(own)}: rows are compared under the same settings; drop a row's own"
                )
    else:
        texts = QUESTIONS if args.chat else PROMPTS
        prompts = [prompt_from_text(text, tokenizer, args.chat) for text in texts]
    ids = [prompt.ids for prompt in prompts]
    settings = Settings(num_draft_tokens=max(args.num_draft_tokens), sampling=sampling)
    _cli.check_settings(settings, config, tokenizer, end_ids(folder, tokenizer))
    check_jobs(config, [Job(prompt, args.max_new_tokens) for prompt in ids])
    dtype = _cli.compute_dtype(args.dtype)
    head_reads = None if args.head_reads is None else HeadReads(args.head_reads)
    generator = Generator.from_pretrained(folder, dtype=dtype, head_reads=head_reads, mesh=_cli.mesh_of(args.mesh))

    console = Console(highlight=False, soft_wrap=True)
    quiet = args.json == "-"
    results = []
    progress = Console(stderr=True)
    for number, prompt in enumerate(prompts, 1):
        with progress.status(f"prompt {number} of {len(prompts)}"):
            comparisons = compare(
                generator,
                prompt.ids,
                args.num_draft_tokens,
                args.max_new_tokens,
                args.repeats,
                sampling,
                args.expected_acceptance,
                args.control,
            )
        results.append((prompt, comparisons))
        if args.show_text and not quiet:
            last = comparisons[-1]
            console.rule(f"prompt {number} of {len(prompts)}, J = {last.num_draft_tokens}", style="dim")
            console.print(Text(prompt.text, "dim"), end="" if generator.tokenizer else " ")
            console.print(marked_text(last.speculative, generator.tokenizer, console, args.marks))
    if args.json is not None:
        record = {
            "checkpoint": str(folder),
            "dtype": str(dtype),
            "head_reads": str(generator.model.config.head_reads),
            "max_new_tokens": args.max_new_tokens,
            "repeats": args.repeats,
            "sampling": dataclasses.asdict(sampling),
            "results": [
                {"prompt": prompt.text, "num_prompt_tokens": len(prompt.ids), **comparison.record()}
                for prompt, comparisons in results
                for comparison in comparisons
            ],
            "totals": totals([comparisons for _, comparisons in results]),
        }
        _cli.write_json(record, args.json)
    if not quiet:
        # Written to a file, a table need not fit into a terminal.
        wide = Console() if console.is_terminal else Console(width=130)
        wide.print(comparison_table([(prompt.text, comparisons) for prompt, comparisons in results], wide.width))
        for row in totals([comparisons for _, comparisons in results]):
            if args.expected_acceptance:
                console.print(describe_acceptance(row), markup=False)
            if args.control:
                console.print(describe_control(row), markup=False)
        for prompt, comparisons in results:
            for comparison in comparisons:
                if comparison.first_difference is not None:
                    console.print(Text(f"{prompt.text!r}: {comparison.describe_difference()}"))


if __name__ == "__main__":
    _cli.run(main)
