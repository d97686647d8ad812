"""What every token mixer, the trunk and the head must satisfy, whatever they are made of.

Each runs on the same small models: DeltaNet alone, attention with grouped heads alone, a hybrid of both, and the head.
Lengths lie around the chunk (64) and the triangular block (16); the delta rule's own tests try many more.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import MODELS, VOCAB
from subjects import SLOTS, apply, bent, close, meaningful, same_state

from mtp_jax import state as states
from mtp_jax.documents import documents
from mtp_jax.mtp import init_params
from mtp_jax.state import DeltaState

commit = jax.jit(states.commit)


@pytest.mark.parametrize("time", [1, 17, 130])
def test_prefill_equals_the_training_pass(subject, time):
    x = subject.inputs(2, time)
    expected = subject.train(x, jnp.zeros((2, time), jnp.int32))
    got, state = subject.extend(x, subject.empty(2), [time, time])
    close(got, expected)
    assert state.length.tolist() == [time, time]


@pytest.mark.parametrize("split", [3, 64, 65])
def test_prefill_in_two_pieces_equals_prefill_in_one(subject, split):
    x = subject.inputs(1, 130)
    whole, end = subject.extend(x, subject.empty(1), [130])
    first, state = subject.extend(x[:, :split], subject.empty(1), [split])
    second, state = subject.extend(x[:, split:], state, [130 - split])
    close(jnp.concatenate([first, second], axis=1), whole)
    same_state(state, 0, end, 0)


def test_prefill_in_pieces_of_one_size_equals_prefill_in_one(subject):
    """Rows end in different pieces, and one has nothing to read at all."""
    lengths, piece = np.array([100, 0, 33, 64]), 32
    x = subject.inputs(4, 128)
    whole, end = subject.extend(x, subject.empty(4), lengths)
    state, pieces = subject.empty(4), []
    for start in range(0, 128, piece):
        hidden, state = subject.extend(x[:, start : start + piece], state, np.clip(lengths - start, 0, piece))
        pieces.append(hidden)
    hidden = jnp.concatenate(pieces, axis=1)
    for row, length in enumerate(lengths):
        close(hidden[row, :length], whole[row, :length])
        same_state(state, row, end, row)


def test_decode_equals_prefill(subject):
    x = subject.inputs(2, 12)
    whole, end = subject.extend(x, subject.empty(2), [12, 12])
    state = subject.empty(2)
    for t in range(12):
        hidden, state = subject.extend(x[:, t : t + 1], state, [1, 1])
        close(hidden[:, 0], whole[:, t])
    same_state(state, 1, end, 1)


@pytest.mark.parametrize("probed", [1, 5])
def test_commit_equals_feeding_the_tokens_one_by_one_for_every_n(subject, probed):
    x = subject.inputs(1, 9 + probed)
    _, before = subject.extend(x[:, :9], subject.empty(1), [9])
    hidden, trail = subject.probe(x[:, 9:], before)
    stepped = before
    same_state(commit(before, trail, jnp.array([0])), 0, stepped, 0)
    for n in range(1, probed + 1):
        y, stepped = subject.extend(x[:, 8 + n : 9 + n], stepped, [1])
        close(hidden[:, n - 1], y[:, 0])
        same_state(commit(before, trail, jnp.array([n])), 0, stepped, 0)


def test_rows_commit_different_numbers(subject):
    x = subject.inputs(4, 9)
    _, before = subject.extend(x[:, :5], subject.empty(4), [5, 2, 0, 5])
    _, trail = subject.probe(x[:, 5:], before)
    after = commit(before, trail, jnp.array([0, 4, 2, 1], jnp.int32))
    for row, (held, n) in enumerate([(5, 0), (2, 4), (0, 2), (5, 1)]):
        alone = jnp.concatenate([x[row : row + 1, :held], x[row : row + 1, 5 : 5 + n]], axis=1)
        _, state = subject.extend(alone, subject.empty(1), [held + n])
        same_state(after, row, state, 0)


def test_probe_changes_nothing_that_its_caller_holds(subject):
    x = subject.inputs(2, 8)
    _, before = subject.extend(x[:, :4], subject.empty(2), [4, 3])
    kept = jax.tree.map(np.array, before)
    first = jax.tree.map(np.array, subject.probe(x[:, 4:], before))
    jax.tree.map(np.testing.assert_array_equal, before, kept)
    jax.tree.map(np.testing.assert_array_equal, subject.probe(x[:, 4:], before), first)


@pytest.mark.parametrize("lengths", [[1, 66], [0, 64]])
def test_a_padded_row_equals_the_row_alone(subject, lengths):
    x = subject.inputs(2, 70)
    hidden, state = subject.extend(x, subject.empty(2), lengths)
    for row, length in enumerate(lengths):
        if length == 0:
            same_state(state, row, subject.empty(1), 0)
            continue
        alone, end = subject.extend(x[row : row + 1, :length], subject.empty(1), [length])
        close(hidden[row, :length], alone[0])
        same_state(state, row, end, 0)


def test_batch_mates_never_change_a_row(subject):
    x, other = subject.inputs(3, 20), subject.inputs(3, 20, seed=1)
    mixed = other.at[1].set(x[1])
    a, state_a = subject.extend(x, subject.empty(3), [20, 11, 20])
    b, state_b = subject.extend(mixed, subject.empty(3), [3, 11, 0])
    np.testing.assert_array_equal(a[1, :11], b[1, :11])
    jax.tree.map(np.testing.assert_array_equal, meaningful(state_a, 1), meaningful(state_b, 1))
    probe_a, _ = subject.probe(x[:, :4], state_a)
    probe_b, _ = subject.probe(mixed[:, :4], state_b)
    np.testing.assert_array_equal(probe_a[1], probe_b[1])


@pytest.mark.parametrize("cut", [16, 40, 64])
def test_the_future_never_leaks(subject, cut):
    x, other = subject.inputs(1, 66), subject.inputs(1, 66, seed=1)
    changed = jnp.concatenate([x[:, :cut], other[:, cut:]], axis=1)
    segment_ids = jnp.zeros((1, 66), jnp.int32)
    np.testing.assert_array_equal(subject.train(x, segment_ids)[:, :cut], subject.train(changed, segment_ids)[:, :cut])
    a, _ = subject.extend(x, subject.empty(1), [66])
    b, _ = subject.extend(changed, subject.empty(1), [66])
    np.testing.assert_array_equal(a[:, :cut], b[:, :cut])


@pytest.mark.parametrize("lengths", [[1, 1, 4, 64], [64, 5, 1]])
@pytest.mark.parametrize("repeat_ids", [False, True])
def test_a_packed_document_never_sees_its_neighbour(subject, lengths, repeat_ids):
    """Ids may repeat: [7, 3, 7] is three documents."""
    x = subject.inputs(1, 70)
    ids = [i % 2 if repeat_ids else i for i in range(len(lengths))]
    segment_ids = jnp.asarray(np.repeat(ids, lengths)[None], jnp.int32)
    packed = subject.train(x, segment_ids)
    start = 0
    for length in lengths:
        end = start + length
        alone = subject.train(x[:, start:end], jnp.zeros((1, length), jnp.int32))
        close(packed[:, start:end], alone)
        start = end


def test_gradients_do_not_cross_documents(subject):
    """Outputs of the second document have no gradient with respect to the first's inputs."""
    x = subject.inputs(1, 30)
    segment_ids = jnp.asarray([[0] * 13 + [1] * 17])
    if x.ndim == 2:
        model, params = subject.model, subject.params

        def second(embedding):
            bound = model.bind({"params": params})
            return jnp.sum(bound.trunk(embedding, documents(segment_ids))[0][:, 13:])

        gradient = jax.jit(jax.grad(second))(model.bind({"params": params}).embed(x))
    else:
        gradient = jax.jit(jax.grad(lambda pairs: jnp.sum(subject.train(pairs, segment_ids)[:, 13:])))(x)
    # Running sums of decays cross the boundary and cancel, so rounding is left where nothing should be.
    leaked, own = (np.abs(np.asarray(x)).max() for x in (gradient[:, :13], gradient[:, 13:]))
    assert leaked < 1e-6 * own


def test_state_keeps_its_shapes_and_dtypes_and_a_second_call_does_not_compile(subject):
    x = subject.inputs(2, 4)
    state = subject.empty(2)

    def shapes(s):
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), s)

    _, after = subject.extend(x, state, [4, 2])
    assert shapes(after) == shapes(state)
    _, trail = subject.probe(x, after)
    assert shapes(commit(after, trail, jnp.array([1, 3]))) == shapes(state)
    compiled = apply._cache_size()
    _, again = subject.extend(x, after, [1, 4])
    subject.probe(x, again)
    assert apply._cache_size() == compiled


@pytest.mark.parametrize("name", ["hybrid", "attention"])
def test_bfloat16_states_and_results(name):
    model = replace(MODELS[name], dtype=jnp.bfloat16)
    params = bent(init_params(model, jax.random.key(7)))
    trunk, head = model.empty_state(2, SLOTS)
    x = jax.random.randint(jax.random.key(0), (2, 9), 0, VOCAB)
    hidden, trunk = apply(model, "extend", params, x, trunk, jnp.array([9, 5]))
    assert hidden.dtype == jnp.bfloat16
    assert all(layer.memory.dtype == jnp.float32 for layer in trunk.layers if isinstance(layer, DeltaState))
    drafted, head = apply(model, "mtp_extend", params, hidden, x, head, jnp.array([9, 5]))
    assert apply(model, "logits", params, drafted).dtype == jnp.float32
