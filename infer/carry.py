"""The values that the decoding loop carries from round to round, and what a compiled loop is specialised to."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from infer.draft_vocabulary import DraftVocabulary
from infer.sampling import Rule
from mtp_jax.mtp import MTPModel
from mtp_jax.state import State

RUNNING, STOP, LENGTH = 0, 1, 2  # values of DecodeCarry.finish


class Context(NamedTuple):
    """What rows have read.

    The head has read one pair fewer than the trunk has tokens, since `hidden` still waits for the token after it.
    """

    trunk: State
    head: State
    hidden: Float[Array, "B D"]  # the trunk's on the newest token, as the head reads it


class Trace(NamedTuple):
    """How each new token came about, at the token's index in `DecodeCarry.tokens`.

    L is S, or 0 where log-probabilities are not recorded.
    """

    draft_position: Int[Array, "B S"]  # k: accepted draft at position k, 1 to J; 0: the trunk's own choice
    round_drafts: Int[Array, "B S"]  # at a round's first token, how many drafts could have been emitted; else -1
    rejected: Int[Array, "B S"]  # the draft refused at this place; else -1
    logprob: Float[Array, "B L"]
    rejected_logprob: Float[Array, "B L"]  # the trunk's, of the refused draft
    top_ids: Int[Array, "B L n"]
    top_logprobs: Float[Array, "B L n"]


class DecodeCarry(NamedTuple):
    """All that a round reads and changes. No shape depends on J, so J may change from call to call.

    Every leaf has the batch as its leading axis: a row can be replaced by another.
    """

    context: Context  # between rounds the newest token is known, so the head has read the last pair too
    draft_hidden: Float[Array, "B D"]  # the head's on its newest pair, as it reads it itself
    key: UInt[Array, "B 2"]  # of the row's noise
    tokens: Int[Array, "B S"]  # prompt, then new tokens; the trunk has not read the newest
    prompt_length: Int[Array, " B"]
    num_new: Int[Array, " B"]  # new tokens so far
    max_new: Int[Array, " B"]  # never exceeded; prompt_length + max_new leaves J + 1 slots
    finish: Int[Array, " B"]  # RUNNING, STOP (an end id) or LENGTH
    trace: Trace

    @property
    def length(self) -> Int[Array, " B"]:
        """Tokens of each row, prompt and new: the index of the one that is decided next."""
        return self.prompt_length + self.num_new

    @property
    def newest(self) -> Int[Array, " B"]:
        """The last token of each row."""
        return row_at(self.tokens, jnp.maximum(self.length - 1, 0))


class Drafts(NamedTuple):
    """What a drafter gives."""

    tokens: Int[Array, "B J"]
    head: State  # with the length it had; slots past it are scratch
    laws: Float[Array, "B J V"] | None  # log-scores of the law that each was drawn from; rejection needs them


Drafter = Callable[[MTPModel, Rule, DraftVocabulary | None, DecodeCarry, Float[Array, "B T V"], int], Drafts]
"""`drafter(bound model, rule, vocabulary, carry, noise, J)`: J >= 1 guesses at what follows the newest token, the i-th
drawn with `noise[:, i]`. Static under jit: pass the same function to reuse the compiled loop.
"""


class Plan(NamedTuple):
    """What a compiled loop is specialised to. Everything else (`Rule`, limits, keys) is traced."""

    num_drafts: int = 0  # J
    verifier: str = "shared_noise"
    with_head: bool = True  # False leaves the head unread, for J = 0 only
    num_logprobs: int | None = None  # alternatives recorded a token; None records no log-probabilities
    raw_logprobs: bool = False  # of the model's own distribution instead of the warped one
    drafter: Drafter | None = None  # None is `infer.speculative.draft_with_head`

    def without_drafts(self) -> "Plan":
        """For the first token, which nothing is drafted before: one program serves every J and drafter."""
        return self._replace(num_drafts=0, drafter=None)


def empty_context(model: MTPModel, batch: int, num_slots: int) -> Context:
    """Nothing read yet.

    Args:
      num_slots: S, at least the most tokens that a row may come to hold, plus what a padded piece or a round writes
        past it: a write past the end would land on good slots.
    """
    trunk, head = model.empty_state(batch, num_slots)
    return Context(trunk, head, jnp.zeros((batch, model.config.width), model.dtype))


def idle_carry(context: Context, num_slots: int, num_logprobs: int | None) -> DecodeCarry:
    """Rows around a context that hold no tokens and are finished."""
    batch = context.hidden.shape[0]
    whole, row = (batch, num_slots), jnp.zeros((batch,), jnp.int32)
    recorded = (batch, 0 if num_logprobs is None else num_slots)
    top = (*recorded, num_logprobs or 0)
    return DecodeCarry(
        context=context,
        draft_hidden=jnp.zeros_like(context.hidden),
        key=jnp.zeros((batch, 2), jnp.uint32),
        tokens=jnp.zeros(whole, jnp.int32),
        prompt_length=row,
        num_new=row,
        max_new=row,
        finish=jnp.full_like(row, LENGTH),
        trace=Trace(
            draft_position=jnp.zeros(whole, jnp.int32),
            round_drafts=jnp.full(whole, -1, jnp.int32),
            rejected=jnp.full(whole, -1, jnp.int32),
            logprob=jnp.zeros(recorded, jnp.float32),
            rejected_logprob=jnp.zeros(recorded, jnp.float32),
            top_ids=jnp.zeros(top, jnp.int32),
            top_logprobs=jnp.zeros(top, jnp.float32),
        ),
    )


def row_at(values: Array, index: Int[Array, " B"]) -> Array:
    """values[b, index[b]] of [B, T, ...]."""
    return jax.vmap(lambda row, i: jax.lax.dynamic_index_in_dim(row, i, keepdims=False))(values, index)
