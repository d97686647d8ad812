"""Attention over a cache, in memory that does not grow with the cache and work that follows what it holds."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 512  # slots read at a time; the scores of a block are [B H T BLOCK]


def attend_to_cache(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B G S K"],
    v: Float[Array, "B G S K"],
    position: Int[Array, "B T"],
    block: int = BLOCK,
) -> Float[Array, "B T H K"]:
    """softmax(q k^T / sqrt(K)) v over the slots up to each query's own position, a block of slots at a time.

    With s the scores of a block, a query carries the largest score so far m, the sum l and the weighted values a:

        m' = max(m, max_j s_j),   p_j = exp(s_j - m'),   l' = exp(m - m') l + sum_j p_j,   a' = exp(m - m') a + p v

    and a / l at the end is the softmax's result. Blocks past the furthest query of the batch are not read. Scores,
    p, l and a are float32; p is rounded to v's dtype for the product, and the result has v's dtype. Not
    differentiable: the number of blocks is traced.

    Args:
      position: slot of each query's own key, 0 <= position < S. So every query sees slot 0, in the first block,
        and m is finite from there on.
      block: slots a block. Where S is not a multiple the last block overlaps the one before.

    Reference: Milakov and Gimelshein 2018, arXiv:1805.02867; Rabe and Staats 2021, arXiv:2112.05682.
    """
    batch, time, heads, width = q.shape
    num_groups, num_slots = k.shape[1:3]
    per_group = heads // num_groups
    block = min(block, num_slots)
    # Query head j reads key/value head j // (H / G): a group's queries are the rows of one product.
    rows = jnp.transpose(q.reshape(batch, time, num_groups, per_group, width), (0, 2, 3, 1, 4))
    rows = rows.reshape(batch, num_groups, per_group * time, width)
    last_seen = jnp.tile(position, (1, per_group))[:, None, :, None]

    def read(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        largest, total, summed = carry
        start = jnp.minimum(i * block, num_slots - block)
        k_block = jax.lax.dynamic_slice_in_dim(k, start, block, axis=2)
        v_block = jax.lax.dynamic_slice_in_dim(v, start, block, axis=2)
        slot = (start + jnp.arange(block))[None, None, None, :]
        visible = (slot >= i * block) & (slot <= last_seen)  # an overlap is counted once
        scores = _product(rows, k_block, contract=3)
        scores = jnp.where(visible, scores * width**-0.5, -jnp.inf)
        new_largest = jnp.maximum(largest, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.exp(scores - new_largest)
        keep = jnp.exp(largest - new_largest)
        total = keep * total + jnp.sum(weights, axis=-1, keepdims=True)
        return new_largest, total, keep * summed + _product(weights.astype(v.dtype), v_block, contract=2)

    nothing = jnp.zeros((*rows.shape[:3], 1), jnp.float32)
    start = (jnp.full_like(nothing, -jnp.inf), nothing, jnp.zeros(rows.shape, jnp.float32))
    num_blocks = jnp.max(position) // block + 1
    _, total, summed = jax.lax.fori_loop(0, num_blocks, read, start)
    result = (summed / total).astype(v.dtype).reshape(batch, num_groups, per_group, time, width)
    return jnp.transpose(result, (0, 3, 1, 2, 4)).reshape(batch, time, heads, width)


def _product(a: Float[Array, "B G X Y"], b: Float[Array, "B G S K"], contract: int) -> Float[Array, "B G X Z"]:
    """a's last axis with axis `contract` of b, summed in float32. In this order: einsum turns the two round, and
    XLA then transposes whole blocks."""
    dimensions = (((3,), (contract,)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)
