"""Speculative decoding as textbooks have it, for comparison: one draft, and what falls is computed again.

A recurrent state that has read a wrong token is of no use, so the state before the pass is kept, and when the draft
falls the one right token is read again from there. Greedy, one row.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from infer.carry import DecodeCarry, row_at
from infer.draft_vocabulary import DraftVocabulary, subset_logits
from infer.sampling import Rule
from mtp_jax.argmax import argmax
from mtp_jax.mtp import MTPModel
from mtp_jax.state import State


class _Loop(NamedTuple):
    trunk: State
    head: State
    draft_hidden: Float[Array, "B D"]
    tokens: Int[Array, " count"]  # new ones; those from num_new on are yet to come
    num_new: Int[Array, ""]


@partial(jax.jit, static_argnames=("model",))
def decode(
    model: MTPModel,
    params: PyTree,
    rule: Rule,
    vocabulary: DraftVocabulary,
    carry: DecodeCarry,
    truth: Int[Array, " count"],
    stands: Bool[Array, " count"],
    num_tokens: Int[Array, ""],
) -> tuple[Int[Array, " count"], Int[Array, ""]]:
    """The first `num_tokens` new tokens, or one more, and how many.

    Drafts are replaced as by `scripted.scripted_drafter`.

    Args:
      carry: with the first of them chosen.
      truth: what plain decoding gives, longer than `num_tokens`.
    """
    bound = model.bind({"params": params})
    vocab = model.config.vocab_size
    one = jnp.ones_like(carry.finish)
    is_token = (jnp.arange(vocab) < rule.num_ids)[None, None]

    def body(loop: _Loop) -> _Loop:
        newest = loop.tokens[loop.num_new - 1]
        logits = subset_logits(bound.head_output(loop.draft_hidden), vocabulary, vocab)
        made = argmax(logits)[0]
        right = truth[loop.num_new]
        replaced = jnp.where(stands[loop.num_new], right, (right + 1) % vocab)
        draft = jnp.where(made == -1, made, replaced)  # no draft is -1: what makes it cannot be left out

        hidden, trunk = bound.extend(jnp.stack([newest, draft])[None], loop.trunk, 2 * one)
        logits = jnp.where(is_token, bound.logits(bound.trunk_output(hidden)), -jnp.inf)
        chosen = argmax(logits)
        stood = chosen[0, 0] == draft

        def again() -> tuple[Array, State]:
            hidden, trunk = bound.extend(newest[None, None], loop.trunk, one)
            return jnp.concatenate([hidden, hidden], axis=1), trunk

        hidden, trunk = jax.lax.cond(stood, lambda: (hidden, trunk), again)
        count = one + stood.astype(jnp.int32)
        own, head = bound.mtp_extend(hidden, chosen, loop.head, count)
        tokens = jax.lax.dynamic_update_slice(loop.tokens, chosen[0], (loop.num_new,))
        return _Loop(trunk, head, row_at(own, count - 1), tokens, loop.num_new + count[0])

    first = jnp.zeros_like(truth).at[0].set(carry.newest[0])
    loop = _Loop(carry.context.trunk, carry.context.head, carry.draft_hidden, first, jnp.ones((), jnp.int32))
    loop = jax.lax.while_loop(lambda loop: loop.num_new < num_tokens, body, loop)
    return loop.tokens, loop.num_new
