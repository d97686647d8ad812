"""Sizes of released models against counts that are made from their tables; nothing is allocated."""

from math import prod

import pytest
from released_tensors import SHAPES, aliases, head_prefix, num_active, num_parameters, published

from configs.released import RELEASED
from mtp_jax.mtp import MTPModel
from mtp_jax.sizes import Part, count_parts, row_bytes, weight_bytes
from train.experiment import Experiment
from train.memory import state_bytes

NAMES = [name for name in RELEASED if RELEASED[name].moe is None]

# What the published names say; the first that is found in a name counts.
PARTS = {
    "norm": Part.NORMS,
    "embed_tokens": Part.EMBEDDING,
    "lm_head": Part.OUTPUT_MATRIX,
    "linear_attn": Part.DELTA_NET,
    "self_attn": Part.ATTENTION,
    "mlp.gate.": Part.ROUTER,
    "mlp.experts": Part.EXPERTS,
    "mlp.shared_expert": Part.SHARED_EXPERT,
    "mlp": Part.MLP,
    "fc": Part.PROJECTION,
    "eh_proj": Part.PROJECTION,
}


@pytest.mark.parametrize("name", NAMES)
def test_parts_add_up_to_the_model(name):
    trunk, head = (count_parts(RELEASED[name], head=head).values() for head in (False, True))
    assert (sum(count.total for count in trunk), sum(count.total for count in head)) == num_parameters(name)
    assert sum(count.active for count in (*trunk, *head)) == num_active(name)


@pytest.mark.parametrize("name", NAMES)
def test_parts_are_those_that_the_published_names_say(name):
    found: dict[bool, dict[Part, int]] = {False: {}, True: {}}
    for tensor, shape in published(name).items():
        if tensor in aliases(name):
            continue
        part = next(part for word, part in PARTS.items() if word in tensor)
        if SHAPES[name].tied and part is Part.EMBEDDING:
            part = Part.OUTPUT_MATRIX
        stack = found[tensor.startswith(head_prefix(name))]
        stack[part] = stack.get(part, 0) + prod(shape)
    for head, expected in found.items():
        assert {part: count.total for part, count in count_parts(RELEASED[name], head=head).items()} == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_state_of_a_row(name):
    shape = SHAPES[name]
    attending = shape.layers // 4 if shape.value_heads else shape.layers
    head_dim = 256 if shape.value_heads else 128
    keys_and_values = 2 * 2 * shape.kv_heads * head_dim  # two bytes each
    memory = 4 * shape.value_heads * 128 * 128
    conv = 2 * 3 * (2 * 16 + shape.value_heads) * 128
    trunk, head = (row_bytes(RELEASED[name], "bfloat16", head=head) for head in (False, True))
    assert trunk == ((shape.layers - attending) * (memory + conv) + 4, attending * keys_and_values)
    assert head == (4, keys_and_values)
    assert trunk.at(1000) == trunk.fixed + 1000 * trunk.per_slot


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_weights_and_of_a_training_run(name):
    number = sum(num_parameters(name))
    assert weight_bytes(RELEASED[name], "float32") == 4 * number
    # Norms, decays and routers stay float32: less than a thousandth of all.
    assert 2 * number < weight_bytes(RELEASED[name], "bfloat16") < 2.002 * number
    counters = 4 * 4  # Adam's and the run's own
    assert state_bytes(MTPModel(RELEASED[name]), Experiment()) == 3 * 4 * number + counters
