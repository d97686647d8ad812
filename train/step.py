"""One optimiser step and one evaluation step, pure and jitted."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from mtp_jax.mtp import MTPModel, init_params
from train.experiment import Experiment
from train.objective import Losses, losses
from train.schedules import learning_rate_schedule


class TrainState(NamedTuple):
    """Everything that a step changes on the device. What follows from the step's number (tokens seen, the data's
    position) is counted on the host."""

    params: PyTree
    optimizer: optax.OptState
    step: Int[Array, ""]  # steps taken, skipped ones included
    skipped: Int[Array, ""]  # steps without a finite loss and gradient, which changed nothing
    skipped_in_a_row: Int[Array, ""]


class StepMetrics(NamedTuple):
    """What a step reports, from before its update."""

    losses: Losses
    learning_rate: Float[Array, ""]
    grad_norm: Float[Array, ""]  # global, before clipping
    skipped: Int[Array, ""]
    skipped_in_a_row: Int[Array, ""]


def optimizer(experiment: Experiment) -> optax.GradientTransformation:
    """AdamW behind a clip by global norm, without the learning rate, which `train_step` applies.

    Decay leaves out vectors (norm scales, A_log, dt_bias), which have no reason to shrink, and the vocabulary's
    matrix, of which rare tokens' columns get no gradient to stand against it.
    """

    def decayed(params: PyTree) -> PyTree:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf.ndim > 1 and path[0].key not in ("lm_head", "embed_tokens"), params
        )

    return optax.chain(
        optax.clip_by_global_norm(experiment.clip_norm),
        optax.scale_by_adam(experiment.beta1, experiment.beta2),
        optax.add_decayed_weights(experiment.weight_decay, mask=decayed),
    )


def initial_state(model: MTPModel, experiment: Experiment) -> TrainState:
    """Step 0: parameters from the experiment's seed, empty moments."""
    params = init_params(model, jax.random.key(experiment.seed))
    zeros = [jnp.zeros((), jnp.int32) for _ in range(3)]  # one buffer each: a donated one must not come twice
    return TrainState(params, optimizer(experiment).init(params), *zeros)


@partial(jax.jit, static_argnames=("model", "experiment"), donate_argnames="state")
def train_step(
    model: MTPModel,
    experiment: Experiment,
    state: TrainState,
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    mtp_weight: Float[Array, ""],
) -> tuple[TrainState, StepMetrics]:
    """Gradient of the loss, then AdamW: params -= lr(step) update. A non-finite loss or gradient changes nothing
    but the counters.

    Args:
      mtp_weight: lambda of this step (`schedules.mtp_weight`).
    """
    objective = partial(losses, model)
    (_, report), gradients = jax.value_and_grad(objective, has_aux=True)(
        state.params, tokens, segment_ids, mtp_weight, experiment.cross_entropy_chunk
    )
    grad_norm = optax.tree.norm(gradients)
    learning_rate = jnp.asarray(learning_rate_schedule(experiment)(state.step))
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to whole-number powers
        updates, new_optimizer = optimizer(experiment).update(gradients, state.optimizer, state.params)
    new_params = jax.tree.map(lambda p, u: p - (learning_rate * u).astype(p.dtype), state.params, updates)

    finite = jnp.isfinite(report.loss) & jnp.isfinite(grad_norm)

    def unless_skipped(new: PyTree, old: PyTree) -> PyTree:
        return jax.tree.map(partial(jnp.where, finite), new, old)

    skipped = state.skipped + (~finite).astype(jnp.int32)
    in_a_row = jnp.where(finite, 0, state.skipped_in_a_row + 1)
    new_state = TrainState(
        params=unless_skipped(new_params, state.params),
        optimizer=unless_skipped(new_optimizer, state.optimizer),
        step=state.step + 1,
        skipped=skipped,
        skipped_in_a_row=in_a_row,
    )
    return new_state, StepMetrics(report, learning_rate, grad_norm, skipped, in_a_row)


@partial(jax.jit, static_argnames=("model", "chunk"))
def eval_step(
    model: MTPModel, params: PyTree, tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"], chunk: int
) -> Losses:
    """The losses of one batch, nothing learnt."""
    return losses(model, params, tokens, segment_ids, jnp.zeros((), jnp.float32), chunk)[1]
