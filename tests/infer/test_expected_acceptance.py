"""How often drafts should stand, against the definition in NumPy and against how often they do."""

import numpy as np
import pytest
from warp_reference import reference_law

from infer.expected_acceptance import expected_acceptance
from infer.logits import all_logits
from infer.sampling import Sampling

SAMPLINGS = {
    "warm": {"temperature": 1.0},
    "all": {"temperature": 0.9, "top_k": 30, "repetition_penalty": 1.2, "frequency_penalty": 0.2, "banned_ids": [5]},
}


def worked_out(generator, sampling, prompt, completion):
    rule = sampling.rule(61, 61, ())
    return expected_acceptance(generator.model, generator.programs.params, rule, prompt, completion)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_it_is_the_distance_of_the_two_laws_where_rounds_began(generator, prompts, name):
    sampling = Sampling(**SAMPLINGS[name], seed=3)
    for prompt in prompts[:2]:
        (got,) = generator.generate([prompt], max_new_tokens=30, num_draft_tokens=3, sampling=sampling)
        logits = all_logits(generator.model, generator.programs.params, np.array([prompt + got.tokens]))
        kept = []
        for i, drafts in enumerate(got.round_drafts):
            if drafts > 0:
                place, past = len(prompt) + i, got.tokens[:i]
                p = reference_law(logits["main_logits"][0, place - 1], sampling, prompt, past)
                q = reference_law(logits["mtp_logits"][0, place - 2], sampling, prompt, past)
                kept.append(np.minimum(p, q).sum())
        expected = worked_out(generator, sampling, prompt, got)
        assert expected.rounds == len(kept) > 3
        assert expected.overlap == pytest.approx(sum(kept), abs=1e-3)
        assert expected.coupling == pytest.approx(sum(x / (2 - x) for x in kept), abs=1e-3)


@pytest.mark.parametrize("verifier", ["shared_noise", "rejection"])
def test_drafts_stand_as_often_as_the_laws_say(generator, prompts, verifier):
    sampling = Sampling(**SAMPLINGS["warm"], seed=3, verifier=verifier)
    got = generator.generate(
        prompts[:1], max_new_tokens=45, num_samples=64, num_draft_tokens=1, sampling=sampling, cache_length=64
    )
    expected = [worked_out(generator, sampling, prompts[0], completion) for completion in got]
    rounds = sum(e.rounds for e in expected)
    share = sum(c.accepted for c in got) / rounds
    overlap, coupling = sum(e.overlap for e in expected) / rounds, sum(e.coupling for e in expected) / rounds
    assert 0.1 < coupling < overlap < 0.9
    error = (0.25 / rounds) ** 0.5
    if verifier == "rejection":
        assert abs(share - overlap) < 4 * error
    else:
        assert coupling - 4 * error < share < overlap + 4 * error
