"""Small models for all decoding tests, so that each shape compiles once."""

import jax.numpy as jnp
import pytest
from bent_model import FAMILIES, bent_params

from infer.generator import Generator
from mtp_jax.mtp import MTPModel


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Four of different lengths, one of a single token."""
    return [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6], [4, 3, 3]]


@pytest.fixture(
    scope="session",
    params=[pytest.param(name, marks=() if name == "dense hybrid" else pytest.mark.slow) for name in FAMILIES],
)
def model(request: pytest.FixtureRequest) -> MTPModel:
    """Dense in the quick run, where `every_family` tests alone go through all."""
    return MTPModel(FAMILIES[request.param], jnp.dtype("float32"))


@pytest.fixture(scope="session")
def params(model: MTPModel) -> dict:
    return bent_params(model, seed=0, trunk_noise=0.8, head_noise=0.1)


@pytest.fixture(scope="session")
def generator(model: MTPModel, params: dict) -> Generator:
    """Shared by tests, so that each shape compiles once; no tokenizer and no end ids."""
    return Generator(model, params)
