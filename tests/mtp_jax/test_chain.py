"""The head at depth d in training against drafts that decoding chains, at every prefix."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import VOCAB, config
from subjects import bent

from infer.logits import all_logits
from mtp_jax.config import HeadReads, interleaved
from mtp_jax.layers.block import REMAT
from mtp_jax.mtp import MTPModel, init_params

MODEL = MTPModel(config(interleaved(2, 2)))
HEADS = {
    "one layer": {},
    "one layer before the norms": {"head_reads": HeadReads.BEFORE_NORM},
    "two layers": {"num_mtp_layers": 2, "mtp_layers_share": False},
    "three layers that share": {"num_mtp_layers": 3},
    "four layers before the norms": {
        "num_mtp_layers": 4,
        "mtp_layers_share": False,
        "head_reads": HeadReads.BEFORE_NORM,
    },
}
DEPTHS, TIME = 3, 11


@pytest.fixture(scope="module", params=HEADS)
def model(request):
    return MTPModel(dataclasses.replace(MODEL.config, **HEADS[request.param]))


@pytest.fixture(scope="module")
def params(model):
    return bent(init_params(model, jax.random.key(7)))


def _tokens(seed, time=TIME):
    return np.random.default_rng(seed).integers(0, VOCAB, (1, time)).astype(np.int32)


@partial(jax.jit, static_argnames=("model", "depths"))
def _trained_logits(model, params, tokens, segment_ids, depths=DEPTHS):
    """[D B T vocab], entry [d-1, b, t] of the token t+d+1."""
    bound = model.bind({"params": params})
    chain, _ = bound.mtp_chain(bound(tokens, segment_ids), tokens, segment_ids, depths)
    return jnp.stack([bound.logits(bound.head_output(own, depth)) for depth, own in enumerate(chain, 1)])


@partial(jax.jit, static_argnames="model")
def _decoded_logits(model, params, tokens):
    """The same for one document [1 T], through the head's cache: a row of the batch for each prefix.

    Row t primes the cache with the t pairs before, then reads (hidden t, token t+1), then its own output and token
    t+2, and so on.
    """
    time = tokens.shape[1]
    bound = model.bind({"params": params})
    trunk, head = model.empty_state(time, time + DEPTHS)
    rows = jnp.broadcast_to(tokens, (time, time))
    hidden, _ = bound.extend(rows, trunk, jnp.full((time,), time))
    ahead = jnp.pad(rows, [(0, 0), (0, DEPTHS + 1)])
    prefix = jnp.arange(time)
    _, head = bound.mtp_extend(hidden, ahead[:, 1 : time + 1], head, prefix)
    own = hidden[prefix, prefix][:, None]
    logits = []
    for depth in range(1, DEPTHS + 1):
        own, head = bound.mtp_extend(own, ahead[prefix, prefix + depth][:, None], head, jnp.ones_like(prefix), depth)
        logits.append(bound.logits(bound.head_output(own, depth))[:, 0])
    return jnp.stack(logits)


def test_depths_equal_decodings_chain_at_every_prefix(model, params):
    tokens = _tokens(0)
    trained = _trained_logits(model, params, tokens, np.zeros_like(tokens))[:, 0]
    decoded = _decoded_logits(model, params, tokens)
    for depth in range(1, DEPTHS + 1):
        known = TIME - depth  # prefixes whose tokens t+1 .. t+depth exist
        np.testing.assert_allclose(trained[depth - 1, :known], decoded[depth - 1, :known], rtol=1e-4, atol=1e-4)
    # The depths are told apart: the same comparison one depth off fails.
    assert np.abs(trained[1, :8] - decoded[0, :8]).max() > 0.1


def test_depths_of_packed_documents_equal_decodings_chains_of_each(model, params):
    """An id that comes back is another document; its chain starts at position 0 and sees itself only."""
    documents = [_tokens(seed) for seed in (1, 2, 3)]
    segment_ids = np.repeat([[5, 2, 5]], [TIME] * 3, axis=1).astype(np.int32)
    trained = _trained_logits(model, params, np.concatenate(documents, axis=1), segment_ids)[:, 0]
    for number, document in enumerate(documents):
        decoded = _decoded_logits(model, params, document)
        for depth in range(1, DEPTHS + 1):
            known = TIME - depth
            part = trained[depth - 1, number * TIME : number * TIME + known]
            np.testing.assert_allclose(part, decoded[depth - 1, :known], rtol=1e-4, atol=1e-4)


def test_depths_equal_the_chained_logits_that_are_dumped(model, params):
    """`chained_logits` reads the arg-maxima as tokens; fed to training, the last prefix gives the same numbers."""
    tokens = _tokens(4)
    dumped = all_logits(model, params, tokens)
    drafts = [dumped["main_logits"][0, -1].argmax(), *dumped["chained_logits"][0, : DEPTHS - 1].argmax(-1)]
    longer = np.concatenate([tokens, np.array([drafts], np.int32)], axis=1)
    trained = _trained_logits(model, params, longer, np.zeros_like(longer))
    np.testing.assert_allclose(trained[:, 0, TIME - 1], dumped["chained_logits"][0, :DEPTHS], rtol=1e-4, atol=1e-4)


def test_the_first_depth_is_the_head_as_it_reads_given_pairs(model, params):
    tokens = jnp.asarray(_tokens(5))

    @jax.jit
    def both(params):
        bound = model.bind({"params": params})
        hidden = bound(tokens, jnp.zeros_like(tokens))
        return bound.mtp_chain(hidden, tokens, jnp.zeros_like(tokens), 1)[0][0], bound.mtp(
            hidden, jnp.roll(tokens, -1, axis=1), jnp.zeros_like(tokens)
        )

    chain, alone = both(params)
    np.testing.assert_allclose(chain[:, :-1], alone[:, :-1], rtol=1e-5, atol=1e-6)


def test_deeper_than_the_row_is_long_is_finite(model, params):
    tokens = _tokens(6, time=2)
    assert np.isfinite(_trained_logits(model, params, tokens, np.zeros_like(tokens), depths=3)).all()


@partial(jax.jit, static_argnames="model")
def _gradient(params, model):
    tokens = jnp.asarray(_tokens(7))

    def value(params):
        return jnp.sum(jnp.square(_trained_logits(model, params, tokens, jnp.zeros_like(tokens), 2)))

    return jax.value_and_grad(value)(params)


@pytest.mark.parametrize("remat", sorted(set(REMAT) - {"none"}))
def test_making_activations_again_changes_nothing(remat):
    model = dataclasses.replace(MODEL, remat=remat)
    params = bent(init_params(MODEL, jax.random.key(7)))
    shapes = jax.eval_shape(lambda: init_params(model, jax.random.key(7)))
    assert jax.tree.structure(shapes) == jax.tree.structure(params)
    again, kept = _gradient(params, model), _gradient(params, MODEL)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-3), again, kept)


def test_an_unknown_policy_is_refused():
    params = bent(init_params(MODEL, jax.random.key(7)))
    with pytest.raises(ValueError, match="remat must be one of none, products, block, got 'all'"):
        _trained_logits(dataclasses.replace(MODEL, remat="all"), params, _tokens(8), np.zeros((1, TIME), np.int32))
