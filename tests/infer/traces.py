"""Completions without a model: a script says how many drafts are right, and `settle` says what comes of it."""

from collections.abc import Sequence

import jax.numpy as jnp

from infer.completion import Completion, TokenLogprob
from infer.verify import Verdict, settle

REFUSED = 7  # the id of every refused draft


def traced(
    truth: Sequence[int], script: Sequence[int], num_drafts: int, limit: int, end_ids: Sequence[int]
) -> Completion:
    """What a loop that asks `settle` after every round writes down of each token."""
    tokens, positions, drafts, rejected = [truth[0]], [0], [-1], [-1]
    finish, round_number = ("stop" if truth[0] in end_ids else None), 0
    while finish is None and len(tokens) < limit:
        right = script[round_number % len(script)]
        made = len(tokens)
        verdict = Verdict(jnp.asarray([truth[made : made + num_drafts + 1]]), jnp.asarray([right]))
        outcome = settle(verdict, jnp.asarray([limit - made]), jnp.asarray([*end_ids, -1]))
        count, accepted = int(outcome.num_tokens[0]), int(outcome.accepted[0])
        tokens += truth[made : made + count]
        positions += [*range(1, accepted + 1), 0][:count]
        drafts += [int(outcome.drafted[0]), *[-1] * (count - 1)]
        rejected += [REFUSED if place == right < num_drafts else -1 for place in range(count)]
        finish = "stop" if bool(outcome.ended[0]) else None
        round_number += 1
    return Completion(
        tokens=tokens,
        text=None,
        finish_reason=finish or "length",
        draft_positions=positions,
        round_drafts=drafts,
        rejected=rejected,
        num_draft_tokens=num_drafts,
        logprobs=[TokenLogprob(-0.5, [(3, -0.5), (4, -float("inf"))])] * len(tokens),
        seconds=2.0,
        compile_seconds=0.0,
    )
