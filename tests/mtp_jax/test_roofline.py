"""Bounds on time against arithmetic by hand for a small model, and against rules of thumb and each other for all."""

from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from released_tensors import num_parameters

from configs.chips import CHIPS
from configs.released import RELEASED
from mtp_jax.chip import Chip, Machine
from mtp_jax.config import AttentionConfig, DeltaNetConfig, LayerType, ModelConfig, MoEConfig
from mtp_jax.flops import pass_flops
from mtp_jax.roofline import (
    decode,
    decode_bytes,
    draft,
    prefill,
    round_seconds,
    tokens_per_round,
    train,
    train_bytes,
    weights_read,
)
from mtp_jax.sizes import Stage

SMALL = ModelConfig(
    vocab_size=1000,
    width=100,
    mlp_width=300,
    layer_types=(LayerType.LINEAR, LayerType.FULL),
    attention=AttentionConfig(4, 2, 16, 8, 1e6, output_gate=False, qk_norm=False),
    delta=DeltaNetConfig(4, 2, 16, 32),
)
MLP = 3 * 100 * 300
NORMS = 2 * 100
ATTENTION = 100 * (64 + 32 + 32) + 64 * 100
DELTA_NET = 100 * (192 + 128 + 4 + 4) + 4 * 192 + 4 + 4 + 32 + 128 * 100
TRUNK = DELTA_NET + ATTENTION + 2 * (MLP + NORMS) + 100
HEAD = 200 * 100 + ATTENTION + MLP + NORMS
OUTPUT = 100 * 1000
SLOT = 2 * 2 * 16 * 4  # keys and values of a layer, float32
FIXED = 4 * (4 * 16 * 32 + 3 * 192) + 4  # memories, convolution inputs, length

MEMORY_ONLY = Chip(memory=1e9, bandwidth=1.0, flops=1e30, dtype="float32", link=1e30)  # bytes are seconds
COUNTS = (1, 2, 4, 8, 16, 32, 64)


def test_a_step_of_decoding_on_one_device():
    chip = Chip(memory=1e9, bandwidth=1e6, flops=1e9, dtype="float32")
    bound = decode(SMALL, Machine(chip, 1), rows=3, slots=50, tokens=2)
    assert bound.memory == pytest.approx((4 * (TRUNK + OUTPUT) + 3 * 52 * SLOT + 3 * 2 * FIXED) / 1e6)
    flops = pass_flops(SMALL, 50, chunk=2)
    assert bound.compute == pytest.approx(3 * 2 * (flops.trunk + flops.output) / 1e9)
    assert bound.links == 0
    assert (bound.seconds, bound.limit) == (bound.memory, "memory")
    assert decode(SMALL, Machine(replace(chip, flops=1.0), 1), rows=1, slots=50).limit == "compute"


def test_a_step_of_decoding_on_four_devices():
    chip = Chip(memory=1e9, bandwidth=1e6, flops=1e9, dtype="float32", link=1e3)
    bound = decode(SMALL, Machine(chip, 4), rows=3, slots=50, tokens=2)
    weights = 4 * (TRUNK + OUTPUT) / 4
    cache = 2 * 52 * SLOT / 2  # three rows of two heads each: two of these six have the same device
    memories = 3 * 2 * FIXED / 4  # of twelve heads each device has three
    assert bound.memory == pytest.approx((weights + cache + memories) / 1e6)
    hidden = 3 * 2 * 100 * 4
    assert bound.links == pytest.approx(4 * 2 * hidden * 3 / 4 / 1e3)  # four sums, each there and back
    assert bound.seconds == bound.memory + bound.links
    assert bound.limit == "links"


def test_a_round_reads_the_trunk_once_and_the_head_for_each_draft():
    machine = Machine(MEMORY_ONLY, 1)
    verify = 4 * (TRUNK + OUTPUT) + 54 * SLOT + 2 * FIXED
    drafts = 3 * (4 * HEAD + 4 * OUTPUT / 10) + (54 + 51 + 51) * SLOT
    assert round_seconds(SMALL, machine, rows=1, slots=50, drafts=3, vocabulary=100) == pytest.approx(verify + drafts)
    full = round_seconds(SMALL, machine, rows=1, slots=50, drafts=3)
    assert full == pytest.approx(verify + drafts + 3 * 4 * OUTPUT * 9 / 10)


def test_operations_of_drafts():
    chip = replace(MEMORY_ONLY, flops=1.0)
    flops = pass_flops(SMALL, 50, chunk=1)
    bound = draft(SMALL, Machine(chip, 2), rows=3, slots=50, tokens=4, vocabulary=500)
    assert bound.compute == pytest.approx(3 * (4 * flops.head + flops.output / 2) / 2)


def test_of_experts_those_are_read_that_a_token_chooses():
    experts = MoEConfig(5, experts_per_token=2, expert_width=7, shared_width=11)
    config = replace(SMALL, moe=experts, mlp_width=0)
    chosen = list(combinations(range(5), 2))
    every = [len(set().union(*choice)) for choice in product(chosen, repeat=3)]
    one_expert = 2 * 3 * 100 * 7 * 4  # two layers
    all_read = weights_read(config, "float32", Stage.TRUNK, 10**6)
    expected = all_read - (5 - sum(every) / len(every)) * one_expert
    assert weights_read(config, "float32", Stage.TRUNK, 3) == pytest.approx(expected)
    assert weights_read(config, "float32", Stage.TRUNK, 1) == pytest.approx(all_read - 3 * one_expert)


def test_tokens_of_a_round():
    assert tokens_per_round(0.5, 2) == 1.75
    assert tokens_per_round(0.5, 10**9) == 2.0
    assert (tokens_per_round(1.0, 3), tokens_per_round(0.0, 3)) == (4, 1)


def test_gathering_over_islands():
    chip = Chip(memory=1.0, bandwidth=1.0, flops=1.0, link=8.0, island=8, network=1.0)
    assert Machine(chip, 1).gather_seconds(64) == 0
    assert Machine(chip, 2).gather_seconds(64) == 4  # the other half
    assert Machine(chip, 8).gather_seconds(64) == 7
    assert Machine(chip, 16).gather_seconds(64) == 7  # 56 by link; 4 of the other island by network
    assert Machine(replace(chip, network=0.5), 16).gather_seconds(64) == 8


def test_devices_that_nothing_joins():
    with pytest.raises(ValueError, match="without link works alone, got 2 devices"):
        Machine(Chip(memory=1.0, bandwidth=1.0, flops=1.0), 2)
    with pytest.raises(ValueError, match="at most 8 chips without network, got 9"):
        Machine(Chip(memory=1.0, bandwidth=1.0, flops=1.0, link=1.0, island=8), 9)


def test_training_moves_weights_and_the_state():
    machine = Machine(replace(MEMORY_ONLY, link=2.0), 4)
    number = TRUNK + HEAD + 3 * 100 + OUTPUT  # and the head's norms beside its layer
    bound = train(SMALL, machine, slots=64)
    assert train_bytes(SMALL, machine) == 16 * number / 4
    assert bound.memory == pytest.approx(3 * 4 * (TRUNK + HEAD + OUTPUT) + 2 * 16 * number / 4)
    assert bound.links == pytest.approx(3 * 4 * number * 3 / 4 / 2)
    assert bound.seconds == max(bound.memory, bound.links)


def test_reading_a_prompt_moves_weights_once_and_writes_the_state():
    bound = prefill(SMALL, Machine(MEMORY_ONLY, 1), rows=2, slots=50)
    state = 2 * (2 * 50 * SLOT + FIXED + 4)
    assert bound.memory == pytest.approx(4 * (TRUNK + HEAD + OUTPUT) + state)


@pytest.mark.parametrize("name", ["qwen3.5-9b", "qwen3.5-27b"])
def test_prompts_and_training_by_the_rule_of_two_and_six_operations_a_parameter(name):
    trunk, head = num_parameters(name)
    config, machine = RELEASED[name], Machine(replace(CHIPS["h200"], flops=1.0), 1)
    vocabulary = config.vocab_size * config.width
    read = prefill(config, machine, rows=1, slots=64)
    # Both vocabulary matrices are the trunk's; pairs of tokens and DeltaNet's memory come on top.
    assert read.compute == pytest.approx(64 * 2 * (trunk + head - 2 * vocabulary) + 2 * vocabulary, rel=0.03)
    step = train(config, machine, slots=64)
    assert step.compute == pytest.approx(64 * 6 * (trunk + head), rel=0.03)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", RELEASED)
def test_more_devices_have_less_to_do_each_and_more_work_takes_longer(name, chip):
    config, machines = RELEASED[name], [Machine(CHIPS[chip], count) for count in COUNTS]
    shape = {"rows": 4, "slots": 4096}
    for at in (decode, prefill):
        bounds = [at(config, machine, **shape) for machine in machines]
        for fewer, more in pairwise(bounds):
            assert more.memory < fewer.memory
            assert more.compute < fewer.compute
            assert more.links >= fewer.links
    for machine in (machines[0], machines[-1]):
        plain = decode(config, machine, **shape).seconds
        assert decode(config, machine, rows=8, slots=4096).seconds > plain
        assert decode(config, machine, rows=4, slots=8192).seconds > plain
        assert decode(config, machine, **shape, tokens=4).seconds > plain
        assert round_seconds(config, machine, **shape, drafts=3) > round_seconds(config, machine, **shape, drafts=1)
        assert train(config, machine, slots=8192).seconds >= train(config, machine, slots=4096).seconds
    memory = [decode_bytes(config, machine, **shape) for machine in machines]
    assert memory == sorted(memory, reverse=True)
    assert 2 * sum(num_parameters(name)) < memory[0]
