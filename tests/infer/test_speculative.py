"""Speculation equals plain decoding, whatever the drafter; limits, end ids, counts, the carry."""

import copy
import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bent_model import FAMILIES
from scripted import scripted_drafter, simulate

from infer import speculative
from infer.carry import RUNNING, Plan
from infer.sampling import Sampling
from infer.speculative import read, unread
from mtp_jax.mtp import MTPModel
from mtp_jax.state import DeltaState

SLOTS = 83  # a prime, for shapes that are recognised
WIDTH = 48  # of padded prompts in every call of read here, so that it compiles once
REPORTED = ("tokens", "draft_positions", "finish_reason", "rounds", "drafted", "accepted", "accepted_per_position")


every_family = pytest.mark.parametrize("model", FAMILIES, indirect=True)


def rule(model, num_ids=None):
    return Sampling().rule(model.config.vocab_size, num_ids or model.config.vocab_size, ())


def start(model, params, prompts, max_new, num_ids=None):
    lengths = np.array(list(map(len, prompts)), np.int32)
    tokens = np.zeros((len(prompts), SLOTS), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    context = unread(model, params, batch=len(prompts), num_slots=SLOTS)
    context = read(model, params, context, tokens[:, :WIDTH], lengths, with_head=True)
    row = lengths, np.full_like(lengths, max_new), np.zeros((len(prompts), 2), np.uint32)
    return speculative.start(model, params, rule(model, num_ids), context, tokens, *row, plan=Plan())


def decode(model, params, carry, num_drafts, num_ids=None, max_rounds=1000):
    limits = np.int32(max_rounds), np.bool_(False)
    plan = Plan(num_drafts)
    return speculative.decode(model, params, rule(model, num_ids), None, carry, *limits, plan=plan)


def new_tokens(carry):
    rows = zip(np.asarray(carry.tokens), carry.prompt_length.tolist(), carry.num_new.tolist(), strict=True)
    return [row[first : first + n].tolist() for row, first, n in rows]


@every_family
def test_three_drafts_a_round_change_no_token(generator, prompts):
    plain = generator.generate(prompts, max_new_tokens=45, num_draft_tokens=0)
    speculative = generator.generate(prompts, max_new_tokens=45, num_draft_tokens=3)
    assert [g.tokens for g in speculative] == [g.tokens for g in plain]
    accepted = np.sum([g.accepted_per_position for g in speculative], axis=0) / sum(g.rounds for g in speculative)
    assert 0.2 <= accepted[0] <= 0.8, "the bent head no longer tests both outcomes"
    assert accepted[1] > 0.05


# Compiling is what takes time here, so two of the four single rows are left to the slow run.
@pytest.mark.parametrize(
    ("batch", "num_drafts"),
    [(4, 1), (4, 2), (4, 3), (4, 4), (1, 1), (1, 3)] + [pytest.param(1, j, marks=pytest.mark.slow) for j in (2, 4)],
)
def test_speculation_equals_plain_decoding_with_a_head_that_is_right_sometimes(generator, prompts, batch, num_drafts):
    plain = generator.generate(prompts[:batch], max_new_tokens=45, num_draft_tokens=0)
    speculative = generator.generate(prompts[:batch], max_new_tokens=45, num_draft_tokens=num_drafts)
    assert [g.tokens for g in speculative] == [g.tokens for g in plain]
    accepted = sum(g.accepted_per_position[0] for g in speculative)
    assert 0.2 <= accepted / sum(g.rounds for g in speculative) <= 0.8, "the bent head no longer tests both outcomes"


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4])
def test_rows_accept_any_number_of_drafts_in_any_order(generator, num_drafts):
    scripts = list(itertools.product(range(num_drafts + 1), repeat={1: 4, 2: 3, 3: 2, 4: 2}[num_drafts]))
    scripts = list(itertools.islice(itertools.cycle(scripts), 27))
    rng = np.random.default_rng(0)
    # Shortest first, as they are put into slots: the drafter knows rows by their slots.
    prompts = sorted((rng.integers(61, size=rng.integers(1, 12)).tolist() for _ in scripts), key=len)
    truth = [g.tokens for g in generator.generate(prompts, max_new_tokens=40, num_draft_tokens=0)]
    drafter = scripted_drafter(truth, scripts, 61)
    # No end id; then one that most rows meet somewhere: inside drafts, as a correction, as a first token.
    for limit, end_ids in [(40, ()), (40, (truth[0][7], truth[1][0], truth[2][20])), (13, (truth[3][12],))]:
        ending = with_end_ids(generator, end_ids)
        got = ending.generate(
            prompts, max_new_tokens=limit, num_draft_tokens=num_drafts, drafter=drafter, batch_size=len(prompts)
        )
        for row, expected in zip(got, map(simulate_row, truth, scripts), strict=True):
            assert {key: getattr(row, key) for key in REPORTED} == expected(num_drafts, limit, end_ids)


def simulate_row(truth, script):
    return lambda num_drafts, limit, end_ids: simulate(truth, script, num_drafts, limit, end_ids)


def with_end_ids(generator, end_ids):
    """The same generator, compiled programs and all, with other end ids."""
    other = copy.copy(generator)
    other.end_ids = frozenset(end_ids)
    return other


@pytest.fixture(scope="module")
def perfect(generator):
    """One prompt, its plain continuation, and a drafter that knows it."""
    prompt = [3, 1, 4, 1, 5]
    (plain,) = generator.generate([prompt], max_new_tokens=45, num_draft_tokens=0)
    return prompt, plain.tokens, scripted_drafter([plain.tokens], [[3]], 61)


def test_a_perfect_drafter_gives_all_drafts_and_one_more_a_round(generator, perfect):
    prompt, truth, drafter = perfect
    (got,) = generator.generate([prompt], max_new_tokens=1 + 4 * 11, num_draft_tokens=3, drafter=drafter)
    assert got.tokens == truth
    assert (got.rounds, got.drafted, got.accepted) == (11, 33, 33)
    assert got.tokens_per_round == 4


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 4, 5, 6, 9, 10])
def test_the_token_limit_is_never_overshot(generator, perfect, limit):
    prompt, truth, drafter = perfect
    (got,) = generator.generate([prompt], max_new_tokens=limit, num_draft_tokens=3, drafter=drafter)
    assert {key: getattr(got, key) for key in REPORTED} == simulate(truth, [3], 3, limit, [])
    assert got.tokens == truth[:limit]
    assert got.finish_reason == "length"


@pytest.mark.parametrize("end_index", range(10))
def test_an_end_id_ends_the_row_wherever_it_falls(generator, perfect, end_index):
    prompt, truth, drafter = perfect
    ending = with_end_ids(generator, [truth[end_index], 60])
    (got,) = ending.generate([prompt], max_new_tokens=45, num_draft_tokens=3, drafter=drafter)
    assert {key: getattr(got, key) for key in REPORTED} == simulate(truth, [3], 3, 45, ending.end_ids)
    assert got.finish_reason == "stop"
    assert got.tokens[-1] in ending.end_ids
    assert not set(got.tokens[:-1]) & ending.end_ids


def test_a_full_cache_ends_rows_one_by_one(generator, prompts):
    free = generator.generate(prompts, max_new_tokens=45, num_draft_tokens=0)
    got = generator.generate(prompts, max_new_tokens=45, num_draft_tokens=3, cache_length=19)
    for row, full, prompt in zip(got, free, prompts, strict=True):
        assert row.tokens == full.tokens[: 19 - len(prompt)]
        assert row.finish_reason == "length"


@every_family
def test_batch_mates_never_change_a_row(model, params, prompts):
    def row_zero(others):
        carry = decode(model, params, start(model, params, [prompts[0], *others], 30), num_drafts=3)
        return jax.tree.map(lambda x: np.asarray(x)[0], carry)

    one, other = row_zero(prompts[1:]), row_zero([[7] * 17, [60, 0], [1]])
    assert int(one.num_new) == 30
    written, read = len(prompts[0]) + 30, int(one.context.trunk.length)
    np.testing.assert_array_equal(one.tokens[:written], other.tokens[:written])
    for a, b in zip(jax.tree.leaves(one.trace), jax.tree.leaves(other.trace), strict=True):
        np.testing.assert_array_equal(a[:written], b[:written])
    for a, b in zip(held(one.context, read), held(other.context, read), strict=True):
        np.testing.assert_array_equal(a, b)


def held(context, length):
    """What one row's context means: memories whole, keys and values of the tokens that a layer has read."""
    trunk = [layer.memory if isinstance(layer, DeltaState) else layer.k[:, :length] for layer in context.trunk.layers]
    return trunk + [layer.v[:, : length - number] for number, layer in enumerate(context.head.layers)]


@every_family
def test_after_decoding_the_carry_is_what_prefilling_the_same_tokens_gives(model, params, prompts):
    """Nothing of a rejected draft is left, in the trunk or in the head, nor of a pair that chaining made up."""
    carry = decode(model, params, start(model, params, prompts, 30), num_drafts=3)
    context = carry.context
    assert context.trunk.length.tolist() == context.head.length.tolist() == [len(p) + 29 for p in prompts]
    read = [prompt + new[:-1] for prompt, new in zip(prompts, new_tokens(carry), strict=True)]
    fresh = start(model, params, read, 1)
    assert fresh.newest.tolist() == carry.newest.tolist()
    np.testing.assert_allclose(carry.draft_hidden, fresh.draft_hidden, atol=2e-4)
    np.testing.assert_allclose(context.hidden, fresh.context.hidden, atol=2e-4)
    for row, length in enumerate(context.trunk.length.tolist()):
        rows = (jax.tree.map(operator.itemgetter(row), c) for c in (context, fresh.context))
        for a, b in zip(*(held(c, length) for c in rows), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-4)
    for a, b in zip(context.head.waiting, fresh.context.head.waiting, strict=True):
        np.testing.assert_allclose(a[:, 1], b[:, 1], atol=2e-4)


def more(carry, max_new):
    return carry._replace(max_new=jnp.full_like(carry.max_new, max_new), finish=jnp.full_like(carry.finish, RUNNING))


def test_the_number_of_drafts_may_change_on_one_carry(model, params, prompts):
    truth = new_tokens(decode(model, params, start(model, params, prompts, 40), num_drafts=0))
    carry = decode(model, params, start(model, params, prompts, 20), num_drafts=3)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), carry)
    # Plain rounds between: the head reads along.
    carry = decode(model, params, more(carry, 27), num_drafts=0)
    carry = decode(model, params, more(carry, 40), num_drafts=1)
    assert new_tokens(carry) == truth
    assert jax.tree.map(lambda x: (x.shape, x.dtype), carry) == shapes


def test_rounds_in_several_calls_are_rounds_in_one(model, params, prompts):
    whole = decode(model, params, start(model, params, prompts, 30), num_drafts=3)
    carry = start(model, params, prompts, 30)
    while (np.asarray(carry.finish) == RUNNING).any():
        carry = decode(model, params, carry, num_drafts=3, max_rounds=2)
    assert new_tokens(carry) == new_tokens(whole)
    for a, b in zip(jax.tree.leaves(carry), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_plan_without_the_head_cannot_draft(model, params, prompts):
    limits = np.int32(1), np.bool_(False)
    with pytest.raises(ValueError, match="leaves the head unread cannot draft 2 tokens"):
        speculative.decode(
            model, params, rule(model), None, start(model, params, prompts, 20), *limits, plan=Plan(2, with_head=False)
        )


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_ids_without_a_token_are_never_emitted(model, params, prompts, num_drafts):
    free = decode(model, params, start(model, params, prompts, 30), num_drafts=0)
    assert max(map(max, new_tokens(free))) >= 40
    carry = decode(model, params, start(model, params, prompts, 30, num_ids=40), num_drafts, num_ids=40)
    plain = decode(model, params, start(model, params, prompts, 30, num_ids=40), 0, num_ids=40)
    assert new_tokens(carry) == new_tokens(plain)
    assert max(map(max, new_tokens(carry))) < 40


def test_bfloat16_runs_and_keeps_its_types(params, model, prompts):
    low = MTPModel(model.config, jnp.dtype("bfloat16"))
    low_params = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 1 else x, params)
    carry = start(low, low_params, prompts, 20)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), carry)
    carry = decode(low, low_params, carry, num_drafts=3)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), carry) == shapes
    assert carry.context.trunk.layers[1].k.dtype == jnp.bfloat16
    assert carry.num_new.tolist() == [20] * 4
