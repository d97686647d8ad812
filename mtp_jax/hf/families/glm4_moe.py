"""GLM-4.5: full attention only, the head is one layer more behind the trunk's, and may repeat both vocabulary
matrices."""

import re
from collections.abc import Iterator

from mtp_jax.config import LayerType, ModelConfig, MoEConfig, RouterType
from mtp_jax.hf.families import keys as read
from mtp_jax.hf.families.blocks import NORMS, OUTPUT_MATRIX, attention, feed_forward, repeats_embedding, trunk
from mtp_jax.hf.families.family import Family, Naming
from mtp_jax.hf.families.keys import Keys
from mtp_jax.hf.rules import Rule, inside, kernel, scale

_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
_HEAD_KEY = "num_nextn_predict_layers"


def _read(keys: Keys) -> ModelConfig:
    keys.only({"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)})
    num_layers = keys.integer("num_hidden_layers", at_most=read.MAX_LAYERS)
    layer_types = read.layer_types(keys, default_interval=1)
    if LayerType.LINEAR in layer_types:
        raise keys.error(f"layer_types: only '{LayerType.FULL}' is supported, got '{LayerType.LINEAR}'")
    counted = keys.integer("first_k_dense_replace", 1, at_least=0)
    return ModelConfig(
        **read.common(keys),
        mlp_width=keys.integer("intermediate_size"),
        layer_types=layer_types,
        attention=read.attention(
            keys,
            rotary_factor=0.5,
            output_gate=False,
            qk_norm=keys.flag("use_qk_norm", False),
            bias=keys.flag("attention_bias", False),
        ),
        delta=None,
        num_mtp_layers=keys.integer(_HEAD_KEY, 0, at_least=0, at_most=read.MAX_HEAD_LAYERS),
        moe=_experts(keys),
        # The published key may count more layers than there are: then all are dense.
        num_dense_layers=min(num_layers, read.num_dense_layers(keys, counted)),
        zero_centred_norms=False,
        mtp_layers_share=False,
    )


def _experts(keys: Keys) -> MoEConfig:
    num_experts = keys.integer("n_routed_experts", at_most=read.MAX_EXPERTS)
    num_groups = keys.integer("n_group", 1)
    if num_experts % num_groups:
        raise keys.error(f"n_group must divide n_routed_experts {num_experts}, got {num_groups}")
    if num_experts == num_groups > 1:
        raise keys.error(f"n_group must leave a group 2 of n_routed_experts {num_experts} or more, got {num_groups}")
    groups_per_token = keys.integer("topk_group", 1)
    if groups_per_token > num_groups:
        raise keys.error(f"topk_group must be at most n_group {num_groups}, got {groups_per_token}")
    # A token's experts are of so many groups.
    most = groups_per_token * num_experts // num_groups
    expert_width = keys.integer("moe_intermediate_size")
    return MoEConfig(
        num_experts=num_experts,
        experts_per_token=keys.integer("num_experts_per_tok", at_most=most),
        expert_width=expert_width,
        shared_width=keys.integer("n_shared_experts", 1) * expert_width,
        shared_gate=False,
        router=RouterType.SIGMOID,
        normalise=keys.flag("norm_topk_prob", True),
        scaling=keys.number("routed_scaling_factor", 1.0),
        num_groups=num_groups,
        groups_per_token=groups_per_token,
    )


def _rules(config: ModelConfig, naming: Naming) -> Iterator[Rule]:
    def block(moe: MoEConfig | None, fused: bool) -> Iterator[Rule]:
        yield from NORMS
        yield from attention(config.attention)
        yield from feed_forward(moe, fused, "shared_experts")

    yield from trunk(config, naming, lambda _, n: block(config.layer_moe(n), naming.fused_trunk))
    for n in range(config.num_mtp_layers):
        published = f"{naming.prefix}layers.{config.num_layers + n}."
        suffix = f"_{n}" if n else ""  # each layer has its own
        own = (
            kernel("eh_proj", f"fc{suffix}"),
            scale("enorm", f"pre_fc_norm_embedding{suffix}"),
            scale("hnorm", f"pre_fc_norm_hidden{suffix}"),
            scale("shared_head.norm", f"norm{suffix}"),
        )
        yield from inside(own, published, "mtp/")
        yield from inside(block(config.moe, naming.fused_head), published, f"mtp/layers_{n}/")


def _head_layer(config: ModelConfig, name: str) -> int | None:
    match = _LAYER.match(name)
    return None if match is None or int(match[1]) < config.num_layers else int(match[1]) - config.num_layers


def _repeats(config: ModelConfig, naming: Naming, name: str) -> str | None:
    """Released 4.5 files repeat both matrices in the head, where engines read them; those of 4.6 do not."""
    if _head_layer(config, name) is not None:
        if name.endswith(".shared_head.head.weight") and not config.tie_embeddings:
            return OUTPUT_MATRIX
        if name.endswith((".shared_head.head.weight", ".embed_tokens.weight")):
            return f"{naming.prefix}embed_tokens.weight"
    return repeats_embedding(config, naming, name)


GLM4_MOE = Family(
    model_type="glm4_moe",
    read=_read,
    rules=_rules,
    head_layer=_head_layer,
    repeats=_repeats,
    head_key=_HEAD_KEY,
)
