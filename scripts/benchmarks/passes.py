"""Parts of a round by themselves, each repeated within one program."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from infer.carry import DecodeCarry
from infer.draft_vocabulary import DraftVocabulary
from infer.sampling import Rule
from infer.speculative import draft_with_head
from mtp_jax.argmax import argmax
from mtp_jax.mtp import MTPModel
from mtp_jax.state import AttentionState, AttentionTrail, State, Trail, commit

COPIES = 4
"""States that are committed to in turns: more than a cache holds, as after a pass that has read all weights."""


@partial(jax.jit, static_argnames=("model",))
def verify(
    model: MTPModel, params: PyTree, trunk: State, tokens: Int[Array, "B T"], passes: Int[Array, ""]
) -> Int[Array, "B T"]:
    """Passes of the trunk over T tokens, with the logits of all; one token is kept, and the next pass reads what was
    chosen."""
    bound = model.bind({"params": params})
    one = jnp.ones_like(trunk.length)

    def body(_: Array, loop: tuple[State, Array]) -> tuple[State, Array]:
        trunk, tokens = loop
        hidden, trail = bound.probe(tokens, trunk)
        chosen = argmax(bound.logits(bound.trunk_output(hidden)))
        return commit(trunk, trail, one), chosen

    return jax.lax.fori_loop(0, passes, body, (trunk, tokens))[1]


@partial(jax.jit, static_argnames=("model", "num_drafts"))
def draft(
    model: MTPModel,
    params: PyTree,
    rule: Rule,
    vocabulary: DraftVocabulary,
    carry: DecodeCarry,
    *,
    num_drafts: int,
) -> Int[Array, "B J"]:
    """Drafts of the head, each of which it reads to make the next."""
    bound = model.bind({"params": params})
    noise = jnp.zeros((carry.finish.shape[0], num_drafts, model.config.vocab_size), jnp.float32)
    return draft_with_head(bound, rule, vocabulary, carry, noise, num_drafts).tokens


@partial(jax.jit, static_argnames=("model",))
def probe(model: MTPModel, params: PyTree, trunk: State, tokens: Int[Array, "B T"]) -> Trail:
    """What `keep` keeps, without the attention's buffers, which no commit touches."""
    _, trail = model.bind({"params": params}).probe(tokens, trunk)
    return Trail(tuple(layer for layer in trail.layers if not isinstance(layer, AttentionTrail)))


@partial(jax.jit, static_argnames=("model",))
def keep(
    model: MTPModel, params: PyTree, trunk: State, trail: Trail, kept: Int[Array, " B"], turns: Int[Array, ""]
) -> tuple[State, ...]:
    """Commits a trail `turns` times to each of COPIES states."""
    delta = State(tuple(layer for layer in trunk.layers if not isinstance(layer, AttentionState)), trunk.length)

    def body(_: Array, states: tuple[State, ...]) -> tuple[State, ...]:
        return tuple(commit(state, trail, kept) for state in states)

    different = tuple(jax.tree.map(lambda x, n=n: x + jnp.asarray(n, x.dtype), delta) for n in range(COPIES))
    return jax.lax.fori_loop(0, turns, body, different)
