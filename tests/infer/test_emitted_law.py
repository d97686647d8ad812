"""The joint law of the first tokens that the real loop emits, against the trunk's own by enumeration.

`test_verify_sampling.py` shows the law of the verifiers for made-up p and q. Here positions, keys, history, commits and
end ids are on trial: a small model, many rows, and the law of every path from one pass over its whole text.
"""

import itertools
from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from bent_model import CONFIG, bent_params
from chi_squared import deviation
from warp_reference import reference_law

from infer import speculative
from infer.carry import RUNNING, Plan
from infer.generator import Generator
from infer.logits import all_logits
from infer.noise import row_key
from infer.sampling import Sampling
from mtp_jax.mtp import MTPModel

VOCAB, PROMPT, NEW, END = 5, [3, 1], 3, 4
SLOTS = 13
MODEL = MTPModel(replace(CONFIG, vocab_size=VOCAB, width=8, mlp_width=6), jnp.dtype("float32"))
CASES = {
    "warm": Sampling(temperature=1.0),
    "top-k and penalties": Sampling(
        temperature=1.4, top_k=4, repetition_penalty=1.6, presence_penalty=0.3, frequency_penalty=0.4
    ),
    "top-p, bias and minimum": Sampling(temperature=1.3, top_p=0.9, logit_bias={1: 0.7}, min_new_tokens=2),
    "min-p and ban": Sampling(temperature=1.5, min_p=0.1, banned_ids=[2]),
}


@cache
def params():
    # Noise that leaves trunk and head laws of their own, and scores near one another.
    made = bent_params(MODEL, seed=2, trunk_noise=0.8, head_noise=0.4)
    made["lm_head"]["kernel"] = made["lm_head"]["kernel"] * 0.4
    return made


@cache
def row_keys(rows):
    return np.stack([row_key(8, row, 0) for row in range(rows)])


def compiled(function, *args, **static):
    """For many rows optimising pays, which the tests leave out."""
    lowered = function.lower(MODEL, params(), *args, **static)
    return lowered.compile(compiler_options={"xla_backend_optimization_level": "2"})(params(), *args)


def first_tokens(sampling, num_drafts, rows):
    """What the loop emits, [rows, NEW] with -1 past an end, and the drafts accepted over those drafted."""
    rule = sampling.rule(VOCAB, VOCAB, [END])
    plan = Plan(num_drafts, sampling.verifier)
    lengths = np.full(rows, len(PROMPT), np.int32)
    tokens = np.zeros((rows, SLOTS), np.int32)
    tokens[:, : len(PROMPT)] = PROMPT
    keys = row_keys(rows)
    context = compiled(speculative.unread, batch=rows, num_slots=SLOTS)
    context = compiled(speculative.read, context, tokens[:, : len(PROMPT)], lengths, with_head=True)
    limits = np.full_like(lengths, NEW)
    carry = compiled(speculative.start, rule, context, tokens, lengths, limits, keys, plan=plan.without_drafts())
    carry = compiled(speculative.decode, rule, None, carry, np.int32(100), np.bool_(False), plan=plan)
    assert not (np.asarray(carry.finish) == RUNNING).any()
    index = np.arange(NEW)
    made = np.asarray(carry.num_new)[:, None] > index
    new = slice(len(PROMPT), len(PROMPT) + NEW)
    positions, drafted = np.asarray(carry.trace.draft_position)[:, new], np.asarray(carry.trace.round_drafts)[:, new]
    share = (made & (positions > 0)).sum() / max(1, (made * np.maximum(drafted, 0)).sum())
    return np.where(made, np.asarray(carry.tokens)[:, new], -1), share


@cache
def law_of(case):
    """Joint law [VOCAB + 1] * NEW; index -1 stands for no token after an end."""
    sampling = CASES[case]
    paths = np.array(list(itertools.product(range(VOCAB), repeat=NEW)))
    logits = all_logits(MODEL, params(), np.concatenate([np.tile(PROMPT, (len(paths), 1)), paths], axis=1))
    law = np.zeros((VOCAB + 1,) * NEW)
    for path, rows in zip(paths.tolist(), logits["main_logits"], strict=True):
        p, emitted = 1.0, []
        for i, token in enumerate(path):
            at = rows[len(PROMPT) + i - 1]
            p *= reference_law(at, sampling, PROMPT, path[:i], end_ids=[END])[token]
            emitted.append(token)
            if token == END:
                break
        # A path that ended comes once for each of its continuations.
        law[*emitted, *[-1] * (NEW - len(emitted))] = p
    assert law.sum() == pytest.approx(1, abs=1e-6)
    return law


def joint_cases():
    for case, verifier, num_drafts in itertools.product(CASES, ["shared_noise", "rejection"], [1, 2, 3]):
        quick = num_drafts == 3 and (case != "min-p and ban" or verifier == "rejection")
        yield pytest.param(case, verifier, num_drafts, marks=[] if quick else [pytest.mark.slow])


@pytest.mark.parametrize(("case", "verifier", "num_drafts"), list(joint_cases()))
def test_the_loop_emits_the_trunks_law(case, verifier, num_drafts):
    tokens, share = first_tokens(replace(CASES[case], verifier=verifier), num_drafts, 100_000)
    assert 0.1 < share < 0.9, "drafts no longer both stand and fall"
    assert abs(deviation(tokens, law_of(case))) < 4
    wrong = law_of("warm" if case != "warm" else "top-k and penalties")
    assert deviation(tokens, wrong) > 20


@pytest.mark.parametrize("verifier", ["shared_noise", "rejection"])
def test_samples_of_one_prompt_have_the_trunks_law(verifier):
    """Through slots: rows are replaced as they finish, and keys come from sample numbers."""
    generator = Generator(MODEL, params(), end_ids=[END])
    sampling = replace(CASES["top-p, bias and minimum"], seed=3, verifier=verifier)
    got = generator.generate(
        [PROMPT], max_new_tokens=NEW, num_samples=3000, num_draft_tokens=2, sampling=sampling, batch_size=64
    )
    tokens = np.array([c.tokens + [-1] * (NEW - len(c.tokens)) for c in got])
    assert abs(deviation(tokens, law_of("top-p, bias and minimum"))) < 4
