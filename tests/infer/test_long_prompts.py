"""Prompts of several pieces: the state is that of the whole prompt at once, and memory grows with the cache alone."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from bent_model import CONFIG, bent_params

from infer.generator import Generator
from infer.logits import all_logits
from infer.prompt_reading import PIECE, read_pieces, slots_for
from infer.sampling import Sampling
from infer.speculative import unread
from mtp_jax.mtp import MTPModel

MOST = 1100


@pytest.fixture(scope="module")
def roomy() -> Generator:
    """With room for prompts of several pieces."""
    model = MTPModel(replace(CONFIG, max_position_embeddings=MOST), jnp.dtype("float32"))
    return Generator(model, bent_params(model, seed=0, trunk_noise=0.8, head_noise=0.1))


def whole_text(generator, ids):
    """One pass over all of it; padded at the end, which nothing before it sees, so that one program serves all."""
    return all_logits(generator.model, generator.programs.params, np.array([ids + [0] * (MOST - len(ids))]))


def tokens(count):
    return np.random.default_rng(count).integers(61, size=count).tolist()


@pytest.mark.parametrize("length", [PIECE - 1, PIECE, PIECE + 1, PIECE + 17, 2 * PIECE, 2 * PIECE + 1])
def test_a_prompt_in_pieces_is_the_whole_prompt(roomy, length):
    """Held against one pass over all of it, which has neither a cache nor pieces."""
    prompt, model, params = tokens(length), roomy.model, roomy.programs.params
    num_slots = slots_for(MOST, 3)
    context = roomy.programs.call(unread, batch=1, num_slots=num_slots)
    pieces = list(read_pieces(roomy.programs, context, 0, prompt, num_slots, True))
    context, _ = pieces[-1]
    assert [count for _, count in pieces] == [*range(PIECE, length, PIECE), length]
    assert (int(context.trunk.length[0]), int(context.head.length[0])) == (length, length - 1)
    whole = whole_text(roomy, prompt)
    bound = model.bind({"params": params})
    np.testing.assert_allclose(context.hidden[0], whole["hidden"][0, length - 1], atol=2e-4)
    # The head reads one pair more, and then says what it says of the whole.
    own, _ = bound.mtp_extend(
        context.hidden[:, None], jnp.zeros((1, 1), jnp.int32), context.head, jnp.ones((1,), jnp.int32)
    )
    np.testing.assert_allclose(bound.logits(own)[0, 0], whole["mtp_logits"][0, length - 1], atol=1e-3)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, repetition_penalty=1.1, seed=1)])
def test_what_follows_is_the_same_for_every_number_of_drafts(roomy, sampling):
    settings = {"max_new_tokens": 24, "sampling": sampling, "cache_length": MOST}
    prompts = [tokens(PIECE + 1), tokens(2 * PIECE)]
    for prompt in prompts:
        plain, speculative = (roomy.generate([prompt], num_draft_tokens=j, **settings)[0] for j in (0, 3))
        assert speculative.tokens == plain.tokens
        assert len(plain.tokens) == 24
        assert 0 < speculative.accepted < speculative.drafted
        logits = whole_text(roomy, prompt + plain.tokens)["main_logits"][0]
        for index in (0, 12):
            got = roomy.next_logits(prompt, index, MOST, sampling)
            np.testing.assert_allclose(got, logits[len(prompt) - 1 + index], atol=2e-3)


@pytest.mark.parametrize("room", [0, 1, 5])
def test_a_prompt_that_all_but_fills_the_cache(roomy, room):
    prompt = tokens(MOST - room)
    plain, got = (roomy.generate([prompt], max_new_tokens=64, num_draft_tokens=j)[0] for j in (0, 3))
    assert (len(got.tokens), got.finish_reason) == (room, "length")
    assert got.tokens == plain.tokens
    if room:
        assert got.tokens[0] == whole_text(roomy, prompt)["main_logits"][0, len(prompt) - 1].argmax()


def peak_memory(num_tokens):
    script = Path(__file__).parent / "peak_memory.py"
    run = subprocess.run([sys.executable, script, str(num_tokens)], capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


@pytest.mark.slow
def test_memory_grows_with_the_cache_alone():
    """Keys and values of the shipped model are 2 KiB a token, and a row is held twice while it is placed."""
    short, long = peak_memory(2048), peak_memory(32760)
    grown = (long["after"] - long["before"]) - (short["after"] - short["before"])
    buffers = 2 * 2 * (32760 - 2048) / 1024
    slack = 60  # the peak of loading differs by so many MiB from run to run
    assert grown < buffers + slack, (short, long)
