"""What the programs of decoding do with their buffers, read from what XLA compiled: nothing is run, nothing timed."""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bent_model import FAMILIES
from compiled_program import Program

from infer import speculative
from infer.carry import Plan, empty_context, idle_carry
from infer.draft_vocabulary import DraftVocabulary
from infer.sampling import Sampling
from mtp_jax.layers.attention import FEW_SLOTS_ON_CPU
from mtp_jax.mtp import MTPModel, init_params
from mtp_jax.sizes import tree_bytes

# No activation, score or logit has as many elements as a cache, a memory or one of the larger matrices.
WIDTH, VOCAB, DRAFTED, SHARED = 134, 1031, 211, 18
ROWS, SLOTS, MANY_SLOTS = 3, 331, 32_749
EXPERTS = "attention with experts"


class Compiled(NamedTuple):
    program: Program
    temporary: int  # bytes
    aliased: int  # bytes of arguments whose buffers the results take over
    flops: float


def build(function, *args, **static) -> Compiled:
    executable = function.lower(*args, **static).compile()
    memory, cost = executable.memory_analysis(), executable.cost_analysis()
    return Compiled(Program(executable), memory.temp_size_in_bytes, memory.alias_size_in_bytes, cost["flops"])


def subject(family="dense hybrid"):
    """A model and the shapes of its parameters."""
    config = FAMILIES[family]
    model = MTPModel(
        replace(
            config,
            width=WIDTH,
            vocab_size=VOCAB,
            attention=replace(config.attention, head_dim=10),
            delta=config.delta and replace(config.delta, head_k_dim=14, head_v_dim=22),
            moe=config.moe and replace(config.moe, shared_width=SHARED),
        ),
        jnp.dtype("float32"),
    )
    return model, jax.eval_shape(lambda: init_params(model, jax.random.key(0)))


def integers(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def carry_of(model, rows, slots):
    return jax.eval_shape(lambda: idle_carry(empty_context(model, rows, slots), slots, None))


RULE = Sampling().rule(VOCAB, VOCAB, ())


@cache
def decode(family="dense hybrid", *, num_drafts=0, rows=ROWS, slots=SLOTS, drafted=None) -> Compiled:
    """The loop over rounds; kept, since compiling it takes seconds."""
    model, params = subject(family)
    kernel = jax.ShapeDtypeStruct((WIDTH, drafted or 0), jnp.float32)
    vocabulary = drafted and DraftVocabulary(integers(drafted), kernel)
    args = RULE, vocabulary, carry_of(model, rows, slots), np.int32(1), np.bool_(False)
    return build(speculative.decode, model, params, *args, plan=Plan(num_drafts, with_head=num_drafts > 0))


def caches_and_memories(context):
    """Their numbers of elements, and how many memories there are."""
    layers = [*context.trunk.layers, *context.head.layers]
    memories = [layer.memory.size for layer in layers if hasattr(layer, "memory")]
    return {layer.k.size for layer in layers if hasattr(layer, "k")}, set(memories), len(memories)


def matrices(params):
    return {leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim > 1 and leaf.size >= 16 * WIDTH}


KINDS = [
    {"num_drafts": 3, "drafted": DRAFTED},
    {"rows": 1, "slots": MANY_SLOTS},
    {"family": EXPERTS},
]
MORE_KINDS = [
    {},
    {"num_drafts": 3},
    {"num_drafts": 3, "rows": 1, "slots": FEW_SLOTS_ON_CPU + 99, "drafted": DRAFTED},
    {"family": EXPERTS, "num_drafts": 3},
    {"family": "hybrid with experts"},
    {"family": "hybrid with experts", "num_drafts": 3, "drafted": DRAFTED},
    {"family": "two head layers", "num_drafts": 3},
]
every_kind = pytest.mark.parametrize(
    "kind",
    KINDS + [pytest.param(kind, marks=pytest.mark.slow) for kind in MORE_KINDS],
    ids=lambda kind: " ".join(f"{name}={value}" for name, value in kind.items()),
)


@every_kind
def test_a_round_copies_no_cache_memory_or_matrix(kind):
    """Caches are written in place, matrices read where and as they lie, and each memory is made once, by its update;
    where that writes several tokens, their sum is made first."""
    model, params = subject(kind.get("family", "dense hybrid"))
    carry = carry_of(model, kind.get("rows", ROWS), kind.get("slots", SLOTS))
    caches, memories, count = caches_and_memories(carry.context)
    kernel = {WIDTH * DRAFTED} if "drafted" in kind else set()
    got = decode(**kind)
    assert got.program.made_of_size(caches) == []
    assert got.program.made_of_size(matrices(params) | kernel) == []
    assert len(got.program.made_of_size(memories)) == count * (2 if kind.get("num_drafts") else 1)
    assert got.aliased >= tree_bytes(carry)


@every_kind
def test_the_most_probable_id_is_not_sought_by_a_loop_over_scalars(kind):
    assert decode(**kind).program.paired_reductions(VOCAB) == []


def test_a_round_over_a_long_cache_takes_little_memory_beside_it():
    """Neither scores of all slots nor a copy of one layer's keys."""
    keys = 2 * MANY_SLOTS * 10 * 4
    assert decode(rows=1, slots=MANY_SLOTS).temporary < keys / 3


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_memory_of_a_round_grows_with_the_rows_and_hardly_with_the_cache(num_drafts):
    """By what counting the tokens of penalties takes, a few integers for each slot."""
    short = decode(num_drafts=num_drafts, rows=1, slots=FEW_SLOTS_ON_CPU + 99)
    long = decode(num_drafts=num_drafts, rows=1, slots=MANY_SLOTS)
    assert long.temporary - short.temporary <= 6 * 4 * (MANY_SLOTS - FEW_SLOTS_ON_CPU - 99)
    assert decode(num_drafts=num_drafts, rows=4, slots=FEW_SLOTS_ON_CPU + 99).temporary < 4.2 * short.temporary


@pytest.mark.slow
def test_a_draft_over_few_ids_makes_few_logits():
    """Of three products a row with all of the output matrix, those with the columns of the ids are left."""
    spared = decode(num_drafts=3).flops - decode(num_drafts=3, drafted=DRAFTED).flops
    assert spared == pytest.approx(3 * ROWS * 2 * WIDTH * (VOCAB - DRAFTED), rel=0.01)


@cache
def read(time, family):
    model, params = subject(family)
    context = jax.eval_shape(lambda: empty_context(model, 1, MANY_SLOTS))
    got = build(speculative.read, model, params, context, integers(1, time), integers(1), with_head=True)
    return got, params, context


def test_a_prompts_piece_costs_as_many_operations_and_bytes_as_it_has_tokens():
    """XLA counts the bodies of loops, over chunks and over slots, once: the rest and that of slots grow with tokens."""
    short, middle, long = (read(time, "dense hybrid")[0] for time in (128, 256, 512))
    assert long.flops - middle.flops == pytest.approx(2 * (middle.flops - short.flops), rel=0.01)
    assert long.temporary <= 1.02 * 2 * middle.temporary <= 1.02**2 * 4 * short.temporary


@pytest.mark.parametrize(
    "family", ["dense hybrid", *(pytest.param(f, marks=pytest.mark.slow) for f in (EXPERTS, "hybrid with experts"))]
)
def test_a_prompts_piece_copies_no_cache_or_matrix(family):
    got, params, context = read(512, family)
    caches, _, _ = caches_and_memories(context)
    assert got.program.made_of_size(caches | matrices(params)) == []
    assert got.program.paired_reductions(VOCAB) == []
    assert got.aliased >= tree_bytes(context)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["start", "fill"])
def test_a_row_that_begins_to_decode_copies_no_cache(name):
    """`fill` copies none of the batch; of the row that it puts in, which others may need, the head's needs a copy."""
    model, params = subject()
    slots = FEW_SLOTS_ON_CPU + 99
    context = jax.eval_shape(lambda: empty_context(model, 1, slots))
    carry = carry_of(model, ROWS, slots)
    row = context, integers(1, slots), integers(1), integers(1), jax.ShapeDtypeStruct((1, 2), jnp.uint32)
    if name == "start":
        got, kept = build(speculative.start, model, params, RULE, *row, plan=Plan()), context
    else:
        got, kept = build(speculative.fill, model, params, RULE, carry, integers(), *row, plan=Plan()), carry
    caches, memories, _ = caches_and_memories(kept.context if name == "fill" else kept)
    assert got.program.made_of_size(caches | memories) == []
    assert got.aliased >= tree_bytes(kept)
