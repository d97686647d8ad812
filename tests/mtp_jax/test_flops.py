"""Counted operations against what XLA counts in the programs that it compiles.

XLA counts the rest too (norms, activations, softmax, the memory's decay), 1 to 8 % here, so models are wide enough for
each term of the formula but the inverse's to be more than that somewhere. It counts the body of a loop
once: all loops here run once.
"""

import jax
import jax.numpy as jnp
import pytest
from released_tensors import BUILT, SHAPES, num_active

from configs.released import RELEASED
from mtp_jax.config import AttentionConfig, DeltaNetConfig, LayerType, ModelConfig, MoEConfig
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
        delta=DeltaNetConfig(num_v_heads, num_k_heads=2, head_k_dim=64, head_v_dim=128),
        **changes,
    )


MODELS = {
    "attention": model((LayerType.FULL,) * 2, num_heads=8, tie_embeddings=False),
    "delta_net": model((LayerType.LINEAR,) * 2, num_v_heads=8),
    "plain": model((LayerType.FULL,), output_gate=False, qk_norm=False, bias=True, num_mtp_layers=2),
    "both": model((LayerType.LINEAR, LayerType.FULL)),
}


# Products with experts are a loop over blocks of rows, so only one token that goes to one expert is counted whole.
FOR_ONE_TOKEN = MODELS | {
    "experts": model(
        (LayerType.FULL,) * 2, moe=MoEConfig(num_experts=8, experts_per_token=1, expert_width=512, shared_width=384)
    )
}


def with_shapes(config):
    model = MTPModel(config)
    return model, jax.eval_shape(lambda: init_params(model, jax.random.key(0)))


@pytest.fixture(params=MODELS)
def subject(request):
    return with_shapes(MODELS[request.param])


@pytest.fixture(params=FOR_ONE_TOKEN)
def with_one_token(request):
    return with_shapes(FOR_ONE_TOKEN[request.param])


def counted(function, *args):
    return jax.jit(function).lower(*args).compile().cost_analysis()["flops"]


def ids(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def states(model):
    return jax.eval_shape(lambda: model.empty_state(1, SLOTS))


def test_decoding(with_one_token):
    model, params = with_one_token

    def step(params, token, state):
        bound = model.bind({"params": params})
        hidden, trail = bound.probe(token, state)
        return bound.logits(hidden), commit(state, trail, jnp.ones(1, jnp.int32))

    expected = token_flops(model.config, SLOTS).decode
    assert counted(step, params, ids(1, 1), states(model)[0]) == pytest.approx(expected, rel=TOLERANCE)


def test_a_draft(with_one_token):
    model, params = with_one_token

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


BATCH = Batch(ids(1, CHUNK), ids(1, CHUNK), jax.ShapeDtypeStruct((1, CHUNK), jnp.bool))


def test_training(subject):
    model, params = subject
    experiment = Experiment(cross_entropy_chunk=2 * CHUNK)

    def loss(params, batch):
        return losses(model, params, batch, jnp.ones(()), experiment)[0]

    flops = token_flops(model.config, CHUNK)
    expected = CHUNK * (flops.train + flops.train_mtp)
    assert counted(jax.grad(loss), params, BATCH) == pytest.approx(expected, rel=TOLERANCE)


def test_training_without_the_mtp_loss():
    model, params = with_shapes(MODELS["attention"])

    def loss(params, batch):
        bound = model.bind({"params": params})
        return jnp.sum(jnp.square(bound.logits(bound(batch.tokens, batch.segment_ids))))

    expected = CHUNK * token_flops(model.config, CHUNK).train
    assert counted(jax.grad(loss), params, BATCH) == pytest.approx(expected, rel=TOLERANCE)


def test_the_mean_prompt_token_attends_to_half_of_the_prompt():
    config = MODELS["attention"]
    by_token = [pass_flops(config, slots, CHUNK).trunk for slots in range(1, 102)]
    assert token_flops(config, 101).prefill == sum(by_token) / 101


def test_each_expert_that_a_token_goes_to_counts():
    experts = {k: MoEConfig(num_experts=8, experts_per_token=k, expert_width=32, shared_width=64) for k in (1, 5)}
    one, five = (pass_flops(model((LayerType.FULL,) * 3, moe=moe), SLOTS, 1) for moe in experts.values())
    each = 2 * 3 * 256 * 32
    assert (five.trunk - one.trunk, five.head - one.head) == (3 * 4 * each, 4 * each)


@pytest.mark.parametrize("name", BUILT)
def test_released_models_multiply_by_all_that_a_token_uses(name):
    flops, shape = pass_flops(RELEASED[name], 0, 0), SHAPES[name]
    linear_layers = shape.layers * 3 // 4 if shape.value_heads else 0
    memories = linear_layers * shape.value_heads * 6 * 128 * 128
    # Norms, biases, convolutions and rows of the embedding are the rest.
    assert 0.999 < (sum(flops) - memories) / (2 * num_active(name)) < 1


def test_without_a_head_there_is_nothing_to_draft():
    config = model((LayerType.FULL,), num_mtp_layers=0)
    flops = token_flops(config, SLOTS)
    assert (flops.draft, flops.prefill_head, flops.train_mtp) == (0, 0, 0)
