"""The chunked losses against NumPy in float64, their gradients against differences of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.experiment import GRADIENT_MODES, HEAD_LOSSES
from train.vocabulary_losses import vocabulary_losses

PREDICTORS, TOKENS, WIDTH, VOCAB = 3, 11, 5, 13


def _inputs(seed=0):
    random = np.random.default_rng(seed)
    shape = (PREDICTORS, TOKENS)
    return (
        random.normal(size=(*shape, WIDTH)),
        random.normal(size=(WIDTH, VOCAB)),
        random.integers(0, VOCAB, TOKENS),
        random.uniform(0, 1, shape) * (random.uniform(size=shape) > 0.3),
    )


def _single(hidden, kernel, labels, weights):
    floats = [jnp.asarray(x, jnp.float32) for x in (hidden, kernel, weights)]
    return floats[0], floats[1], jnp.asarray(labels, jnp.int32), floats[2]


def _softmax(logits):
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def _losses(p, head, labels, head_loss):
    """Of the trunk, whose distribution is p, and of the head at each depth, as the definitions read."""
    at = np.arange(TOKENS)

    def of_head(q):
        if head_loss == "ce":
            return -np.log(q[at, labels])
        if head_loss == "kl":
            return np.sum(p * (np.log(p) - np.log(q)), axis=-1)
        return 1 - np.sum(np.minimum(p, q), axis=-1)

    return np.stack([-np.log(p[at, labels]), *(of_head(q) for q in head)])


def _reference(hidden, kernel, labels, head_loss):
    distributions = _softmax(hidden @ kernel)
    return _losses(distributions[0], distributions[1:], labels, head_loss), (hidden @ kernel).argmax(-1)


def _differences(function, x, step=1e-6):
    """The gradient of a function of an array, by central differences."""
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (function(up) - function(down)) / (2 * step)
    return gradient


def _reference_gradients(hidden, kernel, labels, weights, head_loss, gradient_mode):
    """In hidden and kernel. The trunk's distribution is given to the head's terms, in every mode."""
    p = _softmax(hidden[0] @ kernel)

    def main(trunk, matrix):
        return np.sum(weights[0] * -np.log(_softmax(trunk @ matrix)[np.arange(TOKENS), labels]))

    def mtp(head, matrix):
        return np.sum(weights[1:] * _losses(p, _softmax(head @ matrix), labels, head_loss)[1:])

    d_trunk = _differences(lambda x: main(x, kernel), hidden[0])
    d_head = _differences(lambda x: mtp(x, kernel), hidden[1:])
    d_main = _differences(lambda x: main(hidden[0], x), kernel)
    d_mtp = _differences(lambda x: mtp(hidden[1:], x), kernel)
    if gradient_mode == "joint":
        return np.stack([d_trunk, *d_head]), d_main + d_mtp
    if gradient_mode == "detached":
        return np.stack([d_trunk, *d_head]), d_main
    return np.stack([0 * d_trunk, *d_head]), 0 * kernel


@pytest.mark.parametrize("gradient_mode", GRADIENT_MODES)
@pytest.mark.parametrize("head_loss", HEAD_LOSSES)
def test_values_and_gradients_equal_the_definitions(head_loss, gradient_mode):
    hidden, kernel, labels, weights = _inputs()
    expected, best = _reference(hidden, kernel, labels, head_loss)
    d_hidden, d_kernel = _reference_gradients(hidden, kernel, labels, weights, head_loss, gradient_mode)

    def chunked(*args):
        total, by_token = vocabulary_losses(*args, head_loss, gradient_mode, chunk=9)
        return 3.0 * total, by_token

    (total, by_token), got = jax.jit(jax.value_and_grad(chunked, argnums=(0, 1, 3), has_aux=True))(
        *_single(hidden, kernel, labels, weights)
    )
    np.testing.assert_allclose(total, 3 * np.sum(expected * weights), rtol=1e-5)
    np.testing.assert_allclose(by_token.loss, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(by_token.best, best)
    for ours, reference in zip(got, (d_hidden, d_kernel, expected), strict=True):
        np.testing.assert_allclose(ours, 3 * reference, rtol=1e-4, atol=3e-6)
    if gradient_mode == "head_only":
        np.testing.assert_array_equal(got[0][0], 0.0)
        np.testing.assert_array_equal(got[1], 0.0)


@pytest.mark.parametrize("chunk", [1, 6, 64])
def test_chunks_change_nothing(chunk):
    args = _single(*_inputs())

    def results(chunk):
        function = jax.value_and_grad(lambda *a: vocabulary_losses(*a, "kl", "joint", chunk)[0], argnums=(0, 1))
        return vocabulary_losses(*args, "kl", "joint", chunk), function(*args)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6), results(chunk), results(9))


def test_value_alone_equals_value_beside_gradient():
    args = _single(*_inputs())
    alone, _ = vocabulary_losses(*args, "tv", "joint", 9)
    beside, _ = jax.vjp(lambda *a: vocabulary_losses(*a, *args[2:], "tv", "joint", 9)[0], *args[:2])
    np.testing.assert_array_equal(alone, beside)


def test_losses_of_tokens_carry_no_gradient():
    args = _single(*_inputs())
    gradient = jax.grad(lambda h: jnp.sum(vocabulary_losses(h, *args[1:], "ce", "joint", 9)[1].loss))(args[0])
    np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize("head_loss", HEAD_LOSSES)
def test_labels_of_weight_zero_change_nothing(head_loss):
    hidden, kernel, labels, weights = _single(*_inputs())
    masked = np.arange(TOKENS) % 3 == 0
    weights = jnp.where(masked[None], 0.0, weights)
    others = jnp.where(masked, (labels + 5) % VOCAB, labels)
    function = jax.jit(
        jax.value_and_grad(
            lambda h, k, labels: vocabulary_losses(h, k, labels, weights, head_loss, "joint", 9)[0], argnums=(0, 1)
        )
    )
    jax.tree.map(np.testing.assert_array_equal, function(hidden, kernel, labels), function(hidden, kernel, others))


@pytest.mark.parametrize("head_loss", HEAD_LOSSES)
def test_zero_weights_and_huge_logits_stay_finite(head_loss):
    hidden, kernel, labels, weights = _single(*_inputs())
    total, gradients = jax.value_and_grad(
        lambda h, k: vocabulary_losses(1e4 * h, k, labels, 0.0 * weights, head_loss, "joint", 9)[0], argnums=(0, 1)
    )(hidden, kernel)
    for value in (total, *gradients):
        np.testing.assert_array_equal(value, 0.0)


@pytest.mark.parametrize("head_loss", ["kl", "tv"])
def test_a_head_like_the_trunk_has_no_distance_to_it_and_is_left_alone(head_loss):
    hidden, kernel, labels, weights = _single(*_inputs())
    same = jnp.broadcast_to(hidden[:1], hidden.shape)

    def loss(hidden):
        total, by_token = vocabulary_losses(hidden, kernel, labels, weights, head_loss, "head_only", 9)
        return total, by_token.loss

    gradient, by_token = jax.grad(loss, has_aux=True)(same)
    np.testing.assert_allclose(by_token[1:], 0.0, atol=1e-6)
    np.testing.assert_allclose(gradient, 0.0, atol=1e-7)


def test_bfloat16_is_near_float32():
    hidden, kernel, labels, weights = _single(*_inputs())

    def loss(h, k):
        return vocabulary_losses(h, k, labels, weights, "kl", "joint", 9)[0]

    exact, gradients = jax.value_and_grad(loss, argnums=(0, 1))(hidden, kernel)
    rounded, rough = jax.value_and_grad(loss, argnums=(0, 1))(hidden.astype(jnp.bfloat16), kernel)
    np.testing.assert_allclose(rounded, exact, rtol=2e-2)
    assert (rough[0].dtype, rough[1].dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(rough[1], gradients[1], atol=0.1)


def _temporary_bytes(tokens, vocab, width, chunk, head_loss, gradient_mode="joint"):
    like = [jax.ShapeDtypeStruct(s, jnp.float32) for s in [(2, tokens, width), (width, vocab), (2, tokens)]]
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def gradient(hidden, kernel, weights, labels):
        total = lambda h, k: vocabulary_losses(h, k, labels, weights, head_loss, gradient_mode, chunk)[0]  # noqa: E731
        return jax.grad(total, argnums=(0, 1) if gradient_mode == "joint" else 0)(hidden, kernel)

    analysis = jax.jit(gradient).lower(*like, labels).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("head_loss", HEAD_LOSSES)
def test_memory_at_the_vocabulary_of_qwen_does_not_grow_with_tokens_times_vocabulary(head_loss):
    """At 248,320 entries and width 64, temporary memory is the gradient's and some chunks of logits; a token more costs
    its hidden states and losses."""
    vocab, width, chunk = 248_320, 64, 512
    few, many = (_temporary_bytes(tokens, vocab, width, chunk, head_loss) for tokens in (1024, 16_384))
    one_chunk = chunk * vocab * 4
    all_logits = 2 * 16_384 * vocab * 4
    print(f"{head_loss}: {few / 2**20:,.0f} and {many / 2**20:,.0f} MiB; all logits once {all_logits / 2**20:,.0f} MiB")
    assert many < 5 * one_chunk + 3 * width * vocab * 4 < all_logits / 10
    assert many - few < 15_360 * 2 * (5 * width + 16) * 4
