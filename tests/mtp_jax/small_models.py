"""Small models of every mixer, shared by the tests of this folder. Dimensions differ, so that a swapped axis fails."""

from dataclasses import replace

from mtp_jax.config import AttentionConfig, DeltaNetConfig, LayerType, ModelConfig, interleaved
from mtp_jax.mtp import MTPModel

VOCAB = 53


ATTENTION = AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=10, rotary_dim=4, rope_theta=1e4)


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
}
