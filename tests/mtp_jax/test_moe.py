"""The mixture of experts against its definition, which computes every expert for every token in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import GROUPED_EXPERTS, SOFTMAX_EXPERTS

from mtp_jax.config import MoEConfig
from mtp_jax.layers import moe as module
from mtp_jax.layers.experts import block_rows, grouped_product, sort_by_expert
from mtp_jax.layers.moe import MoE

WIDTH = 10
CONFIGS = {"softmax": SOFTMAX_EXPERTS, "sigmoid": GROUPED_EXPERTS}


def made(config, seed=0):
    layer = MoE(config, jnp.float32)
    params = layer.init(jax.random.key(seed), jnp.zeros((1, 1, WIDTH)))["params"]
    if "bias" in params["gate"]:
        params["gate"]["bias"] = jax.random.normal(jax.random.key(9), params["gate"]["bias"].shape)
    return layer, params


def silu(x):
    return x / (1 + np.exp(-x))


def definition(params, x, config, choice):
    """y of tokens [M, D], given {expert: weight} as arrays."""
    p = jax.tree.map(partial(np.asarray, dtype=np.float64), params)
    x = np.asarray(x, np.float64)
    y = np.zeros_like(x)
    for token, (experts, weights) in enumerate(zip(choice.experts, choice.weights, strict=True)):
        for e, weight in zip(experts, np.asarray(weights, np.float64), strict=True):
            hidden = silu(x[token] @ p["experts"]["gate_proj"][e]) * (x[token] @ p["experts"]["up_proj"][e])
            y[token] += weight * hidden @ p["experts"]["down_proj"][e]
    shared = {name: p["shared_expert"][name]["kernel"] for name in ("gate_proj", "up_proj", "down_proj")}
    hidden = silu(x @ shared["gate_proj"]) * (x @ shared["up_proj"])
    gate = 1.0
    if config.shared_gate:
        gate = 1 / (1 + np.exp(-x @ p["shared_expert_gate"]["kernel"]))
    return y + gate * (hidden @ shared["down_proj"])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (3, 21), (2, 130)])
def test_every_token_gets_what_all_of_its_experts_say(name, shape):
    config = CONFIGS[name]
    layer, params = made(config)
    x = jax.random.normal(jax.random.key(1), (*shape, WIDTH))
    y = layer.apply({"params": params}, x)
    choice = layer.apply({"params": params}, x, method="_choose")
    expected = definition(params, x.reshape(-1, WIDTH), config, choice)
    np.testing.assert_allclose(y.reshape(-1, WIDTH), expected, atol=1e-5)


def test_no_token_is_dropped_when_all_go_to_one_expert():
    layer, params = made(SOFTMAX_EXPERTS)
    # All inputs are alike in the one channel that the router reads.
    params["gate"]["kernel"] = jnp.zeros((WIDTH, 7)).at[0].set(jnp.arange(7.0))
    x = jax.random.normal(jax.random.key(1), (1, 300, WIDTH)).at[:, :, 0].set(2.0)
    choice = layer.apply({"params": params}, x, method="_choose")
    assert set(np.asarray(choice.experts).ravel().tolist()) == {4, 5, 6}
    expected = definition(params, x[0], SOFTMAX_EXPERTS, choice)
    np.testing.assert_allclose(layer.apply({"params": params}, x)[0], expected, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 64])
def test_the_size_of_blocks_changes_nothing(monkeypatch, rows):
    layer, params = made(GROUPED_EXPERTS)
    x = jax.random.normal(jax.random.key(1), (2, 37, WIDTH))
    expected = layer.apply({"params": params}, x)
    monkeypatch.setattr(module, "block_rows", lambda *_: rows)
    np.testing.assert_allclose(layer.apply({"params": params}, x), expected, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("num", [1, 5, 64])
def test_blocks_hold_every_assignment_once_with_its_own_expert(rows, num):
    experts = np.random.default_rng(num).integers(0, 6, num)
    blocks = sort_by_expert(jnp.asarray(experts, jnp.int32), 6, rows)
    assert len(set(blocks.row.tolist())) == num
    for assignment, row in enumerate(blocks.row.tolist()):
        assert blocks.assignment[row] == assignment
        assert blocks.expert[row // rows] == experts[assignment]
        assert row // rows < blocks.used
    assert sorted(blocks.assignment.tolist())[:num] == list(range(num))
    assert (np.asarray(blocks.sizes) % rows == 0).all()
    assert blocks.sizes.sum() == blocks.used * rows


def test_a_block_is_about_an_experts_share():
    assert [block_rows(num, 128) for num in (1, 8, 128, 256, 1000, 4096, 10**6)] == [1, 1, 1, 2, 8, 32, 64]


def test_both_products_are_the_same():
    """What other backends do with the same rows."""
    experts = jax.random.randint(jax.random.key(0), (50,), 0, 5)
    blocks = sort_by_expert(experts, 5, 4)
    x = jax.random.normal(jax.random.key(1), (blocks.assignment.shape[0], 6))
    weights = jax.random.normal(jax.random.key(2), (5, 6, 3))
    other = jax.lax.ragged_dot(x, weights, blocks.sizes, preferred_element_type=jnp.float32)
    used = int(blocks.used) * 4
    np.testing.assert_allclose(grouped_product(x, weights, blocks)[:used], other[:used], atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_computing_every_expert(name):
    config = CONFIGS[name]
    layer, params = made(config)
    x = jax.random.normal(jax.random.key(1), (2, 13, WIDTH))
    target = jax.random.normal(jax.random.key(2), x.shape)

    def every_expert(params, x):
        flat = x.reshape(-1, WIDTH)
        choice = layer.apply({"params": params}, x, method="_choose")
        rows = jnp.arange(flat.shape[0])[:, None]
        weights = jnp.zeros((flat.shape[0], config.num_experts)).at[rows, choice.experts].set(choice.weights)
        experts = params["experts"]
        gate, up = (jnp.einsum("md,ndf->mnf", flat, experts[name]) for name in ("gate_proj", "up_proj"))
        each = jnp.einsum("mnf,nfd->mnd", jax.nn.silu(gate) * up, experts["down_proj"])
        routed = jnp.einsum("mnd,mn->md", each, weights).reshape(x.shape)
        # The shared expert is what is left if no choice weighs anything.
        silent = {**params, "experts": jax.tree.map(jnp.zeros_like, experts)}
        return routed + layer.apply({"params": silent}, x)

    def loss(function, params, x):
        return jnp.sum(function(params, x) * target)

    ours = jax.grad(partial(loss, lambda p, x: layer.apply({"params": p}, x)), argnums=(0, 1))(params, x)
    theirs = jax.grad(partial(loss, every_expert), argnums=(0, 1))(params, x)
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-5), ours, theirs)
    assert np.abs(ours[0]["gate"]["kernel"]).max() > 1e-3


def test_counting_changes_no_output_and_leaves_out_what_does_not_count():
    layer, params = made(SOFTMAX_EXPERTS)
    x = jax.random.normal(jax.random.key(1), (2, 6, WIDTH))
    counted = jnp.asarray([[True] * 6, [True, True] + [False] * 4])
    y, sums = layer.apply({"params": params}, x, counted, method="routed")
    np.testing.assert_array_equal(y, layer.apply({"params": params}, x))
    assert sums.tokens == 8
    assert sums.load.sum() == 8 * 3


def test_bfloat16_keeps_the_router_in_float32():
    layer, params = made(SOFTMAX_EXPERTS)
    x = jax.random.normal(jax.random.key(1), (2, 6, WIDTH)).astype(jnp.bfloat16)
    rounded = MoE(SOFTMAX_EXPERTS, jnp.bfloat16)
    choice = rounded.apply({"params": params}, x, method="_choose")
    exact = layer.apply({"params": params}, x.astype(jnp.float32), method="_choose")
    np.testing.assert_array_equal(choice.experts, exact.experts)
    np.testing.assert_array_equal(choice.weights, exact.weights)
    y = rounded.apply({"params": params}, x)
    assert y.dtype == jnp.bfloat16
    expected = np.asarray(layer.apply({"params": params}, x.astype(jnp.float32)))
    np.testing.assert_allclose(y.astype(jnp.float32), expected, atol=0.02 * np.abs(expected).max())


def test_few_tokens_read_the_chosen_experts_only():
    """Compiled for 2 tokens to 2 of 64 experts, temporaries hold one expert at a time, and the work is theirs."""
    config = MoEConfig(num_experts=64, experts_per_token=2, expert_width=32, shared_width=8)
    layer, width = MoE(config, jnp.float32), 48
    shapes = jax.eval_shape(lambda: layer.init(jax.random.key(0), jnp.zeros((1, 1, width))))
    x = jax.ShapeDtypeStruct((1, 2, width), jnp.float32)
    compiled = jax.jit(layer.apply).lower(shapes, x).compile()
    matrix = width * 32 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * matrix
    text = compiled.as_text()
    assert "f32[64,48,32]" in text
    # Nowhere is an array as large as all experts made, other than the parameters themselves.
    made_here = [line for line in text.splitlines() if "= f32[64,48,32]" in line or "= f32[64,32,48]" in line]
    assert all("parameter(" in line or "get-tuple-element(" in line for line in made_here), made_here
