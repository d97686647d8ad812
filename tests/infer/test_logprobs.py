"""Log-probabilities of emitted tokens, of alternatives and of refused drafts, against teacher forcing in NumPy."""

import numpy as np
import pytest
from warp_reference import reference_law

from infer.logits import all_logits
from infer.sampling import Sampling

NEW, VOCAB = 21, 61
CASES = {
    "greedy": Sampling(),
    "greedy, penalties": Sampling(repetition_penalty=1.3, frequency_penalty=0.3, banned_ids=[3]),
    "warm": Sampling(temperature=1.0, seed=5),
    "all": Sampling(
        temperature=0.9, top_k=30, top_p=0.95, min_p=0.001, repetition_penalty=1.2, presence_penalty=0.3,
        frequency_penalty=0.2, logit_bias={3: 1.5}, banned_ids=[5], seed=6,
    ),
    "rejection": Sampling(temperature=1.0, top_k=40, seed=7, verifier="rejection"),
}  # fmt: skip


@pytest.fixture(scope="module")
def decoded(generator, prompts):
    """Completions by case, J and whether raw, with all alternatives."""
    kept = {}

    def decode(case, num_drafts, raw=False):
        if (case, num_drafts, raw) not in kept:
            kept[case, num_drafts, raw] = generator.generate(
                prompts, max_new_tokens=NEW, num_draft_tokens=num_drafts, sampling=CASES[case], logprobs=VOCAB,
                raw_logprobs=raw,
            )  # fmt: skip
        return kept[case, num_drafts, raw]

    return decode


def expected(generator, prompt, tokens, sampling, raw):
    """Log-probabilities [tokens, vocab] from one pass over the whole text."""
    logits = all_logits(generator.model, generator.programs.params, np.array([prompt + tokens]))["main_logits"][0]
    rows = []
    for i in range(len(tokens)):
        at = np.float64(logits[len(prompt) + i - 1])
        if raw:
            rows.append(at - at.max() - np.log(np.exp(at - at.max()).sum()))
            continue
        # A greedy choice has a law too: the scores as they are, before the largest is taken.
        law = sampling if sampling.temperature else Sampling(**{**vars(sampling), "temperature": 1.0})
        with np.errstate(divide="ignore"):
            rows.append(np.log(reference_law(at, law, prompt, tokens[:i])))
    return np.array(rows)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_they_are_those_of_the_whole_text_read_at_once(generator, prompts, decoded, case, raw):
    refused = 0
    for completion, prompt in zip(decoded(case, 3, raw), prompts, strict=True):
        table = expected(generator, prompt, completion.tokens, CASES[case], raw)
        for row, token, rejected, entry in zip(
            table, completion.tokens, completion.rejected, completion.logprobs, strict=True
        ):
            assert entry.logprob == pytest.approx(row[token], abs=1e-4)
            top = dict(entry.top)
            assert len(top) == len(entry.top) == np.isfinite(row).sum()
            values = [value for _, value in entry.top]
            assert values == sorted(values, reverse=True)
            np.testing.assert_allclose(values, [row[i] for i in top], atol=1e-4)
            assert top[token] == entry.logprob
            if rejected < 0:
                assert entry.rejected is None
            else:
                refused += 1
                assert token != rejected
                assert entry.rejected == pytest.approx(row[rejected], abs=1e-4)
    assert refused > 5


@pytest.mark.parametrize("case", [case for case in CASES if case != "rejection"])
def test_they_are_plain_decodings(decoded, case):
    for plain, got in zip(decoded(case, 0), decoded(case, 3), strict=True):
        assert got.tokens == plain.tokens
        for a, b in zip(plain.logprobs, got.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            mine, others = dict(a.top), dict(b.top)
            assert mine.keys() == others.keys()
            np.testing.assert_allclose([others[i] for i in mine], list(mine.values()), atol=1e-4)


@pytest.mark.parametrize("count", [0, 5])
def test_the_number_of_alternatives_changes_nothing_else(generator, prompts, decoded, count):
    every = decoded("warm", 3)
    got = generator.generate(prompts, max_new_tokens=NEW, num_draft_tokens=3, sampling=CASES["warm"], logprobs=count)
    for few, many in zip(got, every, strict=True):
        assert few.tokens == many.tokens
        assert [entry.rejected for entry in few.logprobs] == [entry.rejected for entry in many.logprobs]
        for a, b in zip(few.logprobs, many.logprobs, strict=True):
            assert (a.logprob, a.top) == (b.logprob, b.top[:count])
        assert len(few.record()["logprobs"]) == len(few.tokens)


def test_without_asking_there_are_none(generator, prompts):
    (got,) = generator.generate(prompts[:1], max_new_tokens=3)
    assert got.logprobs is None
    assert "logprobs" not in got.record()
