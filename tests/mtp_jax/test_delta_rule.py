"""Chunked and recurrent forms against a float64 recurrence, in outputs and gradients, at easy and hard settings."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_program import Program
from reference import delta_rule_float64

from mtp_jax.layers.delta_rule import DeltaAlgorithm, gated_delta_rule, probe_delta_rule
from mtp_jax.layers.triangular import unit_lower_inverse

B, H, K, V = 2, 3, 5, 7  # different primes, so that a swapped axis fails
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 130]


def inputs(time, seed=0, decay=1.0):
    rng = np.random.default_rng(seed)
    q, k = (rng.normal(size=(B, time, H, K)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(B, time, H, V))
    g = -decay * np.log1p(np.exp(rng.normal(size=(B, time, H))))
    beta = 1 / (1 + np.exp(-rng.normal(size=(B, time, H))))
    memory = rng.normal(size=(B, H, K, V))
    return tuple(x.astype(np.float32) for x in (q, k, v, g, beta, memory))


def constant_stream(time):
    """The same key again and again, beta near 1, no decay: where inverses by doubling explode."""
    q, k, v, g, beta, memory = inputs(time)
    return (np.broadcast_to(q[:, :1], q.shape), np.broadcast_to(k[:, :1], k.shape), v, g * 0, beta * 0 + 0.999, memory)


def strong_decay(time):
    """exp(G) = 1e-12 over each chunk of 64."""
    q, k, v, _, beta, memory = inputs(time)
    return q, k, v, np.full((B, time, H), np.log(1e-12) / 64, np.float32), beta, memory


def spiked_decay(time):
    """Every fifth token forgets everything (e^-40); the tokens between hardly decay."""
    q, k, v, g, beta, memory = inputs(time, decay=1e-3)
    g = np.where(np.arange(time)[None, :, None] % 5 == 3, np.float32(-40.0), g)
    return q, k, v, g, beta, memory


HARD = {"random": inputs, "constant": constant_stream, "strong_decay": strong_decay, "spiked_decay": spiked_decay}


@partial(jax.jit, static_argnames="algorithm")
def run(q, k, v, g, beta, memory, document=None, algorithm=DeltaAlgorithm.CHUNKED):
    return gated_delta_rule(q, k, v, g, beta, memory, document, algorithm)


def assert_close(got, expected, tolerance=3e-6):
    for a, b in zip(got, expected, strict=True):
        scale = max(1.0, np.abs(b).max(initial=0))
        np.testing.assert_allclose(np.asarray(a) / scale, b / scale, atol=tolerance, rtol=0)


@pytest.mark.parametrize("algorithm", DeltaAlgorithm)
@pytest.mark.parametrize("case", HARD)
@pytest.mark.parametrize("time", LENGTHS)
def test_both_forms_equal_the_float64_recurrence(case, time, algorithm):
    arguments = HARD[case](time)
    assert_close(run(*arguments, algorithm=algorithm), delta_rule_float64(*arguments))


def segments(time, seed):
    """Documents of 1 to 40 tokens, so that some begin and end inside a chunk and some span chunks."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, size=(B, time))
    return np.stack([np.repeat(np.arange(time), row)[:time] for row in lengths]).astype(np.int32)


@pytest.mark.parametrize("algorithm", DeltaAlgorithm)
@pytest.mark.parametrize("case", HARD)
@pytest.mark.parametrize("time", [1, 17, 64, 65, 200])
def test_documents_start_from_an_empty_memory(case, time, algorithm):
    arguments = HARD[case](time)
    document = segments(time, seed=time)
    assert_close(run(*arguments, document, algorithm=algorithm), delta_rule_float64(*arguments, document))


@pytest.mark.parametrize("algorithm", DeltaAlgorithm)
def test_one_token_documents(algorithm):
    arguments = inputs(70)
    document = np.broadcast_to(np.arange(70, dtype=np.int32), (B, 70))
    assert_close(run(*arguments, document, algorithm=algorithm), delta_rule_float64(*arguments, document))


@partial(jax.jit, static_argnames="algorithm")
def gradients(arguments, document, d_o, d_memory, algorithm):
    def weighted(*x):
        o, memory = gated_delta_rule(*x, document, algorithm)
        return jnp.sum(o * d_o) + jnp.sum(memory * d_memory)

    return jax.grad(weighted, argnums=range(6))(*arguments)


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("case", HARD)
@pytest.mark.parametrize("time", [17, 65, 130])
def test_gradients_equal_those_of_the_float64_recurrence(case, time, with_documents):
    document = segments(time, seed=3) if with_documents else None
    rng = np.random.default_rng(1)
    d_out = rng.normal(size=(B, time, H, V)), rng.normal(size=(B, H, K, V))

    def gradient(dtype, algorithm):
        arguments, d_o, d_memory = jax.tree.map(lambda x: np.asarray(x, dtype), (HARD[case](time), *d_out))
        return gradients(arguments, document, d_o, d_memory, algorithm)

    got = gradient(np.float32, DeltaAlgorithm.CHUNKED)
    with jax.enable_x64(True):
        expected = jax.tree.map(np.asarray, gradient(np.float64, DeltaAlgorithm.RECURRENT))
    assert all(np.isfinite(x).all() for x in got)
    assert_close(got, expected, tolerance=1e-5)


@pytest.mark.parametrize("case", HARD)
@pytest.mark.parametrize("time", [1, 2, 4, 5, 17, 40])
def test_probe_equals_the_recurrence_and_its_writes_rebuild_every_memory(case, time):
    q, k, v, g, beta, memory = HARD[case](time)
    o, u = jax.jit(probe_delta_rule)(q, k, v, g, beta, memory)
    assert_close([o], [delta_rule_float64(q, k, v, g, beta, memory)[0]])
    total = np.cumsum(np.asarray(g, np.float64), axis=1)
    for n in range(1, time + 1):
        weight = np.exp(total[:, n - 1 : n] - total[:, :n])
        rebuilt = np.exp(total[:, n - 1])[:, :, None, None] * memory
        rebuilt = rebuilt + np.einsum("BTH,BTHK,BTHV->BHKV", weight, k[:, :n], np.asarray(u)[:, :n])
        stepped = delta_rule_float64(*(x[:, :n] for x in (q, k, v, g, beta)), memory)[1]
        assert_close([rebuilt], [stepped])


def test_other_precisions_are_refused():
    q, k, v, g, beta, memory = map(jnp.asarray, inputs(3))
    with pytest.raises(TypeError, match="got memory in bfloat16"):
        gated_delta_rule(q, k, v, g, beta, memory.astype(jnp.bfloat16))


def test_no_state_per_token_is_materialised():
    time = 1024
    shapes = [jax.ShapeDtypeStruct((1, time, *s), jnp.float32) for s in ((1, 64), (1, 64), (1, 64), (1,), (1,))]
    memory = jax.ShapeDtypeStruct((1, 1, 64, 64), jnp.float32)

    def loss(*x):
        return jnp.sum(gated_delta_rule(*x)[0])

    compiled = jax.jit(jax.grad(loss, argnums=range(6))).lower(*shapes, memory).compile()
    per_token_states = time * 64 * 64 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < per_token_states


def test_triangular_blocks_are_inverted_without_sums_along_an_axis():
    """Neither forward nor backward: XLA makes slow loops of a CPU's sums, and vector instructions of the rest."""
    strict = jax.ShapeDtypeStruct((6, 64, 64), jnp.float32)
    backward = jax.jit(lambda x, d: jax.vjp(unit_lower_inverse, x)[1](d)).lower(strict, strict).compile()
    assert Program(backward).opcodes() >= {"while", "dot"}
    assert not Program(backward).opcodes() & {"reduce", "reduce-window"}
