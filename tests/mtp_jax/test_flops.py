"""Counted operations against what XLA counts in the programs that it compiles.

XLA counts the rest too (norms, activations, softmax, the memory's decay), 1 to 8 % here, so models are wide enough for
each term of the formula to be more than that somewhere. It counts the body of a loop once: all loops here run once.
"""

import jax
import jax.numpy as jnp
import pytest

from mtp_jax.config import AttentionConfig, DeltaNetConfig, LayerType, ModelConfig
from mtp_jax.flops import pass_flops, token_flops
from mtp_jax.layers.delta_rule import CHUNK
from mtp_jax.mtp import MTPModel, init_params
from mtp_jax.state import commit
from train.batch import Batch
from train.experiment import Experiment
from train.objective import losses

TOLERANCE = 0.08
SLOTS = 512


def model(layer_types, num_heads=2, num_v_heads=4, output_gate=True, qk_norm=True, bias=False, **changes):
    return ModelConfig(
        vocab_size=1024,
        width=256,
        mlp_width=512,
        layer_types=layer_types,
        attention=AttentionConfig(num_heads, 2, 64, 16, 1e6, output_gate, qk_norm, bias),
        delta=DeltaNetConfig(num_v_heads, 2, 64, 128) if LayerType.LINEAR in layer_types else None,
        **changes,
    )


MODELS = {
    "attention": model((LayerType.FULL,) * 2, num_heads=8, tie_embeddings=False),
    "delta_net": model((LayerType.LINEAR,) * 2, num_v_heads=8),
    "plain": model((LayerType.FULL,), output_gate=False, qk_norm=False, bias=True, num_mtp_layers=2),
    "both": model((LayerType.LINEAR, LayerType.FULL)),
}


@pytest.fixture(params=MODELS)
def subject(request):
    config = MODELS[request.param]
    bound = MTPModel(config)
    return bound, jax.eval_shape(lambda: init_params(bound, jax.random.key(0)))


def counted(function, *args):
    return jax.jit(function).lower(*args).compile().cost_analysis()["flops"]


def ids(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def states(model):
    return jax.eval_shape(lambda: model.empty_state(1, SLOTS))


def test_decoding(subject):
    model, params = subject

    def step(params, token, state):
        bound = model.bind({"params": params})
        hidden, trail = bound.probe(token, state)
        return bound.logits(hidden), commit(state, trail, jnp.ones(1, jnp.int32))

    expected = token_flops(model.config, SLOTS).decode
    assert counted(step, params, ids(1, 1), states(model)[0]) == pytest.approx(expected, rel=TOLERANCE)


def test_a_draft(subject):
    model, params = subject

    def draft(params, hidden, token, state):
        bound = model.bind({"params": params})
        last = model.config.num_mtp_layers
        hidden, state = bound.mtp_extend(hidden, token, state, jnp.ones(1, jnp.int32), depth=last)
        return bound.logits(hidden), state

    hidden = jax.ShapeDtypeStruct((1, 1, model.config.width), jnp.float32)
    expected = token_flops(model.config, SLOTS).draft
    assert counted(draft, params, hidden, ids(1, 1), states(model)[1]) == pytest.approx(expected, rel=TOLERANCE)


def test_reading_a_prompt(subject):
    model, params = subject

    def read(params, tokens, state, lengths):
        return model.bind({"params": params}).extend(tokens, state, lengths)

    # One piece, one chunk, one block of slots: the program makes the scores of all slots.
    expected = CHUNK * pass_flops(model.config, SLOTS, CHUNK).trunk
    assert counted(read, params, ids(1, CHUNK), states(model)[0], ids(1)) == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("with_mtp", [False, True])
def test_training(subject, with_mtp):
    model, params = subject
    experiment = Experiment(cross_entropy_chunk=2 * CHUNK)
    batch = Batch(ids(1, CHUNK), ids(1, CHUNK), jax.ShapeDtypeStruct((1, CHUNK), jnp.bool))

    def loss(params, batch):
        if with_mtp:
            return losses(model, params, batch, jnp.ones(()), experiment)[0]
        bound = model.bind({"params": params})
        return jnp.sum(jnp.square(bound.logits(bound(batch.tokens, batch.segment_ids))))

    flops = token_flops(model.config, CHUNK)
    expected = CHUNK * (flops.train + flops.train_mtp * with_mtp)
    assert counted(jax.grad(loss), params, batch) == pytest.approx(expected, rel=TOLERANCE)


def test_the_mean_prompt_token_attends_to_half_of_the_prompt():
    config = MODELS["attention"]
    by_token = [pass_flops(config, slots, CHUNK).trunk for slots in range(1, 102)]
    assert token_flops(config, 101).prefill == sum(by_token) / 101


def test_without_a_head_there_is_nothing_to_draft():
    config = model((LayerType.FULL,), num_mtp_layers=0)
    flops = token_flops(config, SLOTS)
    assert (flops.draft, flops.prefill_head, flops.train_mtp) == (0, 0, 0)
