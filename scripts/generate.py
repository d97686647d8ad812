"""Continue prompts, drafting with the model's own multi-token-prediction head.

What comes is what plain decoding gives, only in fewer passes; accepted drafts are marked. Greedy unless --temperature
says otherwise. To a terminal the text is written as it comes; Ctrl-C ends it with what there is.

  python scripts/generate.py --prompt "def read_lines(path):"
  python scripts/generate.py --prompt "class Queue:" --temperature 0.8 --top-p 0.95 --num-samples 3
  python scripts/generate.py --checkpoint DIR --chat --prompt "Hello, how are you?" --report page.html
  python scripts/generate.py --checkpoint DIR --prompt-ids 1,2,3 --json
  python scripts/generate.py --prompt-file models/demo/held_out_prompts.jsonl --batch-size 16 --output out.jsonl

Rows of a .jsonl file are {"prompt": text}, {"prompt_ids": [ids]} or {"messages": [{"role": "user", "content": text}]},
and may have max_new_tokens, seed and stop of their own. Results are these rows in the same order, with keys added. With
--output they are kept as they come: a run that was stopped goes on where it was when the same command is given again.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _cli

from mtp_jax.errors import UserError
from scripts._generate_flags import parse

if TYPE_CHECKING:  # imports that take a second, which `--help` and mistakes in flags should not wait for
    from infer.completion import Completion
    from infer.generator import Generator
    from infer.requests import Request
    from infer.row import Piece
    from infer.settings import Settings
    from mtp_jax.text import Tokenizer


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(__doc__, argv)
    folder = _cli.existing_checkpoint(args.checkpoint)
    _cli.enable_compilation_cache()
    requests, settings = _checked(args, folder)
    if args.rows:
        _continue_rows(args, folder, requests, settings)
    else:
        _continue_prompt(args, folder, requests[0], settings)


def _checked(args: argparse.Namespace, folder: Path) -> "tuple[list[Request], Settings]":
    """What to do, with all found that can be wrong with it before weights are read."""
    from infer.batch import jobs_for
    from infer.draft_vocabulary import load_draft_vocabulary
    from infer.job import check_jobs
    from infer.requests import read_requests
    from infer.results import check_keys
    from infer.settings import BATCH_SIZE, Settings
    from infer.text_stream import stop_strings
    from mtp_jax.hf import read_config
    from mtp_jax.text import Tokenizer, end_ids

    config, tokenizer = read_config(folder, args.trunk_only), Tokenizer.from_folder(folder)
    ends = end_ids(folder, tokenizer)
    if args.stop and tokenizer is None:
        raise UserError("--stop needs a tokenizer, and the checkpoint has no tokenizer.json")
    try:
        stop_strings(args.stop)
    except UserError as error:
        raise UserError(f"--stop: {error}") from error
    vocabulary = None
    if args.draft_vocab is not None:
        vocabulary = load_draft_vocabulary(args.draft_vocab, folder, config.vocab_size, ends).tolist()
    settings = Settings(
        num_draft_tokens=0 if args.trunk_only else args.num_draft_tokens,
        sampling=_cli.sampling_from(args),
        ignore_eos=args.ignore_eos,
        # The report shows how probable tokens were.
        logprobs=0 if args.logprobs is None and args.report is not None else args.logprobs,
        raw_logprobs=args.raw_logprobs,
        cache_length=args.cache_length,
        batch_size=args.batch_size or BATCH_SIZE,
        draft_vocabulary=vocabulary,
    )
    _cli.check_settings(settings, config, tokenizer, ends)
    if args.rows:
        requests = read_requests(args.prompt_file, tokenizer, config.vocab_size, args.chat)
        check_keys(requests)
    else:
        requests = [_one_request(args, tokenizer)]
    for request, job in zip(requests, jobs_for(requests, _targets(requests, 1), **_limits(args)), strict=True):
        try:
            check_jobs(config, [job], args.cache_length)
            _cli.check_new_tokens(args.min_new_tokens, job.max_new_tokens, "max_new_tokens")
        except UserError as error:
            raise UserError(f"{request.where}: {error}") from error
    return requests, settings


def _one_request(args: argparse.Namespace, tokenizer: "Tokenizer | None") -> "Request":
    from infer.prompts import parse_ids, prompt_from_ids, prompt_from_text
    from infer.requests import Request
    from mtp_jax.files import read_text

    if args.prompt_ids is not None:
        try:
            ids = parse_ids(args.prompt_ids)
        except UserError as error:
            raise UserError(f"--prompt-ids: {error}") from error
        prompt, where = prompt_from_ids(ids), "--prompt-ids"
    else:
        text = args.prompt if args.prompt_file is None else read_text(args.prompt_file)
        prompt = prompt_from_text(text, tokenizer, args.chat)
        where = "--prompt" if args.prompt_file is None else str(args.prompt_file)
    return Request(prompt.ids, prompt.text, None, None, None, {}, where)


def _targets(requests: "Sequence[Request]", num_samples: int) -> list[tuple[int, int]]:
    return [(p, i) for p in range(len(requests)) for i in range(num_samples)]


def _limits(args: argparse.Namespace) -> dict[str, Any]:
    return {"max_new_tokens": args.max_new_tokens, "seed": args.seed, "stop": tuple(args.stop)}


def _continue_prompt(args: argparse.Namespace, folder: Path, request: "Request", settings: "Settings") -> None:
    """One prompt: text, as it comes if stdout is a terminal, or one JSON object."""
    from rich.console import Console

    from infer.batch import InOrder, follow, jobs_for
    from infer.generator import Generator
    from infer.screen import PromptStatus, Transcript

    console, shows_text = Console(highlight=False, soft_wrap=True), args.json != "-"
    dtype, mesh = _cli.compute_dtype(args.dtype), _cli.mesh_of(args.mesh)
    with PromptStatus(Console(stderr=True), until_text=shows_text) as status:
        generator = Generator.from_pretrained(folder, dtype=dtype, trunk_only=args.trunk_only, mesh=mesh)
        status.loaded()
        has_text = generator.tokenizer is not None
        transcript = Transcript(console, args.marks, request.text, args.num_samples, has_text=has_text)
        shown = InOrder(transcript.show)

        def came(piece: "Piece") -> None:
            status.came(piece)
            if shows_text:
                shown.add(piece)

        jobs = jobs_for([request], _targets([request], args.num_samples), **_limits(args))
        events = generator.run(jobs, settings, watched=shows_text and console.is_terminal)
        outcome = follow(events, status.reading, came, keep=True)
    shown.flush()
    if shows_text:
        transcript.finish(generator.programs.compile_seconds)
    auto = generator.auto_drafts
    if auto is not None and shows_text:
        console.print(auto.summary(), style="dim")
    completions = dict(sorted(outcome.completions.items()))
    if completions and args.json is not None:
        records = {sample: _record(args, completion) for sample, completion in completions.items()}
        if args.num_samples == 1:
            record = records[0]
        else:
            record = {"completions": [{"sample": sample, **record} for sample, record in records.items()]}
        record |= {} if auto is None else {"auto_drafts": auto.report()}
        _cli.write_json(record, args.json)
    prompts = [_shown_prompt(request, generator.tokenizer)] * len(completions)
    _write_report(args, generator, list(completions.values()), prompts, settings)
    if outcome.interrupted:
        raise KeyboardInterrupt


def _continue_rows(args: argparse.Namespace, folder: Path, requests: "Sequence[Request]", settings: "Settings") -> None:
    """Rows of a file: a JSON line each, to stdout or a file, in the rows' order."""
    from rich.console import Console

    from infer.batch import InOrder, follow, jobs_for
    from infer.generator import Generator
    from infer.marked_text import prepared
    from infer.results import Results, result_row
    from infer.screen import RowsBar

    dtype, mesh = _cli.compute_dtype(args.dtype), _cli.mesh_of(args.mesh)
    stderr, targets = Console(stderr=True), _targets(requests, args.num_samples)
    num_rows = len(targets)
    with ExitStack() as stack:
        results = None
        if args.output is not None:
            identity = _identity(args, settings, folder, str(dtype))
            results = stack.enter_context(Results(args.output, requests, identity, args.num_samples))
            targets = results.missing
            if not targets:
                results.finish()
                text = f"{args.output}: all {num_rows} rows are there, nothing was left to do"
                if args.report is not None:
                    text += f"; {args.report} is not written, since a report shows the rows that its run decoded"
                print(text, file=sys.stderr)
                return
        # Rows that are written to the terminal would run into the bar.
        hidden = results is None and sys.stdout.isatty()
        bar = stack.enter_context(RowsBar(stderr, num_rows, num_rows - len(targets), hidden=hidden))
        generator = Generator.from_pretrained(folder, dtype=dtype, trunk_only=args.trunk_only, mesh=mesh)
        bar.loaded()

        def write(piece: "Piece") -> None:
            if piece.completion is not None:
                p, i = targets[piece.job]
                sample = i if args.num_samples > 1 else None
                _cli.write_json_line(result_row(requests[p].row, sample, _record(args, piece.completion)))

        written = InOrder(write)

        def came(piece: "Piece") -> None:
            bar.came(piece)
            if results is None:
                written.add(piece)
            elif piece.completion is not None and piece.completion.finish_reason != "interrupted":
                results.add(*targets[piece.job], _record(args, piece.completion))

        events = generator.run(jobs_for(requests, targets, **_limits(args)), settings)
        outcome = follow(events, bar.reading, came, keep=args.report is not None)
        written.flush()
        if results is not None and not outcome.interrupted:
            results.finish()
    preparing = generator.programs.compile_seconds
    figures = outcome.totals.summary(outcome.seconds - preparing)
    lines = [f"{outcome.totals.rows} rows: {figures}; {prepared(preparing)}"]
    if generator.auto_drafts is not None:
        lines.append(generator.auto_drafts.summary())
    if outcome.interrupted and results is not None:
        lines.append(f"finished rows are kept in {args.output}.partial; the same command goes on from there")
    print("\n".join(lines), file=sys.stderr)
    jobs = sorted(outcome.completions)
    prompts = [_shown_prompt(requests[targets[job][0]], generator.tokenizer) for job in jobs]
    _write_report(args, generator, [outcome.completions[job] for job in jobs], prompts, settings)
    if outcome.interrupted:
        raise KeyboardInterrupt


def _record(args: argparse.Namespace, completion: "Completion") -> dict[str, Any]:
    """As JSON; log-probabilities that only the report needs are left out."""
    return (completion if args.logprobs is not None else replace(completion, logprobs=None)).record()


def _identity(args: argparse.Namespace, settings: "Settings", folder: Path, dtype: str) -> dict[str, Any]:
    """All that changes a result, by which results of another run are told apart."""
    sampling = asdict(settings.sampling)
    return {
        **{name: value for name, value in sampling.items() if name != "logit_bias"},
        "logit_bias": {str(token_id): value for token_id, value in sampling["logit_bias"].items()},
        "checkpoint": str(folder.resolve()),
        "dtype": dtype,
        "draft_vocab": None if args.draft_vocab is None else str(args.draft_vocab),
        **{
            name: getattr(args, name)
            for name in (
                *("trunk_only", "chat", "max_new_tokens", "stop", "ignore_eos", "cache_length"),
                *("num_draft_tokens", "logprobs", "raw_logprobs"),
            )
        },
    }


def _shown_prompt(request: "Request", tokenizer: "Tokenizer | None") -> str:
    """A prompt for the report: as it was given, but for ids, which have a text where there is a tokenizer."""
    from infer.prompts import prompt_from_ids

    given_as_ids = request.text == prompt_from_ids(request.ids).text
    return tokenizer.decode(request.ids) if tokenizer is not None and given_as_ids else request.text


def _write_report(
    args: argparse.Namespace,
    generator: "Generator",
    completions: "Sequence[Completion]",
    prompts: Sequence[str],
    settings: "Settings",
) -> None:
    if args.report is None or not completions:
        return
    from infer.report import report_html
    from infer.sampling import Sampling
    from mtp_jax.files import write_text

    sampling, default, auto = settings.sampling, asdict(Sampling()), generator.auto_drafts
    table = {
        "checkpoint": str(args.checkpoint),
        "dtype": str(generator.model.dtype),
        "drafts a round": str(settings.draft_tokens(generator.model.config)) if auto is None else auto.summary(),
        "new tokens, at most": str(args.max_new_tokens),
        "temperature": str(sampling.temperature) if sampling.temperature else "0 (greedy)",
    }
    drawn = ("seed", "verifier") if sampling.temperature else ()  # what another such text needs to be told
    names = {name: value for name, value in asdict(sampling).items() if value != default[name] or name in drawn}
    table |= {name.replace("_", " "): str(value) for name, value in names.items()}
    table |= {"stop": repr(args.stop)} if args.stop else {}
    table |= {"end tokens": "ignored"} if args.ignore_eos else {}
    table |= {"drafts are among": f"{len(settings.draft_vocabulary)} tokens"} if settings.draft_vocabulary else {}
    table |= {"probabilities": "before penalties, temperature and the like"} if args.raw_logprobs else {}
    write_text(Path(args.report), report_html(completions, generator.tokenizer, prompts, table))


if __name__ == "__main__":
    _cli.run(main)
