"""One decoder layer: a token mixer and an MLP or a mixture of experts, each behind a norm and a residual."""

import jax
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mtp_jax.config import LayerType, ModelConfig, MoEConfig
from mtp_jax.documents import Documents
from mtp_jax.layers.attention import Attention
from mtp_jax.layers.delta_net import GatedDeltaNet
from mtp_jax.layers.mlp import SwiGLU
from mtp_jax.layers.moe import MoE
from mtp_jax.layers.norm import RMSNorm
from mtp_jax.layers.router import Routing
from mtp_jax.sharding import FSDP, ROWS, axis_size, spread
from mtp_jax.state import AttentionState, AttentionTrail, ChainState, DeltaState, DeltaTrail


class Block(nn.Module):
    """x = x + mixer(norm(x)); x = x + mlp(norm(x)).

    Attributes:
      moe: the layer's mixture of experts; None: its MLP is dense.
    """

    config: ModelConfig
    layer_type: LayerType
    moe: MoEConfig | None
    dtype: DTypeLike
    position_offset: int = 0

    def setup(self) -> None:
        config = self.config
        norm = config.norm_eps, config.zero_centred_norms
        self.input_layernorm = RMSNorm(*norm)
        self.post_attention_layernorm = RMSNorm(*norm)
        if self.layer_type is LayerType.FULL:
            self.self_attn = Attention(config.attention, config.width, *norm, self.dtype, self.position_offset)
        else:
            assert config.delta is not None
            self.linear_attn = GatedDeltaNet(config.delta, config.width, config.norm_eps, self.dtype)
        self.mlp = SwiGLU(config.mlp_width, self.dtype) if self.moe is None else MoE(self.moe, self.dtype)

    @property
    def mixer(self) -> Attention | GatedDeltaNet:
        """The layer's token mixer."""
        return self.self_attn if self.layer_type is LayerType.FULL else self.linear_attn

    def __call__(self, x: Float[Array, "B T D"], docs: Documents) -> tuple[Float[Array, "B T D"], Routing | None]:
        """Training: no state, documents kept apart. Also how tokens were spread over experts, if there are any."""
        return self._add_routed_mlp(x + self.mixer(self.input_layernorm(x), docs), docs)

    def chain(
        self, x: Float[Array, "B T D"], docs: Documents, state: ChainState | None
    ) -> tuple[Float[Array, "B T D"], ChainState, Routing | None]:
        """Training: the next depth of the chains that start at each token (attention only)."""
        y, state = self.self_attn.chain(self.input_layernorm(x), docs, state)
        x, routing = self._add_routed_mlp(x + y, docs)
        return x, state, routing

    def extend(
        self,
        x: Float[Array, "B T D"],
        state: AttentionState | DeltaState,
        length: Int[Array, " B"],
        lengths: Int[Array, " B"],
    ) -> tuple[Float[Array, "B T D"], AttentionState | DeltaState]:
        """Moves rows that hold `length` tokens forward by `lengths`, known before the call."""
        mixed = self.input_layernorm(x)
        if isinstance(state, AttentionState):
            y, state = self.self_attn.extend(mixed, state, length)
        else:
            y, state = self.linear_attn.extend(mixed, state, lengths)
        return self._add_mlp(x + y), state

    def probe(
        self, x: Float[Array, "B T D"], state: AttentionState | DeltaState, length: Int[Array, " B"]
    ) -> tuple[Float[Array, "B T D"], AttentionTrail | DeltaTrail]:
        """Looks T tokens ahead of rows that hold `length`; the caller decides later how many to keep."""
        mixed = self.input_layernorm(x)
        if isinstance(state, AttentionState):
            y, trail = self.self_attn.probe(mixed, state, length)
        else:
            y, trail = self.linear_attn.probe(mixed, state)
        return self._add_mlp(x + y), trail

    def _add_mlp(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x = spread(x, ROWS)
        return spread(x + self.mlp(self.post_attention_layernorm(x)), ROWS)

    def _add_routed_mlp(
        self, x: Float[Array, "B T D"], docs: Documents
    ) -> tuple[Float[Array, "B T D"], Routing | None]:
        if not isinstance(self.mlp, MoE):
            return self._add_mlp(x), None
        x = spread(x, ROWS)
        y, routing = self.mlp.routed(self.post_attention_layernorm(x), docs.counted)
        return spread(x + y, ROWS), routing


REMAT = {
    "none": None,
    # Kept: results of products with weights. Made again: norms, scores and softmax, the delta rule, activations.
    "products": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    # Kept: a block's input.
    "block": jax.checkpoint_policies.nothing_saveable,
}
"""What a block keeps in training for the backward pass; `none` keeps all that autodiff asks for."""


def block_class(remat: str) -> type[Block]:
    """`Block`, of which training makes again in the backward pass what the policy of that name does not keep.

    Parameters and results are the same under every policy. With parameters spread over `fsdp`, `none` keeps all but
    what is gathered of them: they are gathered again, not before the backward pass has come to the layer.

    Raises:
      ValueError: if there is no such policy.
    """
    if remat not in REMAT:
        raise ValueError(f"remat must be one of {', '.join(REMAT)}, got {remat!r}")
    policy = REMAT[remat]
    if policy is None and axis_size(FSDP) > 1:
        policy = jax.checkpoint_policies.everything_saveable
    return Block if policy is None else nn.remat(Block, policy=policy, methods=("__call__", "chain"))
