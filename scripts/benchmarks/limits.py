"""What this machine can do at best, by programs that do nothing else."""

import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

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
    ways = {f"reading: {name}": partial(timed, jax.jit(program), *args) for name, (program, args) in programs.items()}
    return ways, matrix.nbytes


def _streamed_bytes() -> int:
    """More where reading 2 GiB takes no longer than starting a program."""
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    return min(max(STREAMED_BYTES, memory // 8), 8 * STREAMED_BYTES) if memory else STREAMED_BYTES


def timed(function: Callable, *args) -> float:
    """Seconds until the result is there."""
    started = time.perf_counter()
    jax.block_until_ready(function(*args))
    return time.perf_counter() - started
