"""What a training step does with its buffers, and how much it computes, read from what XLA compiled."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import jax
import pytest
from compiled_program import Program

from configs import PRESETS
from mtp_jax.flops import token_flops
from mtp_jax.sizes import tree_bytes
from train.batch import Batch
from train.step import build_model, compile_step, initial_state

VOCAB = 1031
SMALL = replace(
    PRESETS["tiny"](),
    dtype="float32",
    width=134,
    mlp_width=150,
    num_layers=1,
    full_attention_interval=2,  # DeltaNet in the trunk; the head has attention
    batch_size=2,
    sequence_length=256,
    cross_entropy_chunk=64,
)
TOKENS = SMALL.batch_size * SMALL.sequence_length


def shapes(experiment, vocab):
    model = build_model(replace(experiment.model_config(), vocab_size=vocab), experiment)
    return model, jax.eval_shape(lambda: initial_state(model, experiment))


@pytest.fixture(autouse=True, scope="module")
def few_steps() -> Iterator[None]:
    """Drops them at the end: each takes memory mappings, of which a process has not many."""
    yield
    step.cache_clear()


@cache
def step(experiment=SMALL, vocab=VOCAB):
    """Compiled; kept, since it takes seconds."""
    model, state = shapes(experiment, vocab)
    rows = (experiment.batch_size, experiment.sequence_length)
    batch = Batch(*(jax.ShapeDtypeStruct(rows, dtype) for dtype in ("int32", "int32", "bool")))
    return compile_step(model, experiment, state, batch)


def test_parameters_and_moments_are_updated_in_place():
    size = tree_bytes(shapes(SMALL, VOCAB)[1])
    assert step().memory_analysis().alias_size_in_bytes == pytest.approx(size, rel=0.01)


def test_what_is_made_again_for_the_backward_pass_is_not_kept():
    """XLA on a CPU, left to itself, merges it with what was made first, and every `remat` takes the same."""
    layers = replace(SMALL, num_layers=4, width=64, mlp_width=256, batch_size=4)
    none, products = (
        step(replace(layers, remat=remat), vocab=64).memory_analysis().temp_size_in_bytes
        for remat in ("none", "products")
    )
    assert products < 0.8 * none


def test_no_array_has_a_logit_for_every_token():
    """The trunk's alone would be that large."""
    assert max(size for made in Program(step()).made() for size in made.sizes) < TOKENS * VOCAB


def test_the_most_probable_id_is_not_sought_by_a_loop_over_scalars():
    assert Program(step()).paired_reductions(VOCAB) == []


@pytest.mark.slow
def test_memory_grows_with_the_vocabulary_by_matrices_and_a_chunk_of_logits():
    """An id more costs a row in the gradient and in what becomes of it, and a logit for each token of a chunk, all of
    them a few times. Logits for all tokens would take 4,096 bytes."""
    more = 3 * VOCAB
    grown = step(vocab=VOCAB + more).memory_analysis().temp_size_in_bytes - step().memory_analysis().temp_size_in_bytes
    assert grown < 4 * more * 4 * (SMALL.width + SMALL.cross_entropy_chunk) < 2 * TOKENS * more * 4


@pytest.mark.slow
@pytest.mark.parametrize("full_attention_interval", [1, 2])
def test_a_step_computes_the_products_of_one_forward_and_one_backward_pass(full_attention_interval):
    """XLA counts the rest too: AdamW, 20 operations a parameter, and norms. All loops here run once, as it counts."""
    experiment = replace(
        SMALL, width=256, mlp_width=512, num_heads=4, num_kv_heads=2, head_dim=64, delta_v_heads=4, delta_k_heads=2,
        delta_head_k_dim=64, delta_head_v_dim=64, full_attention_interval=full_attention_interval, sequence_length=64,
        batch_size=8, cross_entropy_chunk=2048,
    )  # fmt: skip
    flops = token_flops(shapes(experiment, VOCAB)[0].config, experiment.sequence_length)
    expected = 8 * 64 * (flops.train + flops.train_mtp)
    assert step(experiment).cost_analysis()["flops"] == pytest.approx(expected, rel=0.04)
