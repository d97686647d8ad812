"""Qwen3.5: released with a vision tower, which is carried along, and with a head named `mtp.` whatever the prefix."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from mtp_jax.config import LayerType, ModelConfig, MoEConfig
from mtp_jax.hf.families import keys as read
from mtp_jax.hf.families.blocks import DELTA_NET, NORMS, attention, feed_forward, repeats_embedding, trunk
from mtp_jax.hf.families.family import Family, Naming
from mtp_jax.hf.families.keys import Keys
from mtp_jax.hf.rules import Rule, inside, kernel, scale

_HEAD = re.compile(r"mtp\.(?:layers\.(\d{1,9})\.)?")

_PROJECTIONS = tuple(
    kernel(f"linear_attn.{name}", f"linear_attn/{name}")
    for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
)


def qwen_model(
    keys: Keys,
    *,
    mlp_width: int = 0,
    moe: MoEConfig | None = None,
    num_mtp_layers: int,
    default_interval: int | None = None,
) -> ModelConfig:
    """What the families of Qwen3.5 and Qwen3-Next say in the same words."""
    keys.only({"attn_output_gate": (True,), "output_gate_type": ("swish",), "attention_bias": (False,)})
    return ModelConfig(
        **read.common(keys),
        mlp_width=mlp_width,
        layer_types=read.layer_types(keys, default_interval),
        attention=read.attention(keys, rotary_factor=0.25),
        delta=read.delta_net(keys),
        num_mtp_layers=num_mtp_layers,
        moe=moe,
    )


def qwen_experts(keys: Keys, normalise: bool) -> MoEConfig:
    """A softmax router, and a gated shared expert, in every layer."""
    keys.only({"mlp_only_layers": ([],), "decoder_sparse_step": (1,)})
    if dense := read.num_dense_layers(keys, 0):
        raise keys.error(f"mlp_layer_types: only 'sparse' is supported, got {dense} dense layers")
    num_experts = keys.integer("num_experts", at_most=read.MAX_EXPERTS)
    return MoEConfig(
        num_experts=num_experts,
        experts_per_token=keys.integer("num_experts_per_tok", at_most=num_experts),
        expert_width=keys.integer("moe_intermediate_size"),
        shared_width=keys.integer("shared_expert_intermediate_size"),
        normalise=normalise,
    )


def qwen_rules(config: ModelConfig, naming: Naming, projections: Sequence[Rule]) -> Iterator[Rule]:
    """The table, given how DeltaNet's input projections are published."""

    def block(layer_type: LayerType, moe: MoEConfig | None, fused: bool) -> Iterator[Rule]:
        yield from NORMS
        if layer_type is LayerType.FULL:
            yield from attention(config.attention)
        else:
            yield from (*projections, *DELTA_NET)
        yield from feed_forward(moe, fused, "shared_expert")

    yield from trunk(config, naming, lambda kind, n: block(kind, config.layer_moe(n), naming.fused_trunk))
    if config.num_mtp_layers:
        yield kernel("mtp.fc", "mtp/fc")
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            yield scale(f"mtp.{name}", f"mtp/{name}")
    for n in range(config.num_mtp_layers):
        yield from inside(block(LayerType.FULL, config.moe, naming.fused_head), f"mtp.layers.{n}.", f"mtp/layers_{n}/")


def head_layer(_config: ModelConfig, name: str) -> int | None:
    """Which of the head's layers owns a tensor; the first one what they share."""
    match = _HEAD.match(name)
    return None if match is None else int(match[1] or 0)


def _num_mtp_layers(keys: Keys) -> int:
    return keys.integer(_HEAD_KEY, 0, at_least=0, at_most=read.MAX_HEAD_LAYERS)


def _dense(keys: Keys) -> ModelConfig:
    keys.only({"num_experts": (0,), "mlp_only_layers": ([],), "decoder_sparse_step": (0,)})
    return qwen_model(keys, mlp_width=keys.integer("intermediate_size"), num_mtp_layers=_num_mtp_layers(keys))


def _with_experts(keys: Keys) -> ModelConfig:
    keys.only({"norm_topk_prob": (True,)})
    moe = qwen_experts(keys, normalise=True)
    return qwen_model(keys, moe=moe, num_mtp_layers=_num_mtp_layers(keys))


def _rules(config: ModelConfig, naming: Naming) -> Iterable[Rule]:
    return qwen_rules(config, naming, _PROJECTIONS)


_HEAD_KEY = "mtp_num_hidden_layers"


def _family(model_type: str, reader: Callable[[Keys], ModelConfig]) -> Family:
    return Family(
        model_type=f"{model_type}_text",
        multimodal_type=model_type,
        read=reader,
        rules=_rules,
        head_layer=head_layer,
        repeats=repeats_embedding,
        head_key=_HEAD_KEY,
        carried=("model.visual.",),
        fused_trunk=True,  # with experts; those of the head are single in 3.5, fused in 3.6
    )


QWEN3_5 = _family("qwen3_5", _dense)
QWEN3_5_MOE = _family("qwen3_5_moe", _with_experts)
