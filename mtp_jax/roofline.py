"""The least time that a model's passes take on given chips, from what must be moved and computed: bounds.

On each device a pass takes, in seconds,

    memory    bytes that must be read and written / bandwidth
    compute   operations / rate of products
    links     bytes exchanged with other devices / what a link carries

Memory and products overlap, so the slower of the two counts. Decoding and prompts are divided among devices inside each
layer (tensor parallel), whose sums the next layer waits for: links come on top. Training divides rows, and parameters
are gathered ahead of their use (FSDP): the slowest of the three counts. docs/sizes.md has all formulas, and what they
leave out.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mtp_jax.chip import Machine
from mtp_jax.config import ModelConfig
from mtp_jax.flops import pass_flops, token_flops
from mtp_jax.hf.parameters import parameter_dtype
from mtp_jax.sizes import Part, Stage, parameters, row_bytes, weight_bytes

ALL_REDUCES = 2  # of a layer: after what mixes tokens, and after the MLP or the experts
TRAINED_BYTES = 4 * 4  # of each parameter: itself, its gradient and AdamW's moments, all float32


class Bound(NamedTuple):
    """The least seconds that a pass takes, and those of each resource on the busiest device."""

    seconds: float
    memory: float
    compute: float
    links: float

    @property
    def limit(self) -> str:
        """The resource that takes longest."""
        return max(("memory", "compute", "links"), key=lambda name: getattr(self, name))


class Work(NamedTuple):
    """What is done in a pass: bytes and operations on the busiest device, and seconds on links."""

    moved: float
    flops: float
    links: float


def decode(config: ModelConfig, machine: Machine, *, rows: int, slots: int, tokens: int = 1) -> Bound:
    """A decoding step: the trunk reads `tokens` of each row (J + 1 to verify J drafts), which attend to `slots`.

    Weights are read once for all, keys and values once, the DeltaNet memories read once and written once.
    """
    dtype = machine.chip.dtype
    state = row_bytes(config, dtype, head=False)
    moved = weights_read(config, dtype, Stage.TRUNK, rows * tokens) + weights_read(config, dtype, Stage.OUTPUT)
    moved /= machine.devices
    moved += rows * (slots + tokens) * state.per_slot * _cache_share(config, machine, rows)
    moved += rows * 2 * state.fixed * _memory_share(config, machine, rows)
    flops = pass_flops(config, slots, chunk=tokens)
    links = _all_reduces(config, machine, config.num_layers, rows * tokens)
    return _in_turn(machine, Work(moved, rows * tokens * (flops.trunk + flops.output) / machine.devices, links))


def draft(
    config: ModelConfig, machine: Machine, *, rows: int, slots: int, tokens: int = 1, vocabulary: int | None = None
) -> Bound:
    """One layer of the head reads `tokens` of each row and drafts one more.

    Args:
      vocabulary: how many tokens a draft is chosen from; None: all.
    """
    dtype = machine.chip.dtype
    chosen_from = (vocabulary or config.vocab_size) / config.vocab_size
    per_slot = row_bytes(config, dtype, head=True).per_slot / config.num_mtp_layers
    moved = weights_read(config, dtype, Stage.HEAD, rows * tokens)
    moved += chosen_from * weights_read(config, dtype, Stage.OUTPUT)
    moved = moved / machine.devices + rows * (slots + tokens) * per_slot * _cache_share(config, machine, rows)
    flops = pass_flops(config, slots, chunk=tokens)
    work = rows * (tokens * flops.head + chosen_from * flops.output)
    return _in_turn(machine, Work(moved, work / machine.devices, _all_reduces(config, machine, 1, rows * tokens)))


def round_seconds(
    config: ModelConfig, machine: Machine, *, rows: int, slots: int, drafts: int, vocabulary: int | None = None
) -> float:
    """A round of speculative decoding: the head reads what was accepted, chains its drafts, the trunk verifies them."""
    first = draft(config, machine, rows=rows, slots=slots, tokens=drafts + 1, vocabulary=vocabulary)
    further = draft(config, machine, rows=rows, slots=slots, vocabulary=vocabulary)
    verify = decode(config, machine, rows=rows, slots=slots, tokens=drafts + 1)
    return first.seconds + (drafts - 1) * further.seconds + verify.seconds


def tokens_per_round(acceptance: float, drafts: int) -> float:
    """The mean if each draft stands with this probability once those before it do: 1 + a + ... + a^J."""
    return float(drafts + 1) if acceptance == 1 else (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


def prefill(config: ModelConfig, machine: Machine, *, rows: int, slots: int) -> Bound:
    """`rows` prompts of `slots` tokens are read, by the head too. Each piece that they are cut into reads the weights
    again: here once."""
    dtype, tokens = machine.chip.dtype, rows * slots
    moved = weights_read(config, dtype, Stage.TRUNK, tokens) + weights_read(config, dtype, Stage.OUTPUT)
    moved += config.num_mtp_layers * weights_read(config, dtype, Stage.HEAD, tokens)
    moved = moved / machine.devices + _state_bytes(config, machine, rows, slots)
    flops = token_flops(config, slots)
    work = tokens * (flops.prefill + flops.prefill_head) + rows * pass_flops(config, slots, chunk=1).output
    layers = config.num_layers + config.num_mtp_layers
    return _in_turn(machine, Work(moved, work / machine.devices, _all_reduces(config, machine, layers, tokens)))


def train(config: ModelConfig, machine: Machine, *, slots: int) -> Bound:
    """A training step with the MTP loss, each device on a row of `slots` tokens.

    Weights are gathered and read forward and again backward, and gradients, as large, are added up and scattered. The
    optimiser reads and writes parameters, gradients and moments.
    """
    chip = machine.chip
    touched = sum(weights_read(config, chip.dtype, stage, slots) for stage in Stage)
    moved = 3 * touched + 2 * train_bytes(config, machine)
    flops = token_flops(config, slots)
    memory, compute = moved / chip.bandwidth, slots * (flops.train + flops.train_mtp) / chip.flops
    links = 3 * machine.gather_seconds(weight_bytes(config, chip.dtype))
    return Bound(max(memory, compute, links), memory, compute, links)


def decode_bytes(config: ModelConfig, machine: Machine, *, rows: int, slots: int) -> float:
    """Memory that decoding takes on the busiest device: weights, and the states of rows with so many slots."""
    return weight_bytes(config, machine.chip.dtype) / machine.devices + _state_bytes(config, machine, rows, slots)


def train_bytes(config: ModelConfig, machine: Machine) -> float:
    """Memory that training takes on a device beside activations: parameters, gradients and moments, divided evenly."""
    return TRAINED_BYTES * sum(parameter.size for parameter in parameters(config)) / machine.devices


def weights_read(config: ModelConfig, dtype: str, stage: Stage, tokens: int = 1) -> float:
    """Bytes of the weights that a pass of so many tokens reads: experts as far as one of the tokens chooses them.

    Of N experts, tokens that choose k each at random leave N (1 - k/N)^tokens untouched.
    """
    experts, rest = _stage_bytes(config, dtype, stage)
    if config.moe is None:
        return float(rest)
    untouched = (1 - config.moe.experts_per_token / config.moe.num_experts) ** tokens
    return experts * (1 - untouched) + rest


@lru_cache
def _stage_bytes(config: ModelConfig, dtype: str, stage: Stage) -> tuple[int, int]:
    """Of all experts, and of all other weights."""
    experts = rest = 0
    for parameter in parameters(config):
        if parameter.stage is stage:
            nbytes = parameter.size * parameter_dtype(parameter.path, np.dtype(dtype)).itemsize
            if parameter.part is Part.EXPERTS:
                experts += nbytes
            else:
                rest += nbytes
    return experts, rest


def _in_turn(machine: Machine, work: Work) -> Bound:
    """Bound of a pass whose layers wait for the sum over devices."""
    memory, compute = work.moved / machine.chip.bandwidth, work.flops / machine.chip.flops
    return Bound(max(memory, compute) + work.links, memory, compute, work.links)


def _all_reduces(config: ModelConfig, machine: Machine, layers: int, tokens: int) -> float:
    """Seconds until every device has the sum of all devices' hidden states: added up in parts, then gathered."""
    hidden = tokens * config.width * np.dtype(machine.chip.dtype).itemsize
    return layers * ALL_REDUCES * 2 * machine.gather_seconds(hidden)


def _cache_share(config: ModelConfig, machine: Machine, rows: int) -> float:
    """Keys and values are divided by row and by head, of which there are few, and no further."""
    return machine.share(rows * config.attention.num_kv_heads)


def _memory_share(config: ModelConfig, machine: Machine, rows: int) -> float:
    """DeltaNet's memories likewise."""
    return machine.share(rows * (config.delta.num_v_heads if config.delta else 1))


def _state_bytes(config: ModelConfig, machine: Machine, rows: int, slots: int) -> float:
    """Of trunk and head, on the busiest device."""
    cache, memory = _cache_share(config, machine, rows), _memory_share(config, machine, rows)
    sizes = [row_bytes(config, machine.chip.dtype, head=head) for head in (False, True)]
    return rows * sum(slots * size.per_slot * cache + size.fixed * memory for size in sizes)
