"""The mixture of experts against its definition in float64: every expert, for every token, times its weight."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import GROUPED_EXPERTS, SOFTMAX_EXPERTS

from mtp_jax.config import RouterType
from mtp_jax.layers.experts import Experts, block_rows, mix_blocks, mix_experts, mix_ragged, sort_by_expert
from mtp_jax.layers.moe import MoE

WIDTH = 10
CONFIGS = {
    "softmax": SOFTMAX_EXPERTS,
    "sigmoid": GROUPED_EXPERTS,
    "one choice": replace(SOFTMAX_EXPERTS, experts_per_token=1, normalise=False),
    "all experts": replace(SOFTMAX_EXPERTS, experts_per_token=7),
}


def made(config, dtype=jnp.float32):
    layer = MoE(config, dtype)
    params = layer.init(jax.random.key(0), jnp.zeros((1, 1, WIDTH)))["params"]
    if config.router is RouterType.SIGMOID:
        params["gate"]["bias"] = jax.random.normal(jax.random.key(1), (config.num_experts,))
    return layer, params


def inputs(*shape):
    return jax.random.normal(jax.random.key(2), (*shape, WIDTH))


def in_float64(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def swiglu(x, gate, up, down):
    return (x @ gate * sigmoid(x @ gate) * (x @ up)) @ down


def defined(params, x, config, choice):
    params, x, weights = in_float64(params), np.asarray(x, np.float64), np.asarray(choice.weights, np.float64)
    names = "gate_proj", "up_proj", "down_proj"
    y = swiglu(x, *(params["shared_expert"][name]["kernel"] for name in names))
    if config.shared_gate:
        y *= sigmoid(x @ params["shared_expert_gate"]["kernel"])
    of_tokens = y.reshape(-1, WIDTH)
    for expert in range(config.num_experts):
        one = swiglu(x.reshape(-1, WIDTH), *(params["experts"][name][expert] for name in names))
        of_tokens += one * np.sum(weights * (np.asarray(choice.experts) == expert), axis=1, keepdims=True)
    return y


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (2, 60)])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_token_gets_its_experts_and_the_shared_one(name, shape):
    config = CONFIGS[name]
    layer, params = made(config)
    x = inputs(*shape)
    choice = layer.apply({"params": params}, x, method="_choose")
    y = jax.jit(layer.apply)({"params": params}, x)
    np.testing.assert_allclose(y, defined(params, x, config, choice), atol=5e-6)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 129])
def test_no_token_is_dropped_where_all_choose_the_same(tokens):
    layer, params = made(SOFTMAX_EXPERTS)
    params["gate"]["kernel"] = jnp.zeros((WIDTH, 7)).at[0].set(jnp.arange(7.0))
    x = inputs(1, tokens).at[:, :, 0].set(2.0)  # the only channel that the router reads
    choice = layer.apply({"params": params}, x, method="_choose")
    assert choice.experts.tolist() == [[6, 5, 4]] * tokens
    np.testing.assert_allclose(
        layer.apply({"params": params}, x), defined(params, x, SOFTMAX_EXPERTS, choice), atol=5e-6
    )


def test_no_tokens_are_no_mistake():
    layer, params = made(SOFTMAX_EXPERTS)
    assert layer.apply({"params": params}, inputs(2, 0)).shape == (2, 0, WIDTH)


def drawn(tokens):
    """Three different experts of the first five of seven for each token."""
    rng = np.random.default_rng(tokens)
    return jnp.asarray(np.stack([rng.permutation(5)[:3] for _ in range(tokens)]), jnp.int32)


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 64])
@pytest.mark.parametrize("tokens", [1, 4, 37])
def test_blocks_hold_every_choice_once_and_none_of_another_expert(tokens, rows):
    choice = drawn(tokens)
    blocks = sort_by_expert(choice, 7, rows)
    used = int(blocks.used)
    assert (np.asarray(blocks.choice)[used:] == choice.size).all()
    held = [(e, c) for e, row in zip(blocks.expert.tolist(), blocks.choice.tolist(), strict=True) for c in row]
    held = [(e, c) for e, c in held if c < choice.size]
    assert sorted(c for _, c in held) == list(range(choice.size))
    assert all(choice.reshape(-1)[c] == e for e, c in held)
    load = np.bincount(np.asarray(choice).ravel())
    assert used == sum(-(-load // rows))


def test_there_are_blocks_enough_however_choices_fall():
    """One expert takes all, or each a row more than fills its blocks."""
    for choice in (np.zeros((50, 1)), np.repeat(np.arange(10), 5)[:, None], np.arange(50)[:, None] % 50):
        blocks = sort_by_expert(jnp.asarray(choice, jnp.int32), 50, 4)
        assert (np.asarray(blocks.choice) < 50).sum() == 50


def test_a_block_is_about_the_share_of_an_expert():
    shapes = [(1, 8, 128), (3, 8, 128), (4, 8, 128), (100, 8, 128), (512, 8, 128), (10**5, 8, 128)]
    assert [block_rows(*shape) for shape in shapes] == [1, 3, 4, 16, 64, 64]


def made_experts():
    keys = jax.random.split(jax.random.key(3), 3)
    shapes = (7, WIDTH, 9), (7, WIDTH, 9), (7, 9, WIDTH)
    return Experts(*(jax.random.normal(key, shape) / 3 for key, shape in zip(keys, shapes, strict=True)))


@pytest.mark.parametrize("rows", [1, 2, 8, 64])
def test_rows_of_a_block_change_nothing(rows):
    x, choice, weights = inputs(37), drawn(37), jax.random.uniform(jax.random.key(4), (37, 3))
    y = mix_blocks(x, weights, made_experts(), sort_by_expert(choice, 7, rows))
    np.testing.assert_allclose(y, mix_experts(x, choice, weights, made_experts()), atol=2e-5)


def test_grouped_products_give_the_same():
    """What a TPU does, and its gradients."""
    choice = drawn(37)
    arguments = inputs(37), jax.random.uniform(jax.random.key(4), (37, 3)), made_experts()

    def run(mix):
        def loss(x, weights, experts):
            y = mix(x, choice, weights, experts)
            return jnp.sum(jnp.sin(y)), y

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*arguments)

    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), run(mix_ragged), run(mix_experts))


@pytest.mark.parametrize("tokens", [4, 16, 300])
def test_batch_mates_never_change_a_row(tokens):
    """Other tokens move a token to other blocks, or within one; the result is the same to the last bit."""
    layer, params = made(SOFTMAX_EXPERTS)
    apply = jax.jit(layer.apply)
    x = inputs(2, tokens)
    other = x.at[1].set(jax.random.normal(jax.random.key(7), x.shape[1:]) * 3)
    expected, got = apply({"params": params}, x), apply({"params": params}, other)
    np.testing.assert_array_equal(got[0], expected[0])
    assert not (got[1] == expected[1]).all()
    spoiled = apply({"params": params}, x.at[1].set(jnp.nan))
    np.testing.assert_array_equal(spoiled[0], expected[0])


@pytest.mark.parametrize("shape", [(1, 1), (2, 21)])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_all_experts_computed(name, shape):
    """Also those of the weights, which lead through the router."""
    config = CONFIGS[name]
    layer, params = made(config)
    x = inputs(*shape)

    experts = layer.apply({"params": params}, x, method="_choose").experts
    chosen = np.any(np.asarray(experts)[:, :, None] == np.arange(config.num_experts), axis=1)

    def everything(params, x):
        of_experts, shared, x = params["experts"], params["shared_expert"], x.reshape(-1, WIDTH)
        scores = x @ params["gate"]["kernel"]
        scores = jax.nn.softmax(scores) if config.router is RouterType.SOFTMAX else jax.nn.sigmoid(scores)
        weights = jnp.where(chosen, scores, jnp.zeros_like(scores))
        if config.normalise:
            weights = weights / jnp.sum(weights, axis=1, keepdims=True)
        gate, up = (jnp.einsum("MD,NDF->MNF", x, of_experts[name]) for name in ("gate_proj", "up_proj"))
        y = jnp.einsum("MNF,NFD,MN->MD", jax.nn.silu(gate) * up, of_experts["down_proj"], weights * config.scaling)
        gate, up = (x @ shared[name]["kernel"] for name in ("gate_proj", "up_proj"))
        extra = (jax.nn.silu(gate) * up) @ shared["down_proj"]["kernel"]
        return y + (jax.nn.sigmoid(x @ params["shared_expert_gate"]["kernel"]) * extra if config.shared_gate else extra)

    def loss(function):
        return lambda params, x: jnp.sum(jnp.sin(2 * function(params, x)))

    ours = jax.jit(jax.grad(loss(lambda p, x: layer.apply({"params": p}, x)), argnums=(0, 1)))(params, x)
    with jax.enable_x64(True):
        expected = jax.grad(loss(everything), argnums=(0, 1))(*in_float64((params, x)))
    for (path, got), wanted in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(expected), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, wanted, atol=2e-6 * max(10, np.abs(wanted).max()), err_msg=str(path))
    if config.experts_per_token < config.num_experts and config.normalise:
        assert np.abs(ours[0]["gate"]["kernel"]).max() > 1e-3


def test_counting_tokens_changes_no_output():
    layer, params = made(SOFTMAX_EXPERTS)
    x = inputs(2, 6)
    counted = jnp.asarray([[True] * 6, [True, True] + [False] * 4])
    y, routing = layer.apply({"params": params}, x, counted, method="routed")
    np.testing.assert_array_equal(y, layer.apply({"params": params}, x))
    assert routing.tokens == 8
    assert routing.load.sum() == 8 * SOFTMAX_EXPERTS.experts_per_token


@pytest.mark.parametrize("params_dtype", [jnp.float32, jnp.bfloat16])
def test_bfloat16_rounds_products_and_neither_choices_nor_their_weights(params_dtype):
    layer, params = made(SOFTMAX_EXPERTS)
    params = jax.tree.map(lambda a: a.astype(params_dtype).astype(jnp.float32), params)
    x = inputs(2, 20).astype(jnp.bfloat16)
    low, low_params = MoE(SOFTMAX_EXPERTS, jnp.bfloat16), jax.tree.map(lambda a: a.astype(params_dtype), params)
    exact = layer.apply({"params": params}, x.astype(jnp.float32), method="_choose")
    choice = low.apply({"params": low_params}, x, method="_choose")
    np.testing.assert_array_equal(choice.experts, exact.experts)
    np.testing.assert_array_equal(choice.weights, exact.weights)
    y = low.apply({"params": low_params}, x)
    assert y.dtype == jnp.bfloat16
    expected = defined(params, x, SOFTMAX_EXPERTS, exact)
    assert np.abs(np.asarray(y, np.float64) - expected).max() < 0.02 * np.abs(expected).max()

    def loss(layer, params, x):
        return jnp.sum(jnp.sin(layer.apply({"params": params}, x).astype(jnp.float32)))

    rounded = jax.grad(loss, argnums=(1, 2))(low, low_params, x)
    gradients = jax.grad(loss, argnums=(1, 2))(layer, params, x.astype(jnp.float32))
    for got, wanted in zip(jax.tree.leaves(rounded), jax.tree.leaves(gradients), strict=True):
        assert np.abs(np.asarray(got, np.float32) - wanted).max() < 0.05 * np.abs(wanted).max()


def test_products_are_taken_in_the_compute_dtype_and_added_up_in_float32():
    experts = Experts(*(jnp.zeros(s, jnp.float32) for s in ((7, 10, 9), (7, 10, 9), (7, 9, 10))))
    x, choice = jnp.zeros((5, 10), jnp.bfloat16), drawn(5)
    text = str(jax.make_jaxpr(mix_experts)(x, choice, jnp.zeros((5, 3)), experts))
    products = [line for line in text.splitlines() if "dot_general[" in line or "preferred_element_type" in line]
    assert sum("preferred_element_type=float32" in line for line in products) == 3
    assert sum("preferred_element_type" in line for line in products) == 3
    assert "bf16[7,10,9]" not in text  # nothing is converted but the expert of a block


def compiled(num_experts, tokens, *, gradient):
    def run(x, weights, experts, choice):
        return mix_experts(x, choice, weights, experts)

    def backward(*arguments):
        return jax.grad(lambda *a: jnp.sum(jnp.sin(run(*a))), argnums=(0, 1, 2))(*arguments)

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    inwards, outwards = array(num_experts, 48, 32), array(num_experts, 32, 48)
    experts = Experts(gate=inwards, up=inwards, down=outwards)
    arguments = array(tokens, 48), array(tokens, 2), experts, array(tokens, 2, dtype=jnp.int32)
    return jax.jit(backward if gradient else run).lower(*arguments).compile()


def test_the_work_is_that_of_the_experts_chosen_however_many_there_are():
    """XLA counts a loop's body once: a block. Nothing outside it reads or holds matrices."""
    few, many = compiled(8, 3, gradient=False), compiled(256, 3, gradient=False)
    matrices = 3 * 48 * 32 * 4
    assert many.cost_analysis()["flops"] < 1.5 * few.cost_analysis()["flops"]
    assert few.memory_analysis().temp_size_in_bytes < 2 * matrices
    assert many.memory_analysis().temp_size_in_bytes < 2 * matrices


def test_the_backward_pass_holds_one_gradient_of_the_experts():
    """Its own results; a copy for every block, or of one more, would show."""
    memory = compiled(64, 40, gradient=True).memory_analysis()
    assert memory.temp_size_in_bytes < memory.output_size_in_bytes / 4


def test_each_expert_starts_as_a_layer_of_its_own_would():
    config = replace(SOFTMAX_EXPERTS, num_experts=40, expert_width=90)
    params = MoE(config, jnp.float32).init(jax.random.key(0), jnp.zeros((1, 1, 30)))["params"]["experts"]
    for name, fan_in in (("gate_proj", 30), ("up_proj", 30), ("down_proj", 90)):
        np.testing.assert_allclose(np.std(params[name], axis=(1, 2)), fan_in**-0.5, rtol=0.1)
    assert not (params["gate_proj"][0] == params["gate_proj"][1]).any()
