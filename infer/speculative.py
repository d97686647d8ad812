"""The jitted loop: draft -> verify -> accept -> commit, over one carry. Plain decoding is this loop with J = 0.

Between rounds the trunk holds every token but the last one chosen, the head holds as many (hidden, next
token) pairs as the trunk holds tokens, and `draft_hidden` is the head's output on its newest pair: its logits
are the next draft.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from infer.sampling import choose
from infer.verify import Outcome, Verdict, settle, verify_greedy
from mtp_jax.mtp import MTPModel
from mtp_jax.state import State, commit

RUNNING, STOP, LENGTH = 0, 1, 2  # values of DecodeCarry.finish


class Limits(NamedTuple):
    """What may be emitted. Traced: other values do not compile again."""

    max_new: Int[Array, " B"]  # tokens; S - J_max - 1 at most together with the row's prompt
    end_ids: Int[Array, " ends"]  # an emitted one ends its row; negative entries are padding
    num_ids: Int[Array, ""]  # ids at or above it are never chosen


class Statistics(NamedTuple):
    """Counts a row, as `docs/` and the command lines report them."""

    rounds: Int[Array, " B"]  # verifications while the row was live
    drafted: Int[Array, " B"]
    accepted: Int[Array, " B"]
    accepted_per_position: Int[Array, "B J_max"]


class DecodeCarry(NamedTuple):
    """All that a round reads and changes. No shape depends on J, so J may change from call to call."""

    trunk: State
    head: State  # with fewer pairs than the trunk has tokens (after J = 0) it is stale: nothing can be drafted
    draft_hidden: Float[Array, "B D"]  # the head's normed output on its newest pair
    last: Int[Array, " B"]  # the newest token, which the trunk has not read yet
    tokens: Int[Array, "B S"]  # new tokens; entries at or past `num_new` hold nothing of meaning
    from_draft: Bool[Array, "B S"]  # the token was an accepted draft
    num_new: Int[Array, " B"]  # new tokens so far
    finish: Int[Array, " B"]  # RUNNING, STOP or LENGTH
    limits: Limits
    statistics: Statistics


Drafter = Callable[[MTPModel, DecodeCarry, int], tuple[Int[Array, "B J"], State]]
"""`drafter(bound model, carry, J) -> (drafts, head)`: J >= 1 guesses at what follows `carry.last`. The head comes back
with the length it had; slots past it are scratch. Static under jit: pass the same function to reuse the
compiled loop.
"""


def draft_with_head(model: MTPModel, carry: DecodeCarry, num_drafts: int) -> tuple[Int[Array, "B J"], State]:
    """Drafts greedily with the MTP head: the first from `draft_hidden`, the others by chaining its own output.

    A chained pass reads (own output after the last norm, embedding of the newest draft), one token at a time.
    """
    hidden, head = carry.draft_hidden[:, None, :], carry.head
    one = jnp.ones_like(head.length)
    drafts = [choose(model.logits(hidden), carry.limits.num_ids)]
    for _ in range(num_drafts - 1):
        hidden, head = model.mtp_extend(hidden, drafts[-1], head, one)
        drafts.append(choose(model.logits(hidden), carry.limits.num_ids))
    return jnp.concatenate(drafts, axis=1), head._replace(length=carry.head.length)


@partial(jax.jit, static_argnames=("model", "num_slots", "max_drafts", "with_head"))
def prefill(
    model: MTPModel,
    params: PyTree,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    limits: Limits,
    *,
    num_slots: int,
    max_drafts: int,
    with_head: bool,
) -> DecodeCarry:
    """Reads the prompts and chooses the first new token from the logits at each prompt's end.

    No token enters the trunk twice: a recurrent memory cannot unlearn one. The head reads the pairs
    (hidden_i, token i+1) of the whole prompt; in the last pair the next token is the new one.

    Args:
      tokens: prompts, padded on the right.
      lengths: of the prompts, at least 1 and at most T.
      num_slots: S, at least T and at least the most tokens a row may come to hold + `max_drafts` + 1.
      max_drafts: the largest J that the carry will be used with.
      with_head: False leaves the head unread (stale), for a carry that is used with J = 0 only.
    """
    batch, width = tokens.shape
    bound = model.bind({"params": params})
    trunk, head = model.empty_state(batch, num_slots)
    hidden, trunk = bound.extend(tokens, trunk, lengths)
    first = choose(bound.logits(_at(hidden, lengths - 1)), limits.num_ids)

    draft_hidden = jnp.zeros((batch, model.config.width), model.dtype)
    if with_head:
        is_last = jnp.arange(width)[None, :] == lengths[:, None] - 1
        next_tokens = jnp.where(is_last, first[:, None], jnp.roll(tokens, -1, axis=1))
        head_hidden, head = bound.mtp_extend(hidden, next_tokens, head, lengths)
        draft_hidden = _at(head_hidden, lengths - 1)

    carry = DecodeCarry(
        trunk=trunk,
        head=head,
        draft_hidden=draft_hidden,
        last=first,
        tokens=jnp.zeros((batch, num_slots), jnp.int32),
        from_draft=jnp.zeros((batch, num_slots), jnp.bool_),
        num_new=jnp.zeros((batch,), jnp.int32),
        finish=jnp.full((batch,), RUNNING, jnp.int32),
        limits=limits,
        statistics=Statistics(
            *(jnp.zeros((batch,), jnp.int32) for _ in range(3)),
            accepted_per_position=jnp.zeros((batch, max_drafts), jnp.int32),
        ),
    )
    # The first token goes through the same door as all others: limits and end ids hold for it too.
    verdict = Verdict(first[:, None], jnp.zeros_like(first))
    return _emit(carry, verdict, settle(verdict, limits.max_new, limits.end_ids))


@partial(jax.jit, static_argnames=("model", "num_drafts", "drafter"), donate_argnames=("carry",))
def decode(
    model: MTPModel,
    params: PyTree,
    carry: DecodeCarry,
    *,
    num_drafts: int,
    drafter: Drafter = draft_with_head,
) -> DecodeCarry:
    """Runs rounds until every row has met an end id or its limit. The carry is donated.

    Args:
      num_drafts: J >= 0, at most the `max_drafts` of the prefill. J > 0 needs a head that is not stale, which
        traced values cannot show here: see `check_can_draft`.

    Raises:
      ValueError: J is out of range.
    """
    max_drafts = carry.statistics.accepted_per_position.shape[1]
    if not 0 <= num_drafts <= max_drafts:
        raise ValueError(f"num_drafts must be between 0 and the prefill's max_drafts {max_drafts}, got {num_drafts}")
    bound = model.bind({"params": params})
    return jax.lax.while_loop(
        lambda carry: jnp.any(carry.finish == RUNNING),
        lambda carry: advance(bound, carry, num_drafts, drafter),
        carry,
    )


def check_can_draft(carry: DecodeCarry) -> None:
    """Refuses a stale head: one that has read fewer pairs than the trunk has read tokens.

    Raises:
      ValueError: the carry was prefilled without the head, or decoded with J = 0 since.
    """
    pairs, tokens = jax.device_get((carry.head.length, carry.trunk.length))
    if (pairs != tokens).any():
        raise ValueError(
            f"the MTP head is stale: it has read {pairs.tolist()} pairs a row where the trunk has read "
            f"{tokens.tolist()} tokens; prefill again with_head=True before drafting"
        )


def advance(model: MTPModel, carry: DecodeCarry, num_drafts: int, drafter: Drafter) -> DecodeCarry:
    """One round: draft J tokens, verify them in one pass, commit those that stand and the one that follows.

    Rows differ in how many tokens they keep; a finished row keeps none.
    """
    if num_drafts:
        drafts, head = drafter(model, carry, num_drafts)
    else:
        drafts, head = jnp.zeros((carry.last.shape[0], 0), jnp.int32), carry.head
    hidden, trail = model.probe(jnp.concatenate([carry.last[:, None], drafts], axis=1), carry.trunk)
    verdict = verify_greedy(drafts, model.logits(hidden), carry.limits.num_ids)

    live = carry.finish == RUNNING
    remaining = jnp.where(live, carry.limits.max_new - carry.num_new, 0)
    outcome = settle(verdict, remaining, carry.limits.end_ids)
    trunk = commit(carry.trunk, trail, outcome.num_tokens)
    draft_hidden = carry.draft_hidden
    if num_drafts:
        head_hidden, head = model.mtp_extend(hidden, verdict.tokens, head, outcome.num_tokens)
        newest = _at(head_hidden, jnp.maximum(outcome.num_tokens - 1, 0))
        draft_hidden = jnp.where((outcome.num_tokens > 0)[:, None], newest, draft_hidden)

    counts = carry.statistics
    position = jnp.arange(counts.accepted_per_position.shape[1])[None, :]
    per_position = (position < outcome.accepted[:, None]).astype(jnp.int32)
    statistics = Statistics(
        rounds=counts.rounds + live.astype(jnp.int32),
        drafted=counts.drafted + outcome.drafted,
        accepted=counts.accepted + outcome.accepted,
        accepted_per_position=counts.accepted_per_position + per_position,
    )
    carry = carry._replace(trunk=trunk, head=head, draft_hidden=draft_hidden, statistics=statistics)
    return _emit(carry, verdict, outcome)


def _emit(carry: DecodeCarry, verdict: Verdict, outcome: Outcome) -> DecodeCarry:
    """Appends the outcome's tokens to each row and says which rows are finished.

    All tokens of the verdict are written; those past `num_new` are overwritten by the next round or never
    read.
    """
    is_draft = jnp.arange(verdict.tokens.shape[1])[None, :] < verdict.accepted[:, None]
    num_new = carry.num_new + outcome.num_tokens
    newest = _at(verdict.tokens, jnp.maximum(outcome.num_tokens - 1, 0))
    full = jnp.where(num_new >= carry.limits.max_new, LENGTH, RUNNING)
    return carry._replace(
        last=jnp.where(outcome.num_tokens > 0, newest, carry.last),
        tokens=_write(carry.tokens, verdict.tokens, carry.num_new),
        from_draft=_write(carry.from_draft, is_draft, carry.num_new),
        num_new=num_new,
        finish=jnp.where(carry.finish == RUNNING, jnp.where(outcome.ended, STOP, full), carry.finish),
    )


def _at(values: Array, index: Int[Array, " B"]) -> Array:
    """values[b, index[b]] of [B, T, ...]."""
    return jax.vmap(lambda row, i: jax.lax.dynamic_index_in_dim(row, i, keepdims=False))(values, index)


def _write(buffer: Array, values: Array, start: Int[Array, " B"]) -> Array:
    """The buffer [B, S] with values [B, T] from start[b] on in each row."""
    return jax.vmap(lambda row, new, i: jax.lax.dynamic_update_slice_in_dim(row, new, i, 0))(buffer, values, start)


@partial(jax.jit, static_argnames=("model",))
def next_token_logits(model: MTPModel, params: PyTree, carry: DecodeCarry) -> Float[Array, "B vocab"]:
    """Logits that the next round of plain decoding would choose from; the carry stays as it is."""
    bound = model.bind({"params": params})
    hidden, _ = bound.probe(carry.last[:, None], carry.trunk)
    return bound.logits(hidden[:, 0])
