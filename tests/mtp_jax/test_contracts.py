"""What every token mixer, the trunk and the head must satisfy, whatever they are made of.

Each runs on the same small models: DeltaNet alone, attention with grouped heads alone, a hybrid of both, and the head.
Lengths lie around the chunk (64) and the triangular block (16); the delta rule's own tests try many more.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import MODELS, VOCAB

from mtp_jax import state as states
from mtp_jax.documents import documents
from mtp_jax.mtp import init_params
from mtp_jax.state import AttentionTrail, DeltaState, State, Trail

SLOTS = 160


class Trunk:
    """A trunk's three ways through tokens, as functions of arrays."""

    def __init__(self, model):
        self.model = model
        self.params = bent(init_params(model, jax.random.key(7)))

    def empty(self, batch):
        return self.model.empty_state(batch, SLOTS)[0]

    def inputs(self, batch, time, seed=0):
        return jax.random.randint(jax.random.key(seed), (batch, time), 0, VOCAB)

    def train(self, tokens, segment_ids):
        return apply(self.model, "__call__", self.params, tokens, segment_ids)

    def extend(self, tokens, state, lengths):
        return apply(self.model, "extend", self.params, tokens, state, jnp.asarray(lengths))

    def probe(self, tokens, state):
        return apply(self.model, "probe", self.params, tokens, state)


class Head(Trunk):
    """The MTP head's; its input is a pair of a hidden state and the next token, carried here as one array."""

    def empty(self, batch):
        return self.model.empty_state(batch, SLOTS)[1]

    def inputs(self, batch, time, seed=0):
        hidden = jax.random.normal(jax.random.key(seed), (batch, time, self.model.config.width))
        tokens = super().inputs(batch, time, seed)
        return jnp.concatenate([hidden, tokens[:, :, None].astype(jnp.float32)], axis=-1)

    def train(self, pairs, segment_ids):
        return apply(self.model, "mtp", self.params, *self._split(pairs), segment_ids)

    def extend(self, pairs, state, lengths):
        return apply(self.model, "mtp_extend", self.params, *self._split(pairs), state, jnp.asarray(lengths))

    def probe(self, pairs, state):
        """The head has no probe of its own: a chained draft extends, and putting `length` back forgets it."""
        hidden, after = self.extend(pairs, state, np.full(pairs.shape[0], pairs.shape[1]))
        return hidden, Trail(tuple(AttentionTrail(layer.k, layer.v) for layer in after.layers))

    @staticmethod
    def _split(pairs):
        return pairs[:, :, :-1], pairs[:, :, -1].astype(jnp.int32)


@partial(jax.jit, static_argnames=("model", "method"))
def apply(model, method, params, *arguments):
    return model.apply({"params": params}, *arguments, method=method)


def bent(params):
    """Scales away from their neutral initial values, so that a forgotten one shows."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(11), len(leaves))
    return jax.tree.unflatten(
        tree,
        [
            x + 0.3 * jax.random.normal(k, x.shape) if x.ndim == 1 else 1.5 * x
            for x, k in zip(leaves, keys, strict=True)
        ],
    )


commit = jax.jit(states.commit)

SUBJECTS = {name: Trunk(model) for name, model in MODELS.items()} | {"head": Head(MODELS["attention"])}


@pytest.fixture(params=SUBJECTS, name="subject")
def _subject(request):
    return SUBJECTS[request.param]


def close(a, b):
    # Moving the embeddings by one unit in the last place moves the hybrid's hidden states by up to 4e-5.
    tolerance = 1e-4
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=tolerance, rtol=0)


def meaningful(state: State, row: int):
    """A row's state without the slots that hold nothing."""
    length = int(state.length[row])
    return [
        jax.tree.map(lambda x: x[row], layer)
        if isinstance(layer, DeltaState)
        else jax.tree.map(lambda x: x[row, :, :length], layer)
        for layer in state.layers
    ]


def same_state(a: State, row_a: int, b: State, row_b: int):
    assert int(a.length[row_a]) == int(b.length[row_b])
    jax.tree.map(close, meaningful(a, row_a), meaningful(b, row_b))


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
            return jnp.sum(bound.trunk(embedding, documents(segment_ids))[:, 13:])

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
