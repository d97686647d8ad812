"""With parameters spread over `fsdp`, a compiled program holds no more than one layer's at a time whole.

Facts of the compiled program, no seconds. XLA's CPU backend by itself orders instructions breadth first and drops what
keeps a gather behind what it must wait for, and it adds up all layers' gradients in one operation without a limit of
size: it would gather everything first. So it is told not to, as other backends need not be.
"""

import re
from dataclasses import replace
from math import prod

import jax
import numpy as np
import pytest
from bent_model import CONFIG
from jax.sharding import NamedSharding, PartitionSpec
from meshes import mesh

from configs import PRESETS
from infer.carry import Plan
from infer.sampling import Sampling
from infer.speculative import decode, idle
from mtp_jax.config import AttentionConfig, DeltaNetConfig, LayerType, ModelConfig
from mtp_jax.hf.parameters import parameter_shapes
from mtp_jax.mtp import MTPModel, init_params
from mtp_jax.sharding import ROWS, laid_out, on_mesh
from train.batch import empty_batch
from train.step import build_model, initial_state, train_step

OPTIONS: dict[str, str | bool] = {
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "xla_disable_hlo_passes": "cse_barrier_expander,cpu-all-reduce-combiner",
}
DEVICES = 8
# What a token leaves is little beside a layer's parameters.
LAYERS = replace(
    CONFIG,
    width=64,
    mlp_width=512,
    layer_types=(LayerType.LINEAR, LayerType.FULL),
    attention=AttentionConfig(num_heads=8, num_kv_heads=4, head_dim=16, rotary_dim=8, rope_theta=1e4),
    delta=DeltaNetConfig(num_v_heads=8, num_k_heads=4, head_k_dim=16, head_v_dim=16),
)


def compiled_step(config: ModelConfig, remat: str) -> tuple[str, int]:
    """The program of a training step, and the bytes of its temporaries."""
    experiment = replace(PRESETS["tiny"](), cross_entropy_chunk=32, dtype="float32", remat=remat)
    model = build_model(config, experiment)
    state = jax.eval_shape(lambda: initial_state(model, experiment))
    over_fsdp = mesh(f"fsdp:{DEVICES}")
    rows = NamedSharding(over_fsdp, PartitionSpec(ROWS))
    with on_mesh(over_fsdp):
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), empty_batch(DEVICES, sequence_length=4)
        )
        lowered = train_step.lower(model, experiment, laid_out(state, config), batch, np.float32(0.3))
        return program(lowered)


def program(lowered: jax.stages.Lowered) -> tuple[str, int]:
    compiled = lowered.compile(compiler_options=OPTIONS)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    return text, memory.temp_size_in_bytes


def layer_bytes(config: ModelConfig) -> dict[str, int]:
    """Bytes of each layer, by what its parameters' paths begin with."""
    sizes: dict[str, int] = {}
    for path, shape in parameter_shapes(config).items():
        if found := re.match(r"(trunk|mtp)/layers_\d+", path):
            sizes[found[0]] = sizes.get(found[0], 0) + 4 * prod(shape)
    return sizes


def most_gathered(text: str) -> tuple[int, int]:
    """The most bytes of gathered arrays that a computation holds at one time, and how often an array is gathered."""
    assert "is_scheduled=true" in text
    found = [_most_gathered(part) for part in re.split(r"\n\n", text) if " all-gather(" in part]
    return max(most for most, _ in found), sum(times for _, times in found)


def _most_gathered(computation: str) -> tuple[int, int]:
    lines = [line for line in computation.splitlines() if " = " in line]
    names = [re.match(r"\s*(?:ROOT )?%?([\w.-]+) =", line) for line in lines]
    last, alias, gathers = {}, {}, {}
    for place, (line, name) in enumerate(zip(lines, names, strict=True)):
        assert name is not None
        operation = re.search(r" ([\w-]+)\(", line)
        assert operation is not None
        used = {origin for operand in re.findall(r"%([\w.-]+)", line) for origin in alias.get(operand, ())}
        for origin in used:
            last[origin] = place
        if operation[1] == "all-gather":
            kind = re.search(r" = f32\[([\d,]+)\]", line)
            if kind:
                gathers[name[1]] = place, 4 * prod(map(int, kind[1].split(",")))
                alias[name[1]] = {name[1]}
        elif operation[1] in ("bitcast", "tuple", "get-tuple-element", "opt-barrier"):
            alias[name[1]] = used
    held = [
        sum(size for name, (begin, size) in gathers.items() if begin <= place <= last[name])
        for place in range(len(lines))
    ]
    return max(held), len(gathers)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "block"])
def test_no_more_than_a_layer_is_gathered_at_a_time(remat):
    deep = replace(LAYERS, layer_types=LAYERS.layer_types * 2)
    layers = layer_bytes(deep)
    step, temporaries = compiled_step(deep, remat)
    gathered, times = most_gathered(step)
    assert times > 10 * len(layers)  # five matrices or more of each, in the forward and in the backward pass
    assert gathered <= max(layers.values())
    assert gathered >= max(layers.values()) / 8  # a matrix at the least
    # A layer more is a gradient more of it, and what AdamW makes of that, all spread over the devices.
    grown = temporaries - compiled_step(LAYERS, remat)[1]
    assert grown < 5 / DEVICES * (layers["trunk/layers_2"] + layers["trunk/layers_3"])


@pytest.mark.slow
def test_a_round_of_decoding_gathers_a_layer_at_a_time():
    """And not all of them before the first round, to be kept."""
    deep = replace(LAYERS, layer_types=LAYERS.layer_types * 2)
    model, over_fsdp = MTPModel(deep), mesh(f"fsdp:{DEVICES}")
    with on_mesh(over_fsdp):
        params = laid_out(jax.eval_shape(lambda: init_params(model, jax.random.key(0))), deep)
        carry = jax.eval_shape(lambda: idle(model, params, batch=DEVICES, num_slots=16, num_logprobs=None))
        rule = Sampling().rule(deep.vocab_size, deep.vocab_size, ())
        plan = Plan(num_drafts=1, verifier="shared_noise", with_head=True, num_logprobs=None, raw_logprobs=False)
        lowered = decode.lower(model, params, rule, None, carry, np.int32(8), np.bool_(False), plan=plan)
        decoding, temporaries = program(lowered)
    layers = layer_bytes(deep)
    gathered, times = most_gathered(decoding)
    assert times > 5 * len(layers)
    assert gathered <= max(layers.values())
    assert temporaries < 1.5 * max(layers.values())
