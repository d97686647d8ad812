"""What the contracts are tested on: trunks and the head, each as functions of arrays, and how results are compared."""

import operator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from small_models import MODELS, VOCAB

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


SUBJECTS = {name: Trunk(model) for name, model in MODELS.items()} | {
    "head": Head(MODELS["attention"]),
    "head with experts": Head(MODELS["grouped experts"]),
}
SLOW = ("head with experts",)


def close(a, b):
    # Moving the embeddings by one unit in the last place moves the hybrid's hidden states by up to 4e-5.
    tolerance = 1e-4
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=tolerance, rtol=0)


def meaningful(state: State, row: int):
    """A row's state without the slots that hold nothing."""
    # Of a head with several layers each further one holds one token fewer.
    behind = range(len(state.layers)) if state.waiting else [0] * len(state.layers)
    layers = []
    for layer, fewer in zip(state.layers, behind, strict=True):
        held = max(int(state.length[row]) - fewer, 0)
        part = row if isinstance(layer, DeltaState) else (row, slice(None), slice(held))
        layers.append(jax.tree.map(operator.itemgetter(part), layer))
    # As many outputs wait as the layer before has read more.
    return layers, [pair[row, max(2 + k - int(state.length[row]), 0) :] for k, pair in enumerate(state.waiting)]


def same_state(a: State, row_a: int, b: State, row_b: int):
    assert int(a.length[row_a]) == int(b.length[row_b])
    jax.tree.map(close, meaningful(a, row_a), meaningful(b, row_b))
