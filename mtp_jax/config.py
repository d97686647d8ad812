"""What a model is made of: frozen descriptions, checked when they are built, explicit for every layer."""

from dataclasses import dataclass
from enum import StrEnum


class LayerType(StrEnum):
    """How a layer mixes tokens. The values are the published `layer_types`."""

    LINEAR = "linear_attention"
    FULL = "full_attention"


def _check_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value <= 0:
            raise ValueError(f"{name} must be positive, got {value}")


@dataclass(frozen=True)
class AttentionConfig:
    """Gated full attention with grouped key/value heads and partial rotary positions.

    Attributes:
      num_heads: query heads, H.
      num_kv_heads: key/value heads, G; divides H.
      head_dim: width of a head, K.
      rotary_dim: leading channels of a head that rotate, R; even, at most K.
      rope_theta: base of the rotary frequencies.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float

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
class ModelConfig:
    """A hybrid decoder with tied or untied vocabulary matrices and a multi-token-prediction head.

    Attributes:
      vocab_size: rows of the embedding, `vocab`.
      width: the residual stream, D.
      mlp_width: hidden width of the SwiGLU, F.
      layer_types: one entry a trunk layer, first to last.
      attention: shape of the full-attention layers and of the MTP head's block.
      delta: shape of the DeltaNet layers; None only if there are none.
      norm_eps: added to the mean square in every RMSNorm.
      tie_embeddings: the embedding is the output matrix, transposed.
      num_mtp_layers: 0 (no head) or 1.
      max_position_embeddings: the most tokens a row may hold.
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

    def __post_init__(self) -> None:
        _check_positive(self, "vocab_size", "width", "mlp_width", "norm_eps", "max_position_embeddings")
        if not self.layer_types:
            raise ValueError("layer_types must name at least one layer, got none")
        if LayerType.LINEAR in self.layer_types and self.delta is None:
            raise ValueError("layer_types has linear_attention layers, so delta must be given, got None")
        if self.num_mtp_layers not in (0, 1):
            raise ValueError(f"num_mtp_layers must be 0 or 1, got {self.num_mtp_layers}")

    @property
    def num_layers(self) -> int:
        """Trunk layers, L."""
        return len(self.layer_types)


def interleaved(num_layers: int, full_attention_interval: int) -> tuple[LayerType, ...]:
    """Layer types where every `full_attention_interval`-th layer (4th, 8th, ...) is full attention."""
    return tuple(
        LayerType.FULL if (i + 1) % full_attention_interval == 0 else LayerType.LINEAR for i in range(num_layers)
    )
