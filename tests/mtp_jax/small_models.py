"""Small models of every mixer, shared by the tests of this folder. Dimensions differ, so that a swapped axis fails."""

from dataclasses import replace

from mtp_jax.config import AttentionConfig, DeltaNetConfig, LayerType, ModelConfig, MoEConfig, RouterType, interleaved
from mtp_jax.mtp import MTPModel

VOCAB = 53


ATTENTION = AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=10, rotary_dim=4, rope_theta=1e4)

SOFTMAX_EXPERTS = MoEConfig(num_experts=7, experts_per_token=3, expert_width=9, shared_width=11)
GROUPED_EXPERTS = MoEConfig(
    num_experts=8,
    experts_per_token=3,
    expert_width=9,
    shared_width=11,
    shared_gate=False,
    router=RouterType.SIGMOID,
    scaling=2.5,
    num_groups=4,
    groups_per_token=2,
)


def config(layer_types, **changes):
    settings = {
        "vocab_size": VOCAB,
        "width": 24,
        "mlp_width": 40,
        "layer_types": layer_types,
        "attention": ATTENTION,
        "delta": DeltaNetConfig(num_v_heads=4, num_k_heads=2, head_k_dim=5, head_v_dim=7),
    }
    return ModelConfig(**(settings | changes))


MODELS = {
    "delta": MTPModel(config((LayerType.LINEAR,))),
    "attention": MTPModel(config((LayerType.FULL,))),
    "hybrid": MTPModel(config(interleaved(4, 2))),
    "plain": MTPModel(
        config(
            (LayerType.FULL,),
            attention=replace(ATTENTION, output_gate=False, qk_norm=False, bias=True),
            zero_centred_norms=False,
        )
    ),
    "experts": MTPModel(config(interleaved(2, 2), mlp_width=0, moe=SOFTMAX_EXPERTS)),
    "grouped experts": MTPModel(config((LayerType.FULL,) * 2, num_dense_layers=1, moe=GROUPED_EXPERTS)),
}
