"""Returning to a bookmark, growing, and replacing a row, on every mixer and on the head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from subjects import SLOTS, SUBJECTS, close, meaningful

from mtp_jax.state import AttentionState, bookmark, commit, grow, place, return_to

go_back = jax.jit(return_to)
place_row = jax.jit(place)


def same_future(subject, a, b):
    """Both states give the same outputs, and states, whichever way they move on; to the last bit."""
    x = subject.inputs(a.length.shape[0], 4, seed=9)
    equal = np.testing.assert_array_equal
    equal(a.length, b.length)
    hidden_a, trail_a = subject.probe(x, a)
    hidden_b, trail_b = subject.probe(x, b)
    equal(hidden_a, hidden_b)
    n = jnp.arange(a.length.shape[0]) % 4
    extended = [subject.extend(x, state, n) for state in (a, b)]
    for row in range(a.length.shape[0]):
        equal(extended[0][0][row, : row % 4], extended[1][0][row, : row % 4])
        jax.tree.map(equal, meaningful(extended[0][1], row), meaningful(extended[1][1], row))
        committed = [meaningful(commit(a, trail_a, n), row), meaningful(commit(b, trail_b, n), row)]
        jax.tree.map(equal, *committed)


def move_on(subject, state, seed):
    """Fed tokens, a probe kept in part, and a probe not kept; rows move by different numbers."""
    x = subject.inputs(3, 17, seed)
    _, state = subject.extend(x[:, :7], state, [7, 0, 3])
    _, trail = subject.probe(x[:, 7:12], state)
    state = commit(state, trail, jnp.array([2, 0, 5]))
    _, trail = subject.probe(x[:, 12:], state)
    return commit(state, trail, jnp.array([0, 0, 0]))


def test_returning_to_a_bookmark_is_the_state_that_was(subject):
    _, start = subject.extend(subject.inputs(3, 30), subject.empty(3), [30, 0, 12])
    kept = bookmark(start)
    later = move_on(subject, start, seed=1)
    same_future(subject, go_back(later, kept), start)
    # A second time, after going another way from it; and from a later bookmark to an earlier one.
    other = move_on(subject, go_back(later, kept), seed=2)
    later_mark = bookmark(other)
    end = move_on(subject, other, seed=3)
    same_future(subject, go_back(end, later_mark), other)
    same_future(subject, go_back(end, kept), start)


def test_a_bookmark_outlives_donated_states(subject):
    x = subject.inputs(2, 6)
    donated = jax.jit(lambda state: subject.extend(x, state, [6, 2])[1], donate_argnums=0)
    start = donated(subject.empty(2))
    expected = jax.tree.map(np.array, start)
    kept = bookmark(start)
    state = donated(start)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(start))
    for _ in range(2):
        state = go_back(state, kept)
        for row in range(2):
            jax.tree.map(np.testing.assert_array_equal, meaningful(state, row), meaningful(expected, row))
        state = donated(state)


def test_a_bookmark_holds_no_keys_and_values(subject):
    state = subject.empty(2)
    buffers = jax.tree.leaves([layer for layer in state.layers if isinstance(layer, AttentionState)])
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(bookmark(state)))
    assert size == sum(leaf.nbytes for leaf in jax.tree.leaves(state)) - sum(leaf.nbytes for leaf in buffers)


def test_growing_changes_nothing_that_follows(subject):
    _, state = subject.extend(subject.inputs(3, 30), subject.empty(3), [30, 0, 12])
    wider = grow(state, SLOTS + 37)
    for layer in wider.layers:
        assert not isinstance(layer, AttentionState) or layer.k.shape[2] == layer.v.shape[2] == SLOTS + 37
    x = subject.inputs(3, 5, seed=4)
    n = [5, 2, 0]
    hidden, narrow_end = subject.extend(x, state, n)
    got, wide_end = subject.extend(x, wider, n)
    for row in range(3):
        close(got[row, : n[row]], hidden[row, : n[row]])
        jax.tree.map(close, meaningful(wide_end, row), meaningful(narrow_end, row))


def test_growing_makes_room(subject):
    """A prompt longer than the first buffers equals one read into buffers that were long from the start."""
    x = subject.inputs(1, SLOTS + 20)
    whole, _ = subject.extend(x, grow(subject.empty(1), SLOTS + 20), [SLOTS + 20])
    _, state = subject.extend(x[:, :SLOTS], subject.empty(1), [SLOTS])
    rest, _ = subject.extend(x[:, SLOTS:], grow(state, SLOTS + 20), [20])
    close(rest, whole[:, SLOTS:])


def test_a_placed_row_is_the_fresh_one_and_touches_no_other(subject):
    _, state = subject.extend(subject.inputs(3, 30), subject.empty(3), [30, 4, 12])
    _, fresh = subject.extend(subject.inputs(1, 30, seed=1), subject.empty(1), [9])
    place_row.clear_cache()
    for row in range(3):
        placed = place_row(state, jnp.int32(row), fresh)
        expected = jax.tree.map(lambda old, new, row=row: np.array(old.at[row].set(new[0])), state, fresh)
        jax.tree.map(np.testing.assert_array_equal, placed, expected)
    assert place_row._cache_size() == 1


def test_a_row_of_another_shape_is_refused(subject):
    with pytest.raises(ValueError, match=r"must have shape \(1,.*, got \(2,"):
        place(subject.empty(3), jnp.int32(0), subject.empty(2))


def test_fewer_slots_are_refused():
    state = SUBJECTS["hybrid"].empty(1)
    with pytest.raises(ValueError, match="at least the 160 slots there are, got 159"):
        grow(state, SLOTS - 1)
