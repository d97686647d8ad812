"""Products of rows with the matrix of the expert that each row goes to. No row is dropped; no other expert is read.

Rows are sorted by expert, and each expert's padded to whole blocks, so that a block has one matrix. On a CPU a loop
over blocks takes each matrix where it lies: `ragged_dot` computes every expert for every row there, and gathering
matrices first copies them.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LARGEST_BLOCK = 64
"""Of 16 to 256 rows, the best on 2 CPU cores for 2,048 tokens to 8 of 128 experts of [1024, 512]; a quarter of an
expert's share to twice it were within 20 % of each other for 512 tokens, and one row a block took 6 times as long."""


class Blocks(NamedTuple):
    """Where A assignments (a token to an expert) lie among R rows sorted by expert, in blocks of equal size.

    Attributes:
      row: of each assignment.
      assignment: of each row; A in rows that only fill a block up.
      expert: of each block; past the last block that is used, any.
      sizes: rows of each expert, filled up.
      used: blocks that hold rows.
    """

    row: Int[Array, " A"]
    assignment: Int[Array, " R"]
    expert: Int[Array, " X"]
    sizes: Int[Array, " N"]
    used: Int[Array, ""]


def block_rows(num_assignments: int, num_experts: int) -> int:
    """Rows of a block: about an expert's share, so that few matrices are read twice and few rows are padding."""
    share = max(1, num_assignments // num_experts)
    return min(LARGEST_BLOCK, 1 << (share - 1).bit_length())


def sort_by_expert(experts: Int[Array, " A"], num_experts: int, rows: int) -> Blocks:
    """Blocks of so many rows for assignments to these experts."""
    num = experts.shape[0]
    # Every expert that is chosen at all may leave up to rows - 1 rows of its last block empty.
    num_blocks = (num + min(num, num_experts) * (rows - 1)) // rows
    counts = jnp.zeros((num_experts,), jnp.int32).at[experts].add(1)
    blocks = (counts + rows - 1) // rows
    begin, first_block = jnp.cumsum(counts) - counts, jnp.cumsum(blocks) - blocks
    order = jnp.argsort(experts, stable=True)
    place = jnp.zeros((num,), jnp.int32).at[order].set(jnp.arange(num, dtype=jnp.int32))
    row = first_block[experts] * rows + place - begin[experts]
    return Blocks(
        row=row,
        assignment=jnp.full((num_blocks * rows,), num, jnp.int32).at[row].set(jnp.arange(num, dtype=jnp.int32)),
        expert=jnp.repeat(jnp.arange(num_experts, dtype=jnp.int32), blocks, total_repeat_length=num_blocks),
        sizes=blocks * rows,
        used=jnp.sum(blocks),
    )


def grouped_product(x: Float[Array, "R I"], weights: Float[Array, "N I O"], blocks: Blocks) -> Float[Array, "R O"]:
    """x[r] weights[expert of r] for every row r, accumulated in float32, in x's dtype; 0 past the last block used."""
    if jax.default_backend() == "cpu":
        return _in_blocks(x, weights, blocks)
    return jax.lax.ragged_dot(x, weights, blocks.sizes, preferred_element_type=jnp.float32).astype(x.dtype)


@jax.custom_vjp
def _in_blocks(x: Float[Array, "R I"], weights: Float[Array, "N I O"], blocks: Blocks) -> Float[Array, "R O"]:
    return _loop(x, weights, blocks, transposed=False)


def _forward(x, weights, blocks):
    return _in_blocks(x, weights, blocks), (x, weights, blocks)


def _backward(residuals, d_y):
    """Autodiff of the loop would add up a gradient of all experts' matrices for each block."""
    x, weights, blocks = residuals
    rows = x.shape[0] // blocks.expert.shape[0]

    def body(block, d_weights):
        x_rows, d_rows = (jax.lax.dynamic_slice_in_dim(values, block * rows, rows) for values in (x, d_y))
        product = partial(jnp.matmul, preferred_element_type=jnp.float32)
        expert = blocks.expert[block]
        return d_weights.at[expert].add(product(x_rows.T, d_rows))

    d_weights = jax.lax.fori_loop(0, blocks.used, body, jnp.zeros(weights.shape, jnp.float32))
    return _loop(d_y, weights, blocks, transposed=True), d_weights.astype(weights.dtype), None


_in_blocks.defvjp(_forward, _backward)


def _loop(x, weights, blocks: Blocks, *, transposed: bool) -> Array:
    rows = x.shape[0] // blocks.expert.shape[0]
    contracted, width = (2, weights.shape[1]) if transposed else (1, weights.shape[2])

    def body(block, y):
        matrix = jax.lax.dynamic_index_in_dim(weights, blocks.expert[block], keepdims=False)
        inputs = jax.lax.dynamic_slice_in_dim(x, block * rows, rows)
        outputs = jax.lax.dot_general(
            inputs, matrix, (((1,), (contracted - 1,)), ((), ())), preferred_element_type=jnp.float32
        )
        return jax.lax.dynamic_update_slice_in_dim(y, outputs.astype(y.dtype), block * rows, 0)

    return jax.lax.fori_loop(0, blocks.used, body, jnp.zeros((x.shape[0], width), x.dtype))
