"""Completions made up for tests of what shows them."""

from collections.abc import Sequence
from typing import Any

from infer.completion import Completion


def completion(
    rounds: Sequence[int], num_drafts: int, tokens: Sequence[int] | None = None, **fields: Any
) -> Completion:
    """Prefill's token, then rounds of so many accepted drafts and the trunk's token.

    Args:
      rounds: drafts accepted in each, of `num_drafts` that could have been.
    """
    positions, drafted = [0], [-1]
    for accepted in rounds:
        positions += [*range(1, accepted + 1), 0]
        drafted += [num_drafts] + [-1] * accepted
    tokens = list(range(1, len(positions) + 1)) if tokens is None else list(tokens)
    rejected = [-1] * len(tokens)
    values = {"text": None, "finish_reason": "length", "logprobs": None, "seconds": 0.5, "compile_seconds": 1.5}
    values |= fields
    return Completion(
        tokens=tokens,
        draft_positions=positions[: len(tokens)],
        round_drafts=drafted[: len(tokens)],
        rejected=rejected,
        num_draft_tokens=num_drafts,
        **values,
    )
