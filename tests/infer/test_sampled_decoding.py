"""Sampling with shared noise, end to end: plain sampling's tokens, and rows that depend on their seed alone.

One compiled program of each J serves all settings here, so trying many of them is cheap.
"""

import copy
from itertools import product

import numpy as np
import pytest
from reciting import recite

from infer.generator import Generator
from infer.job import Job
from infer.noise import row_key
from infer.row import Piece
from infer.sampling import Sampling
from infer.settings import Settings

NEW = 45
SAMPLES = 2
ENDS = frozenset([7, 22, 40])  # rows meet one of them now and then
ALL = {
    "temperature": 0.9,
    "top_k": 30,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "logit_bias": {3: 1.5, 11: -2.0, 40: 1.0},
    "banned_ids": [5, 9],
    "min_new_tokens": 6,
}
SETTINGS = {
    "greedy": {},
    "greedy, repetition": {"repetition_penalty": 1.3},
    "greedy, presence and frequency": {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    "greedy, negative penalties": {"presence_penalty": -0.5, "repetition_penalty": 0.8},
    "greedy, bias, bans, minimum": {"logit_bias": {4: 2.0}, "banned_ids": [7, 40], "min_new_tokens": 9},
    "cold": {"temperature": 0.2},
    "warm": {"temperature": 1.0},
    "hot": {"temperature": 3.0},
    "top-k": {"temperature": 1.5, "top_k": 5},
    "top-p": {"temperature": 1.5, "top_p": 0.7},
    "min-p": {"temperature": 1.5, "min_p": 0.1},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.5},
    "presence": {"temperature": 1.0, "presence_penalty": 1.0},
    "frequency": {"temperature": 1.0, "frequency_penalty": 0.8},
    "bias": {"temperature": 1.0, "logit_bias": {3: 3.0, 11: -5.0}},
    "bans": {"temperature": 1.0, "banned_ids": [3, 4, 5, 6, 7]},
    "minimum": {"temperature": 1.0, "min_new_tokens": 20},
    "all": ALL,
}


@pytest.fixture(scope="module")
def ending(generator: Generator) -> Generator:
    """With end ids."""
    other = copy.copy(generator)
    other.end_ids = ENDS
    return other


def sampled(generator, prompts, sampling, num_drafts, **settings):
    settings = {"max_new_tokens": NEW, "num_samples": SAMPLES, **settings}
    return generator.generate(prompts, num_draft_tokens=num_drafts, sampling=sampling, **settings)


def told(completions):
    """What must not depend on how a text was decoded."""
    return [(c.tokens, c.finish_reason) for c in completions]


@pytest.mark.parametrize("name", SETTINGS)
def test_speculation_gives_plain_samplings_tokens(ending, prompts, name):
    sampling = Sampling(**SETTINGS[name], seed=4)
    plain = sampled(ending, prompts, sampling, 0)
    for num_drafts in (1, 2, 3, 4):
        got = sampled(ending, prompts, sampling, num_drafts)
        assert told(got) == told(plain), num_drafts
        drafted, accepted = sum(c.drafted for c in got), sum(c.accepted for c in got)
        assert 0 < accepted < drafted, "this setting no longer tests both outcomes"


@pytest.mark.parametrize("verifier", ["shared_noise", "rejection"])
def test_a_head_with_the_trunks_logits_has_its_law(verifier):
    """Then every draft stands: drafts are warped as choices are, with the drafts before them as their past."""
    reciter = recite(range(2, 50), [60])
    sampling = Sampling(**{**ALL, "temperature": 1.5, "top_k": 60, "frequency_penalty": 1.0}, verifier=verifier)
    got = reciter.generate([[2], [3, 4, 5]], max_new_tokens=NEW, num_draft_tokens=3, sampling=sampling, num_samples=16)
    assert len({token for c in got for token in c.tokens}) > 50
    assert sum(c.accepted for c in got) == sum(c.drafted for c in got) > 100


def test_settings_are_heeded(ending, prompts):
    """Plain decoding is what speculation is held against, so it must itself do what was asked."""
    hot = {"temperature": 3.0, "seed": 4}
    rows = {name: sampled(ending, prompts, Sampling(**hot, **more), 3) for name, more in {
        "free": {}, "bans": {"banned_ids": [1, 2, 3, 4, 5, 6]}, "minimum": {"min_new_tokens": 20},
        "bias": {"logit_bias": {50: 30.0}}, "first": {"top_k": 1},
    }.items()}  # fmt: skip
    tokens = {name: [t for row in of_name for t in row.tokens] for name, of_name in rows.items()}
    assert set(tokens["free"]) & {1, 2, 3, 4, 5, 6}
    assert not set(tokens["bans"]) & {1, 2, 3, 4, 5, 6}
    assert min(len(row.tokens) for row in rows["free"]) < 20 < min(len(row.tokens) for row in rows["minimum"])
    assert {row.finish_reason for row in rows["minimum"]} == {"stop", "length"}
    assert tokens["bias"].count(50) > 0.9 * len(tokens["bias"])
    assert told(rows["first"][::SAMPLES]) == told(ending.generate(prompts, max_new_tokens=NEW))
    assert told(rows["first"][1::SAMPLES]) == told(rows["first"][::SAMPLES])


WARM = Sampling(temperature=1.0, top_p=0.95, frequency_penalty=0.2, seed=12)


def test_seeds_and_samples_differ_and_repeat(generator, prompts):
    first = sampled(generator, prompts, WARM, 3)
    assert told(sampled(generator, prompts, WARM, 3)) == told(first)
    texts = {tuple(c.tokens) for c in first}
    for seed in (0, 13, 2**32, 2**64 + 12):
        other = Sampling(temperature=1.0, top_p=0.95, frequency_penalty=0.2, seed=seed)
        texts |= {tuple(c.tokens) for c in sampled(generator, prompts, other, 3)}
    assert len(texts) == 5 * len(first)
    same_prompt = sampled(generator, [prompts[0]] * 4, WARM, 3)
    assert len({tuple(c.tokens) for c in same_prompt}) == len(same_prompt)


@pytest.mark.parametrize("verifier", ["shared_noise", "rejection"])
def test_a_seeded_row_depends_on_nothing_but_its_key_and_prompt(ending, prompts, verifier):
    """Not on batch mates or their number, the order, the slot or whose place it takes, nor on the cache's size."""
    sampling = Sampling(temperature=1.0, top_p=0.95, frequency_penalty=0.2, seed=12, verifier=verifier)
    whole = dict(zip(product(range(4), range(SAMPLES)), sampled(ending, prompts, sampling, 3), strict=True))

    def run(rows, **settings):
        jobs = [Job(prompts[p], NEW, row_key(12, p, i)) for p, i in rows]
        pieces = ending.run(jobs, Settings(num_draft_tokens=3, sampling=sampling, **settings))
        done = {piece.job: piece.completion for piece in pieces if isinstance(piece, Piece) and piece.completion}
        return dict(zip(rows, (done[index] for index in range(len(rows))), strict=True))

    def check(got):
        for row, completion in got.items():
            expected = whole[row]
            for name in ("tokens", "draft_positions", "round_drafts", "rejected", "finish_reason"):
                assert getattr(completion, name) == getattr(expected, name), (row, name)

    rows = list(whole)
    check(run([(2, 1)]))
    check(run(rows[::-1]))
    check(run(rows, batch_size=3))
    check(run([rows[i] for i in (5, 0, 7, 3)], batch_size=3))
    check(run(rows[::-1], batch_size=3, cache_length=256))
    # More samples of each prompt: those there were stay.
    more = sampled(ending, prompts, sampling, 3, num_samples=5)
    check({(p, i): more[5 * p + i] for p, i in rows})


def test_a_seeded_row_does_not_depend_on_pieces_of_its_prompt(generator, monkeypatch):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(61, size=size).tolist() for size in (40, 33, 17, 16)]
    whole = sampled(generator, prompts, WARM, 3, max_new_tokens=20)
    monkeypatch.setattr("infer.prompt_reading.PIECE", 16)
    assert told(sampled(generator, prompts, WARM, 3, max_new_tokens=20)) == told(whole)
    assert told(sampled(generator, prompts, WARM, 0, max_new_tokens=20)) == told(whole)


def test_a_limit_cuts_a_seeded_row_and_changes_nothing_before(generator, prompts):
    whole = sampled(generator, prompts, WARM, 3)
    for limit in (0, 1, 2, 7, 30):
        got = sampled(generator, prompts, WARM, 3, max_new_tokens=limit, cache_length=64)
        assert [c.tokens for c in got] == [c.tokens[:limit] for c in whole]


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, ALL], ids=["greedy", "warm", "all"])
def test_automatic_drafts_change_no_token(ending, prompts, settings):
    # Long rows: the first rounds are plain ones.
    sampling = Sampling(**{**settings, "min_new_tokens": NEW - 5}, seed=4)
    plain = sampled(ending, prompts, sampling, 0)
    got = sampled(ending, prompts, sampling, "auto")
    assert told(got) == told(plain)
    assert sum(c.accepted for c in got) > 0


@pytest.mark.parametrize("num_ids", [1, 7, 61])
def test_a_draft_vocabulary_changes_no_token_and_holds_all_drafts(ending, prompts, num_ids):
    ids = sorted(np.random.default_rng(num_ids).permutation(61)[:num_ids].tolist())
    for settings, num_drafts in product(({}, {"temperature": 1.0}), (1, 3)):
        sampling = Sampling(**settings, seed=4)
        plain = sampled(ending, prompts, sampling, 0)
        got = sampled(ending, prompts, sampling, num_drafts, draft_vocabulary=ids)
        assert told(got) == told(plain)
        drafts = {t for c in got for t, k in zip(c.tokens, c.draft_positions, strict=True) if k}
        drafts |= {t for c in got for t in c.rejected if t >= 0}
        assert drafts
        assert drafts <= set(ids)


def test_a_draft_vocabulary_that_is_banned_as_a_whole_drafts_nothing_that_stands(generator, prompts):
    """Rejection then draws from the trunk's law with the numbers that decoding without drafts uses."""
    sampling = Sampling(temperature=1.0, banned_ids=[3, 4], seed=4, verifier="rejection")
    plain = sampled(generator, prompts, sampling, 0)
    got = sampled(generator, prompts, sampling, 3, draft_vocabulary=[3, 4])
    assert told(got) == told(plain)
    assert sum(c.accepted for c in got) == 0
    assert sum(c.drafted for c in got) > 0
