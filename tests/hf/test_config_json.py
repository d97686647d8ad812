"""config.json in all its published forms, and everything that is refused by name."""

import json
from dataclasses import replace

import pytest
from random_checkpoint import Variant, config_json

from mtp_jax.config import AttentionConfig, DeltaNetConfig, LayerType, ModelConfig, interleaved
from mtp_jax.errors import UserError
from mtp_jax.hf import config_from_json, config_to_json

TEXT = config_json(Variant("text", 0))
NESTED = config_json(Variant("nested", 0, prefix="model.language_model."))
EXPECTED = ModelConfig(
    vocab_size=131,
    width=40,
    mlp_width=72,
    layer_types=interleaved(4, 4),
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=32, rotary_dim=8, rope_theta=1e7),
    delta=DeltaNetConfig(num_v_heads=4, num_k_heads=2, head_k_dim=16, head_v_dim=24, conv_width=4),
    norm_eps=1e-6,
    tie_embeddings=True,
    num_mtp_layers=1,
    max_position_embeddings=4096,
)


def without(values, *keys):
    return {key: value for key, value in values.items() if key not in keys}


@pytest.mark.parametrize("values", [TEXT, NESTED], ids=["text", "nested"])
def test_both_published_forms_are_read(values):
    assert config_from_json(values) == EXPECTED


def test_flat_rotary_keys_are_read():
    values = {**without(TEXT, "rope_parameters"), "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    assert config_from_json(values) == EXPECTED
    assert config_from_json({**values, "rope_scaling": None}) == EXPECTED
    assert config_from_json({**values, "rope_scaling": {"type": "default"}}) == EXPECTED


def test_the_interval_stands_in_for_layer_types():
    assert config_from_json(without(TEXT, "layer_types")) == EXPECTED
    assert config_from_json(without(TEXT, "full_attention_interval")) == EXPECTED
    values = {**without(TEXT, "layer_types"), "full_attention_interval": 2}
    assert config_from_json(values).layer_types == (LayerType.LINEAR, LayerType.FULL) * 2


def test_layer_types_count_more_than_the_interval():
    values = {**TEXT, "layer_types": ["full_attention"] * 4}
    assert config_from_json(values).layer_types == (LayerType.FULL,) * 4


def test_tied_at_either_level():
    text = without(NESTED["text_config"], "tie_word_embeddings")
    untied = without(NESTED, "tie_word_embeddings")
    assert config_from_json({**untied, "text_config": text}).tie_embeddings is False
    assert config_from_json({**untied, "text_config": text, "tie_word_embeddings": True}).tie_embeddings is True
    assert config_from_json(untied).tie_embeddings is True


def test_no_head_when_none_is_declared():
    assert config_from_json(without(TEXT, "mtp_num_hidden_layers")).num_mtp_layers == 0


def test_what_is_written_is_read_back():
    for config in (EXPECTED, replace(EXPECTED, tie_embeddings=False, num_mtp_layers=0)):
        assert config_from_json(config_to_json(config)) == config


@pytest.mark.parametrize("head_dim", [10, 22, 26, 98, 100])
def test_any_rotary_width_survives(head_dim):
    for rotary_dim in range(2, head_dim + 1, 2):
        attention = replace(EXPECTED.attention, head_dim=head_dim, rotary_dim=rotary_dim)
        config = replace(EXPECTED, attention=attention)
        assert config_from_json(config_to_json(config)) == config


@pytest.mark.parametrize("model_type", [None, "qwen3_6", "llama", 3, []])
def test_another_model_type_lists_the_supported_ones(model_type):
    known = "qwen3_5, qwen3_5_text, qwen3_5_moe, qwen3_5_moe_text, qwen3_next, glm4_moe"
    with pytest.raises(UserError, match=f"model_type must be one of {known}, got"):
        config_from_json({**TEXT, "model_type": model_type})


REFUSED = {
    "attn_output_gate": False,
    "output_gate_type": "sigmoid",
    "hidden_act": "gelu",
    "attention_bias": True,
    "attention_dropout": 0.1,
    "mtp_use_dedicated_embeddings": True,
    "quantization_config": {"quant_method": "fp8"},
    "use_sliding_window": True,
    "sliding_window": 4096,
    "num_experts": 8,
    "mlp_only_layers": [1],
    "decoder_sparse_step": 1,
    "mtp_num_hidden_layers": 65,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7},
    "rope_scaling": {"type": "linear", "factor": 2},
    "layer_types": ["linear_attention"] * 3,
    "full_attention_interval": 0,
    "num_attention_heads": 3,
    "linear_num_value_heads": 3,
    "hidden_size": 0,
    "vocab_size": -1,
    "num_hidden_layers": "4",
    "head_dim": 32.5,
    "intermediate_size": True,
    "tie_word_embeddings": "yes",
    "rms_norm_eps": "1e-6",
}


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("rms_norm_eps", "NaN"),
        ("rms_norm_eps", "1e999"),
        ("rms_norm_eps", "-1"),
        ("num_hidden_layers", "1000000000"),
        ("vocab_size", "9" * 30),
        ("head_dim", "-32"),
        ("intermediate_size", "0"),
    ],
)
def test_numbers_that_no_model_has_are_refused(key, text):
    values = {**without(TEXT, "layer_types"), key: json.loads(text)}
    with pytest.raises(UserError, match=f"c.json: {key} must be"):
        config_from_json(values, "c.json")


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_not_built_is_refused_by_name(key):
    values = {**TEXT, key: REFUSED[key]}
    if key == "full_attention_interval":
        values = without(values, "layer_types")
    with pytest.raises(UserError, match=rf"c\.json: .*{key}"):
        config_from_json(values, "c.json")


def test_quantization_outside_the_text_config_is_refused():
    with pytest.raises(UserError, match="quantization_config"):
        config_from_json({**NESTED, "quantization_config": {"quant_method": "fp8"}})


@pytest.mark.parametrize(
    "key",
    [
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "linear_num_value_heads", "linear_num_key_heads", "rms_norm_eps"),
        *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "max_position_embeddings"),
    ],
)
def test_a_missing_key_is_named(key):
    with pytest.raises(UserError, match=f"{key} is missing"):
        config_from_json(without(TEXT, key))


def test_a_missing_theta_is_never_guessed():
    for values in (without(TEXT, "rope_parameters"), {**TEXT, "rope_parameters": {"rope_type": "default"}}):
        with pytest.raises(UserError, match="rope_theta is missing"):
            config_from_json(values)


def test_a_missing_text_config_is_named():
    with pytest.raises(UserError, match="text_config"):
        config_from_json(without(NESTED, "text_config"))
    with pytest.raises(UserError, match=r"text_config\.model_type"):
        config_from_json({**NESTED, "text_config": {**TEXT, "model_type": "qwen3"}})


def test_no_layer_pattern_is_an_error():
    with pytest.raises(UserError, match="layer_types or full_attention_interval is missing"):
        config_from_json(without(TEXT, "layer_types", "full_attention_interval"))
