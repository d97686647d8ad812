"""Rotary positions on the leading channels of a head."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotate(
    x: Float[Array, "B T H K"], position: Int[Array, "B T"], rotary_dim: int, theta: float
) -> Float[Array, "B T H K"]:
    """Rotates channel pairs (i, i + R/2), i < R/2, by position * theta^(-2 i / R); channels from R on pass.

    Angles are float32; the result has x's dtype.

    Args:
      position: tokens counted from 0.
      rotary_dim: R, even.

    Reference: Su et al. 2021, arXiv:2104.09864, with pairs split by halves as in GPT-NeoX.
    """
    half = rotary_dim // 2
    frequency = theta ** (-2.0 * jnp.arange(half, dtype=jnp.float32) / rotary_dim)
    angle = position.astype(jnp.float32)[:, :, None, None] * frequency[None, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second, rest = jnp.split(x, (half, rotary_dim), axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), rest], axis=-1)
