"""What comes out of rounds of drafting and verifying has the trunk's law, for both verifiers.

Trunk and head are tables here: logits by the last two tokens. The expected law of the first tokens is
enumerated in float64; what 1e5 rows emit is compared by a chi-squared test.
"""

import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chi_squared import deviation
from warp_reference import reference_law

from infer.noise import Role, gumbel, row_key
from infer.sampling import Past, Sampling, draw, warp
from infer.verify import verify_rejection, verify_shared_noise

ROWS, VOCAB, NUM_TOKENS = 100_000, 4, 3
PROMPT = (1, 2)
NONE = -1e9  # probability 0, finite so that penalties and temperatures keep it a number


def tables(seed, holes=False):
    """Logits of trunk and head [before last, last, vocab]."""
    rng = np.random.default_rng(seed)
    trunk, head = 1.5 * rng.normal(size=(2, VOCAB, VOCAB, VOCAB))
    head = 0.6 * trunk + 0.8 * head
    if holes:  # one id that only the head proposes, one that only the trunk does, others by chance
        trunk[:, :, 0], head[:, :, 3] = NONE, NONE
        head[:, ::2, 2] = NONE
    return trunk.astype(np.float32), head.astype(np.float32)


DISJOINT = np.zeros((2, VOCAB, VOCAB, VOCAB), np.float32)
DISJOINT[0, :, :, 2:], DISJOINT[1, :, :, :2] = NONE, NONE
DISJOINT[0, 1, :, 1] = 1.0


@partial(jax.jit, static_argnames=("num_drafts", "verifier"), compiler_options={"xla_backend_optimization_level": "2"})
def emit(trunk, head, rule, keys, num_drafts, verifier):
    """The first `NUM_TOKENS` new tokens [rows, ...] of every row, and drafts accepted in the first round."""
    rows = keys.shape[0]
    prompt_length = jnp.full((rows,), len(PROMPT), jnp.int32)
    tokens = jnp.zeros((rows, len(PROMPT) + NUM_TOKENS + num_drafts + 1), jnp.int32)
    tokens = tokens.at[:, : len(PROMPT)].set(jnp.asarray(PROMPT))
    num_new = jnp.zeros((rows,), jnp.int32)
    accepted_first = None
    every = jnp.arange(rows)[:, None]
    for _ in range(NUM_TOKENS):
        length = prompt_length + num_new
        last_two = tokens[every, length[:, None] + jnp.asarray([-2, -1])[None, :]]
        position = length[:, None] + jnp.arange(num_drafts + 1)[None, :]
        drafts, warped_q = jnp.zeros((rows, 0), jnp.int32), []
        shared = gumbel(keys, position, VOCAB, Role.SHARED)
        own = gumbel(keys, position, VOCAB, Role.DRAFT)
        for i in range(num_drafts):
            before = jnp.concatenate([last_two, drafts], axis=1)
            logits = head[before[:, -2], before[:, -1]][:, None]
            warped_q.append(warp(logits, rule, Past(tokens, prompt_length, num_new, drafts)))
            noise = shared if verifier == "shared_noise" else own
            drafts = jnp.concatenate([drafts, draw(warped_q[-1], noise[:, i : i + 1])], axis=1)
        before = jnp.concatenate([last_two, drafts], axis=1)
        warped_p = warp(trunk[before[:, :-1], before[:, 1:]], rule, Past(tokens, prompt_length, num_new, drafts))
        if verifier == "shared_noise":
            verdict = verify_shared_noise(drafts, warped_p, shared)
        else:
            warped_q = jnp.concatenate(warped_q, axis=1) if warped_q else jnp.zeros((rows, 0, VOCAB))
            verdict = verify_rejection(drafts, warped_p, warped_q, keys, position)
        live = num_new < NUM_TOKENS
        place = jnp.where(live[:, None], position, tokens.shape[1])
        tokens = tokens.at[every, place].set(verdict.tokens, mode="drop")
        num_new = jnp.where(live, num_new + verdict.accepted + 1, num_new)
        accepted_first = verdict.accepted if accepted_first is None else accepted_first
    return tokens[:, len(PROMPT) : len(PROMPT) + NUM_TOKENS], accepted_first


@pytest.fixture(scope="module")
def keys():
    return row_keys()


@cache
def row_keys():
    return jnp.asarray(np.stack([row_key(11, row, 0) for row in range(ROWS)]))


def expected_law(table, sampling):
    """Joint law [vocab] * NUM_TOKENS of the first new tokens."""
    law = np.zeros((VOCAB,) * NUM_TOKENS)
    for path in itertools.product(range(VOCAB), repeat=NUM_TOKENS):
        p = 1.0
        for i, token in enumerate(path):
            before = [*PROMPT, *path[:i]]
            # No id is allowed that only rounding of NONE would tell from the others.
            row = np.where(table[before[-2], before[-1]] <= NONE, -np.inf, table[before[-2], before[-1]])
            p *= reference_law(row, sampling, PROMPT, path[:i])[token]
        law[path] = p
    return law


HOT = Sampling(temperature=1.0)
CASES = {
    "random": (tables(0), HOT),
    "zeros in both laws": (tables(1, holes=True), HOT),
    "head is trunk": ((tables(2)[0], tables(2)[0]), HOT),
    "disjoint": (DISJOINT, HOT),
    "top-k and penalties": (
        tables(3),
        Sampling(temperature=0.7, top_k=3, repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.4),
    ),
    "top-p and bias": (tables(4), Sampling(temperature=1.3, top_p=0.8, logit_bias={1: 0.7})),
    "min-p and ban": (tables(5), Sampling(temperature=1.0, min_p=0.15, banned_ids=[2])),
}


# J = 2 is between: of most cases with the slow tests.
CASES_AND_DRAFTS = [
    pytest.param(case, j, marks=[pytest.mark.slow] if j == 2 and case != "random" else [])
    for case in CASES
    for j in (1, 2, 3)
]


def rule_of(sampling):
    return jax.tree.map(jnp.asarray, sampling.rule(VOCAB, VOCAB, []))


@cache
def emitted(case, num_drafts, verifier):
    """Of all rows, on the host."""
    (trunk, head), sampling = CASES[case]
    return jax.device_get(
        emit(jnp.asarray(trunk), jnp.asarray(head), rule_of(sampling), row_keys(), num_drafts, verifier)
    )


@pytest.mark.parametrize("verifier", ["shared_noise", "rejection"])
@pytest.mark.parametrize(("case", "num_drafts"), CASES_AND_DRAFTS)
def test_the_joint_law_is_the_trunks(case, verifier, num_drafts):
    (trunk, head), sampling = CASES[case]
    tokens, _ = emitted(case, num_drafts, verifier)
    assert abs(deviation(tokens, expected_law(trunk, sampling))) < 4
    if case != "head is trunk":  # the test can tell the two
        assert deviation(tokens, expected_law(head, sampling)) > 20


def test_the_statistic_sees_a_law_that_is_slightly_wrong():
    """Tokens redrawn from p instead of the positive part of p - q are what a wrong verifier would give."""
    rng = np.random.default_rng(0)
    p, q = np.asarray([0.4, 0.3, 0.2, 0.1]), np.asarray([0.3, 0.4, 0.2, 0.1])
    wrong = np.minimum(p, q) + (1 - np.minimum(p, q).sum()) * p
    for law, low, high in ((p, -4, 4), (wrong, 8, np.inf)):
        assert low < deviation(rng.choice(4, (ROWS, 1), p=law), p) < high


@pytest.mark.parametrize(("case", "num_drafts"), CASES_AND_DRAFTS)
def test_shared_noise_gives_plain_decodings_tokens(case, num_drafts):
    plain, _ = emitted(case, 0, "shared_noise")
    np.testing.assert_array_equal(emitted(case, num_drafts, "shared_noise")[0], plain)


@pytest.mark.parametrize("case", CASES)
def test_acceptance_is_what_theory_says(case):
    (trunk, head), sampling = CASES[case]

    def rate(verifier):
        return np.mean(emitted(case, 1, verifier)[1])

    p, q = (
        reference_law(np.where(row <= NONE, -np.inf, row), sampling, PROMPT) for row in (trunk[PROMPT], head[PROMPT])
    )
    distance = np.abs(p - q).sum() / 2
    error = 4 * (distance * (1 - distance) / ROWS) ** 0.5 + 1e-9
    assert abs(rate("rejection") - (1 - distance)) <= error
    assert (1 - distance) / (1 + distance) - 4 * (0.25 / ROWS) ** 0.5 <= rate("shared_noise") <= 1 - distance + error


def test_without_noise_verification_is_greedy():
    (trunk, _), _ = CASES["random"]
    one = jnp.ones((1,), jnp.int32)
    past = Past(jnp.zeros((1, 5), jnp.int32), one, one, jnp.zeros((1, VOCAB - 1), jnp.int32))
    greedy = rule_of(Sampling())
    warped = warp(jnp.asarray(trunk[1:2]), greedy, past)
    best = np.argmax(trunk[1], axis=-1)
    drafts = jnp.asarray([[best[0], best[1], (best[2] + 1) % VOCAB]], jnp.int32)
    verdict = verify_shared_noise(drafts, warped, jnp.zeros_like(warped))
    assert verdict.tokens.tolist() == [best.tolist()]
    assert verdict.accepted.tolist() == [2]


def single(p, rows):
    """Scores [rows, 1, vocab] of one law."""
    with np.errstate(divide="ignore"):
        return jnp.broadcast_to(jnp.asarray(np.log(p), jnp.float32), (rows, 1, len(p)))


def test_a_draft_that_the_head_could_not_draw_never_stands(keys):
    """Then the rest of p - q is drawn from or, where it is empty, p."""
    p, q = np.asarray([0.1, 0.2, 0.3, 0.4]), np.asarray([0.0, 0.5, 0.3, 0.2])
    rest = np.asarray([1, 0, 0, 2]) / 3
    position = jnp.full((ROWS, 2), 7)
    drafts = jnp.zeros((ROWS, 1), jnp.int32)
    twice = jnp.concatenate([single(p, ROWS)] * 2, axis=1)
    verdict = verify_rejection(drafts, twice, single(q, ROWS), keys, position)
    assert not verdict.accepted.any()
    assert abs(deviation(verdict.tokens[:, :1], rest)) < 4

    twice = jnp.concatenate([single(q, ROWS)] * 2, axis=1)
    verdict = verify_rejection(drafts, twice, single(q, ROWS), keys, position)
    assert not verdict.accepted.any()
    assert abs(deviation(verdict.tokens[:, :1], q)) < 4


def test_a_draft_of_the_trunks_own_law_always_stands(keys):
    p = np.asarray([0.1, 0.2, 0.3, 0.4])
    for draft in range(4):
        drafts = jnp.full((ROWS, 1), draft, jnp.int32)
        twice = jnp.concatenate([single(p, ROWS)] * 2, axis=1)
        verdict = verify_rejection(drafts, twice, single(p, ROWS), keys, jnp.full((ROWS, 2), 7))
        assert verdict.accepted.all()
        assert (verdict.tokens[:, 0] == draft).all()


def test_rejection_without_drafts_draws_from_the_trunk(keys):
    p = np.asarray([0.1, 0.2, 0.3, 0.4])
    none = jnp.zeros((ROWS, 0), jnp.int32), jnp.zeros((ROWS, 0, 4), jnp.float32)
    verdict = verify_rejection(none[0], single(p, ROWS), none[1], keys, jnp.full((ROWS, 1), 7))
    assert verdict.tokens.shape == (ROWS, 1)
    assert not verdict.accepted.any()
    assert abs(deviation(verdict.tokens, p)) < 4


@pytest.mark.parametrize("verifier", ["shared_noise", "rejection"])
def test_a_row_does_not_depend_on_its_batch_mates(verifier, keys):
    (trunk, head), sampling = CASES["top-k and penalties"]
    run = partial(emit, jnp.asarray(trunk), jnp.asarray(head), rule_of(sampling), num_drafts=3, verifier=verifier)
    for row in range(7):
        alone = run(keys=keys[row : row + 1])
        for x, y in zip(alone, emitted("top-k and penalties", 3, verifier), strict=True):
            np.testing.assert_array_equal(x[0], y[row])
