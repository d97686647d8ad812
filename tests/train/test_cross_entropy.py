"""The chunked cross entropy against plain autodiff in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.cross_entropy import weighted_cross_entropy

TOKENS, WIDTH, VOCAB = 23, 7, 31


def _inputs(seed=0):
    random = np.random.default_rng(seed)
    weights = random.uniform(0, 1, TOKENS) * (random.uniform(size=TOKENS) > 0.3)
    return (
        random.normal(size=(TOKENS, WIDTH)),
        random.normal(size=(WIDTH, VOCAB)),
        random.integers(0, VOCAB, TOKENS),
        weights,
    )


def _reference(hidden, kernel, labels, weights):
    log_probabilities = jax.nn.log_softmax(hidden @ kernel, axis=-1)
    losses = -jnp.take_along_axis(log_probabilities, labels[:, None], axis=-1)[:, 0]
    return jnp.sum(losses * weights), losses


def _single(hidden, kernel, labels, weights):
    return (*(jnp.asarray(x, jnp.float32) for x in (hidden, kernel)), jnp.asarray(labels, jnp.int32),
            jnp.asarray(weights, jnp.float32))  # fmt: skip


@pytest.mark.parametrize("chunk", [1, 5, 23, 64])
def test_values_and_gradients_equal_autodiff(chunk):
    hidden, kernel, labels, weights = _inputs()
    with jax.enable_x64(True):
        wide = (jnp.asarray(hidden), jnp.asarray(kernel), jnp.asarray(labels), jnp.asarray(weights))
        (total, losses), gradients = jax.value_and_grad(_reference, argnums=(0, 1, 3), has_aux=True)(*wide)
        best = jnp.argmax(wide[0] @ wide[1], axis=-1)
    total, losses, gradients, best = jax.device_get((total, losses, gradients, best))

    def chunked(*args):
        total, *rest = weighted_cross_entropy(*args, chunk)
        return 3.0 * total, rest

    (got_total, (got_losses, got_best)), got = jax.jit(jax.value_and_grad(chunked, argnums=(0, 1, 3), has_aux=True))(
        *_single(hidden, kernel, labels, weights)
    )
    np.testing.assert_allclose(got_total, 3 * total, rtol=1e-6)
    np.testing.assert_allclose(got_losses, losses, rtol=2e-6)
    np.testing.assert_array_equal(got_best, best)
    for ours, theirs in zip(got, gradients, strict=True):
        np.testing.assert_allclose(ours, 3 * theirs, rtol=1e-5, atol=2e-6)


def test_value_alone_equals_value_beside_gradient():
    args = _single(*_inputs())
    alone = weighted_cross_entropy(*args, 5)
    beside, _ = jax.vjp(lambda *a: weighted_cross_entropy(*a, args[2], args[3], 5)[0], *args[:2])
    np.testing.assert_array_equal(alone[0], beside)


def test_losses_of_tokens_carry_no_gradient():
    args = _single(*_inputs())
    gradient = jax.grad(lambda h: jnp.sum(weighted_cross_entropy(h, *args[1:], 5)[1]))(args[0])
    np.testing.assert_array_equal(gradient, 0.0)


def test_zero_weights_and_huge_logits_stay_finite():
    hidden, kernel, labels, weights = _single(*_inputs())
    total, (d_hidden, d_kernel) = jax.value_and_grad(
        lambda h, k: weighted_cross_entropy(1e4 * h, k, labels, 0.0 * weights, 5)[0], argnums=(0, 1)
    )(hidden, kernel)
    for value in (total, d_hidden, d_kernel):
        np.testing.assert_array_equal(value, 0.0)


def test_bfloat16_is_near_float32():
    hidden, kernel, labels, weights = _single(*_inputs())

    def loss(h, k):
        return weighted_cross_entropy(h, k, labels, weights, 8)[0]

    exact, gradients = jax.value_and_grad(loss, argnums=(0, 1))(hidden, kernel)
    rounded, rough = jax.value_and_grad(loss, argnums=(0, 1))(hidden.astype(jnp.bfloat16), kernel)
    np.testing.assert_allclose(rounded, exact, rtol=2e-2)
    assert (rough[0].dtype, rough[1].dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(rough[1], gradients[1], atol=0.1)


def test_logits_of_all_tokens_never_exist():
    """Peak temporary memory is the gradients' and one chunk's, not tokens x vocabulary."""
    tokens, width, vocab, chunk = 4096, 16, 1024, 128
    shapes = [(tokens, width), (width, vocab)]
    like = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    weights = jax.ShapeDtypeStruct((tokens,), jnp.float32)
    compiled = (
        jax.jit(jax.grad(lambda h, k, y, w: weighted_cross_entropy(h, k, y, w, chunk)[0], argnums=(0, 1)))
        .lower(*like, labels, weights)
        .compile()
    )
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < tokens * vocab * 4 / 4
