"""What this machine can do at best, by programs that do nothing else."""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from mtp_jax.compiler_options import DECODING, compiler_options
from mtp_jax.config import LayerType, ModelConfig
from mtp_jax.flops import attention_flops, product_flops
from mtp_jax.hf.parameters import flatten
from mtp_jax.sizes import Stage, parameters

STREAMED_BYTES = 2**31  # far more than any cache holds
ROWS = 1024  # of the streamed matrix, about a model's width


def streams() -> tuple[dict[str, Callable[[], float]], int]:
    """Ways to read the same bytes once, with as many threads as XLA has: seconds for each; and how many bytes.

    Which of them is fastest differs from machine to machine.
    """
    matrix = jnp.full((ROWS, _streamed_bytes() // (4 * ROWS)), 1e-3, jnp.float32)
    row, column = jnp.ones((1, matrix.shape[0])), jnp.ones((matrix.shape[1], 1))
    programs = {
        "sum": (lambda matrix: jnp.sum(matrix), (matrix,)),
        "row times matrix": (lambda row, matrix: row @ matrix, (row, matrix)),
        "matrix times column": (lambda matrix, column: matrix @ column, (matrix, column)),
    }
    ways = {f"reading: {name}": partial(timed, jitted(program), *args) for name, (program, args) in programs.items()}
    return ways, matrix.nbytes


def _streamed_bytes() -> int:
    """More where reading 2 GiB takes no longer than starting a program."""
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    return min(max(STREAMED_BYTES, memory // 8), 8 * STREAMED_BYTES) if memory else STREAMED_BYTES


def jitted(function: Callable) -> Callable:
    """Compiled as the model's programs are."""
    return jax.jit(function, compiler_options=compiler_options(DECODING))


def timed(function: Callable, *args) -> float:
    """Seconds until the result is there."""
    started = time.perf_counter()
    jax.block_until_ready(function(*args))
    return time.perf_counter() - started


Stages = Sequence[tuple[Stage, int]]
"""Parts of a model, and how many tokens go through each."""


def flops_of(config: ModelConfig, stages: Stages) -> int:
    """Of the products with weights, forward."""
    per_token = product_flops(config)
    return sum(per_token[stage] * tokens for stage, tokens in stages)


def causal_attention_flops(config: ModelConfig, tokens: int) -> int:
    """Of a trunk that reads so many tokens, each of which attends to itself and to those before."""
    return config.layer_types.count(LayerType.FULL) * attention_flops(config, tokens * (tokens + 1) // 2)


class Products(NamedTuple):
    """Products of rows of activations with matrices of a model."""

    weights: list[Array]  # [D, F], or [N, D, F] of experts
    rows: list[int]  # for each; for each expert, as many as it gets if all get alike

    @classmethod
    def of(cls, config: ModelConfig, params: PyTree, stages: Stages) -> "Products":
        """Those that `flops_of` counts."""
        leaves = flatten(params)
        weights, rows = [], []
        for stage, tokens in stages:
            for parameter in parameters(config):
                if parameter.is_matrix and parameter.stage is stage:
                    weights.append(leaves[parameter.path])
                    rows.append(math.ceil(tokens * parameter.active / parameter.size))
        return cls(weights, rows)

    def timer(self, dtype: DTypeLike, backward: bool = False) -> Callable[[], float]:
        """Seconds for all of them in one program that does nothing else; backward too, for inputs and for weights."""
        program, args = self.program(dtype, backward)
        return partial(timed, jitted(program), *args)

    def program(self, dtype: DTypeLike, backward: bool) -> tuple[Callable, tuple]:
        """What is timed, and its arguments."""
        pairs = [_shapes(weight, rows) for weight, rows in zip(self.weights, self.rows, strict=True)]
        inputs = _shared(dtype, [shape for shape, _ in pairs])
        upstream = _shared(dtype, [shape for _, shape in pairs]) if backward else [None] * len(pairs)
        if backward:  # the same inputs and the same upstream gradient would make the same product, which is made once
            inputs = [x + jnp.asarray(number, dtype) for number, x in enumerate(inputs)]

        def run(weights: list[Array], inputs: list[Array], upstream: list[Array | None]) -> Array:
            total = jnp.zeros((), dtype)
            for weight, x, dy in zip(weights, inputs, upstream, strict=True):
                matrix = weight.astype(dtype)
                results = [x @ matrix] if dy is None else [x @ matrix, dy @ matrix.mT, x.mT @ dy]
                # Each is made in full, though one entry is used.
                for result in jax.lax.optimization_barrier(results):
                    total += result.ravel()[0]
            return total

        return run, (self.weights, inputs, upstream)


def _shapes(weight: Array, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of what the weight is multiplied with, and of what comes out."""
    *experts, width, outputs = weight.shape
    return (*experts, rows, width), (*experts, rows, outputs)


def _shared(dtype: DTypeLike, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Random values of these shapes, one array for equal ones."""
    made = {shape: jax.random.normal(jax.random.key(0), shape).astype(dtype) for shape in set(shapes)}
    return [made[shape] for shape in shapes]
