"""A step of decoding beside the peer's and beside reading memory; what drafting and verifying add; what they bring."""

import argparse
import time
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import _cli
import numpy as np
from rich.console import Console
from rich.table import Table

from infer.carry import DecodeCarry, Plan
from infer.completion import Completion
from infer.draft_vocabulary import DraftVocabulary
from infer.generator import Generator
from infer.job import Job
from infer.noise import row_key
from infer.prompt_reading import padded, read_pieces, slots_for
from infer.sampling import Rule, Sampling
from infer.settings import MOST_DRAFT_TOKENS, Settings
from infer.speculative import start, unread
from infer.step_time import seconds_per_step, summary
from mtp_jax import roofline
from mtp_jax.config import ModelConfig
from mtp_jax.errors import UserError
from mtp_jax.sizes import Stage
from scripts._tables import new_table
from scripts.benchmarks import passes, textbook
from scripts.benchmarks.flags import NUM_DRAFTS
from scripts.benchmarks.limits import streams, timed
from scripts.benchmarks.peer import Peer
from scripts.benchmarks.scripted import scripted_drafter, standing
from scripts.benchmarks.subject import check_positions, circumstances
from scripts.benchmarks.turns import fastest, print_result, take_turns, time_table

PROMPT_LENGTH = 32
NEW_TOKENS = 64
VERIFIED = 4
PASSES = 8  # in a measurement of a part
CHAINED = 8  # drafts in a measurement
PLAIN, PEER = "plain step", "transformers"
ONE, SEVERAL, DRAFT, COMMIT = "pass over 1", f"pass over {VERIFIED}", "a draft", f"commit of {VERIFIED}"


def check(args: argparse.Namespace, config: ModelConfig) -> None:
    """Refuses what takes more positions than the model has, and drafts that cannot be made."""
    if args.acceptance and not config.num_mtp_layers:
        raise UserError("--acceptance is of drafts, and the checkpoint has no MTP head to draft with")
    most = max(args.num_draft_tokens or NUM_DRAFTS)
    if most > MOST_DRAFT_TOKENS:
        raise UserError(f"--num-draft-tokens: expected at most {MOST_DRAFT_TOKENS}, got {most}")
    longest = _longest(args)
    check_positions(config, longest.flag, longest.given, PROMPT_LENGTH + longest.room)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    dtype = _cli.compute_dtype(args.dtype)
    status = Console(stderr=True).status
    with status("loading"):
        started = time.perf_counter()
        generator = Generator.from_pretrained(folder, dtype=dtype)
        load_seconds = time.perf_counter() - started
    subject = Subject(generator, args)

    measurements = {PLAIN: lambda: seconds_per_step(subject.plain_seconds, args.steps)}
    if args.vs:
        with status("loading with transformers"):
            peer = Peer(folder, args.peer_dtype or str(dtype))
        measurements[PEER] = lambda: seconds_per_step(partial(peer.decode_seconds, subject.prompt), args.steps)
    readers, nbytes = streams()
    measurements |= readers | subject.parts()
    speculation = None
    if args.acceptance:
        with status("decoding plainly what drafts are to foretell"):
            speculation = Speculation(subject, args)
        measurements |= speculation.measurements()
    taken = take_turns(measurements, args.repeats)

    step = median(taken[PLAIN])
    bandwidth = nbytes / fastest({name: taken[name] for name in readers})
    parameter_bytes = sum(
        roofline.weights_read(generator.model.config, str(dtype), stage) for stage in (Stage.TRUNK, Stage.OUTPUT)
    )
    record = circumstances(args, folder) | {
        "dtype": str(dtype),
        "steps": args.steps,
        "load_seconds": load_seconds,
        "seconds_per_step": step,
        "tokens_per_second": 1 / step,
        "bytes_per_step": parameter_bytes,
        "limit_bytes_per_second": bandwidth,
        "limit_bytes": nbytes,
        "share_of_limit": parameter_bytes / step / bandwidth,
        f"verify_{VERIFIED}_over_plain": median(taken[SEVERAL]) / median(taken[ONE]),
        "commit_over_plain": median(taken[COMMIT]) / step if COMMIT in taken else None,
        "draft_over_plain": median(taken[DRAFT]) / step if DRAFT in taken else None,
        "draft_vocabulary": len(subject.draft_ids),
        "spread": {name: summary(values) for name, values in taken.items()},
    }
    if args.vs:
        record["peer_dtype"] = args.peer_dtype or str(dtype)
        record["peer_seconds_per_step"] = median(taken[PEER])
        record["ratio"] = step / record["peer_seconds_per_step"]
    if speculation is not None:
        record["speculative"] = results = speculation.results(taken, step)
        record["best"] = {f"{rate:g}": _best(results, rate) for rate in args.acceptance}
    return record


class _Longest(NamedTuple):
    """What takes most positions."""

    room: int  # positions after the prompt
    flag: str
    given: int


def _longest(args: argparse.Namespace) -> _Longest:
    # The first token, those asked for, and those by which parts of a round, or drafts, look ahead.
    asked = [_Longest(1 + args.steps + VERIFIED * PASSES, "--steps", args.steps)]
    if args.acceptance:
        new_tokens, drafts = args.new_tokens or NEW_TOKENS, max(args.num_draft_tokens or NUM_DRAFTS)
        asked.append(_Longest(2 + new_tokens + max(drafts, VERIFIED * PASSES), "--new-tokens", new_tokens))
    return max(asked)


class Subject:
    """A loaded model with a prompt, and caches that are equally long whatever is measured."""

    def __init__(self, generator: Generator, args: argparse.Namespace) -> None:
        self.generator = generator
        generator.end_ids = frozenset()  # every measurement has its full length
        self.config = generator.model.config
        self.seed = args.seed
        vocab = self.config.vocab_size
        self.prompt = [token % vocab for token in range(100, 100 + PROMPT_LENGTH)]
        rng = np.random.default_rng(args.seed)
        self.draft_ids = np.sort(rng.choice(vocab, min(args.draft_vocab, vocab), replace=False)).astype(np.int32)
        self.cache_length = Job(self.prompt, _longest(args).room).cache_length(self.config, None)

    def complete(self, num_new: int, num_drafts: int, **settings: Any) -> Completion:
        """One completion of the prompt."""
        (completion,) = self.generator.generate(
            [self.prompt],
            max_new_tokens=num_new,
            num_draft_tokens=num_drafts,
            cache_length=self.cache_length,
            **settings,
        )
        return completion

    def plain_seconds(self, num_new: int) -> float:
        return self.complete(num_new, 0).seconds

    @cached_property
    def started(self) -> tuple[Rule, DraftVocabulary | None, DecodeCarry]:
        """What a round reads: the rule, the draft vocabulary and the carry with the first token chosen."""
        programs, with_head = self.generator.programs, self.config.num_mtp_layers > 0
        settings = Settings(
            num_draft_tokens=int(with_head), draft_vocabulary=self.draft_ids.tolist() if with_head else None
        )
        decoding = self.generator.decoding(settings, 1)
        num_slots = slots_for(self.cache_length, CHAINED)
        empty = programs.call(unread, batch=1, num_slots=num_slots)
        *_, (context, _) = read_pieces(programs, empty, 0, self.prompt, num_slots, with_head)
        row = *padded(self.prompt, num_slots), np.array([self.cache_length - PROMPT_LENGTH], np.int32)
        plan = Plan(with_head=with_head)
        carry = programs.call(start, decoding.rule, context, *row, row_key(0, 0, 0)[None], plan=plan)
        return decoding.rule, decoding.vocabulary, carry

    def parts(self) -> dict[str, Callable[[], float]]:
        """Seconds of each part of a round."""
        programs = self.generator.programs
        rule, vocabulary, carry = self.started
        trunk = carry.context.trunk

        def verify(count: int) -> float:
            tokens = np.asarray([self.prompt[:count]], np.int32)
            return timed(programs.call, passes.verify, trunk, tokens, np.int32(PASSES)) / PASSES

        def draft() -> float:
            def drafted(count: int) -> float:
                return timed(partial(programs.call, passes.draft, rule, vocabulary, carry, num_drafts=count))

            # Once there are more of them: the first one reads what a round has prepared.
            return (drafted(1 + CHAINED) - drafted(1)) / CHAINED

        parts: dict[str, Callable[[], float]] = {ONE: partial(verify, 1), SEVERAL: partial(verify, VERIFIED)}
        if self.config.delta is not None:
            trail = programs.call(passes.probe, trunk, np.asarray([self.prompt[:VERIFIED]], np.int32))
            kept, turns = np.array([VERIFIED], np.int32), np.int32(PASSES)
            parts[COMMIT] = lambda: (
                timed(programs.call, passes.keep, trunk, trail, kept, turns) / (PASSES * passes.COPIES)
            )
        if vocabulary is not None:
            parts[DRAFT] = draft
        return parts


class Speculation:
    """Decoding with drafts that stand at given rates."""

    def __init__(self, subject: Subject, args: argparse.Namespace) -> None:
        self.subject = subject
        self.rates = args.acceptance
        self.sizes = args.num_draft_tokens or NUM_DRAFTS
        self.num_tokens = args.new_tokens or NEW_TOKENS
        count = self.num_tokens + max(self.sizes) + 2
        self.truth = subject.complete(count, 0).tokens
        self.scripts = [standing(rate, count, subject.seed + number) for number, rate in enumerate(self.rates)]
        vocab = subject.config.vocab_size
        self.settings = {
            "drafter": scripted_drafter(self.truth, self.scripts, vocab),
            "draft_vocabulary": subject.draft_ids.tolist(),
        }
        self.last: dict[str, Any] = {}

    def measurements(self) -> dict[str, Callable[[], float]]:
        """Seconds for `num_tokens` tokens after the first."""
        result: dict[str, Callable[[], float]] = {}
        for number, rate in enumerate(self.rates):
            for size in self.sizes:
                result[_name(rate, size)] = partial(self._seconds, number, size)
            result[_name(rate, None)] = partial(self._textbook_seconds, number)
        return result

    def _seconds(self, number: int, size: int) -> float:
        settings = self.settings | {"sampling": Sampling(seed=number)}
        first = self.subject.complete(1, size, **settings)
        whole = self.subject.complete(1 + self.num_tokens, size, **settings)
        self.last[_name(self.rates[number], size)] = whole
        return whole.seconds - first.seconds

    def _textbook_seconds(self, number: int) -> float:
        programs = self.subject.generator.programs
        rule, vocabulary, carry = self.subject.started
        name, truth = _name(self.rates[number], None), np.asarray(self.truth, np.int32)
        script = truth, self.scripts[number], np.int32(1 + self.num_tokens)

        def run() -> None:
            tokens, num_new = programs.call(textbook.decode, rule, vocabulary, carry, *script)
            self.last[name] = np.asarray(tokens)[: int(num_new)].tolist()

        # It may have made one token more.
        return timed(run) * self.num_tokens / (len(self.last[name]) - 1)

    def results(self, taken: Mapping[str, list[float]], step: float) -> list[dict[str, Any]]:
        """For each rate, each number of drafts and the textbook's way: what it brings over plain decoding."""
        results = []
        for rate in self.rates:
            for size in (*self.sizes, None):
                name = _name(rate, size)
                seconds = median(taken[name])
                result = {
                    "rate": rate,
                    "num_draft_tokens": size or 1,
                    "way": "textbook" if size is None else "mtp_jax",
                    "seconds_per_token": seconds / self.num_tokens,
                    "speedup": step * self.num_tokens / seconds,
                }
                last = self.last[name]
                if size is None:
                    result["identical"] = last == self.truth[: len(last)]
                else:
                    refused = sum(token >= 0 for token in last.rejected)
                    tokens_per_round = roofline.tokens_per_round(rate, size)
                    result |= {
                        "identical": last.tokens == self.truth[: len(last.tokens)],
                        "acceptance": last.accepted / max(last.accepted + refused, 1),
                        "seconds_per_round": seconds / last.rounds,
                        "tokens_per_round": self.num_tokens / last.rounds,
                        "speedup_at_rate": step * tokens_per_round * last.rounds / seconds,
                    }
                results.append(result)
        return results


def _name(rate: float, size: int | None) -> str:
    return f"acceptance {rate:g}, " + ("textbook" if size is None else f"J = {size}")


def _best(results: list[dict[str, Any]], rate: float) -> dict[str, Any]:
    """The number of drafts that brings most."""
    ours = [result for result in results if result["rate"] == rate and result["way"] == "mtp_jax"]
    result = max(ours, key=lambda result: result["speedup"])
    return {key: result[key] for key in ("num_draft_tokens", "speedup", "speedup_at_rate")}


def show(record: dict[str, Any]) -> None:
    each = {
        name: f"{record['limit_bytes'] / values['median'] / 1e9:,.1f} GB/s"
        for name, values in record["spread"].items()
        if name.startswith("reading")
    }
    each |= {
        name: f"{1 / record['spread'][name]['median']:,.1f} tokens/s"
        for name in (PLAIN, PEER)
        if name in record["spread"]
    }
    spread = {name: values for name, values in record["spread"].items() if not name.startswith("acceptance")}
    tables, lines = [time_table(f"decoding, {record['dtype']}", spread, "rate", each)], []
    lines.append(
        f"a step reads {record['bytes_per_step'] / 1e9:,.2f} GB of parameters at {record['share_of_limit']:.0%} of the "
        f"limit, {record['limit_bytes_per_second'] / 1e9:,.1f} GB/s"
    )
    parts = {
        f"verifying {VERIFIED} tokens takes {{:.2f}} of a pass over one": f"verify_{VERIFIED}_over_plain",
        f"a draft over {record['draft_vocabulary']:,} tokens {{:.1%}} of a step": "draft_over_plain",
        "a commit {:.1%}": "commit_over_plain",
    }
    lines.append(", ".join(text.format(record[key]) for text, key in parts.items() if record[key] is not None))
    if "ratio" in record:
        lines.append(f"a step takes {record['ratio']:.2f} of the time that transformers takes ({record['peer_dtype']})")
    if "speculative" in record:
        tables.append(_speculation_table(record["speculative"]))
    print_result(tables, lines)


def _speculation_table(results: list[dict[str, Any]]) -> Table:
    columns = ("drafts", "x plain", "x at the rate", "stood", "tokens a round", "ms a round", "same text")
    table = new_table("drafts that stand at a given rate", "rate", *columns)
    for result in results:
        ours = result["way"] == "mtp_jax"
        table.add_row(
            f"{result['rate']:g}",
            str(result["num_draft_tokens"]) if ours else "textbook",
            f"{result['speedup']:.2f}",
            *(
                (
                    f"{result['speedup_at_rate']:.2f}",
                    f"{result['acceptance']:.2f}",
                    f"{result['tokens_per_round']:.2f}",
                    f"{1e3 * result['seconds_per_round']:,.1f}",
                )
                if ours
                else [""] * 4
            ),
            "yes" if result["identical"] else "no",
        )
    return table
