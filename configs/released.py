"""Shapes of released models, for measuring without their weights."""

from mtp_jax.config import AttentionConfig, DeltaNetConfig, ModelConfig, interleaved


def qwen3_5_0_8b() -> ModelConfig:
    """Qwen3.5-0.8B: 752,393,024 parameters in the trunk, 20,452,864 in the head."""
    return ModelConfig(
        vocab_size=248320,
        width=1024,
        mlp_width=3584,
        layer_types=interleaved(24, 4),
        attention=AttentionConfig(num_heads=8, num_kv_heads=2, head_dim=256, rotary_dim=64, rope_theta=1e7),
        delta=DeltaNetConfig(num_v_heads=16, num_k_heads=16, head_k_dim=128, head_v_dim=128),
        tie_embeddings=True,
        max_position_embeddings=262144,
    )


RELEASED = {"0.8b": qwen3_5_0_8b}
