"""Losses on what is held out."""

from collections.abc import Sequence

import jax
import numpy as np

from mtp_jax.mtp import MTPModel
from mtp_jax.sharding import all_rows
from train.experiment import Experiment
from train.lora import merged
from train.objective import Losses, count_targets, mtp_figures
from train.packing import PackedRows
from train.step import TrainState, eval_step


def evaluate(
    experiment: Experiment, model: MTPModel, state: TrainState, held_out: Sequence[PackedRows]
) -> dict[str, float]:
    """Losses on all held-out rows, each mean over all their targets, under keys `eval_...`, at all measured depths."""
    experiment = experiment.measured()
    params = merged(state.params, experiment)
    batches = [batch for rows in held_out for batch in rows.batches(experiment.batch_size)]
    counts = sum(np.asarray(count_targets(batch, experiment.depths)) for batch in batches)
    parts = [jax.device_get(eval_step(model, experiment, params, all_rows(batch), counts)) for batch in batches]
    whole: Losses = jax.tree.map(lambda *x: np.sum(x, axis=0, dtype=np.float64), *parts)
    figures = {"main_loss": float(whole.main_loss), "mtp_loss": float(whole.mtp_loss), **mtp_figures(whole)}
    return {f"eval_{name}": value for name, value in figures.items()}
