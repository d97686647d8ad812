"""What a model is made of: frozen descriptions, checked when they are built, explicit for every layer."""

from dataclasses import dataclass
from enum import StrEnum


class LayerType(StrEnum):
    """How a layer mixes tokens. The values are the published `layer_types`."""

    LINEAR = "linear_attention"
    FULL = "full_attention"


class RouterType(StrEnum):
    """How a router's scores s = W x become probabilities, and how experts are chosen by them."""

    SOFTMAX = "softmax"  # softmax over all experts; the k largest
    SIGMOID = "sigmoid"  # sigmoid of each; the k largest of score + bias, within the best groups of experts


class HeadReads(StrEnum):
    """Which hidden state the MTP head reads: the trunk's at first, its own where drafts are chained."""

    AFTER_NORM = "after_norm"  # after the final norm, and after the head's own last norm
    BEFORE_NORM = "before_norm"  # the residual streams that these norms read


def _check_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value <= 0:
            raise ValueError(f"{name} must be positive, got {value}")


@dataclass(frozen=True)
class AttentionConfig:
    """Full attention with grouped key/value heads and partial rotary positions.

    Attributes:
      num_heads: query heads, H.
      num_kv_heads: key/value heads, G; divides H.
      head_dim: width of a head, K.
      rotary_dim: leading channels of a head that rotate, R; even, at most K.
      rope_theta: base of the rotary frequencies.
      output_gate: the result is multiplied by a sigmoid gate that the query projection also makes.
      qk_norm: an RMSNorm over each head of queries and keys, before they rotate.
      bias: query, key and value projections add one.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    output_gate: bool = True
    qk_norm: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        _check_positive(self, "num_heads", "num_kv_heads", "head_dim", "rope_theta")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"rotary_dim must be even and between 0 and head_dim {self.head_dim}, got {self.rotary_dim}"
            )


@dataclass(frozen=True)
class DeltaNetConfig:
    """Gated DeltaNet.

    Attributes:
      num_v_heads: value heads, H.
      num_k_heads: key heads, G; divides H. Value head j reads key head j // (H / G).
      head_k_dim: width of a key, K.
      head_v_dim: width of a value, V.
      conv_width: taps of the short convolution, w + 1.
    """

    num_v_heads: int
    num_k_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_width: int = 4

    def __post_init__(self) -> None:
        _check_positive(self, "num_v_heads", "num_k_heads", "head_k_dim", "head_v_dim", "conv_width")
        if self.num_v_heads % self.num_k_heads:
            raise ValueError(
                f"num_v_heads must be a multiple of num_k_heads, got {self.num_v_heads} and {self.num_k_heads}"
            )

    @property
    def key_width(self) -> int:
        """Channels of all keys together, G K (queries have as many)."""
        return self.num_k_heads * self.head_k_dim

    @property
    def value_width(self) -> int:
        """Channels of all values together, H V."""
        return self.num_v_heads * self.head_v_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution, P = 2 G K + H V, in the order q, k, v."""
        return 2 * self.key_width + self.value_width


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of SwiGLU experts, of which a router chooses a few for each token, beside one that all tokens use.

    Attributes:
      num_experts: N.
      experts_per_token: k.
      expert_width: hidden width of an expert, F.
      shared_width: hidden width of the shared expert.
      shared_gate: the shared expert's output is multiplied by sigmoid(w x).
      router: what the scores go through. SIGMOID comes with a bias for each expert that counts for choosing only.
      normalise: the weights of the chosen experts are divided by their sum.
      scaling: factor on those weights.
      num_groups: experts are chosen from some of so many equal groups; divides N.
      groups_per_token: how many groups a token may choose from.
    """

    num_experts: int
    experts_per_token: int
    expert_width: int
    shared_width: int
    shared_gate: bool = True
    router: RouterType = RouterType.SOFTMAX
    normalise: bool = True
    scaling: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1

    def __post_init__(self) -> None:
        _check_positive(self, "num_experts", "experts_per_token", "expert_width", "shared_width", "scaling")
        _check_positive(self, "num_groups", "groups_per_token")
        if self.num_experts % self.num_groups:
            raise ValueError(f"num_groups must divide num_experts {self.num_experts}, got {self.num_groups}")
        if self.groups_per_token > self.num_groups:
            raise ValueError(
                f"groups_per_token must be at most num_groups {self.num_groups}, got {self.groups_per_token}"
            )
        if self.num_groups > 1 and self.router is RouterType.SOFTMAX:
            raise ValueError(f"num_groups must be 1 with a softmax router, got {self.num_groups}")
        if self.num_groups > 1 and self.group_size < 2:
            raise ValueError(
                f"a group must hold at least 2 experts, whose scores add up to its own, got {self.group_size}"
            )
        if self.experts_per_token > self.groups_per_token * self.group_size:
            raise ValueError(
                "experts_per_token must be at most the "
                f"{self.groups_per_token * self.group_size} experts that may be chosen, got {self.experts_per_token}"
            )

    @property
    def group_size(self) -> int:
        """Experts in a group."""
        return self.num_experts // self.num_groups


@dataclass(frozen=True)
class ModelConfig:
    """A decoder with tied or untied vocabulary matrices and a multi-token-prediction head.

    Attributes:
      vocab_size: rows of the embedding, `vocab`.
      width: the residual stream, D.
      mlp_width: hidden width of the dense layers' SwiGLU, F; 0 only if there are none.
      layer_types: one entry a trunk layer, first to last.
      attention: shape of the full-attention layers and of the MTP head's block.
      delta: shape of the DeltaNet layers; None only if there are none.
      norm_eps: added to the mean square in every RMSNorm.
      tie_embeddings: the embedding is the output matrix, transposed.
      num_mtp_layers: layers of the head; 0: there is none. The first drafts one token ahead, each further one one more.
      max_position_embeddings: the most tokens a row may hold.
      moe: shape of the mixture of experts; None: all layers are dense.
      num_dense_layers: with `moe`, so many layers from the first on are dense even so. The head's never are.
      zero_centred_norms: RMSNorms multiply by 1 + scale, not by scale (DeltaNet's gated norm always by scale).
      head_reads: which hidden state the head reads.
      mtp_layers_share: the head's layers share one projection and its norms (Qwen), or have their own each (GLM).
    """

    vocab_size: int
    width: int
    mlp_width: int
    layer_types: tuple[LayerType, ...]
    attention: AttentionConfig
    delta: DeltaNetConfig | None
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    num_mtp_layers: int = 1
    max_position_embeddings: int = 32768
    moe: MoEConfig | None = None
    num_dense_layers: int = 0
    zero_centred_norms: bool = True
    head_reads: HeadReads = HeadReads.AFTER_NORM
    mtp_layers_share: bool = True

    def __post_init__(self) -> None:
        _check_positive(self, "vocab_size", "width", "norm_eps", "max_position_embeddings")
        if self.moe is None and self.num_dense_layers:
            raise ValueError(f"num_dense_layers must be 0 without moe, got {self.num_dense_layers}")
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise ValueError(
                f"num_dense_layers must be between 0 and the {self.num_layers} layers, got {self.num_dense_layers}"
            )
        if self.moe is None or self.num_dense_layers:
            _check_positive(self, "mlp_width")
        if not self.layer_types:
            raise ValueError("layer_types must name at least one layer, got none")
        if LayerType.LINEAR in self.layer_types and self.delta is None:
            raise ValueError("layer_types has linear_attention layers, so delta must be given, got None")
        if self.num_mtp_layers < 0:
            raise ValueError(f"num_mtp_layers must be at least 0, got {self.num_mtp_layers}")

    @property
    def num_layers(self) -> int:
        """Trunk layers, L."""
        return len(self.layer_types)

    def layer_moe(self, layer: int) -> MoEConfig | None:
        """The mixture of experts of a trunk layer; None if it is dense."""
        return None if layer < self.num_dense_layers else self.moe


def interleaved(num_layers: int, full_attention_interval: int) -> tuple[LayerType, ...]:
    """Layer types where every `full_attention_interval`-th layer (4th, 8th, ...) is full attention."""
    return tuple(
        LayerType.FULL if (i + 1) % full_attention_interval == 0 else LayerType.LINEAR for i in range(num_layers)
    )
