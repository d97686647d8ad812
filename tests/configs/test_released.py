"""Shapes of released models against their tables; nothing is allocated."""

import pytest
from released_tensors import BILLIONS, SHAPES, aliases, head_prefix, num_parameters, published

from configs.released import RELEASED, released_name
from mtp_jax.config import LayerType, RouterType
from mtp_jax.hf.families import released_naming, slots


@pytest.mark.parametrize("name", RELEASED)
def test_a_preset_is_its_line_of_the_table(name):
    config, shape = RELEASED[name], SHAPES[name]
    attention, experts = config.attention, config.moe
    assert (config.width, config.num_layers, config.vocab_size) == (shape.width, shape.layers, shape.vocab)
    assert (attention.num_heads, attention.num_kv_heads) == (shape.heads, shape.kv_heads)
    assert config.mlp_width == shape.mlp
    assert config.tie_embeddings is shape.tied
    assert config.num_dense_layers == shape.dense_layers
    assert config.num_mtp_layers == 1
    assert attention.rotary_dim == 64
    if experts is None:
        assert shape.experts[0] == 0
    else:
        assert (experts.num_experts, experts.experts_per_token, experts.expert_width) == shape.experts
        assert experts.shared_width == experts.expert_width
        assert (experts.num_groups, experts.normalise) == (1, True)
    if name.startswith("qwen"):
        assert config.delta is not None
        assert config.delta.num_v_heads == shape.value_heads
        assert config.layer_types == 3 * (LayerType.LINEAR,) + (LayerType.FULL,) + config.layer_types[:-4]
        assert (attention.head_dim, attention.rope_theta, config.norm_eps) == (256, 1e7, 1e-6)
        assert (attention.output_gate, attention.qk_norm, attention.bias) == (True, True, False)
        assert (config.zero_centred_norms, config.mtp_layers_share) == (True, True)
        assert experts is None or (experts.router, experts.shared_gate) == (RouterType.SOFTMAX, True)
    else:
        assert experts is not None
        assert set(config.layer_types) == {LayerType.FULL}
        assert (attention.head_dim, attention.rope_theta, config.norm_eps) == (128, 1e6, 1e-5)
        assert (attention.output_gate, attention.qk_norm, attention.bias) == (False, shape.qk_norm, True)
        assert (config.zero_centred_norms, config.mtp_layers_share) == (False, False)
        assert (experts.router, experts.shared_gate) == (RouterType.SIGMOID, False)
        assert experts.scaling == {"glm-4.5": 2.5, "glm-4.5-air": 1.0}[name]


@pytest.mark.parametrize("name", BILLIONS)
def test_the_tables_give_the_known_numbers_of_parameters(name):
    for number, known in zip(num_parameters(name), BILLIONS[name], strict=True):
        if known is not None:
            assert f"{number / 1e9:.{len(known.partition('.')[2])}f}" == known


@pytest.mark.parametrize("name", RELEASED)
def test_the_checkpoint_of_a_preset_has_the_released_tensors(name):
    model_type = {"qwen3-next-80b-a3b": "qwen3_next", "glm-4.5": "glm4_moe", "glm-4.5-air": "glm4_moe"}.get(name)
    naming = released_naming(model_type or ("qwen3_5" if RELEASED[name].moe is None else "qwen3_5_moe"))
    table = slots(RELEASED[name], naming)
    expected = published(name)
    repeated = {tensor: naming.family.repeats(RELEASED[name], naming, tensor) for tensor in expected}
    assert {tensor for tensor, original in repeated.items() if original} == aliases(name)
    assert all(expected[tensor] == expected[original] for tensor, original in repeated.items() if original)
    assert {tensor: slot.shape for tensor, slot in table.items()} == {
        tensor: shape for tensor, shape in expected.items() if tensor not in aliases(name)
    }
    head = {tensor for tensor in expected if tensor.startswith(head_prefix(name))}
    assert {tensor for tensor in expected if naming.family.is_head(RELEASED[name], tensor)} == head


def test_names_may_be_short_and_in_any_case():
    assert released_name("0.8b") == released_name("Qwen3.5-0.8B") == "qwen3.5-0.8b"
    assert released_name("GLM-4.5-Air") == "glm-4.5-air"


@pytest.mark.parametrize("name", ["", "80b-a3b", "qwen3.5-", "qwen3.5-1b"])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError, match=r"qwen3.5-0.8b, .*, glm-4.5-air .*, got '" + name):
        released_name(name)
