"""What a caller of the generator meets: checks, buckets, one compilation, statistics."""

import copy
import dataclasses
import subprocess
import sys

import pytest

from infer.buckets import bucket
from infer.generator import Generator
from infer.sampling import Sampling
from mtp_jax.errors import UserError


@pytest.mark.parametrize(
    ("prompts", "kwargs", "message"),
    [
        ([[]], {}, "the prompt is empty"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, 61]], {}, "holds id 61; expected ids from 0 to 60"),
        ([[-1]], {}, "holds id -1; expected ids from 0 to 60"),
        ([[1]], {"num_draft_tokens": -1}, "num_draft_tokens must be at least 0, got -1"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1"),
        ([[1]], {"num_samples": 0}, "num_samples must be at least 1, got 0"),
        ([[1]], {"num_draft_tokens": 10**9}, "draft tokens must be at most 128"),
        ([[1]], {"draft_vocabulary": [1], "num_draft_tokens": 0}, "drop one of the two"),
        ([[1]], {"draft_vocabulary": []}, "draft_vocabulary must hold at least one id"),
        ([[1]], {"draft_vocabulary": [-1]}, "an id of draft_vocabulary must be at least 0, got -1"),
        ([[1]], {"draft_vocabulary": [61], "num_draft_tokens": 1}, "draft_vocabulary holds id 61"),
        ([[1]], {"stop": "\udcff"}, "expected stop strings that have a UTF-8 form"),
        ([[1] * 9], {"cache_length": 8}, "a prompt of 9 tokens does not fit into the cache of 8 tokens"),
        ([[1] * 257], {}, "a prompt of 257 tokens does not fit into the cache of 256 tokens"),
        ([[1]], {"cache_length": 257}, "between 1 and the model's max_position_embeddings 256, got 257"),
        ([[1]], {"cache_length": 0}, "between 1 and the model's max_position_embeddings 256, got 0"),
    ],
)
def test_bad_input_is_a_users_error(generator, prompts, kwargs, message):
    with pytest.raises(UserError, match=message):
        generator.generate(prompts, **{"max_new_tokens": 4, "num_draft_tokens": 0, **kwargs})


WRONG_TYPES = [
    ([[1]], dict(max_new_tokens=2.5), "max_new_tokens must be an integer, got 2.5"),
    ([[1]], dict(num_samples=None), "num_samples must be an integer, got None"),
    ([[1]], dict(num_draft_tokens="Auto"), "num_draft_tokens must be an integer or \"auto\", got 'Auto'"),
    ([[1]], dict(num_draft_tokens=1.5), "num_draft_tokens must be an integer, got 1.5"),
    ([[1]], dict(batch_size=None), "batch_size must be an integer, got None"),
    ([[1]], dict(cache_length="64"), "cache_length must be an integer, got '64'"),
    ([[1]], dict(logprobs=True), "logprobs must be an integer, got True"),
    ([[1]], dict(ignore_eos="no"), "ignore_eos must be True or False, got 'no'"),
    ([[1]], dict(sampling={"seed": 1}), "sampling must be a Sampling, got {'seed': 1}"),
    ([[1]], dict(draft_vocabulary=5), "draft_vocabulary must be a list of ids, got 5"),
    ([[1]], dict(stop=None), "expected a stop string or a list of them, got None"),
    (None, {}, "expected a list of prompts, got None"),
    ([b"ab"], {}, "prompt 0: expected a text or a list of ids, got b'ab'"),
]


def test_wrong_types_are_a_users_error():
    """In a process of its own: here the suite's type checker would refuse them first."""
    code = f"""
from infer import Generator
from mtp_jax.errors import UserError
for prompts, settings, message in {WRONG_TYPES!r}:
    try:
        object.__new__(Generator).generate(prompts, **settings)
        got = "nothing"
    except UserError as error:
        got = str(error)
    assert got == message, (prompts, settings, got)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_drafting_without_a_head_says_what_to_do(generator):
    params = {name: value for name, value in generator.programs.params.items() if name != "mtp"}
    config = dataclasses.replace(generator.model.config, num_mtp_layers=0)
    trunk = Generator(dataclasses.replace(generator.model, config=config), params)
    with pytest.raises(UserError, match=r"not --trunk-only, or decode plainly with --num-draft-tokens 0"):
        trunk.generate([[1]], num_draft_tokens=1)


def test_a_limit_beyond_all_integers_is_the_caches(generator):
    (got,) = generator.generate([[1]], max_new_tokens=10**30, num_draft_tokens=0, cache_length=8)
    assert len(got.tokens) == 7


def test_no_prompts_give_no_completions(generator):
    assert generator.generate([]) == []


def test_a_prompt_that_fills_the_cache_gets_no_token(generator):
    (got,) = generator.generate([[1] * 64], max_new_tokens=4, cache_length=64)
    assert (got.tokens, got.finish_reason, got.rounds, got.tokens_per_round) == ([], "length", 0, None)


@pytest.mark.parametrize(("size", "expected"), [(1, 64), (64, 64), (65, 128), (1000, 1024)])
def test_bucket(size, expected):
    assert bucket(size, 64) == expected


def test_a_second_call_with_other_values_does_not_compile(generator, prompts, compiled, no_programs_dropped):
    generator.generate(prompts, max_new_tokens=45, num_draft_tokens=3)
    del compiled[:]
    other = copy.copy(generator)
    other.end_ids = frozenset([5, 6])
    other_prompts = [[*prompt[:-1], 8, 9, 10] for prompt in prompts]
    sampling = Sampling(
        temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1,
        frequency_penalty=0.1, logit_bias={3: 1.0}, banned_ids=[4], min_new_tokens=3, seed=1,
    )  # fmt: skip
    for settings in ({}, {"sampling": Sampling(temperature=1.0)}, {"sampling": sampling, "num_samples": 2}):
        got = other.generate(other_prompts, max_new_tokens=31, num_draft_tokens=3, batch_size=4, **settings)
        assert not compiled
    assert len(got) == 8
    assert got[0].compile_seconds == 0


def test_next_logits_are_what_plain_decoding_chose_from(generator, prompts):
    (plain,) = generator.generate(prompts[:1], max_new_tokens=10, num_draft_tokens=0)
    for index in (0, 1, 9):
        assert int(generator.next_logits(prompts[0], index, 10).argmax()) == plain.tokens[index]
    (single,) = generator.generate([[9]], max_new_tokens=1, num_draft_tokens=0)
    assert int(generator.next_logits([9], 0, 1).argmax()) == single.tokens[0]


def test_a_draft_vocabulary_is_a_set(generator):
    law = {"max_new_tokens": 12, "num_draft_tokens": 2}
    runs = [generator.generate([[9]], draft_vocabulary=ids, **law)[0] for ids in ([7, 3, 3, 9], (3, 7, 9))]
    assert runs[0].tokens == runs[1].tokens
    assert runs[0].draft_positions == runs[1].draft_positions
