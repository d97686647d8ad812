"""Plain against speculative decoding of the same prompts in the same process."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from infer.generator import Generation, Generator


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
    """One prompt with one J; both generations carry the median seconds of their repeats."""

    num_draft_tokens: int
    plain: Generation
    speculative: Generation
    first_difference: FirstDifference | None

    @property
    def identical(self) -> bool:
        """Token by token."""
        return self.plain.tokens == self.speculative.tokens

    @property
    def speedup(self) -> float:
        """Tokens per second of speculative over plain decoding; above 1 is faster."""
        return self.speculative.tokens_per_second / self.plain.tokens_per_second

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
) -> list[Comparison]:
    """Decodes a prompt plainly and with each J in turn, `repeats` times over.

    The turns alternate, so that a machine that slows down slows all of them; medians are reported. What
    compiles does so in an unmeasured turn before.
    """
    turns = [0, *num_draft_tokens]
    warm = [generator.generate([prompt], max_new_tokens, j)[0] for j in turns]
    seconds: list[list[float]] = [[] for _ in turns]
    for _ in range(repeats):
        for taken, j in zip(seconds, turns, strict=True):
            taken.append(generator.generate([prompt], max_new_tokens, j)[0].seconds)
    plain, *others = (
        replace(generation, seconds=statistics.median(taken)) for generation, taken in zip(warm, seconds, strict=True)
    )
    return [
        Comparison(j, plain, other, first_difference(generator, prompt, plain.tokens, other.tokens))
        for j, other in zip(num_draft_tokens, others, strict=True)
    ]


def first_difference(
    generator: Generator, prompt: Sequence[int], plain: Sequence[int], speculative: Sequence[int]
) -> FirstDifference | None:
    """The first place where two continuations of a prompt differ; None if they are the same."""
    same = 0
    while same < min(len(plain), len(speculative)) and plain[same] == speculative[same]:
        same += 1
    if same == len(plain) == len(speculative):
        return None
    logits = generator.next_logits(prompt, same)
    ids = [tokens[same] if same < len(tokens) else None for tokens in (plain, speculative)]
    values = [None if i is None else float(logits[i]) for i in ids]
    return FirstDifference(same, *ids, *values)


def distinct_ngrams(tokens: Sequence[int], n: int) -> float | None:
    """Distinct n-grams over all n-grams; None if there are none. Near 0 in a loop, which flatters acceptance."""
    ngrams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else None
