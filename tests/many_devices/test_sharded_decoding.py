"""Decoding over several devices gives the tokens of one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from bent_model import CONFIG, FAMILIES, bent_params
from meshes import SMALLEST, mesh

from infer.generator import Generator
from infer.sampling import Sampling
from mtp_jax.mtp import MTPModel
from mtp_jax.sharding import parameter_shardings

PROMPTS = [[3, 1, 4, 1, 5], [9], [4, 3, 3], [7, 7, 2], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]]
MODELS = {
    "smallest": SMALLEST,
    "tied hybrid": replace(CONFIG, tie_embeddings=True),
    "hybrid with experts": FAMILIES["hybrid with experts"],
    "attention with experts": FAMILIES["attention with experts"],
}


def decoded(name, devices, **settings):
    """Tokens, and how many drafts were accepted."""
    model = MTPModel(MODELS[name], jnp.dtype("float32"))
    params = bent_params(replace(model, config=replace(model.config, tie_embeddings=False)), 0, 0.8, 0.1)
    if model.config.tie_embeddings:
        del params["embed_tokens"]
    generator = Generator(model, params, mesh=mesh(devices) if devices else None)
    if devices:
        shardings = parameter_shardings(params, model.config, mesh(devices))
        assert jax.tree.map(lambda x: x.sharding, generator.programs.params) == shardings
    completions = generator.generate(PROMPTS, max_new_tokens=12, num_draft_tokens=1, batch_size=4, **settings)
    return [completion.tokens for completion in completions], sum(completion.accepted for completion in completions)


def check(name, devices, **settings):
    """Five prompts in four rows: one row is filled a second time."""
    tokens, accepted = decoded(name, devices, **settings)
    assert (tokens, accepted) == decoded(name, None, **settings)
    assert accepted > 0
    assert all(len(row) == 12 for row in tokens)


def test_greedy_tokens():
    check("smallest", "data:2,fsdp:2,tensor:2")


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["data:8", "fsdp:8", "data:2,fsdp:2,tensor:2", "fsdp:2,tensor:4"])
@pytest.mark.parametrize("name", ["tied hybrid", "hybrid with experts", "attention with experts"])
def test_greedy_tokens_on_other_meshes(name, devices):
    check(name, devices)


@pytest.mark.slow
def test_sampled_tokens():
    sampling = Sampling(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.1, seed=3)
    check(
        "tied hybrid", "data:2,fsdp:2,tensor:2", sampling=sampling, logprobs=2, draft_vocabulary=list(range(0, 61, 2))
    )
