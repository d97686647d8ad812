"""Root-mean-square norms. Statistics and the scale are float32 in every precision mode."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float


def _normalise(x: Float[Array, "... D"], eps: float) -> Float[Array, "... D"]:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def _along_last(scale: Float[Array, " D"], ndim: int) -> Float[Array, "... D"]:
    return jnp.expand_dims(scale.astype(jnp.float32), tuple(range(ndim - 1)))


class RMSNorm(nn.Module):
    """Zero-centred RMSNorm, y = x / sqrt(mean(x^2) + eps) * (1 + scale), over the last axis.

    Reference: Zhang and Sennrich 2019, arXiv:1910.07467; the scale is stored less 1, as Qwen's checkpoints do.
    """

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        scale = self.param("scale", nn.initializers.zeros, (x.shape[-1],), jnp.float32)
        return (_normalise(x, self.eps) * (1.0 + _along_last(scale, x.ndim))).astype(x.dtype)


class GatedRMSNorm(nn.Module):
    """RMSNorm with a plain scale, then a gate: y = x / sqrt(mean(x^2) + eps) * scale * silu(z).

    DeltaNet's output norm, over the V channels of each head. The norm comes before the gate.
    """

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "... V"], z: Float[Array, "... V"]) -> Float[Array, "... V"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        y = _normalise(x, self.eps) * _along_last(scale, x.ndim) * nn.silu(z.astype(jnp.float32))
        return y.astype(z.dtype)
