"""How many drafts stand, which token follows them, and how many of those tokens a row may still emit."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from infer.sampling import choose


class Verdict(NamedTuple):
    """What verification says, before limits and end ids: the first `accepted` + 1 of `tokens` count."""

    tokens: Int[Array, "B J+1"]  # the drafts that stand, then the token that follows them
    accepted: Int[Array, " B"]  # drafts that stand, 0 to J


class Outcome(NamedTuple):
    """What a round does to each row. All zero for a row that may emit nothing."""

    num_tokens: Int[Array, " B"]  # tokens emitted, and tokens committed to the trunk
    ended: Bool[Array, " B"]  # the last of them is an end id
    drafted: Int[Array, " B"]  # drafts that could have been emitted
    accepted: Int[Array, " B"]  # drafts that were


def verify_greedy(drafts: Int[Array, "B J"], logits: Float[Array, "B J+1 vocab"], num_ids: Int[Array, ""]) -> Verdict:
    """A draft stands if it and all before it are what the trunk chooses itself.

    With x_i = argmax logits_i, n is the length of the longest prefix with d_i = x_i. The tokens are x_0..x_n:
    up to n they are the drafts, and x_n is what plain decoding takes next, since logits_n has read accepted
    drafts only.

    Sampling has its verifiers beside this one, with the same result: shared noise chooses x_i by noisy
    logits; rejection decides each draft by its probabilities and then redraws.

    Args:
      drafts: d_0..d_{J-1}.
      logits: the trunk's, after the last token and after each draft.
      num_ids: ids at or above it are never chosen.
    """
    tokens = choose(logits, num_ids)
    stands = (tokens[:, :-1] == drafts).astype(jnp.int32)
    return Verdict(tokens, jnp.sum(jnp.cumprod(stands, axis=1), axis=1))


def settle(verdict: Verdict, remaining: Int[Array, " B"], end_ids: Int[Array, " ends"]) -> Outcome:
    """Cuts a verdict to what each row may still emit, and after its first end id.

    A draft past the limit is not counted as drafted, nor is one past an accepted end id: neither could have
    been emitted however good it was.

    Args:
      remaining: tokens that the row may still emit; 0 for a finished row.
      end_ids: in any order; negative entries are padding.
    """
    num_drafts = verdict.tokens.shape[1] - 1
    position = jnp.arange(num_drafts + 1)[None, :]
    available = jnp.minimum(verdict.accepted + 1, remaining)
    is_end = jnp.any(verdict.tokens[:, :, None] == end_ids[None, None, :], axis=2)
    is_end = is_end & (position < available[:, None])
    ended = jnp.any(is_end, axis=1)
    up_to_end = jnp.where(ended, jnp.argmax(is_end, axis=1).astype(jnp.int32) + 1, num_drafts + 1)
    num_tokens = jnp.minimum(available, up_to_end)
    end_was_drafted = ended & (up_to_end <= verdict.accepted)
    possible = jnp.where(end_was_drafted, up_to_end, num_drafts)
    return Outcome(
        num_tokens=num_tokens,
        ended=ended,
        drafted=jnp.minimum(possible, remaining),
        accepted=jnp.minimum(verdict.accepted, num_tokens),
    )
