"""The gated delta rule of one layer: chunked, by its definition, the peer's, and its products alone."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from infer.step_time import summary
from mtp_jax.config import DeltaNetConfig, ModelConfig
from mtp_jax.errors import UserError
from mtp_jax.layers.delta_rule import CHUNK, DeltaAlgorithm, gated_delta_rule
from scripts._tables import new_table
from scripts.benchmarks.flags import LENGTHS
from scripts.benchmarks.limits import jitted, timed
from scripts.benchmarks.peer import PeerDeltaRule
from scripts.benchmarks.subject import check_positions, circumstances, config_of
from scripts.benchmarks.turns import print_result, take_turns

CHUNKED, RECURRENT, PEER, BARE = "chunked", "recurrent", "transformers", "products alone"
FORWARD, BOTH = "forward", "forward and backward"


def check(args: argparse.Namespace, config: ModelConfig) -> None:
    """Refuses a model without such layers, and sequences for which it has too few positions."""
    if config.delta is None:
        raise UserError(f"{args.shape or args.checkpoint}: expected a model with Gated DeltaNet layers, it has none")
    longest = max(args.lengths or LENGTHS)
    check_positions(config, "--lengths", longest, longest)


def measure(args: argparse.Namespace, folder: Path | None) -> dict[str, Any]:
    delta = config_of(args).delta
    assert delta is not None
    lengths = args.lengths or LENGTHS
    measurements: dict[str, Callable[[], float]] = {}
    differences = {}
    for length in lengths:
        inputs = random_inputs(delta, length)
        for algorithm, name in ((DeltaAlgorithm.CHUNKED, CHUNKED), (DeltaAlgorithm.RECURRENT, RECURRENT)):
            forward, both = programs(algorithm)
            measurements[_name(length, FORWARD, name)] = partial(timed, forward, inputs)
            measurements[_name(length, BOTH, name)] = partial(timed, both, inputs)
        if args.vs:
            peer = PeerDeltaRule(inputs)
            measurements[_name(length, FORWARD, PEER)] = partial(peer.timed, peer.forward)
            measurements[_name(length, BOTH, PEER)] = partial(peer.timed, peer.backward)
            ours = programs(DeltaAlgorithm.CHUNKED)[0](inputs)
            differences[length] = float(np.abs(peer.forward().cpu().numpy() - np.asarray(ours)).max())
        measurements |= {_name(length, FORWARD, name): run for name, run in bare_products(delta, length).items()}
    # The definition's backward pass leaves much memory to be taken back, which slows what comes next.
    measurements = {
        name: run if name.endswith(RECURRENT) else partial(second, run) for name, run in measurements.items()
    }
    taken = take_turns(measurements, args.repeats)

    seconds = {name: median(values) for name, values in taken.items()}
    results = []
    for length in lengths:
        result: dict[str, Any] = {"length": length}
        for pass_ in (FORWARD, BOTH):
            result[pass_.replace(" ", "_")] = {
                name: seconds[_name(length, pass_, name)]
                for name in (CHUNKED, RECURRENT, PEER)
                if _name(length, pass_, name) in seconds
            }
        bare = min(value for name, value in seconds.items() if name.startswith(_name(length, FORWARD, BARE)))
        result["share_of_limit"] = bare / seconds[_name(length, FORWARD, CHUNKED)]
        if args.vs:
            result["largest_difference"] = differences[length]
        results.append(result)
    return circumstances(args, folder) | {
        "heads": delta.num_v_heads,
        "dtype": "float32",
        "share_of_limit": results[0]["share_of_limit"],
        "lengths": results,
        "spread": {name: summary(values) for name, values in taken.items()},
    }


def second(run: Callable[[], float]) -> float:
    """Seconds of the second of two runs."""
    run()
    return run()


def random_inputs(config: DeltaNetConfig, length: int) -> dict[str, Array]:
    """What a layer's rule reads of one row, with decays from almost 1 down to a half."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Float[np.ndarray, "..."]:
        return rng.normal(size=(1, length, config.num_v_heads, *shape)).astype(np.float32)

    q, k, v = draw(config.head_k_dim), draw(config.head_k_dim), draw(config.head_v_dim)
    unit = {name: x / np.linalg.norm(x, axis=-1, keepdims=True) for name, x in (("q", q), ("k", k))}
    decay, strength = rng.uniform(size=(2, *v.shape[:3])).astype(np.float32)
    return {name: jnp.asarray(x) for name, x in (unit | {"v": v, "g": -0.7 * decay**4, "beta": strength}).items()}


def programs(algorithm: DeltaAlgorithm) -> tuple[Callable, Callable]:
    """What comes out, and the gradients of its sum: functions of `random_inputs`."""

    def run(inputs: dict[str, Array]) -> Array:
        _, _, heads, width = inputs["q"].shape
        memory = jnp.zeros((1, heads, width, inputs["v"].shape[-1]))
        scaled = inputs | {"q": inputs["q"] * width**-0.5}
        return gated_delta_rule(**scaled, memory=memory, algorithm=algorithm)[0]

    return jitted(run), jitted(jax.grad(lambda inputs: jnp.sum(run(inputs))))


def bare_products(config: DeltaNetConfig, length: int) -> dict[str, Callable[[], float]]:
    """Seconds for the products of the chunked form: those of all chunks at once, and one chunk after another."""
    heads, chunks, c, k, v = config.num_v_heads, -(-length // CHUNK), CHUNK, config.head_k_dim, config.head_v_dim
    # k k^T and q k^T; the inverse with k and with v; scores with u; the memory read twice and written.
    shapes = [*[(c, k, c)] * 2, (c, c, k), *[(c, c, v)] * 2, *[(c, k, v)] * 2, (k, c, v)]
    pairs = [
        [
            jax.random.normal(jax.random.key(number), (chunks, heads, *matrix))
            for matrix in ((rows, inner), (inner, columns))
        ]
        for number, (rows, inner, columns) in enumerate(shapes)
    ]

    def products(pairs: list[list[Array]]) -> Array:
        total = jnp.zeros(())
        for a, b in pairs:
            made = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
            total += jax.lax.optimization_barrier(made).ravel()[0]  # made in full, though one entry is used
        return total

    def chunk_by_chunk(pairs: list[list[Array]]) -> Array:
        return jax.lax.scan(lambda total, pairs: (total + products(pairs), None), jnp.zeros(()), pairs)[0]

    ways = {"all at once": products, "chunk by chunk": chunk_by_chunk}
    return {f"{BARE}, {name}": partial(timed, jitted(run), pairs) for name, run in ways.items()}


def _name(length: int, pass_: str, side: str) -> str:
    return f"{length} tokens, {pass_}, {side}"


def show(record: dict[str, Any]) -> None:
    sides = list(record["lengths"][0][FORWARD])
    table = new_table(f"gated delta rule of one layer, {record['heads']} heads, ms", "tokens", "", *sides)
    for result in record["lengths"]:
        for pass_ in (FORWARD, BOTH):
            values = result[pass_.replace(" ", "_")]
            table.add_row(f"{result['length']:,}", pass_, *(f"{1e3 * values[side]:,.2f}" for side in sides))
    lines = [
        f"{result['length']:,} tokens forward, chunked: {result['share_of_limit']:.0%} of the limit, the rate of its "
        "products alone"
        for result in record["lengths"]
    ]
    print_result([table], lines)
