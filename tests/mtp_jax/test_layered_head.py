"""A head of several layers: each reads one token behind the one before, whatever the pieces that pairs come in."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import MODELS
from subjects import Head, close, meaningful, same_state

from mtp_jax.mtp import MTPModel
from mtp_jax.state import bookmark, forget_newest, return_to

DEPTH = 3
HEAD = Head(MTPModel(replace(MODELS["attention"].config, num_mtp_layers=DEPTH, mtp_layers_share=False)))


@partial(jax.jit, static_argnames="depth")
def draft(own, tokens, state, depth):
    one = jnp.ones_like(state.length)
    return HEAD.model.apply({"params": HEAD.params}, own, tokens, state, one, depth, method="mtp_extend")


def chain(state, pairs):
    """Drafts of every depth after what the state has read, from the given hidden state and tokens."""
    hidden, tokens = HEAD._split(pairs)
    own, outputs = hidden[:, :1], []
    for depth in range(1, DEPTH + 2):
        own, state = draft(own, tokens[:, depth - 1 : depth], state, depth)
        outputs.append(own)
    return jnp.concatenate(outputs, axis=1), state


@pytest.mark.parametrize("split", [1, 2, 3, 5])
def test_pairs_in_two_pieces_equal_pairs_in_one(split):
    pairs = HEAD.inputs(1, 9)
    whole, end = HEAD.extend(pairs, HEAD.empty(1), [9])
    first, state = HEAD.extend(pairs[:, :split], HEAD.empty(1), [split])
    second, state = HEAD.extend(pairs[:, split:], state, [9 - split])
    close(jnp.concatenate([first, second], axis=1), whole)
    same_state(state, 0, end, 0)
    after = HEAD.inputs(1, DEPTH + 1, seed=1)
    close(chain(state, after)[0], chain(end, after)[0])


def test_a_padded_row_equals_the_row_alone():
    """From rows that have read nothing, one pair, or as many as there are layers, on."""
    pairs, lengths = HEAD.inputs(6, 6), [0, 1, 2, 3, 4, 6]
    _, first = HEAD.extend(pairs, HEAD.empty(6), lengths)
    more = [3, 0, 1, 2, 6, 1]
    _, both = HEAD.extend(pairs, first, more)
    after = HEAD.inputs(6, DEPTH + 1, seed=1)
    drafts, _ = chain(both, after)
    for row in range(6):
        state = HEAD.empty(1)
        for count in (lengths[row], more[row]):
            _, state = HEAD.extend(pairs[row : row + 1, :count], state, [count]) if count else (None, state)
        same_state(both, row, state, 0)
        close(drafts[row], chain(state, after[row : row + 1])[0][0])


def test_drafts_are_forgotten_by_putting_length_and_waiting_back():
    pairs = HEAD.inputs(2, 8)
    _, state = HEAD.extend(pairs[:, :5], HEAD.empty(2), [5, 1])
    _, scratched = chain(state, HEAD.inputs(2, DEPTH + 1, seed=1))
    forgot = scratched._replace(length=state.length, waiting=state.waiting)
    expected, end = HEAD.extend(pairs[:, 5:], state, [3, 3])
    got, after = HEAD.extend(pairs[:, 5:], forgot, [3, 3])
    np.testing.assert_array_equal(got, expected)
    for row in range(2):
        jax.tree.map(np.testing.assert_array_equal, meaningful(after, row), meaningful(end, row))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7])
def test_the_newest_pair_can_be_forgotten(length):
    pairs = HEAD.inputs(1, length)
    other = HEAD.inputs(1, 4, seed=1)
    _, state = HEAD.extend(pairs, HEAD.empty(1), [length])
    expected = HEAD.empty(1)
    if length > 1:
        _, expected = HEAD.extend(pairs[:, :-1], expected, [length - 1])
    got, end = HEAD.extend(other, forget_newest(state), [4])
    alone, expected_end = HEAD.extend(other, expected, [4])
    close(got, alone)
    same_state(end, 0, expected_end, 0)


def test_returning_to_a_bookmark_is_the_state_that_was():
    pairs = HEAD.inputs(1, 9)
    _, state = HEAD.extend(pairs[:, :4], HEAD.empty(1), [4])
    kept = bookmark(state)
    _, later = HEAD.extend(pairs[:, 4:], state, [5])
    back = return_to(later, kept)
    assert (np.asarray(back.length) == 4).all()
    jax.tree.map(np.testing.assert_array_equal, meaningful(back, 0), meaningful(state, 0))
    assert all(np.any(a != b) for a, b in zip(later.waiting, state.waiting, strict=True))
