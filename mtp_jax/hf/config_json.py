"""config.json <-> ModelConfig."""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mtp_jax.config import AttentionConfig, DeltaNetConfig, HeadReads, LayerType, ModelConfig
from mtp_jax.errors import UserError
from mtp_jax.hf.families import MODEL_TYPES, QWEN3_5, QWEN3_5_MOE, Family
from mtp_jax.hf.families.keys import HEAD_READS, Keys


def family_from_json(values: Mapping[str, Any], where: str = "config.json") -> Family:
    """The family of the model that a config.json describes.

    Raises:
      UserError: if it is none that is built here; lists those that are.
    """
    model_type = values.get("model_type")
    if model_type is None and "mtp_weights" in values:
        raise UserError(
            f"{where}: these are the settings of a training run, not a model's config; write a checkpoint from it with "
            "export_checkpoint.py --workdir"
        )
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise UserError(f"{where}: model_type must be one of {', '.join(MODEL_TYPES)}, got {model_type!r}")
    return MODEL_TYPES[model_type]


def config_from_json(values: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """The model that a config.json describes; without a head where the family's config does not speak of it.

    Args:
      values: the file's object; a multimodal one nests the language model in `text_config`, others are flat.
      where: the file, for error messages.

    Raises:
      UserError: if the model type is another, a key is missing, has a wrong type, or asks for what is not built;
        the message names the key.
    """
    family = family_from_json(values, where)
    text = values
    if values["model_type"] == family.multimodal_type:
        text = values.get("text_config")
        if not isinstance(text, Mapping):
            raise UserError(f"{where}: {family.multimodal_type} keeps the language model in text_config, got {text!r}")
        inner = text.get("model_type", family.model_type)
        if inner != family.model_type:
            raise UserError(f"{where}: text_config.model_type must be {family.model_type}, got {inner!r}")
    # Either level may say it. A wrong matrix cannot pass unseen: the files then lack or repeat one.
    levels = [Keys(level, where) for level in (values, text)]
    tied = any([level.flag("tie_word_embeddings", False) for level in levels])
    for level in levels:
        level.only({"quantization_config": ()})
    try:
        return family.read(Keys({**text, "tie_word_embeddings": tied}, where))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error


def family_of_new(config: ModelConfig) -> Family:
    """The family as which a model that was trained from nothing is written."""
    return QWEN3_5 if config.moe is None else QWEN3_5_MOE


def config_to_json(config: ModelConfig, eos_token_id: int | None = None) -> dict[str, Any]:
    """The config.json of a model trained here: Qwen3.5 for text only, which `transformers` 5.24 loads.

    Raises:
      UserError: if Qwen3.5 has no such models; names what is different there.
    """
    attention = config.attention
    # Published text configs have these keys whether or not a layer uses them.
    delta = config.delta or DeltaNetConfig(num_v_heads=1, num_k_heads=1, head_k_dim=1, head_v_dim=1)
    values = {
        "architectures": ["Qwen3_5ForCausalLM" if config.moe is None else "Qwen3_5MoeForCausalLM"],
        "model_type": family_of_new(config).model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        **_feed_forward(config),
        "num_hidden_layers": config.num_layers,
        "layer_types": [str(layer_type) for layer_type in config.layer_types],
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "attn_output_gate": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": attention.rope_theta,
            "partial_rotary_factor": _rotary_factor(attention),
        },
        "linear_num_value_heads": delta.num_v_heads,
        "linear_num_key_heads": delta.num_k_heads,
        "linear_key_head_dim": delta.head_k_dim,
        "linear_value_head_dim": delta.head_v_dim,
        "linear_conv_kernel_dim": delta.conv_width,
        "mamba_ssm_dtype": "float32",
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_embeddings,
        "mtp_num_hidden_layers": config.num_mtp_layers,
        "mtp_use_dedicated_embeddings": False,
        **({} if config.head_reads is HeadReads.AFTER_NORM else {HEAD_READS: str(config.head_reads)}),
        "eos_token_id": eos_token_id,
        "dtype": "bfloat16",
    }
    without_effect = {
        "delta": LayerType.LINEAR not in config.layer_types,
        "mlp_width": config.moe is not None and not config.num_dense_layers,
        "mtp_layers_share": config.num_mtp_layers < 2,
    }
    read_back = config_from_json(values)
    different = [
        f"{field.name} {getattr(config, field.name)}, not {getattr(read_back, field.name)}"
        for field in fields(ModelConfig)
        if not without_effect.get(field.name) and getattr(config, field.name) != getattr(read_back, field.name)
    ]
    if different:
        raise UserError(
            f"a model trained from nothing is written as {values['model_type']}, which this one is not: "
            + "; ".join(different)
        )
    return values


def _feed_forward(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    if moe is None:
        return {"intermediate_size": config.mlp_width}
    return {
        "moe_intermediate_size": moe.expert_width,
        "shared_expert_intermediate_size": moe.shared_width,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
    }


def _rotary_factor(attention: AttentionConfig) -> float:
    """The share of a head that rotates; readers round head_dim times it down, so it may not be a hair too small."""
    factor = attention.rotary_dim / attention.head_dim
    exact = int(attention.head_dim * factor) == attention.rotary_dim
    return factor if exact else math.nextafter(factor, 1.0)
