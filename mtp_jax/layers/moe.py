"""The mixture of experts that takes the place of an MLP."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from mtp_jax.config import MoEConfig, RouterType
from mtp_jax.layers.experts import Experts, mix_experts
from mtp_jax.layers.mlp import SwiGLU
from mtp_jax.layers.router import Choice, Routing, choose, routing


class MoE(nn.Module):
    """y = sum_{e chosen} w_e expert_e(x) + g(x) shared(x), each expert a SwiGLU.

    g is sigmoid(w x) with `shared_gate`, else 1. Every token gets all of its experts, however uneven the choices are.

    Reference: Shazeer et al. 2017, arXiv:1701.06538; DeepSeekMoE, arXiv:2401.06066, for the shared expert.
    """

    config: MoEConfig
    dtype: DTypeLike

    def setup(self) -> None:
        config = self.config
        self.gate = _Gate(config.num_experts, config.router is RouterType.SIGMOID)
        self.experts = _Experts(config.num_experts, config.expert_width, self.dtype)
        self.shared_expert = SwiGLU(config.shared_width, self.dtype)
        if config.shared_gate:
            self.shared_expert_gate = nn.Dense(1, use_bias=False, dtype=self.dtype)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self._mix(x, self._choose(x))

    def routed(self, x: Float[Array, "B T D"], counted: Bool[Array, "B T"]) -> tuple[Float[Array, "B T D"], Routing]:
        """Also how the counted tokens were spread over the experts."""
        choice = self._choose(x)
        return self._mix(x, choice), routing(choice, counted.reshape(-1))

    def _choose(self, x: Float[Array, "B T D"]) -> Choice:
        logits, bias = self.gate(x.reshape(-1, x.shape[-1]))
        return choose(logits, bias, self.config)

    def _mix(self, x: Float[Array, "B T D"], choice: Choice) -> Float[Array, "B T D"]:
        y = self.experts(x.reshape(-1, x.shape[-1]), choice).reshape(x.shape)
        shared = self.shared_expert(x)
        if self.config.shared_gate:
            shared = shared * nn.sigmoid(self.shared_expert_gate(x))
        return y + shared


class _Gate(nn.Module):
    """Scores of all experts, in float32 and full precision: a rounded score is another choice."""

    num_experts: int
    with_bias: bool

    @nn.compact
    def __call__(self, x: Float[Array, "M D"]) -> tuple[Float[Array, "M N"], Float[Array, " N"] | None]:
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[1], self.num_experts), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.num_experts,), jnp.float32) if self.with_bias else None
        wide = x.astype(jnp.float32), kernel.astype(jnp.float32)
        return jnp.matmul(*wide, precision=jax.lax.Precision.HIGHEST), bias


class _Experts(nn.Module):
    """sum_e w_e W_down^e (silu(W_gate^e x) * W_up^e x) over the experts chosen."""

    num_experts: int
    hidden: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "M D"], choice: Choice) -> Float[Array, "M D"]:
        init = nn.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)
        shape = (self.num_experts, x.shape[1], self.hidden)
        experts = Experts(
            gate=self.param("gate_proj", init, shape, jnp.float32),
            up=self.param("up_proj", init, shape, jnp.float32),
            down=self.param("down_proj", init, (shape[0], shape[2], shape[1]), jnp.float32),
        )
        return mix_experts(x.astype(self.dtype), choice.experts, choice.weights, experts).astype(x.dtype)
