"""Root-mean-square norms. Statistics and the scale are float32 in every precision mode."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from mtp_jax.config import HeadReads


def _normalise(x: Float[Array, "... D"], eps: float) -> Float[Array, "... D"]:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def _along_last(scale: Float[Array, " D"], ndim: int) -> Float[Array, "... D"]:
    return jnp.expand_dims(scale.astype(jnp.float32), tuple(range(ndim - 1)))


class RMSNorm(nn.Module):
    """RMSNorm over the last axis, y = x / sqrt(mean(x^2) + eps) * (1 + scale) if zero-centred, else .. * scale.

    Reference: Zhang and Sennrich 2019, arXiv:1910.07467; Qwen's checkpoints store the scale less 1, GLM's plain.
    """

    eps: float
    zero_centred: bool

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        neutral = nn.initializers.zeros if self.zero_centred else nn.initializers.ones
        scale = _along_last(self.param("scale", neutral, (x.shape[-1],), jnp.float32), x.ndim)
        return (_normalise(x, self.eps) * (1.0 + scale if self.zero_centred else scale)).astype(x.dtype)


class LastNorm(RMSNorm):
    """The norm before the output matrix; the MTP head reads what comes out of it, or what goes in.

    Of a stream x that leaves the last layer, `hidden(x)` is what the head reads and what is kept until it does, and
    `output(hidden)` is what the output matrix reads.
    """

    reads: HeadReads

    def hidden(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """norm(x), or x itself."""
        return self(x) if self.reads is HeadReads.AFTER_NORM else x

    def output(self, hidden: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """norm(x) in either case."""
        return hidden if self.reads is HeadReads.AFTER_NORM else self(hidden)


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
