"""Small parts against their definitions in NumPy float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.config import (
    AttentionConfig,
    DeltaNetConfig,
    LayerType,
    ModelConfig,
    MoEConfig,
    RouterType,
    interleaved,
)
from mtp_jax.documents import documents
from mtp_jax.layers.attention import attend
from mtp_jax.layers.norm import GatedRMSNorm, RMSNorm
from mtp_jax.layers.rope import rotate
from mtp_jax.layers.short_conv import short_conv
from mtp_jax.layers.triangular import unit_lower_inverse


def test_documents_start_at_every_change_of_id():
    docs = documents(jnp.array([[7, 7, 3, 7, 7, 7], [0, 1, 2, 2, 1, 1]]))
    assert docs.number.tolist() == [[0, 0, 1, 2, 2, 2], [0, 1, 2, 2, 3, 3]]
    assert docs.position.tolist() == [[0, 1, 0, 0, 1, 2], [0, 0, 0, 1, 0, 1]]


@pytest.mark.parametrize("size", [1, 2, 5, 16, 17, 32, 33, 64])
def test_triangular_inverse(size):
    rng = np.random.default_rng(size)
    strict = np.tril(rng.normal(size=(3, 2, size, size)) / np.sqrt(size), -1).astype(np.float32)
    expected = np.linalg.inv(np.eye(size) + strict.astype(np.float64))
    np.testing.assert_allclose(jax.jit(unit_lower_inverse)(strict), expected, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("size", [16, 64])
def test_triangular_inverse_where_doubling_explodes(size):
    strict = np.tril(np.full((size, size), 0.9), -1)
    got = unit_lower_inverse(jnp.asarray(strict, jnp.float32))
    np.testing.assert_allclose(got, np.linalg.inv(np.eye(size) + strict), atol=1e-6)


def test_triangular_inverse_gradient():
    rng = np.random.default_rng(0)
    strict = np.tril(rng.normal(size=(33, 33)) / 6, -1)
    d_inverse = rng.normal(size=(33, 33))
    got = jax.grad(lambda s: jnp.sum(unit_lower_inverse(s) * d_inverse.astype(np.float32)))(
        jnp.asarray(strict, jnp.float32)
    )
    inverse = np.linalg.inv(np.eye(33) + strict)
    np.testing.assert_allclose(got, np.tril(-inverse.T @ d_inverse @ inverse.T, -1), atol=2e-4)


@pytest.mark.parametrize("masked", [False, True])
def test_short_convolution_and_its_gradient(masked):
    """The written-out gradient equals autodiff's of the plain sum of products."""
    rng = np.random.default_rng(0)
    window, kernel, dy = rng.normal(size=(2, 10, 5)), rng.normal(size=(4, 5)), rng.normal(size=(2, 7, 5))
    visible = rng.random((2, 7, 4)) < 0.6 if masked else np.ones((2, 7, 4), bool)
    mask = jnp.asarray(visible) if masked else None

    def definition(window, kernel):
        taps = jnp.stack([window[:, i : i + 7] for i in range(4)], axis=2)
        return jnp.einsum("BTWP,WP,BTW->BTP", taps, kernel, visible.astype(window.dtype))

    with jax.enable_x64(True):
        expected, pullback = jax.vjp(definition, jnp.asarray(window), jnp.asarray(kernel))
        expected, gradients = np.asarray(expected), [np.asarray(x) for x in pullback(jnp.asarray(dy))]
    window, kernel, dy = (jnp.asarray(x, jnp.float32) for x in (window, kernel, dy))
    got, pullback = jax.vjp(lambda w, k: short_conv(w, k, mask), window, kernel)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    for a, b in zip(pullback(dy), gradients, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_rotation_keeps_the_tail_and_depends_on_distance_only():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 3, 2, 10)), jnp.float32) for _ in range(2))
    position = jnp.array([[0, 4, 9]])
    turned = rotate(q, position, 4, 1e4)
    np.testing.assert_array_equal(turned[..., 4:], q[..., 4:])
    np.testing.assert_allclose(turned[:, 0], q[:, 0], atol=1e-6)
    near = jnp.sum(rotate(q, position, 4, 1e4) * rotate(k, position + 3, 4, 1e4), -1)
    far = jnp.sum(rotate(q, position + 70, 4, 1e4) * rotate(k, position + 73, 4, 1e4), -1)
    np.testing.assert_allclose(near, far, atol=2e-5)
    angle = 9 * 1e4 ** (-2.0 / 4)  # channel 1 pairs with channel 3
    expected = np.asarray(q[0, 2, 0, 1]) * np.cos(angle) - np.asarray(q[0, 2, 0, 3]) * np.sin(angle)
    np.testing.assert_allclose(turned[0, 2, 0, 1], expected, atol=1e-6)


def test_attention_equals_its_definition_per_head():
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(2, 3, 6, 5)), rng.normal(size=(2, 2, 7, 5)), rng.normal(size=(2, 2, 7, 5))
    visible = rng.random((2, 3, 7)) < 0.5
    visible[..., 0] = True
    got = attend(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), jnp.asarray(visible))
    for head in range(6):
        scores = np.einsum("btk,bsk->bts", q[:, :, head], k[:, head // 3]) / np.sqrt(5)
        weights = np.where(visible, np.exp(scores), 0)
        weights /= weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(got[:, :, head], weights @ v[:, head // 3], atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_norms_compute_in_float32(dtype):
    x = (100 * jax.random.normal(jax.random.key(0), (2, 3, 8))).astype(dtype)
    z = jax.random.normal(jax.random.key(1), (2, 3, 8)).astype(dtype)
    scale = np.asarray(jax.random.normal(jax.random.key(2), (8,)))
    exact = np.asarray(x, np.float64)
    normed = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6)
    centred = RMSNorm(1e-6, zero_centred=True).apply({"params": {"scale": jnp.asarray(scale)}}, x)
    plain = RMSNorm(1e-6, zero_centred=False).apply({"params": {"scale": jnp.asarray(scale)}}, x)
    gated = GatedRMSNorm(1e-6).apply({"params": {"scale": jnp.asarray(scale)}}, x, z)
    gate = np.asarray(z, np.float64)
    tolerance = 1e-5 if dtype == jnp.float32 else 2**-7
    assert centred.dtype == plain.dtype == gated.dtype == dtype
    np.testing.assert_allclose(np.asarray(plain, np.float64), normed * scale, rtol=tolerance, atol=1e-6)
    np.testing.assert_allclose(np.asarray(centred, np.float64), normed * (1 + scale), rtol=tolerance, atol=1e-6)
    expected = normed * scale * gate / (1 + np.exp(-gate))
    np.testing.assert_allclose(np.asarray(gated, np.float64), expected, rtol=tolerance, atol=1e-6)


def small(**changes):
    settings = {
        "vocab_size": 11,
        "width": 8,
        "mlp_width": 12,
        "layer_types": interleaved(4, 4),
        "attention": AttentionConfig(4, 2, 6, 2, 1e4),
        "delta": DeltaNetConfig(4, 2, 3, 5),
    }
    return ModelConfig(**(settings | changes))


def test_interleaved_layers():
    assert [kind is LayerType.FULL for kind in interleaved(8, 4)] == [False, False, False, True] * 2
    assert small().num_layers == 4


EXPERTS = MoEConfig(
    num_experts=12,
    experts_per_token=2,
    expert_width=5,
    shared_width=5,
    router=RouterType.SIGMOID,
    num_groups=3,
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AttentionConfig(4, 3, 6, 2, 1e4), "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
        (lambda: AttentionConfig(4, 2, 6, 3, 1e4), "rotary_dim must be even and between 0 and head_dim 6, got 3"),
        (lambda: AttentionConfig(4, 2, 6, 8, 1e4), "rotary_dim must be even and between 0 and head_dim 6, got 8"),
        (lambda: AttentionConfig(4, 2, 6, 2, 0.0), "rope_theta must be positive, got 0.0"),
        (lambda: DeltaNetConfig(5, 2, 3, 5), "num_v_heads must be a multiple of num_k_heads, got 5 and 2"),
        (lambda: DeltaNetConfig(4, 2, 0, 5), "head_k_dim must be positive, got 0"),
        (lambda: small(layer_types=()), "layer_types must name at least one layer"),
        (lambda: small(delta=None), "delta must be given, got None"),
        (lambda: small(num_mtp_layers=-1), "num_mtp_layers must be at least 0, got -1"),
        (lambda: small(num_dense_layers=1), "num_dense_layers must be 0 without moe, got 1"),
        (lambda: small(moe=EXPERTS, num_dense_layers=5), "num_dense_layers must be between 0 and the 4 layers, got 5"),
        (lambda: small(moe=EXPERTS, mlp_width=0, num_dense_layers=1), "mlp_width must be positive, got 0"),
        (lambda: replace(EXPERTS, num_experts=0), "num_experts must be positive, got 0"),
        (lambda: replace(EXPERTS, num_groups=5), "num_groups must divide num_experts 12, got 5"),
        (lambda: replace(EXPERTS, num_groups=12), "at least 2 experts, whose scores add up to its own, got 1"),
        (lambda: replace(EXPERTS, groups_per_token=4), "groups_per_token must be at most num_groups 3, got 4"),
        (lambda: replace(EXPERTS, experts_per_token=5), "experts_per_token must be at most the 4 experts .*, got 5"),
        (lambda: replace(EXPERTS, router=RouterType.SOFTMAX), "num_groups must be 1 with a softmax router, got 3"),
        (lambda: small(vocab_size=0), "vocab_size must be positive, got 0"),
    ],
)
def test_impossible_configs_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
