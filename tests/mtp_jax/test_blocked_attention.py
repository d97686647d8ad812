"""Attention over a cache by blocks: the one-product form's result, in memory and work that do not follow S."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import config

from mtp_jax.config import LayerType
from mtp_jax.layers.attention import FEW_SLOTS, FEW_TOKENS, attend
from mtp_jax.layers.blocked_attention import attend_to_cache
from mtp_jax.mtp import MTPModel, init_params

BLOCK = 8


def one_product(q, k, v, position):
    return attend(q, k, v, position[:, :, None] >= jnp.arange(k.shape[2])[None, None, :])


def arrays(slots, time, held, dtype=jnp.float32, scale=1.0):
    """Queries of 6 heads for 2 key/value heads 5 wide; row b holds `held[b]` tokens before them."""
    rng = np.random.default_rng(slots + time)
    batch = len(held)
    shapes = [(batch, time, 6, 5), (batch, 2, slots, 5), (batch, 2, slots, 5)]
    q, k, v = (jnp.asarray(scale * rng.normal(size=shape), dtype) for shape in shapes)
    return q, k, v, jnp.asarray(held)[:, None] + jnp.arange(time)[None, :]


by_blocks = jax.jit(partial(attend_to_cache, block=BLOCK))


@pytest.mark.parametrize("slots", [5, 8, 24, 29])
@pytest.mark.parametrize("time", [1, 3])
def test_blocks_equal_one_product_around_their_edges(slots, time):
    """Every number of tokens held, alone and beside rows that hold none or all, S a multiple of the block or not."""
    most = slots - time
    for held in range(most + 1):
        for held_by_row in ([held], [held, 0, most]):
            inputs = arrays(slots, time, held_by_row)
            np.testing.assert_allclose(by_blocks(*inputs), one_product(*inputs), atol=2e-6, rtol=0)


@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_blocks_equal_float64(scale):
    """Scores of thousands, where a softmax without its largest score taken out overflows, and of almost nothing."""
    q, k, v, position = arrays(29, 11, [7, 18], scale=scale)
    q64, k64, v64 = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = np.einsum("BTHK,BHSK->BHTS", q64, np.repeat(k64, 3, axis=1)) / np.sqrt(5)
    scores = np.where((np.arange(29) <= np.asarray(position)[:, :, None])[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("BHTS,BHSK->BTHK", weights / weights.sum(-1, keepdims=True), np.repeat(v64, 3, axis=1))
    # A score of 1e4 is off by 1e-3 in float32, and so is its weight.
    np.testing.assert_allclose(by_blocks(q, k, v, position), expected, atol=1e-6 if scale < 1 else 3e-2, rtol=1e-6)


def test_bfloat16_rounds_the_weights_and_the_result_only():
    inputs = arrays(29, 11, [7, 18], jnp.bfloat16)
    got = by_blocks(*inputs)
    assert got.dtype == jnp.bfloat16
    exact = one_product(*(x.astype(jnp.float32) for x in inputs[:3]), inputs[3])
    np.testing.assert_allclose(got.astype(jnp.float32), exact, atol=2e-2, rtol=0)


def test_slots_past_every_query_are_not_read():
    """Blocks that hold nothing would be multiplied by weights of 0, and so show."""
    q, k, v, position = arrays(40, 3, [2, 12])
    expected = by_blocks(q, k, v, position)
    np.testing.assert_array_equal(
        by_blocks(q, k.at[:, :, 16:].set(jnp.nan), v.at[:, :, 16:].set(jnp.nan), position), expected
    )


def test_a_longer_row_beside_it_changes_no_bit_of_a_row():
    """It makes the loop longer for all rows."""
    q, k, v, position = arrays(40, 3, [2, 2])
    longer = position.at[1].add(30)
    np.testing.assert_array_equal(by_blocks(q, k, v, position)[0], by_blocks(q, k, v, longer)[0])


def compiled(method, model, slots, time):
    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    trunk, head = jax.eval_shape(lambda: model.empty_state(3, slots))
    tokens = jax.ShapeDtypeStruct((3, time), jnp.int32)
    hidden = jax.ShapeDtypeStruct((3, time, model.config.width), model.dtype)
    lengths = jax.ShapeDtypeStruct((3,), jnp.int32)
    state, inputs = (trunk, (tokens,)) if method == "extend" else (head, (hidden, tokens))

    def run(state, params, inputs, lengths):
        return model.apply({"params": params}, *inputs, state, lengths, method=method)

    return jax.jit(run, donate_argnums=0).lower(state, params, inputs, lengths).compile().memory_analysis(), state


@pytest.mark.parametrize("method", ["extend", "mtp_extend"])
@pytest.mark.parametrize("time", [512, FEW_TOKENS])
def test_memory_of_a_prompts_piece_does_not_grow_with_the_cache(method, time):
    """DeltaNet and attention; buffers are written in place, and neither they nor [T, S] scores are made again."""
    model = MTPModel(config((LayerType.LINEAR, LayerType.FULL)))
    short, _ = compiled(method, model, FEW_SLOTS + 64, time)
    long, state = compiled(method, model, 32768, time)
    assert long.temp_size_in_bytes == short.temp_size_in_bytes
    assert long.alias_size_in_bytes >= sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
