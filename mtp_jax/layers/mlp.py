"""The feed-forward layer."""

from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class SwiGLU(nn.Module):
    """y = W_down (silu(W_gate x) * W_up x).

    Reference: Shazeer 2020, arXiv:2002.05202.
    """

    hidden: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate = nn.Dense(self.hidden, use_bias=False, dtype=self.dtype, name="gate_proj")(x)
        up = nn.Dense(self.hidden, use_bias=False, dtype=self.dtype, name="up_proj")(x)
        return nn.Dense(x.shape[-1], use_bias=False, dtype=self.dtype, name="down_proj")(nn.silu(gate) * up)
