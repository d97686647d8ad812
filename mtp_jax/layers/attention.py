"""Full attention with grouped key/value heads and partial rotary positions, gated and with q/k norm where asked for."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.config import AttentionConfig
from mtp_jax.documents import Documents
from mtp_jax.layers.blocked_attention import attend_to_cache
from mtp_jax.layers.norm import RMSNorm
from mtp_jax.layers.rope import rotate
from mtp_jax.sharding import ROWS, TENSOR, spread
from mtp_jax.state import AttentionState, AttentionTrail, ChainState

# Up to here one product over all slots, which compiles faster than a loop over blocks. Over more slots it is slower, as
# it reads those that hold nothing too.
FEW_TOKENS = 16
FEW_SLOTS = 2048
# With one product for a single row, XLA on a CPU copies the cache. A token through the 6 layers of the 0.8B shape, half
# of the slots full, takes 6.4 ms over 1,040 slots and 10.1 over 2,064; by blocks 4.0 and 4.8.
FEW_SLOTS_ON_CPU = 512


def attend(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B G S K"],
    v: Float[Array, "B G S K"],
    visible: Bool[Array, "B T S"],
    own: tuple[Float[Array, "B G T C K"], Float[Array, "B G T C K"]] | None = None,
) -> Float[Array, "B T H K"]:
    """softmax(q k^T / sqrt(K)) v over the visible slots; query head j reads key/value head j // (H / G).

    Scores and softmax are float32; the result has v's dtype. Every query must see at least one slot.

    Args:
      own: C further keys and values of each query, which no other query sees.
    """
    batch, time, heads, width = q.shape
    num_slots = k.shape[2]
    grouped = q.reshape(batch, time, k.shape[1], heads // k.shape[1], width)  # [B T G r K], r = H / G
    scores = jnp.einsum("BTGrK,BGSK->BGrTS", grouped, k, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, None, None], scores * width**-0.5, -jnp.inf)
    if own is not None:
        own_scores = jnp.einsum("BTGrK,BGTCK->BGrTC", grouped, own[0], preferred_element_type=jnp.float32)
        scores = jnp.concatenate([scores, own_scores * width**-0.5], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    y = jnp.einsum("BGrTS,BGSK->BTGrK", weights[..., :num_slots], v)
    if own is not None:
        y += jnp.einsum("BGrTC,BGTCK->BTGrK", weights[..., num_slots:], own[1])
    return y.reshape(batch, time, heads, width)


class Attention(nn.Module):
    """y = W_o (attend(rotate(norm(q)), rotate(norm(k)), v) * sigmoid(gate)), without what the config leaves out.

    Attributes:
      position_offset: added to every rotary position. The MTP head's is 1: it counts like the token it embeds.
    """

    config: AttentionConfig
    width: int
    norm_eps: float
    zero_centred_norms: bool
    dtype: DTypeLike
    position_offset: int = 0

    def setup(self) -> None:
        config = self.config

        def heads(num_heads: int, parts: int = 1) -> nn.Dense:
            return nn.Dense(num_heads * config.head_dim * parts, use_bias=config.bias, dtype=self.dtype)

        self.q_proj = heads(config.num_heads, 2 if config.output_gate else 1)  # per head: K of query, then K of gate
        self.k_proj = heads(config.num_kv_heads)
        self.v_proj = heads(config.num_kv_heads)
        self.o_proj = nn.Dense(self.width, use_bias=False, dtype=self.dtype)
        if config.qk_norm:
            self.q_norm = RMSNorm(self.norm_eps, self.zero_centred_norms)
            self.k_norm = RMSNorm(self.norm_eps, self.zero_centred_norms)

    def __call__(self, x: Float[Array, "B T D"], docs: Documents) -> Float[Array, "B T D"]:
        """Causal attention within each document of a packed row."""
        return self.chain(x, docs, None)[0]

    def chain(
        self, x: Float[Array, "B T D"], docs: Documents, state: ChainState | None
    ) -> tuple[Float[Array, "B T D"], ChainState]:
        """The next depth of the chains that start at each token, depth 1 if there is no state yet.

        At depth d the chain of token t is at position t + d - 1 and sees what it would see in a cache: the depth-1
        keys of its document up to t, and its own of depths 2 to d.
        """
        depth = 1 if state is None else state.depth + 1
        q, gate, k, v = self._project(x, docs.position + (depth - 1))
        state = ChainState.start(k, v) if state is None else state.extended(k, v)
        time = jnp.arange(x.shape[1])
        causal = time[:, None] >= time[None, :]
        visible = causal[None] & (docs.number[:, :, None] == docs.number[:, None, :])
        own = (state.own_k, state.own_v) if depth > 1 else None
        return self._output(attend(q, state.k, state.v, visible, own), gate), state

    def extend(
        self, x: Float[Array, "B T D"], state: AttentionState, length: Int[Array, " B"]
    ) -> tuple[Float[Array, "B T D"], AttentionState]:
        """Writes T slots behind the first `length` of each row, then reads; needs length + T <= S.

        Written before read, into the buffers that are then passed on: read first, and XLA copies both.
        """
        time = jnp.arange(x.shape[1])[None, :] + length[:, None]
        q, gate, k, v = self._project(x, time)
        state = AttentionState(_write(state.k, k, length), _write(state.v, v, length))
        num_slots = state.k.shape[2]
        few_slots = FEW_SLOTS_ON_CPU if jax.default_backend() == "cpu" else FEW_SLOTS
        if x.shape[1] > FEW_TOKENS or num_slots > few_slots:
            return self._output(attend_to_cache(q, state.k, state.v, time), gate), state
        visible = time[:, :, None] >= jnp.arange(num_slots)[None, None, :]
        return self._output(attend(q, state.k, state.v, visible), gate), state

    def probe(
        self, x: Float[Array, "B T D"], state: AttentionState, length: Int[Array, " B"]
    ) -> tuple[Float[Array, "B T D"], AttentionTrail]:
        """As `extend`; the caller moves `length` by what it keeps, and later writes cover the rest."""
        y, after = self.extend(x, state, length)
        return y, AttentionTrail(after.k, after.v)

    def _project(self, x: Float[Array, "B T D"], position: Int[Array, "B T"]):
        config = self.config
        batch, time = x.shape[:2]
        position = position + self.position_offset
        q, gate = self.q_proj(x).reshape(batch, time, config.num_heads, -1), None
        k = self.k_proj(x).reshape(batch, time, config.num_kv_heads, -1)
        v = self.v_proj(x).reshape(batch, time, config.num_kv_heads, -1)
        if config.output_gate:
            q, gate = jnp.split(q, 2, axis=-1)
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q = rotate(q, position, config.rotary_dim, config.rope_theta)
        k = rotate(k, position, config.rotary_dim, config.rope_theta)
        k, v = (spread(jnp.swapaxes(x, 1, 2), ROWS, TENSOR) for x in (k, v))
        return spread(q, ROWS, None, TENSOR), gate, k, v

    def _output(self, y: Float[Array, "B T H K"], gate: Float[Array, "B T H K"] | None) -> Float[Array, "B T D"]:
        if gate is not None:
            y = y * nn.sigmoid(gate)
        return self.o_proj(y.reshape(*y.shape[:2], -1))


def _write(
    buffer: Float[Array, "B G S K"], new: Float[Array, "B G T K"], start: Int[Array, " B"]
) -> Float[Array, "B G S K"]:
    def write_row(row: Array, values: Array, slot: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(row, values, slot, axis=1)

    return jax.vmap(write_row)(buffer, new.astype(buffer.dtype), start)
