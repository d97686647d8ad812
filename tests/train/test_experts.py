"""Training a model with experts: what is counted of them, what balances them, and what leaves them alone."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import PRESETS
from mtp_jax.config import AttentionConfig, LayerType, ModelConfig, MoEConfig, RouterType
from mtp_jax.errors import UserError
from mtp_jax.mtp import MTPModel
from train.batch import Batch
from train.objective import expert_figures
from train.step import build_model, initial_state, loss_and_gradients, train_step

EXPERIMENT = replace(PRESETS["tiny"](), cross_entropy_chunk=32, dtype="float32", depths=2)
EXPERTS = MoEConfig(
    num_experts=6, experts_per_token=2, expert_width=5, shared_width=5, shared_gate=False, router=RouterType.SIGMOID
)
CONFIG = ModelConfig(
    vocab_size=EXPERIMENT.vocab_size,
    width=16,
    mlp_width=20,
    layer_types=(LayerType.FULL,) * 2,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8, rotary_dim=4, rope_theta=1e4),
    delta=None,
    tie_embeddings=False,
    moe=EXPERTS,
    num_dense_layers=1,
)
MODEL = MTPModel(CONFIG)
LAYERS = ("trunk/layers_1/mlp", "mtp/layers_0/mlp")


@pytest.fixture(scope="module")
def params():
    return jax.device_get(initial_state(MODEL, EXPERIMENT).params)


def batch():
    tokens = np.random.default_rng(0).integers(0, EXPERIMENT.vocab_size, (4, 12)).astype(np.int32)
    segment_ids = np.repeat([[1], [1], [2], [1]], 12, axis=1).astype(np.int32)
    segment_ids[1, 5:] = 0
    segment_ids[3, 11] = 2  # a document of one token, from which no depth reads on
    return Batch(tokens, segment_ids, segment_ids > 0)


def results(params, **changes):
    function = jax.jit(
        lambda p: loss_and_gradients(MODEL, replace(EXPERIMENT, **changes), p, batch(), jnp.float32(0.3))
    )
    return function(params)


def test_every_token_counts_but_padding_and_what_the_head_reads_past_a_documents_end(params):
    report, _ = results(params)
    assert set(report.expert_load) == set(LAYERS)
    lengths = [12, 5, 12, 11, 1]
    assert sum(lengths) == batch().num_tokens
    assert report.expert_load[LAYERS[0]].sum() == 2 * sum(lengths)
    pairs = sum(max(length - depth, 0) for length in lengths for depth in (1, 2))
    assert report.expert_load[LAYERS[1]].sum() == 2 * pairs
    # A balanced layer gives k; none can give less than what its probabilities allow.
    assert 1.5 < float(report.balance_loss) < 6
    figures = expert_figures(jax.device_get(report))
    assert 1 <= figures["expert_load_max"] <= 3
    assert 0 <= figures["experts_unused"] < 1


def test_parts_give_the_losses_and_loads_of_the_whole(params):
    (whole, gradients), (parts, of_parts) = results(params), results(params, accumulate_steps=2)
    for name in ("main_loss", "mtp_loss", "mtp_agreement"):
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, parts.expert_load, whole.expert_load)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), of_parts, gradients)


def test_the_balancing_loss_reaches_the_routers_and_is_not_in_what_is_reported(params):
    (plain, without), (report, balanced) = results(params), results(params, balance_loss_weight=0.5)
    assert report.loss == plain.loss
    for stack, n in (("trunk", 1), ("mtp", 0)):
        a, b = (g[stack][f"layers_{n}"]["mlp"]["gate"]["kernel"] for g in (without, balanced))
        assert np.abs(a - b).max() > 1e-4
    np.testing.assert_array_equal(balanced["lm_head"]["kernel"], without["lm_head"]["kernel"])
    frozen = results(params, balance_loss_weight=0.5, gradient_mode="head_only")[1]
    assert set(frozen) == {"mtp"}


def step(params, **changes):
    experiment = replace(EXPERIMENT, **changes)
    state = initial_state(MODEL, experiment, jax.device_put(params))
    return jax.device_get(train_step(MODEL, experiment, state, batch(), jnp.float32(0.3)))


def biases(params):
    return {path: params[path.split("/")[0]][path.split("/")[1]]["mlp"]["gate"]["bias"] for path in LAYERS}


def test_biases_move_to_what_was_chosen_too_little_and_by_nothing_else(params):
    state, _ = step(params)
    jax.tree.map(np.testing.assert_array_equal, biases(state.params), biases(params))
    state, metrics = step(params, router_bias_rate=0.25)
    for path, load in metrics.losses.expert_load.items():
        expected = biases(params)[path] + 0.25 * np.sign(load.mean() - load)
        np.testing.assert_allclose(biases(state.params)[path], expected)
        assert np.abs(expected).max() == 0.25
    state, _ = step(params, router_bias_rate=0.25, gradient_mode="head_only")
    np.testing.assert_array_equal(biases(state.params)[LAYERS[0]], biases(params)[LAYERS[0]])
    assert np.abs(biases(state.params)[LAYERS[1]]).max() == 0.25


def test_a_step_that_is_skipped_moves_no_bias(params):
    experiment = replace(EXPERIMENT, router_bias_rate=0.25)
    state = initial_state(MODEL, experiment, jax.device_put(params))
    state, metrics = jax.device_get(train_step(MODEL, experiment, state, batch(), jnp.float32("nan")))
    assert metrics.skipped == 1
    jax.tree.map(np.testing.assert_array_equal, biases(state.params), biases(params))


@pytest.mark.parametrize(
    ("changes", "moe", "message"),
    [
        ({"balance_loss_weight": 0.1}, None, "balance_loss_weight: expected 0, the model has no experts, got 0.1"),
        ({"router_bias_rate": 0.1}, None, "router_bias_rate: expected 0, the model's router has no biases, got 0.1"),
        (
            {"router_bias_rate": 0.1},
            replace(EXPERTS, router=RouterType.SOFTMAX),
            "router_bias_rate: expected 0, the model's router has no biases, got 0.1",
        ),
    ],
)
def test_settings_of_experts_that_are_not_there_are_refused(changes, moe, message):
    config = replace(CONFIG, moe=moe, num_dense_layers=0)
    with pytest.raises(UserError, match=message):
        build_model(config, replace(EXPERIMENT, **changes))


def test_a_dense_model_has_no_figures_of_experts(params):
    report, _ = results(params)
    assert expert_figures(report._replace(expert_load={})) == {}
