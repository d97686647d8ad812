"""Settings are checked, and every warper is what a sort in float64 says, at every position and shape."""

import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from warp_reference import reference_law

from infer.sampling import Past, Sampling, draw, log_probabilities, warp
from mtp_jax.errors import UserError

compiled_warp = jax.jit(warp)
NO_PAST = ([], [])

SETTINGS = {
    "temperature": dict(temperature=0.7),
    "cold": dict(temperature=0.05),
    "hot": dict(temperature=11.0),
    "top-k": dict(temperature=1.0, top_k=3),
    "top-p": dict(temperature=1.0, top_p=0.8),
    "least top-p": dict(temperature=1.0, top_p=1e-9),
    "most top-p": dict(temperature=2.0, top_p=0.999),
    "min-p": dict(temperature=1.0, min_p=0.1),
    "top-p of what top-k kept": dict(temperature=1.5, top_k=5, top_p=0.6),
    "all": dict(temperature=0.9, top_k=9, top_p=0.95, min_p=0.02, repetition_penalty=1.3, presence_penalty=0.4),
}


def past(prompt, new, drafts, num_slots=29):
    """One row; the slots after its tokens hold ids that must not count."""
    tokens = np.zeros((1, num_slots), np.int32)
    tokens[0, : len(prompt) + len(new)] = [*prompt, *new]
    lengths = (jnp.asarray([len(x)], jnp.int32) for x in (prompt, new))
    return Past(jnp.asarray(tokens), *lengths, jnp.asarray([drafts], jnp.int32).reshape(1, len(drafts)))


def law(logits, sampling, prompt=(), new=(), drafts=(), num_ids=None, end_ids=()):
    """Probabilities of logits [T, vocab]; one-hot at temperature 0."""
    vocab = logits.shape[-1]
    rule = sampling.rule(vocab, vocab if num_ids is None else num_ids, end_ids)
    warped = compiled_warp(jnp.asarray(logits, jnp.float32)[None], rule, past(prompt, new, drafts))
    if sampling.temperature == 0:
        return np.eye(vocab)[np.asarray(draw(warped, jnp.zeros_like(warped)))[0]]
    return np.exp(np.asarray(log_probabilities(warped), np.float64))[0]


def assert_same_law(found, expected):
    np.testing.assert_array_equal(found > 0, expected > 0)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-30)


def random_logits(vocab, seed=0, ties=False, holes=False):
    rng = np.random.default_rng([seed, vocab])
    logits = rng.integers(-3, 4, vocab) if ties else 3 * rng.normal(size=vocab)
    logits = logits.astype(np.float32)
    if holes:
        logits[rng.permutation(vocab)[: vocab // 2]] = -np.inf
    return logits


@pytest.mark.parametrize("kind", [{}, {"ties": True}, {"holes": True}], ids=["random", "ties", "holes"])
@pytest.mark.parametrize("name", SETTINGS)
def test_warpers_are_the_definition(name, kind):
    sampling = Sampling(**SETTINGS[name])
    for vocab in (1, 2, 17, 307):
        logits = random_logits(vocab, **kind)
        prompt, new = [0], [vocab // 2]
        expected = reference_law(logits, sampling, prompt, new)
        assert_same_law(law(logits[None], sampling, prompt, new)[0], expected)


@pytest.mark.parametrize("ties", [False, True])
def test_every_top_k(ties):
    vocab = 17
    logits = random_logits(vocab, ties=ties)
    for k in [*range(1, vocab + 2), 2**70]:
        sampling = Sampling(temperature=1.0, top_k=k)
        assert_same_law(law(logits[None], sampling)[0], reference_law(logits, sampling))


def test_top_p_over_a_large_vocabulary():
    logits = 0.5 * random_logits(100_003)
    for top_p in (0.1, 0.5, 0.9, 0.99):
        sampling = Sampling(temperature=1.0, top_p=top_p)
        found, expected = law(logits[None], sampling)[0] > 0, reference_law(logits, sampling) > 0
        # The sums of float32 may move the last few of many nearly equal ids.
        assert 1 < expected.sum() < 100_003
        assert abs(int(found.sum()) - int(expected.sum())) <= 2


def test_ids_without_a_token_have_no_probability():
    logits = random_logits(17)
    logits[11:] += 20
    for sampling in (Sampling(temperature=1.0, top_k=4, top_p=0.9), Sampling()):
        found = law(logits[None], sampling, num_ids=11)[0]
        assert_same_law(found, reference_law(logits, sampling, num_ids=11))
        assert not found[11:].any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "settings",
    [
        dict(repetition_penalty=1.7),
        dict(repetition_penalty=0.6),
        dict(presence_penalty=0.9),
        dict(frequency_penalty=0.7),
        dict(presence_penalty=-0.5, frequency_penalty=-0.3, repetition_penalty=2.0),
        dict(min_new_tokens=5),
        dict(logit_bias={3: 2.5, 4: -1.0}, banned_ids=[0, 5]),
        dict(repetition_penalty=1.2, frequency_penalty=0.5, min_new_tokens=4, logit_bias={2: 1.0}, banned_ids=[6]),
    ],
)
def test_each_position_has_the_drafts_before_it_as_its_past(settings, temperature):
    """Logits equal everywhere, so that a draft counted too early or too late shows."""
    vocab, end_ids = 7, [1, 2]
    prompt, new, drafts = [3, 3, 6], [4, 4, 2], [2, 5, 2]
    sampling = Sampling(temperature=temperature, **settings)
    row = random_logits(vocab)
    logits = np.stack([row] * (len(drafts) + 1))
    expected = [reference_law(row, sampling, prompt, new + drafts[:t], end_ids=end_ids) for t in range(len(drafts) + 1)]
    verified = law(logits, sampling, prompt, new, drafts, end_ids=end_ids)
    for t in range(len(drafts) + 1):
        assert_same_law(verified[t], expected[t])
        drafted = law(logits[:1], sampling, prompt, new, drafts[:t], end_ids=end_ids)
        assert_same_law(drafted[0], expected[t])


def test_rows_have_their_own_pasts():
    sampling = Sampling(temperature=1.0, repetition_penalty=1.5, frequency_penalty=0.4, min_new_tokens=3)
    vocab, pasts = 7, [([1], [2, 2, 3], [4]), ([1, 2, 3, 4], [], [5]), ([5, 6], [1], [0])]
    logits = np.stack([random_logits(vocab, seed) for seed in (1, 2)])
    rows = [past(*p) for p in pasts]
    together = Past(*(jnp.concatenate(x) for x in zip(*rows, strict=True)))
    rule = sampling.rule(vocab, vocab, [3])
    warped = compiled_warp(jnp.stack([jnp.asarray(logits)] * 3), rule, together)
    for row, (prompt, new, drafts) in zip(np.exp(log_probabilities(warped)), pasts, strict=True):
        for t in range(2):
            expected = reference_law(logits[t], sampling, prompt, new + drafts[:t], end_ids=[3])
            assert_same_law(row[t].astype(np.float64), expected)


@pytest.mark.parametrize("level", ["0", "3"])
def test_scores_have_the_same_bits_in_every_shape(level):
    """Plain decoding (T = 1) and verification (T = J + 1) must draw from one law, also where a threshold is near."""
    run = jax.jit(warp, compiler_options={"xla_backend_optimization_level": level})
    batch, width, vocab = 3, 5, 5003
    rng = np.random.default_rng(1)
    logits = jnp.asarray(3 * rng.normal(size=(batch, width, vocab)), jnp.float32)
    drafts = rng.integers(0, vocab, (batch, width - 1)).astype(np.int32)
    tokens = rng.integers(0, vocab, (batch, 31)).astype(np.int32)
    for settings in (
        dict(temperature=0.7, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.3),
        dict(temperature=1.3, top_k=700, top_p=0.7, presence_penalty=0.1),
        dict(temperature=0.9, min_p=0.01),
    ):
        rule = Sampling(**settings).rule(vocab, vocab, [])
        lengths = jnp.full((batch,), 3, jnp.int32), jnp.full((batch,), 7, jnp.int32)
        whole = np.asarray(run(logits, rule, Past(jnp.asarray(tokens), *lengths, jnp.asarray(drafts))))
        for row in range(batch):
            one = slice(row, row + 1)
            for t in range(width):
                before = Past(jnp.asarray(tokens[one]), *(x[one] for x in lengths), jnp.asarray(drafts[one, :t]))
                alone = np.asarray(run(logits[one, t : t + 1], rule, before))
                np.testing.assert_array_equal(alone[0, 0].view(np.int32), whole[row, t].view(np.int32))


def test_one_program_serves_all_settings():
    program = jax.jit(lambda *arguments: warp(*arguments))  # jits of one function share what they compiled
    logits = jnp.asarray(random_logits(17)).reshape(1, 1, 17)
    for name, settings in SETTINGS.items():
        rule = Sampling(**settings, seed=len(name)).rule(17, 17, [3])
        program(logits, rule, past([1], [2], []))
    rule = Sampling(banned_ids=range(8), min_new_tokens=2, frequency_penalty=1.0).rule(17, 13, range(9, 12))
    program(logits, rule, past([1, 2, 3], [], []))
    assert program._cache_size() == 1


def test_greedy_takes_the_best_and_of_equals_the_lowest():
    logits = jnp.asarray([[[1.0, 3.0, 3.0, 2.0]]])
    warped = warp(logits, Sampling().rule(4, 4, []), past([0], [], []))
    np.testing.assert_array_equal(warped, logits)
    assert draw(warped, jnp.zeros_like(warped)).tolist() == [[1]]


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e30])
def test_extreme_settings_give_a_law(temperature):
    """Nothing overflows to nan."""
    logits = np.asarray([5e4, -3e4, 5e4, 0.0], np.float32)
    for more in ({}, dict(repetition_penalty=1e30), dict(repetition_penalty=1e-30), dict(logit_bias={1: 1e30})):
        found = law(logits[None], Sampling(temperature=temperature, top_p=0.5, **more), [0, 1], [2])[0]
        assert np.isfinite(found).all()
        assert math.isclose(found.sum(), 1, rel_tol=1e-5)


def test_the_coldest_law_is_that_of_the_best_ids():
    found = law(np.asarray([[5e4, -3e4, 5e4, 0.0]], np.float32), Sampling(temperature=1e-30))
    assert_same_law(found[0], np.asarray([0.5, 0, 0.5, 0]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(temperature=-0.1), "temperature must be 0 (greedy) or between 1e-30 and 1e+30, got -0.1"),
        (dict(temperature=1e-40), "temperature must be 0 (greedy) or between"),
        (dict(temperature=math.nan), "temperature must be a finite number, got nan"),
        (dict(temperature=math.inf), "temperature must be a finite number, got inf"),
        (dict(temperature=1, top_k=-1), "top_k must be at least 0, got -1"),
        (dict(temperature=1, top_p=0.0), "top_p must be above 0 and at most 1, got 0.0"),
        (dict(temperature=1, top_p=1.5), "top_p must be above 0 and at most 1, got 1.5"),
        (dict(temperature=1, top_p=math.nan), "top_p must be a finite number, got nan"),
        (dict(temperature=1, min_p=1.1), "min_p must be between 0 and 1, got 1.1"),
        (dict(repetition_penalty=0), "repetition_penalty must be between 1e-30 and 1e+30, got 0.0"),
        (dict(repetition_penalty=-2.0), "repetition_penalty must be between"),
        (dict(presence_penalty=-math.inf), "presence_penalty must be a finite number, got -inf"),
        (dict(frequency_penalty=1e31), "frequency_penalty must be between -1e+30 and 1e+30, got 1e+31"),
        (dict(logit_bias={2: math.inf}), "logit_bias must be a finite number, got inf"),
        (dict(logit_bias={2: 1e31}), "logit_bias of id 2 must be between"),
        (dict(logit_bias={-1: 1.0}), "an id of logit_bias must be at least 0, got -1"),
        (dict(banned_ids=[-1]), "an id of banned_ids must be at least 0, got -1"),
        (dict(min_new_tokens=-1), "min_new_tokens must be at least 0, got -1"),
        (dict(seed=-1), "seed must be at least 0, got -1"),
        (dict(verifier="exact"), "verifier must be one of shared_noise, rejection, got 'exact'"),
        (dict(top_k=5), "top_k 5 needs a temperature above 0"),
        (dict(top_p=0.9), "top_p 0.9 needs a temperature above 0"),
        (dict(min_p=0.1), "min_p 0.1 needs a temperature above 0"),
        (dict(verifier="rejection"), "verifier rejection needs a temperature above 0"),
        (dict(logit_bias={3: 1.0}, banned_ids=[3]), "id 3 is in both logit_bias and banned_ids"),
    ],
)
def test_wrong_and_contradictory_settings_are_refused(settings, message):
    with pytest.raises(UserError) as caught:
        Sampling(**settings)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(banned_ids=[5]), "banned_ids holds id 5; expected ids from 0 to 4, the vocabulary"),
        (dict(logit_bias={6: 1.0}), "logit_bias holds id 6; expected ids from 0 to 4, the vocabulary"),
        (dict(banned_ids=range(5)), "no id is left to choose: of 5, 5 are in banned_ids"),
        (dict(banned_ids=range(3), min_new_tokens=1), "no id is left to choose: of 5, 3 are in banned_ids, and"),
    ],
)
def test_settings_that_do_not_fit_the_vocabulary_are_refused(settings, message):
    with pytest.raises(UserError) as caught:
        Sampling(**settings).rule(7, 5, [3, 4])
    assert str(caught.value).startswith(message)


WRONG_TYPES = [
    (dict(temperature=True), "temperature must be a number, got True"),
    (dict(temperature="1"), "temperature must be a number, got '1'"),
    (dict(temperature=1, top_k=2.0), "top_k must be an integer, got 2.0"),
    (dict(banned_ids=["2"]), "an id of banned_ids must be an integer, got '2'"),
    (dict(banned_ids=3), "banned_ids must be a list of ids, got 3"),
    (dict(logit_bias=[3]), "logit_bias must be a mapping from ids to numbers, got [3]"),
    (dict(logit_bias={"3": 1.0}), "an id of logit_bias must be an integer, got '3'"),
    (dict(seed=1.5), "seed must be an integer, got 1.5"),
]


def test_wrong_types_are_refused():
    """In a process of its own: here the suite's type checker would refuse them first."""
    code = f"""
from infer.sampling import Sampling
from mtp_jax.errors import UserError
for settings in {[settings for settings, _ in WRONG_TYPES]}:
    try:
        Sampling(**settings)
    except UserError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [message for _, message in WRONG_TYPES]


def test_whole_numbers_are_numbers():
    sampling = Sampling(temperature=1, presence_penalty=2, logit_bias={1: 3}, seed=2**200)
    assert (sampling.temperature, sampling.presence_penalty, sampling.seed) == (1.0, 2.0, 2**200)
    assert isinstance(sampling.temperature, float)


@pytest.mark.peer
@pytest.mark.parametrize("vocab", [1, 2, 17, 307])
@pytest.mark.parametrize("holes", [False, True])
def test_transformers_processors_give_the_same_law(vocab, holes):
    torch = pytest.importorskip("torch")
    from transformers import generation as hf

    logits = random_logits(vocab, seed=5, holes=holes)
    middle = vocab // 2
    prompt, new = [0], [middle]
    ids = torch.tensor([[0, middle]])
    penalty = hf.RepetitionPenaltyLogitsProcessor
    cases = [
        (dict(temperature=0.6), [hf.TemperatureLogitsWarper(0.6)]),
        *((dict(temperature=1.0, top_k=k), [hf.TopKLogitsWarper(k)]) for k in range(1, min(vocab, 20) + 3)),
        *((dict(temperature=1.0, top_p=p), [hf.TopPLogitsWarper(p)]) for p in (0.1, 0.5, 0.9, 0.99)),
        *((dict(temperature=1.0, min_p=p), [hf.MinPLogitsWarper(p)]) for p in (0.01, 0.3, 1.0)),
        (dict(temperature=1.0, repetition_penalty=1.4), [penalty(1.4)]),
        (
            dict(temperature=1.0, repetition_penalty=1.4, logit_bias={0: 2.0, vocab - 1: -1.5}),
            [penalty(1.4), hf.SequenceBiasLogitsProcessor([[[0], 2.0], [[vocab - 1], -1.5]])],
        ),
        (
            dict(temperature=0.8, repetition_penalty=0.7, top_k=9, top_p=0.9, min_p=0.05),
            [
                penalty(0.7),
                hf.TemperatureLogitsWarper(0.8),
                hf.TopKLogitsWarper(9),
                hf.TopPLogitsWarper(0.9),
                hf.MinPLogitsWarper(0.05),
            ],
        ),
    ]
    if vocab > 2 and not holes:
        cases += [
            (dict(temperature=1.0, min_new_tokens=n), [hf.MinNewTokensLengthLogitsProcessor(1, n, [1, 2])])
            for n in (1, 2)
        ]
        cases.append((dict(temperature=1.0, min_new_tokens=2), [hf.MinLengthLogitsProcessor(3, [1, 2])]))
        cases.append((dict(temperature=1.0, banned_ids=[0, 2]), [hf.SuppressTokensLogitsProcessor([0, 2])]))
    for settings, processors in cases:
        if vocab == 1 and len(settings.get("logit_bias", {})) != 2 and "logit_bias" in settings:
            continue  # one id with two biases
        scores = torch.tensor(logits)[None]
        for processor in processors:
            scores = processor(ids, scores)
        expected = torch.softmax(scores.double(), -1)[0].numpy()
        found = law(logits[None], Sampling(**settings), prompt, new, end_ids=[1, 2] if vocab > 2 else [])[0]
        assert_same_law(found, expected)
