"""Shapes of released models, for measuring and describing them without their weights."""

from mtp_jax.config import (
    AttentionConfig,
    DeltaNetConfig,
    LayerType,
    ModelConfig,
    MoEConfig,
    RouterType,
    interleaved,
)


def _qwen(
    width: int,
    layers: int,
    heads: tuple[int, int],
    value_heads: int,
    *,
    mlp: int = 0,
    experts: tuple[int, int, int] | None = None,
    tied: bool = False,
    vocab: int = 248320,
) -> ModelConfig:
    """Qwen3.5 and Qwen3-Next: three Gated DeltaNet layers to one of gated full attention.

    Args:
      heads: of queries, of keys and values.
      mlp: F of dense layers.
      experts: how many, of which a token uses, and F of each. The shared expert is as wide as one of them.
    """
    return ModelConfig(
        vocab_size=vocab,
        width=width,
        mlp_width=mlp,
        layer_types=interleaved(layers, 4),
        attention=AttentionConfig(*heads, head_dim=256, rotary_dim=64, rope_theta=1e7),
        delta=DeltaNetConfig(value_heads, num_k_heads=16, head_k_dim=128, head_v_dim=128),
        tie_embeddings=tied,
        max_position_embeddings=262144,
        moe=None if experts is None else MoEConfig(*experts, shared_width=experts[2]),
    )


def _glm_4_5(
    width: int,
    layers: int,
    *,
    mlp: int,
    dense_layers: int,
    experts: tuple[int, int, int],
    scaling: float,
    qk_norm: bool,
) -> ModelConfig:
    """GLM-4.5: full attention everywhere, experts in all but the first layers. Arguments as in `_qwen`."""
    return ModelConfig(
        vocab_size=151552,
        width=width,
        mlp_width=mlp,
        layer_types=(LayerType.FULL,) * layers,
        attention=AttentionConfig(
            num_heads=96,
            num_kv_heads=8,
            head_dim=128,
            rotary_dim=64,
            rope_theta=1e6,
            output_gate=False,
            qk_norm=qk_norm,
            bias=True,
        ),
        delta=None,
        norm_eps=1e-5,
        tie_embeddings=False,
        max_position_embeddings=131072,
        moe=MoEConfig(*experts, shared_width=experts[2], shared_gate=False, router=RouterType.SIGMOID, scaling=scaling),
        num_dense_layers=dense_layers,
        zero_centred_norms=False,
        mtp_layers_share=False,
    )


RELEASED = {
    "qwen3.5-0.8b": _qwen(1024, 24, (8, 2), 16, mlp=3584, tied=True),
    "qwen3.5-2b": _qwen(2048, 24, (8, 2), 16, mlp=6144, tied=True),
    "qwen3.5-4b": _qwen(2560, 32, (16, 4), 32, mlp=9216, tied=True),
    "qwen3.5-9b": _qwen(4096, 32, (16, 4), 32, mlp=12288),
    "qwen3.5-27b": _qwen(5120, 64, (24, 4), 48, mlp=17408),
    "qwen3.5-35b-a3b": _qwen(2048, 40, (16, 2), 32, experts=(256, 8, 512)),
    "qwen3.5-122b-a10b": _qwen(3072, 48, (32, 2), 64, experts=(256, 8, 1024)),
    "qwen3.5-397b-a17b": _qwen(4096, 60, (32, 2), 64, experts=(512, 10, 1024)),
    "qwen3-next-80b-a3b": _qwen(2048, 48, (16, 2), 32, experts=(512, 10, 512), vocab=151936),
    "glm-4.5": _glm_4_5(5120, 92, mlp=12288, dense_layers=3, experts=(160, 8, 1536), scaling=2.5, qk_norm=True),
    "glm-4.5-air": _glm_4_5(4096, 46, mlp=10944, dense_layers=1, experts=(128, 8, 1408), scaling=1.0, qk_norm=False),
}
"""By published name, in small letters."""

SHORT_FOR = "qwen3.5-"
"""What may be left out of a name: 0.8b is qwen3.5-0.8b."""


def released_name(name: str) -> str:
    """The key in `RELEASED` that is meant.

    Raises:
      ValueError: if there is none; lists those there are.
    """
    for key in (name.lower(), SHORT_FOR + name.lower()):
        if key in RELEASED:
            return key
    known = ", ".join(RELEASED)
    raise ValueError(f"expected one of {known} ({SHORT_FOR} may be left out), got {name!r}")
