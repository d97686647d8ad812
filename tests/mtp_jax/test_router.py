"""Choices of experts against their definition, one token at a time in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import GROUPED_EXPERTS, SOFTMAX_EXPERTS

from mtp_jax.layers.moe import MoE
from mtp_jax.layers.router import Routing, balanced_bias, balancing_loss, choose, routing

TOKENS = 40
CONFIGS = {
    "softmax": SOFTMAX_EXPERTS,
    "softmax as it is": replace(SOFTMAX_EXPERTS, normalise=False, scaling=1.5),
    "all of them": replace(SOFTMAX_EXPERTS, experts_per_token=7),
    "one": replace(SOFTMAX_EXPERTS, experts_per_token=1),
    "groups": GROUPED_EXPERTS,
    "one group": replace(GROUPED_EXPERTS, num_groups=1, groups_per_token=1),
    "all groups": replace(GROUPED_EXPERTS, groups_per_token=4, normalise=False),
}


def definition(logits, bias, config):
    """One token's {expert: weight}."""
    if config.router == "softmax":
        scores = np.exp(logits - logits.max())
        scores = preference = scores / scores.sum()
        allowed = range(config.num_experts)
    else:
        scores = 1 / (1 + np.exp(-logits))
        preference = scores + bias
        groups = preference.reshape(config.num_groups, -1)
        strength = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
        best = np.argsort(-strength)[: config.groups_per_token]
        allowed = [e for e in range(config.num_experts) if e // groups.shape[1] in best]
    chosen = sorted(allowed, key=lambda e: -preference[e])[: config.experts_per_token]
    total = sum(scores[e] for e in chosen) if config.normalise else 1.0
    return {e: scores[e] / total * config.scaling for e in chosen}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_choices_are_those_of_the_definition(name, spread):
    config = CONFIGS[name]
    rng = np.random.default_rng(3)
    logits = (rng.normal(size=(TOKENS, config.num_experts)) * spread).astype(np.float32)
    bias = rng.normal(size=config.num_experts).astype(np.float32)
    choice = choose(jnp.asarray(logits), jnp.asarray(bias), config)
    assert choice.weights.dtype == jnp.float32
    for token in range(TOKENS):
        expected = definition(logits[token].astype(np.float64), bias.astype(np.float64), config)
        got = dict(zip(choice.experts[token].tolist(), choice.weights[token].tolist(), strict=True))
        assert got.keys() == expected.keys()
        for expert, weight in expected.items():
            assert got[expert] == pytest.approx(weight, rel=1e-5, abs=1e-30)
    np.testing.assert_allclose(np.sum(choice.probabilities, axis=-1), 1, atol=1e-6)


def test_the_bias_changes_who_is_chosen_and_no_weight():
    logits = jnp.zeros((1, 8))
    bias = jnp.asarray([0.0, 0, 0, 0, 0, 3, 2, 1])
    config = replace(GROUPED_EXPERTS, normalise=False)
    choice = choose(logits, bias, config)
    assert set(choice.experts[0].tolist()) == {5, 6, 7}
    np.testing.assert_allclose(choice.weights, 0.5 * 2.5)
    gradient = jax.grad(lambda b: jnp.sum(jnp.square(choose(logits, b, config).weights)))(bias)
    np.testing.assert_array_equal(gradient, 0)


def test_scores_that_vanish_are_finite():
    choice = choose(jnp.full((2, 8), -200.0), jnp.zeros(8), GROUPED_EXPERTS)
    np.testing.assert_array_equal(choice.weights, 0)
    assert np.isfinite(choice.probabilities).all()


@pytest.mark.parametrize("config", [SOFTMAX_EXPERTS, GROUPED_EXPERTS], ids=["softmax", "sigmoid"])
def test_load_is_counted_over_counted_tokens_and_balanced_is_k(config):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(30, config.num_experts))
    choice = choose(jnp.asarray(logits, jnp.float32), jnp.zeros(config.num_experts), config)
    counted = rng.random(30) < 0.6
    sums = routing(choice, jnp.asarray(counted))
    expected = np.bincount(np.asarray(choice.experts)[counted].ravel(), minlength=config.num_experts)
    np.testing.assert_array_equal(sums.load, expected)
    np.testing.assert_allclose(sums.probability, np.asarray(choice.probabilities)[counted].sum(0), rtol=1e-5)
    assert float(sums.tokens) == counted.sum()
    frequency, mean = expected / counted.sum(), np.asarray(choice.probabilities)[counted].mean(0)
    assert balancing_loss(sums) == pytest.approx(config.num_experts * (frequency * mean).sum(), rel=1e-5)
    even = Routing(jnp.full(8, 12.0), jnp.full(8, 4.0), jnp.asarray(32.0))
    assert balancing_loss(even) == pytest.approx(3.0)
    assert float(balancing_loss(jax.tree.map(jnp.zeros_like, sums))) == 0


def test_the_bias_moves_towards_what_was_chosen_too_little():
    moved = balanced_bias(jnp.asarray([0.5, 0.0, -0.25, 0.0]), jnp.asarray([9.0, 1.0, 4.0, 2.0]), 0.01)
    np.testing.assert_allclose(moved, [0.49, 0.01, -0.25, 0.01])


@pytest.mark.parametrize("config", [SOFTMAX_EXPERTS, GROUPED_EXPERTS], ids=["softmax", "sigmoid"])
def test_of_equals_the_first_are_chosen_however_low_the_bias(config):
    """Biased scores far below 0 are still above those of groups that are closed."""
    choice = choose(jnp.zeros((1, config.num_experts)), jnp.full(config.num_experts, -3.0), config)
    assert choice.experts.tolist() == [[0, 1, 2]]


def test_experts_of_groups_not_chosen_are_closed():
    """The best two stand alone in their groups, which lose to one with two good experts."""
    config = replace(GROUPED_EXPERTS, experts_per_token=2, groups_per_token=1)
    bias = jnp.asarray([0.9, 0, 0.8, 0, 0.5, 0.5, 0, 0])
    assert set(choose(jnp.zeros((1, 8)), bias, config).experts[0].tolist()) == {4, 5}


def test_moving_the_bias_evens_out_a_lopsided_load():
    config = replace(GROUPED_EXPERTS, num_groups=1, groups_per_token=1)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(300, 8)) + np.linspace(-1, 1, 8), jnp.float32)
    bias, uneven = jnp.zeros(8), []
    for _ in range(60):
        load = routing(choose(logits, bias, config), jnp.ones(300, bool)).load
        bias = balanced_bias(bias, load, 0.01)
        uneven.append(np.ptp(np.asarray(load)))
    assert uneven[-1] < uneven[0] / 5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("config", [SOFTMAX_EXPERTS, GROUPED_EXPERTS], ids=["softmax", "sigmoid"])
def test_scores_are_made_in_float32_at_the_highest_precision(config, dtype):
    layer, x = MoE(config, dtype), jnp.zeros((1, 5, 13), dtype)
    params = layer.init(jax.random.key(0), x)
    params["params"]["gate"]["kernel"] = params["params"]["gate"]["kernel"].astype(dtype)
    with jax.default_matmul_precision("default"):  # what a user has
        jaxpr = jax.make_jaxpr(lambda p, x: layer.apply(p, x, method="_choose"))(params, x)
    (product,) = (e for e in jaxpr.eqns if e.primitive.name == "dot_general")
    assert {v.aval.dtype for v in (*product.invars, *product.outvars)} == {jnp.dtype(jnp.float32)}
    assert set(product.params["precision"]) == {jax.lax.Precision.HIGHEST}
