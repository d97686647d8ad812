"""One optimiser step and one evaluation step, pure and jitted."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

from mtp_jax.compiler_options import TRAINING, compiler_options
from mtp_jax.config import ModelConfig, RouterType
from mtp_jax.errors import UserError
from mtp_jax.hf.parameters import flatten, unflatten
from mtp_jax.layers.router import balanced_bias
from mtp_jax.mtp import MTPModel, init_params
from mtp_jax.sharding import ROWS, spread, spread_gradients, spread_parameters
from train.batch import Batch
from train.experiment import Experiment
from train.lora import ADAPTERS, adapting, with_adapters
from train.objective import Losses, count_targets, losses
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


def trained(params: PyTree, experiment: Experiment) -> PyTree:
    """The parameters that a run changes, and keeps moments and checkpoints of: adapters, or the head's, or all."""
    if experiment.lora_rank:
        return {ADAPTERS: params[ADAPTERS]}
    return {"mtp": params["mtp"]} if experiment.gradient_mode == "head_only" else params


def with_dtype(experiment: Experiment) -> Experiment:
    """The experiment with `dtype=auto` settled: float32 on a CPU, bfloat16 elsewhere."""
    if experiment.dtype != "auto":
        return experiment
    return experiment.override(["dtype=" + ("float32" if jax.default_backend() == "cpu" else "bfloat16")])


def build_model(config: ModelConfig, experiment: Experiment) -> MTPModel:
    """The model as the experiment computes with it; `dtype` must be settled.

    Raises:
      UserError: if a setting is about experts, or their biases, and the model has none.
    """
    if experiment.balance_loss_weight and config.moe is None:
        raise UserError(
            f"setting balance_loss_weight: expected 0, the model has no experts, got {experiment.balance_loss_weight}"
        )
    if experiment.router_bias_rate and (config.moe is None or config.moe.router is not RouterType.SIGMOID):
        raise UserError(
            f"setting router_bias_rate: expected 0, the model's router has no biases, got {experiment.router_bias_rate}"
        )
    return MTPModel(config=config, dtype=jnp.dtype(experiment.dtype), remat=experiment.remat)


def initial_state(model: MTPModel, experiment: Experiment, params: dict | None = None) -> TrainState:
    """Step 0: empty moments, and adapters that change nothing yet if the experiment has any.

    Args:
      params: to start from; by default random ones, from the experiment's seed.
    """
    params = with_adapters(params or init_params(model, jax.random.key(experiment.seed)), experiment)
    zeros = [jnp.zeros((), jnp.int32) for _ in range(3)]  # one buffer each: a donated one must not come twice
    return TrainState(params, optimizer(experiment).init(trained(params, experiment)), *zeros)


def stored(state: TrainState, experiment: Experiment) -> TrainState:
    """What a checkpoint keeps of a state: not the weights that stay what the run began with."""
    return state._replace(params=trained(state.params, experiment))


@partial(jax.jit, static_argnames=("model", "experiment"), donate_argnames="state")
def train_step(
    model: MTPModel, experiment: Experiment, state: TrainState, batch: Batch, mtp_weight: Float[Array, ""]
) -> tuple[TrainState, StepMetrics]:
    """Gradient of the loss, then AdamW: params -= lr(step) update. A non-finite loss or gradient changes nothing
    but the counters.

    Args:
      mtp_weight: lambda of this step (`schedules.mtp_weight`).
    """
    report, gradients = loss_and_gradients(model, experiment, state.params, batch, mtp_weight)
    old = trained(state.params, experiment)
    grad_norm = optax.tree.norm(gradients)
    learning_rate = jnp.asarray(learning_rate_schedule(experiment)(state.step))
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to whole-number powers
        updates, new_optimizer = optimizer(experiment).update(gradients, state.optimizer, old)

    def moved(path: tuple, parameter: Array, update: Array) -> Array:
        names = [entry.key for entry in path]  # mtp/.. or, of adapters, adapters/mtp/..
        rate = learning_rate * (experiment.head_learning_rate_scale if "mtp" in names[:2] else 1.0)
        return parameter - (rate * update).astype(parameter.dtype)

    new = jax.tree_util.tree_map_with_path(moved, old, updates)
    if experiment.router_bias_rate:
        new = _rebalanced(new, report.expert_load, experiment.router_bias_rate)
    finite = jnp.isfinite(report.loss) & jnp.isfinite(grad_norm)

    def unless_skipped(new: PyTree, old: PyTree) -> PyTree:
        return jax.tree.map(partial(jnp.where, finite), new, old)

    skipped = state.skipped + (~finite).astype(jnp.int32)
    in_a_row = jnp.where(finite, 0, state.skipped_in_a_row + 1)
    new_state = TrainState(
        params={**state.params, **unless_skipped(new, old)},
        optimizer=unless_skipped(new_optimizer, state.optimizer),
        step=state.step + 1,
        skipped=skipped,
        skipped_in_a_row=in_a_row,
    )
    new_state = spread_parameters(new_state, model.config)
    # On every device: each process reads them.
    return new_state, jax.tree.map(spread, StepMetrics(report, learning_rate, grad_norm, skipped, in_a_row))


def compile_step(model: MTPModel, experiment: Experiment, state: PyTree, batch: PyTree) -> jax.stages.Compiled:
    """`train_step` ahead of time, a function of (state, batch, mtp_weight); arrays or their shapes will do."""
    lowered = train_step.lower(model, experiment, state, batch, np.float32(0.0))
    return lowered.compile(compiler_options(TRAINING))


def _rebalanced(params: PyTree, loads: dict[str, Float[Array, " N"]], rate: float) -> PyTree:
    """With the routers' biases moved, in those layers that are trained."""
    leaves = flatten(params)
    for path, load in loads.items():
        name = f"{path}/gate/bias"
        if name in leaves:
            leaves[name] = balanced_bias(leaves[name], load, rate)
    return unflatten(leaves)


def loss_and_gradients(
    model: MTPModel, experiment: Experiment, params: PyTree, batch: Batch, mtp_weight: Float[Array, ""]
) -> tuple[Losses, PyTree]:
    """Losses of a batch and the gradients of what is trained, worked off in `accumulate_steps` parts one by one.

    Each term of a part is divided by the targets of the whole batch, so the parts' losses and gradients add up to
    the batch's own, however unevenly its targets are spread. What is not trained is no input of the differentiated
    function, so nothing is kept of it for a backward pass.
    """
    counts = count_targets(batch, experiment.depths)

    def part_loss(trained_params: PyTree, part: Batch) -> tuple[Float[Array, ""], Losses]:
        every = {**params, **trained_params}
        with adapting(every, experiment):
            return losses(model, every, part, mtp_weight, experiment, counts)

    def part_result(part: Batch) -> tuple[Losses, PyTree]:
        (_, report), gradients = jax.value_and_grad(part_loss, has_aux=True)(trained(params, experiment), part)
        return report, spread_gradients(gradients, model.config)

    num_parts = experiment.accumulate_steps
    if num_parts == 1:
        return part_result(batch)

    def add(total: PyTree, part: Batch) -> tuple[PyTree, None]:
        return jax.tree.map(jnp.add, total, part_result(part)), None

    parts = jax.tree.map(lambda x: spread(jnp.asarray(x).reshape(num_parts, -1, *x.shape[1:]), None, ROWS), batch)
    shapes = jax.eval_shape(part_result, jax.tree.map(lambda x: x[0], parts))
    total, _ = jax.lax.scan(add, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), parts)
    return total


@partial(jax.jit, static_argnames=("model", "experiment"))
def eval_step(
    model: MTPModel, experiment: Experiment, params: PyTree, batch: Batch, counts: Float[Array, " predictors"]
) -> Losses:
    """A batch's share in the losses of all batches whose targets `counts` counts: the sum over them is the mean."""
    return jax.tree.map(spread, losses(model, params, batch, jnp.zeros((), jnp.float32), experiment, counts)[1])
