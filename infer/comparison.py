"""Plain against speculative decoding of the same prompts in the same process."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from infer.carry import Drafter
from infer.completion import Completion
from infer.control import draft_one_place_on
from infer.expected_acceptance import ExpectedAcceptance, expected_acceptance
from infer.generator import GREEDY, Generator
from infer.sampling import Sampling
from infer.settings import Settings


@dataclass(frozen=True)
class FirstDifference:
    """Where two continuations part: the ids there and plain decoding's logits of both.

    An id or its logit is None where that continuation had ended.
    """

    index: int
    plain_id: int | None
    speculative_id: int | None
    plain_logit: float | None
    speculative_logit: float | None

    def record(self) -> dict[str, Any]:
        """As the command line gives it in JSON."""
        return {
            "index": self.index,
            "ids": [self.plain_id, self.speculative_id],
            "logits": [self.plain_logit, self.speculative_logit],
        }


@dataclass(frozen=True)
class Comparison:
    """One prompt with one J; both completions carry the median seconds of their repeats.

    Attributes:
      comparable: whether the tokens should be the same; under the rejection verifier they are others of the same law.
      expected: how often a round's first draft should stand, if that was asked for.
      control: the same text decoded with drafts from one place further on, if that was asked for.
    """

    num_draft_tokens: int
    plain: Completion
    speculative: Completion
    first_difference: FirstDifference | None
    comparable: bool = True
    expected: ExpectedAcceptance | None = None
    control: Completion | None = None

    @property
    def identical(self) -> bool | None:
        """Token by token; None where the tokens are not meant to be the same."""
        return self.plain.tokens == self.speculative.tokens if self.comparable else None

    @property
    def speedup(self) -> float:
        """Tokens per second of speculative over plain decoding; above 1 is faster."""
        return self.speculative.tokens_per_second / self.plain.tokens_per_second

    def describe_difference(self) -> str:
        """One line about the first difference, for people."""
        if not self.comparable:
            return f"J = {self.num_draft_tokens}: other tokens of the same distribution"
        if (where := self.first_difference) is None:
            return f"J = {self.num_draft_tokens}: identical"
        return (
            f"J = {self.num_draft_tokens}: token {where.index} is {where.plain_id} plainly (logit {where.plain_logit}) "
            f"and {where.speculative_id} speculatively (logit {where.speculative_logit})"
        )

    def record(self) -> dict[str, Any]:
        """As the command line gives it in JSON."""
        return {
            "num_draft_tokens": self.num_draft_tokens,
            **self.speculative.record(),
            "plain_tokens_per_second": self.plain.tokens_per_second,
            "speedup": self.speedup,
            "identical": self.identical,
            "first_difference": None if self.first_difference is None else self.first_difference.record(),
            "distinct_4grams": distinct_ngrams(self.speculative.tokens, 4),
        }


def compare(
    generator: Generator,
    prompt: Sequence[int],
    num_draft_tokens: Sequence[int],
    max_new_tokens: int,
    repeats: int,
    sampling: Sampling = GREEDY,
    expect: bool = False,
    control: bool = False,
) -> list[Comparison]:
    """Decodes a prompt plainly and with each J in turn, `repeats` times over, all with the same seed.

    The turns alternate, so that a machine that slows down slows all of them; medians are reported. What
    compiles does so in an unmeasured turn before.

    Args:
      sampling: greedy by default.
      expect: also work out how often first drafts should stand; for temperatures above 0.
      control: also decode, untimed, with each draft replaced by the one meant for the place after.
    """
    turns = [0, *num_draft_tokens]

    def decode(num_drafts: int, drafter: Drafter | None = None) -> Completion:
        (completion,) = generator.generate(
            [prompt], max_new_tokens=max_new_tokens, num_draft_tokens=num_drafts, sampling=sampling, drafter=drafter
        )
        return completion

    warm = [decode(j) for j in turns]
    seconds: list[list[float]] = [[] for _ in turns]
    for _ in range(repeats):
        for taken, j in zip(seconds, turns, strict=True):
            taken.append(decode(j).seconds)
    plain, *others = (
        replace(completion, seconds=statistics.median(taken)) for completion, taken in zip(warm, seconds, strict=True)
    )
    comparable = sampling.verifier != "rejection"

    def compared(num_drafts: int, other: Completion) -> Comparison:
        difference = expected = None
        if comparable:
            difference = first_difference(generator, prompt, plain.tokens, other.tokens, max_new_tokens, sampling)
        if expect:
            model, params = generator.model, generator.programs.params
            rule = Settings(sampling=sampling).rule(model.config, generator.tokenizer, generator.end_ids)
            expected = expected_acceptance(model, params, rule, list(prompt), other)
        shifted = decode(num_drafts, draft_one_place_on) if control and num_drafts else None
        return Comparison(num_drafts, plain, other, difference, comparable, expected, shifted)

    return [compared(j, other) for j, other in zip(num_draft_tokens, others, strict=True)]


def first_difference(
    generator: Generator,
    prompt: Sequence[int],
    plain: Sequence[int],
    speculative: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
) -> FirstDifference | None:
    """The first place where two continuations of a prompt differ; None if they are the same.

    Args:
      max_new_tokens: of the two, since in bfloat16 a cache of another length may round differently.
      sampling: of the two; greedy by default.
    """
    same = 0
    while same < min(len(plain), len(speculative)) and plain[same] == speculative[same]:
        same += 1
    if same == len(plain) == len(speculative):
        return None
    logits = generator.next_logits(prompt, same, max_new_tokens, sampling)
    ids = [tokens[same] if same < len(tokens) else None for tokens in (plain, speculative)]
    values = [None if i is None else float(logits[i]) for i in ids]
    return FirstDifference(same, *ids, *values)


def distinct_ngrams(tokens: Sequence[int], n: int) -> float | None:
    """Distinct n-grams over all n-grams; None if there are none. Near 0 in a loop, which flatters acceptance."""
    ngrams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else None


def totals(results: Sequence[Sequence[Comparison]]) -> list[dict[str, Any]]:
    """Over all prompts, for each J: shares and tokens a round of all rounds together, the median speedup.

    `first_accepted_share` is of the drafts that a round began with; where it was worked out how often they should
    stand, `expected_rejection` is the mean of 1 - TV and `expected_shared_noise` that of (1 - TV) / (1 + TV), a lower
    bound. `position_shares` are, of the rounds that could emit a draft at position 1, 2, .., the shares that did, and
    `control_share` is the first of them where the drafts were meant for the place after. The errors are standard
    errors, prompts being independent.
    """
    rows = []
    for comparisons in zip(*results, strict=True):
        runs = [c.speculative for c in comparisons]
        rounds = sum(g.rounds for g in runs)
        share, error = _share([(g.accepted, g.drafted) for g in runs])
        positions = _position_shares(runs)
        first_share, first_error = positions[0] if positions else (None, None)
        controls = _position_shares([c.control for c in comparisons if c.control is not None])
        control_share, control_error = controls[0] if controls else (None, None)
        expected = [c.expected for c in comparisons if c.expected is not None]
        expected_rounds = sum(e.rounds for e in expected)
        rows.append(
            {
                "num_draft_tokens": comparisons[0].num_draft_tokens,
                "rounds": rounds,
                "drafted": sum(g.drafted for g in runs),
                "accepted": sum(g.accepted for g in runs),
                "accepted_share": share,
                "accepted_share_error": error,
                "first_accepted_share": first_share,
                "first_accepted_share_error": first_error,
                "position_shares": [share for share, _ in positions],
                "position_share_errors": [error for _, error in positions],
                "control_share": control_share,
                "control_share_error": control_error,
                "expected_rejection": sum(e.overlap for e in expected) / expected_rounds if expected_rounds else None,
                "expected_shared_noise": (
                    sum(e.coupling for e in expected) / expected_rounds if expected_rounds else None
                ),
                "tokens_per_round": sum(len(g.tokens) - 1 for g in runs) / rounds if rounds else None,
                "speedup": statistics.median(c.speedup for c in comparisons),
                "identical": all(c.identical for c in comparisons) if comparisons[0].comparable else None,
            }
        )
    return rows


def _position_shares(runs: Sequence[Completion]) -> list[tuple[float | None, float | None]]:
    """For each draft position: emitted drafts over rounds that could have emitted one there, and the standard error."""
    if not runs:
        return []
    accepted = zip(*(run.accepted_per_position for run in runs), strict=True)
    drafted = zip(*(run.drafted_per_position for run in runs), strict=True)
    return [_share(list(zip(*counts, strict=True))) for counts in zip(accepted, drafted, strict=True)]


def _share(counts: Sequence[tuple[int, int]]) -> tuple[float | None, float | None]:
    """Of (part, whole) by prompt: all parts over all wholes, and its standard error; None where there is too little."""
    whole = sum(n for _, n in counts)
    if not whole:
        return None, None
    share = sum(part for part, _ in counts) / whole
    if len(counts) < 2:
        return share, None
    squares = sum((part - share * n) ** 2 for part, n in counts)
    return share, (squares * len(counts) / (len(counts) - 1)) ** 0.5 / whole


WIDE = 118
"""Columns of a terminal from which on the whole table fits."""

_YES_OR_NO = {True: "yes", False: "no", None: "-"}
_ALWAYS = ("J", "rounds", "a round", "accepted", "tokens/s", "speedup", "identical")
_HEADINGS = (
    "J",
    "tokens",
    "rounds",
    "a round",
    "accepted",
    "by position",
    "tokens/s",
    "speedup",
    "identical",
    "distinct",
)


def comparison_table(results: Sequence[tuple[str, Sequence[Comparison]]], width: int) -> Table:
    """A row for plain decoding of each prompt, and one for each J.

    Args:
      width: of the terminal, in columns; below `WIDE` the less telling columns are left out.
    """
    headings = _HEADINGS if width >= WIDE else _ALWAYS
    caption = "accepted: drafts emitted of those that could have been"
    if width >= WIDE:
        caption += (
            "; by position: how often a round's first, second, ... draft was; distinct: share of different 4-grams in "
            "the text, low where it loops, which flatters acceptance"
        )
    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left", padding=(0, 1, 0, 0))
    table.add_column("prompt", max_width=20 if width >= WIDE else 12, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "identical" else "right", no_wrap=True)

    def add_row(prompt: str, cells: Mapping[str, str]) -> None:
        # Text, not a string: brackets in a prompt would be read as markup.
        table.add_row(Text(prompt), *(cells.get(heading, "") for heading in headings))

    for prompt, comparisons in results:
        plain = {"J": "plain", "speedup": "1.00", "accepted": "-"}
        add_row(" ".join(prompt.split()), _cells(comparisons[0].plain) | plain)
        for c in comparisons:
            compared = {"speedup": f"{c.speedup:.2f}", "identical": _YES_OR_NO[c.identical]}
            add_row("", _cells(c.speculative) | compared | {"J": str(c.num_draft_tokens)})
        table.add_section()
    for number, row in enumerate(totals([comparisons for _, comparisons in results])):
        cells = {
            "J": str(row["num_draft_tokens"]),
            "rounds": str(row["rounds"]),
            "a round": "-" if row["tokens_per_round"] is None else f"{row['tokens_per_round']:.2f}",
            "accepted": f"{row['accepted']}/{row['drafted']}",
            "by position": "-" if row["accepted_share"] is None else f"{row['accepted_share']:.2f} of all",
            "speedup": f"{row['speedup']:.2f}",
            "identical": _YES_OR_NO[row["identical"]],
        }
        add_row("" if number else "all prompts", cells)
    return table


def _cells(completion: Completion) -> dict[str, str]:
    distinct = distinct_ngrams(completion.tokens, 4)
    by_position = (f"{n / max(completion.rounds, 1):.2f}" for n in completion.accepted_per_position)
    return {
        "tokens": str(len(completion.tokens)),
        "rounds": str(completion.rounds),
        "a round": f"{completion.tokens_per_round:.2f}" if completion.rounds else "-",
        "accepted": f"{completion.accepted}/{completion.drafted}",
        "by position": " ".join(by_position) or "-",
        "tokens/s": f"{completion.tokens_per_second:.1f}",
        "distinct": "-" if distinct is None else f"{distinct:.2f}",
    }


def describe_control(row: Mapping[str, Any]) -> str:
    """One line about a row of `totals`: what stood at each position, and what stood of the control."""
    stood = [
        "-" if share is None else f"{share:.3f}" + ("" if error is None else f" ± {error:.3f}")
        for share, error in zip(
            [*row["position_shares"], row["control_share"]],
            [*row["position_share_errors"], row["control_share_error"]],
            strict=True,
        )
    ]
    return (
        f"J = {row['num_draft_tokens']}: stood by position {', '.join(stood[:-1])}; "
        f"of first drafts meant for the place after {stood[-1]} (± one standard error over prompts)"
    )


def describe_acceptance(row: Mapping[str, Any]) -> str:
    """One line about a row of `totals`: how often a round's first draft stood and should stand."""
    error = row["first_accepted_share_error"]
    line = f"J = {row['num_draft_tokens']}: of the drafts that a round began with {row['first_accepted_share']:.3f}"
    line += " stood" if error is None else f" (standard error {error:.3f}) stood"
    return (
        f"{line}; by the laws {row['expected_rejection']:.3f} (1 - TV) under rejection, and at least "
        f"{row['expected_shared_noise']:.3f}, (1 - TV) / (1 + TV), under shared noise"
    )
