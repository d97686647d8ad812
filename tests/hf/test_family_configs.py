"""config.json of the families with experts: read in its old and new forms, and refused by name."""

from dataclasses import replace

import pytest
from random_checkpoint import GLM, MOE, NEXT, Variant, config_json

from mtp_jax.config import (
    AttentionConfig,
    DeltaNetConfig,
    HeadReads,
    LayerType,
    ModelConfig,
    MoEConfig,
    RouterType,
    interleaved,
)
from mtp_jax.errors import UserError
from mtp_jax.hf import config_from_json, config_to_json

CONFIGS = {
    "qwen3_5_moe": config_json(Variant("", 0, family=MOE, prefix="model.language_model.")),
    "qwen3_5_moe_text": config_json(Variant("", 0, family=MOE)),
    "qwen3_next": config_json(Variant("", 0, family=NEXT, tied=False)),
    "glm4_moe": config_json(Variant("", 0, family=GLM, tied=False, layers=5, groups=(4, 2), scaling=2.5)),
}
QWEN_EXPERTS = MoEConfig(num_experts=6, experts_per_token=2, expert_width=28, shared_width=20)
QWEN = ModelConfig(
    vocab_size=131,
    width=40,
    mlp_width=0,
    layer_types=interleaved(4, 4),
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=32, rotary_dim=8, rope_theta=1e7),
    delta=DeltaNetConfig(num_v_heads=4, num_k_heads=2, head_k_dim=16, head_v_dim=24),
    max_position_embeddings=4096,
    moe=QWEN_EXPERTS,
)
EXPECTED = {
    "qwen3_5_moe": QWEN,
    "qwen3_5_moe_text": QWEN,
    "qwen3_next": replace(QWEN, tie_embeddings=False, num_mtp_layers=0),  # how many there are, the tensors say
    "glm4_moe": ModelConfig(
        vocab_size=131,
        width=40,
        mlp_width=72,
        layer_types=(LayerType.FULL,) * 5,
        attention=AttentionConfig(4, 2, 32, rotary_dim=16, rope_theta=1e6, output_gate=False, qk_norm=True, bias=True),
        delta=None,
        norm_eps=1e-5,
        tie_embeddings=False,
        num_mtp_layers=1,
        max_position_embeddings=4096,
        moe=MoEConfig(
            num_experts=8,
            experts_per_token=3,
            expert_width=28,
            shared_width=28,
            shared_gate=False,
            router=RouterType.SIGMOID,
            scaling=2.5,
            num_groups=4,
            groups_per_token=2,
        ),
        num_dense_layers=1,
        zero_centred_norms=False,
        mtp_layers_share=False,
    ),
}

each = pytest.mark.parametrize("name", CONFIGS)


def changed(name, **changes):
    """A config with keys of the language model changed; with None, removed."""
    values = dict(CONFIGS[name])
    text = dict(values.get("text_config", values))
    text.update(changes)
    text = {key: value for key, value in text.items() if value is not None}
    return {**values, "text_config": text} if "text_config" in values else text


def read(name, **changes):
    return config_from_json(changed(name, **changes), "c.json")


@each
def test_published_configs_are_read(name):
    assert read(name) == EXPECTED[name]


@each
def test_rotary_settings_are_read_flat_and_nested(name):
    theta, factor = EXPECTED[name].attention.rope_theta, 0.5 if name == "glm4_moe" else 0.25
    apart = {"rope_parameters": None, "rope_theta": None, "partial_rotary_factor": None, "rope_scaling": None}
    nested = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": factor}
    assert read(name, **apart | {"rope_parameters": nested}) == EXPECTED[name]
    assert read(name, **apart | {"rope_theta": theta, "partial_rotary_factor": factor}) == EXPECTED[name]
    assert read(name, **apart | {"rope_theta": theta}) == EXPECTED[name]  # what a family rotates is known
    with pytest.raises(UserError, match="rope_theta is missing"):
        read(name, **apart)


@each
def test_layer_types_are_read_given_and_as_an_interval(name):
    expected = EXPECTED[name]
    given = {"layer_types": [str(kind) for kind in expected.layer_types], "full_attention_interval": None}
    assert read(name, **given) == expected
    if name == "glm4_moe":
        return
    other = read(name, layer_types=None, full_attention_interval=2)
    assert other.layer_types == (LayerType.LINEAR, LayerType.FULL) * 2
    if name == "qwen3_next":
        assert read(name, layer_types=None, full_attention_interval=None) == expected
    else:
        with pytest.raises(UserError, match="layer_types or full_attention_interval is missing"):
            read(name, layer_types=None, full_attention_interval=None)


def test_dense_layers_are_read_counted_and_listed():
    listed = ["dense"] * 2 + ["sparse"] * 3
    assert read("glm4_moe", mlp_layer_types=listed) == replace(EXPECTED["glm4_moe"], num_dense_layers=2)
    assert read("glm4_moe", first_k_dense_replace=2) == replace(EXPECTED["glm4_moe"], num_dense_layers=2)
    assert read("glm4_moe", first_k_dense_replace=9).num_dense_layers == 5
    assert read("qwen3_next", mlp_layer_types=["sparse"] * 4) == EXPECTED["qwen3_next"]
    with pytest.raises(UserError, match="dense layers must come first"):
        read("glm4_moe", mlp_layer_types=listed[::-1])
    with pytest.raises(UserError, match="mlp_layer_types must list num_hidden_layers 5 of dense, sparse"):
        read("glm4_moe", mlp_layer_types=["dense"])
    with pytest.raises(UserError, match="mlp_layer_types: only 'sparse' is supported"):
        read("qwen3_next", mlp_layer_types=["dense"] + ["sparse"] * 3)


def test_what_routes_tokens_is_read():
    moe = EXPECTED["glm4_moe"].moe
    assert moe is not None
    for changes, expected in (
        ({"norm_topk_prob": False}, replace(moe, normalise=False)),
        ({"n_shared_experts": 3}, replace(moe, shared_width=84)),
        ({"n_group": None, "topk_group": None}, replace(moe, num_groups=1, groups_per_token=1)),
        ({"scoring_func": "sigmoid", "topk_method": "noaux_tc"}, moe),
    ):
        assert read("glm4_moe", **changes).moe == expected
    assert read("qwen3_next", norm_topk_prob=False).moe == replace(QWEN_EXPERTS, normalise=False)
    assert read("glm4_moe", use_qk_norm=False, attention_bias=False).attention == replace(
        EXPECTED["glm4_moe"].attention, qk_norm=False, bias=False
    )


@each
def test_which_hidden_state_the_head_reads_may_be_said(name):
    assert read(name, mtp_head_reads="before_norm") == replace(EXPECTED[name], head_reads=HeadReads.BEFORE_NORM)
    assert read(name, mtp_head_reads="after_norm") == EXPECTED[name]
    with pytest.raises(UserError, match=r"mtp_head_reads must be one of after_norm, before_norm, got 'both'"):
        read(name, mtp_head_reads="both")


COMMON = {
    "hidden_act": "gelu",
    "attention_dropout": 0.1,
    "quantization_config": {"quant_method": "fp8"},
    "mtp_use_dedicated_embeddings": True,
    "sliding_window": 4096,
    "rope_scaling": {"type": "yarn", "factor": 2},
    "num_attention_heads": 3,
    "head_dim": None,
    "rms_norm_eps": None,
    "max_position_embeddings": None,
    "num_experts_per_tok": None,
    "moe_intermediate_size": None,
}
OF_QWEN = {
    "attn_output_gate": False,
    "output_gate_type": "sigmoid",
    "attention_bias": True,
    "mlp_only_layers": [1],
    "decoder_sparse_step": 2,
    "num_experts": 0,
    "shared_expert_intermediate_size": None,
    "linear_num_value_heads": 3,
    "full_attention_interval": 0,
}
REFUSED = {
    "qwen3_5_moe": {**COMMON, **OF_QWEN, "norm_topk_prob": False, "mtp_num_hidden_layers": 65},
    "qwen3_next": {**COMMON, **OF_QWEN, "norm_topk_prob": 1},
    "glm4_moe": {
        **COMMON,
        "layer_types": ["linear_attention"] * 5,
        "n_group": 3,
        "topk_group": 5,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "moe_layer_freq": 2,
        "n_routed_experts": 10**9,
        "n_shared_experts": 0,
        "num_nextn_predict_layers": -1,
        "routed_scaling_factor": 0,
        "use_qk_norm": "yes",
        "num_experts_per_tok": 5,
    },
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name in REFUSED for key in REFUSED[name]])
def test_what_is_not_built_is_refused_by_name(name, key):
    changes = {key: REFUSED[name][key]}
    if key == "full_attention_interval":
        changes["layer_types"] = None
    with pytest.raises(UserError, match=rf"c\.json: .*{key}"):
        read(name, **changes)


BROKEN = (-1, 0, 7, 2**31, 10**40, 1.5, 1e-300, 1e300, float("nan"), True, "x", [], {})


@each
def test_whatever_is_wrong_with_a_key_is_told_by_its_name(name):
    text = CONFIGS[name].get("text_config", CONFIGS[name])
    for key in text.keys() - {"model_type"}:
        for value in BROKEN:
            try:
                read(name, **{key: value})
            except UserError as error:
                told = "layer_types" if key == "full_attention_interval" else key  # which they then say of GLM
                assert told in str(error) or key in str(error), (key, value)  # noqa: PT017


@each
@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize("value", [0, -1, 1e-300, 1e300, 10**40])
def test_a_number_that_float32_cannot_hold_is_refused(name, key, value):
    nested = {**changed(name).get("text_config", changed(name)).get("rope_parameters", {}), key: value}
    changes = {"rope_parameters": nested} if key == "rope_theta" else {key: value}
    with pytest.raises(UserError, match=f"{key} must be a positive number that float32 holds, got"):
        read(name, **changes)


def test_a_group_of_one_expert_is_refused_by_name():
    with pytest.raises(UserError, match="n_group must leave a group 2 of n_routed_experts 8 or more, got 8"):
        read("glm4_moe", n_group=8)


def test_groups_that_do_not_divide_the_experts_are_named():
    with pytest.raises(UserError, match="n_group must divide n_routed_experts 8, got 3"):
        read("glm4_moe", n_group=3)


def test_experts_of_a_model_trained_here_are_written_and_read_back():
    config = replace(QWEN, tie_embeddings=False, head_reads=HeadReads.BEFORE_NORM)
    values = config_to_json(config)
    assert values["model_type"] == "qwen3_5_moe_text"
    assert config_from_json(values) == config
    assert "mtp_head_reads" not in config_to_json(QWEN)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EXPECTED["glm4_moe"], "mlp_width 72, not 0; attention .*; moe .*num_dense_layers 1, not 0; zero_centred.*"),
        (replace(QWEN, moe=replace(QWEN_EXPERTS, normalise=False)), r"moe MoEConfig.*normalise=False"),
    ],
)
def test_a_model_that_qwen3_5_is_not_is_not_written_as_one(config, message):
    with pytest.raises(UserError, match=f"written as qwen3_5_moe_text, which this one is not: {message}"):
        config_to_json(config)
