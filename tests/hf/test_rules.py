"""The table at the sizes of released models; shapes only, nothing is allocated."""

import math
from dataclasses import replace

import numpy as np
import pytest

from mtp_jax.config import AttentionConfig, DeltaNetConfig, ModelConfig, interleaved
from mtp_jax.hf.rules import Layout, parameter_shapes, slots

# D, layers, heads, kv heads, value heads, F, tied; billions of parameters without the head, parameters of the head
RELEASED = {
    "0.8B": (1024, 24, 8, 2, 16, 3584, True, 0.752, 20_452_864),
    "2B": (2048, 24, 8, 2, 16, 6144, True, 1.882, 60.8e6),
    "4B": (2560, 32, 16, 4, 32, 9216, True, 4.206, 120.6e6),
    "9B": (4096, 32, 16, 4, 32, 12288, False, 8.954, 243e6),
    "27B": (5120, 64, 24, 4, 48, 17408, False, 26.896, 425e6),
}


def released(width, layers, heads, kv_heads, value_heads, mlp_width, tied):
    return ModelConfig(
        vocab_size=248320,
        width=width,
        mlp_width=mlp_width,
        layer_types=interleaved(layers, 4),
        attention=AttentionConfig(heads, kv_heads, head_dim=256, rotary_dim=64, rope_theta=1e7),
        delta=DeltaNetConfig(value_heads, num_k_heads=16, head_k_dim=128, head_v_dim=128),
        tie_embeddings=tied,
    )


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_have_their_published_number_of_parameters(name):
    *shape, billions, head = RELEASED[name]
    config = released(*shape)
    table = slots(config, "model.language_model.")
    sizes = {tensor: math.prod(slot.shape) for tensor, slot in table.items()}
    in_head = sum(size for tensor, size in sizes.items() if tensor.startswith("mtp."))
    assert sum(tensor.startswith("mtp.") for tensor in sizes) == 15
    assert (sum(sizes.values()) - in_head) / 1e9 == pytest.approx(billions, abs=5e-4)
    assert in_head == pytest.approx(head, rel=3e-3)
    if name == "0.8B":
        assert in_head == head


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", [0, 1])
def test_the_table_is_one_to_one_and_total(tied, head):
    config = replace(released(64, 5, 4, 2, 16, 128, tied), num_mtp_layers=head)
    table = slots(config, "model.")
    paths = [slot.path for slot in table.values()]
    assert len(set(paths)) == len(paths)
    assert set(paths) == parameter_shapes(config).keys()


@pytest.mark.parametrize("layout", Layout)
def test_layouts_invert(layout):
    ours = np.arange(12).reshape(4, 3)
    published = layout.to_published(ours)
    np.testing.assert_array_equal(layout.to_ours(published), ours)
    assert layout.published_shape(ours.shape) == published.shape
    assert layout.shape_of_ours(published.shape) == ours.shape
