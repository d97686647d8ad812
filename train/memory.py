"""How much memory a training step takes, from its compiled program: nothing is allocated."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from mtp_jax.mtp import MTPModel
from mtp_jax.sizes import tree_bytes
from train.batch import Batch
from train.experiment import Experiment
from train.objective import count_targets, losses
from train.step import TrainState, compile_step, initial_state, trained


class StepMemory(NamedTuple):
    """All in bytes."""

    state: int  # parameters, moments, counters; updated in place
    kept: int  # what the forward pass of one part of the batch leaves for the backward pass, weights included
    temporary: int  # the most that is alive at once beside the state, as compiled here


def step_memory(model: MTPModel, experiment: Experiment) -> StepMemory:
    """Compiles one step of the experiment and reads what its buffers take."""
    state = _state(model, experiment)
    compiled = compile_step(model, experiment, state, _batch(experiment, experiment.batch_size))
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise NotImplementedError(f"{jax.default_backend()} does not say what a program's buffers take")
    return StepMemory(tree_bytes(state), kept_bytes(model, experiment), analysis.temp_size_in_bytes)


def kept_bytes(model: MTPModel, experiment: Experiment) -> int:
    """What the forward pass of one part of the batch leaves for the backward pass; the same on every backend."""
    params = _state(model, experiment).params
    part = _batch(experiment, experiment.batch_size // experiment.accumulate_steps)

    def backward(params: PyTree, part: Batch) -> PyTree:
        counts = count_targets(part, experiment.depths)

        def loss(trained_params: PyTree) -> jax.Array:
            return losses(model, {**params, **trained_params}, part, jnp.ones(()), experiment, counts)[0]

        return jax.vjp(loss, trained(params, experiment))[1]  # a tree whose leaves are what it keeps

    return tree_bytes(jax.eval_shape(backward, params, part))


def state_bytes(model: MTPModel, experiment: Experiment) -> int:
    """Parameters, moments and counters of a run."""
    return tree_bytes(_state(model, experiment))


def _state(model: MTPModel, experiment: Experiment) -> TrainState:
    """As shapes."""
    return jax.eval_shape(lambda: initial_state(model, experiment))


def _batch(experiment: Experiment, rows: int) -> Batch:
    tokens = np.zeros((rows, experiment.sequence_length), np.int32)
    return Batch(tokens, np.ones_like(tokens), np.ones_like(tokens, bool))
