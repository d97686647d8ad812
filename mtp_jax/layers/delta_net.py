"""Gated DeltaNet: projections, short convolution, gates, delta rule, gated norm."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.config import DeltaNetConfig
from mtp_jax.documents import Documents
from mtp_jax.layers.delta_rule import gated_delta_rule, probe_delta_rule
from mtp_jax.layers.norm import GatedRMSNorm
from mtp_jax.layers.short_conv import short_conv
from mtp_jax.sharding import ROWS, TENSOR, spread
from mtp_jax.state import DeltaState, DeltaTrail, empty_delta_state, last_inputs

UNIT_NORM_EPS = 1e-6


class _RuleInputs(NamedTuple):
    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T H V"]
    g: Float[Array, "B T H"]
    beta: Float[Array, "B T H"]


class GatedDeltaNet(nn.Module):
    """Mixes tokens through a fast-weight memory.

    Write strength beta = sigmoid(W_b x), log decay g = -exp(A_log) softplus(W_a x + dt_bias).

    Reference: Yang et al. 2024, arXiv:2412.06464, with Qwen3.5's layout: one short convolution over q|k|v
    and an output norm gated by silu(W_z x).
    """

    config: DeltaNetConfig
    width: int
    norm_eps: float
    dtype: DTypeLike

    def setup(self) -> None:
        config = self.config

        def dense(features: int) -> nn.Dense:
            return nn.Dense(features, use_bias=False, dtype=self.dtype)

        self.in_proj_qkv = dense(config.conv_channels)
        self.in_proj_z = dense(config.value_width)
        self.in_proj_b = dense(config.num_v_heads)
        self.in_proj_a = dense(config.num_v_heads)
        self.conv1d = _Taps(config.conv_width, config.conv_channels)
        self.A_log = self.param("A_log", _init_a_log, (config.num_v_heads,), jnp.float32)
        self.dt_bias = self.param("dt_bias", _init_dt_bias, (config.num_v_heads,), jnp.float32)
        self.norm = GatedRMSNorm(self.norm_eps)
        self.out_proj = dense(self.width)

    def __call__(self, x: Float[Array, "B T D"], docs: Documents) -> Float[Array, "B T D"]:
        """From nothing, forgetting everything (memory and convolution) wherever a document starts."""
        state = empty_delta_state(self.config, x.shape[0], self.dtype)
        taps_back = jnp.arange(self.config.conv_width)[::-1]  # tap i reads the input this many tokens back
        same_document = docs.position[:, :, None] >= taps_back[None, None, :]
        inputs, _ = self._inputs(x, state.conv, same_document)
        o, _ = gated_delta_rule(*inputs, state.memory, document=docs.number)
        return self._output(x, o)

    def extend(
        self, x: Float[Array, "B T D"], state: DeltaState, lengths: Int[Array, " B"]
    ) -> tuple[Float[Array, "B T D"], DeltaState]:
        """Keeps the first `lengths` tokens of each row; the rest neither decays nor writes."""
        inputs, window = self._inputs(x, state.conv, None)
        kept = (jnp.arange(x.shape[1])[None, :] < lengths[:, None])[:, :, None]
        inputs = inputs._replace(g=jnp.where(kept, inputs.g, 0.0), beta=jnp.where(kept, inputs.beta, 0.0))
        o, memory = gated_delta_rule(*inputs, state.memory)
        return self._output(x, o), DeltaState(memory, last_inputs(window, lengths, state.conv.shape[1]))

    def probe(self, x: Float[Array, "B T D"], state: DeltaState) -> tuple[Float[Array, "B T D"], DeltaTrail]:
        """Outputs for T further tokens, and what `commit` needs to keep any prefix of them."""
        inputs, window = self._inputs(x, state.conv, None)
        o, u = probe_delta_rule(*inputs, state.memory)
        return self._output(x, o), DeltaTrail(inputs.k, u, inputs.g, window)

    def _inputs(
        self, x: Float[Array, "B T D"], past: Float[Array, "B w P"], visible: Bool[Array, "B T W"] | None
    ) -> tuple[_RuleInputs, Float[Array, "B X P"]]:
        """Inputs of the delta rule, in float32, and the window the convolution read."""
        config = self.config
        batch, time = x.shape[:2]
        window = jnp.concatenate([past, self.in_proj_qkv(x)], axis=1)
        mixed = nn.silu(short_conv(window, self.conv1d().astype(self.dtype), visible)).astype(jnp.float32)
        q, k, v = jnp.split(mixed, (config.key_width, 2 * config.key_width), axis=-1)
        per_key = config.num_v_heads // config.num_k_heads

        def by_head(y: Array) -> Array:
            return spread(y, ROWS, None, TENSOR)

        def unit_heads(y: Array) -> Array:
            y = y.reshape(batch, time, config.num_k_heads, config.head_k_dim)
            y = y * jax.lax.rsqrt(jnp.sum(jnp.square(y), axis=-1, keepdims=True) + UNIT_NORM_EPS)
            return by_head(jnp.repeat(y, per_key, axis=2))

        rate = jnp.exp(self.A_log)[None, None]
        step = nn.softplus(self.in_proj_a(x).astype(jnp.float32) + self.dt_bias[None, None])
        inputs = _RuleInputs(
            q=unit_heads(q) * config.head_k_dim**-0.5,
            k=unit_heads(k),
            v=by_head(v.reshape(batch, time, config.num_v_heads, config.head_v_dim)),
            g=-rate * step,
            beta=nn.sigmoid(self.in_proj_b(x).astype(jnp.float32)),
        )
        return inputs, window

    def _output(self, x: Float[Array, "B T D"], o: Float[Array, "B T H V"]) -> Float[Array, "B T D"]:
        z = self.in_proj_z(x).reshape(o.shape)
        return self.out_proj(self.norm(o, z).reshape(*x.shape[:2], -1))


class _Taps(nn.Module):
    width: int
    channels: int

    @nn.compact
    def __call__(self) -> Float[Array, "W P"]:
        init = nn.initializers.variance_scaling(1.0 / 3, "fan_in", "uniform", in_axis=0, out_axis=1)
        return self.param("kernel", init, (self.width, self.channels), jnp.float32)


def _init_a_log(key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """log A with A uniform in [1, 16), as Mamba-2 does."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


def _init_dt_bias(key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Inverse softplus of step sizes log-uniform in [1e-3, 1e-1], as Mamba-2 does."""
    step = jnp.exp(jax.random.uniform(key, shape, dtype, jnp.log(1e-3), jnp.log(1e-1)))
    return step + jnp.log(-jnp.expm1(-step))
