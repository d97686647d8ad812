"""The training loss: next token, plus lambda times what the multi-token-prediction head, run on its own output, misses.

Everything is laid out by *place*: at place t, a row's tokens up to t are known and token t+1 is the label. The trunk
predicts it from index t, the head at depth d from index t - d. So all predictors of a place share one label, one mask
of targets, and the trunk's distribution that the head is measured against.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from mtp_jax.documents import documents
from mtp_jax.layers.router import balancing_loss
from mtp_jax.mtp import MTPModel
from train.batch import PADDING, Batch
from train.experiment import Experiment
from train.vocabulary_losses import vocabulary_losses


class Losses(NamedTuple):
    """What one batch gives; all float32. Each is a mean over its own unmasked targets, 0 if there are none.

    Over microbatches that were given the counts of all, the sum of each field is that of the whole.
    """

    loss: Float[Array, ""]  # main_loss + mtp_weight * mtp_loss
    main_loss: Float[Array, ""]
    mtp_loss: Float[Array, ""]  # mean over depths, by depth weight
    depth_losses: Float[Array, " depths"]
    mtp_accuracy: Float[Array, " depths"]  # share of a depth's targets where the head's argmax is the label
    mtp_agreement: Float[Array, " depths"]  # share where it is the trunk's argmax for the same place
    main_count: Float[Array, ""]  # unmasked targets
    mtp_count: Float[Array, " depths"]
    balance_loss: Float[Array, ""]  # mean over layers with experts; 0 if there are none
    expert_load: dict[str, Float[Array, " N"]]  # tokens that chose each expert, by the layer's path


def targets(batch: Batch, depths: int) -> tuple[Int[Array, "B T"], Bool[Array, "predictors B T"]]:
    """Labels of all places, and where each predictor (the trunk, then the head at depths 1, 2, ..) has a target.

        labels[b, t] = tokens[b, t+1],    mask[d, b, t] = loss_mask[b, t+1] and no change of document from t-d to t+1

    A document of n tokens has n - 1 - d of depth d (0: the trunk) less those whose label is masked. Segment ids may
    come back in a row (1, 2, 1): every change starts a document. Where there is no target the label may be any id.
    """
    number = documents(jnp.asarray(batch.segment_ids)).number
    may_be_label = jnp.asarray(batch.loss_mask & (batch.segment_ids != PADDING))
    num_tokens = number.shape[1]
    after = [(0, 0), (0, 1)]
    label_number = jnp.pad(jnp.where(may_be_label, number, -1)[:, 1:], after, constant_values=-1)
    # A row has no number below 0: -2 stands for a start before the row's, -1 for no label.
    starts = [jnp.pad(number, [(0, 0), (depth, 0)], constant_values=-2)[:, :num_tokens] for depth in range(depths + 1)]
    return jnp.pad(batch.tokens[:, 1:], after), jnp.stack(starts) == label_number[None]


def count_targets(batch: Batch, depths: int) -> Float[Array, " predictors"]:
    """Targets of the trunk, then of the head at each depth."""
    return jnp.sum(targets(batch, depths)[1], axis=(1, 2), dtype=jnp.float32)


def losses(
    model: MTPModel,
    params: PyTree,
    batch: Batch,
    mtp_weight: Float[Array, ""],
    experiment: Experiment,
    counts: Float[Array, " predictors"] | None = None,
) -> tuple[Float[Array, ""], Losses]:
    """loss = main + lambda sum_d w_d mtp_d, each term a sum over its own targets divided by their number.

        main  = mean_t -log p(token t+1 | tokens <= t)            trunk
        mtp_d = mean_t of the head's loss at depth d, at the same places and through the same output matrix

    The head's loss is cross entropy to the label, or a distance to the trunk's own distribution (`head_loss`, see
    `vocabulary_losses`). `gradient_mode` says what the terms reach:

        joint      both reach trunk, head and vocabulary matrices
        detached   the MTP terms reach parameters under `mtp` only: the trunk's output, the embedding and the output
                   matrix count as given in them
        head_only  as detached, and the main loss reaches nothing; differentiate in `params["mtp"]` alone

    With experts, `balance_loss_weight` times the mean of their layers' balancing losses is added to what is
    differentiated, not to what is reported as the loss. Microbatches are balanced each by itself.

    Args:
      mtp_weight: lambda.
      experiment: depths, depth_weights, head_loss, gradient_mode, cross_entropy_chunk, balance_loss_weight,
        accumulate_steps.
      counts: `count_targets` of all microbatches together, if the batch is one of several.

    Returns:
      the loss to differentiate, and everything to report.

    Reference: DeepSeek-V3, arXiv:2412.19437, section 2.2, with one head for all depths that attends as it does when
    drafts are chained in decoding.
    """
    depths = experiment.depths
    labels, mask = targets(batch, depths)
    if counts is None:
        counts = count_targets(batch, depths)
    per_target = mask.astype(jnp.float32) / jnp.maximum(counts, 1.0)[:, None, None]
    depth_weights = jnp.asarray(experiment.depth_weight_values(), jnp.float32)
    weights = per_target * jnp.concatenate([jnp.ones(1), mtp_weight[None] * depth_weights])[:, None, None]

    tokens, segment_ids = jnp.asarray(batch.tokens), jnp.asarray(batch.segment_ids)
    trunk = model.bind({"params": params})
    counted = segment_ids != PADDING
    hidden, trunk_routings = trunk.routed(tokens, segment_ids, counted)
    head_params, seen_by_head = params, hidden
    if experiment.gradient_mode != "joint":
        given, seen_by_head = jax.lax.stop_gradient((params, hidden))
        head_params = {**given, "mtp": params["mtp"]}
    head = model.bind({"params": head_params})
    chained, head_routings = head.mtp_chain(seen_by_head, tokens, segment_ids, depths, counted)
    head_outputs = [head.head_output(own, depth) for depth, own in enumerate(chained, 1)]

    at_place = [
        jnp.pad(own, [(0, 0), (depth, 0), (0, 0)])[:, : tokens.shape[1]] for depth, own in enumerate(head_outputs, 1)
    ]
    loss, by_token = vocabulary_losses(
        jnp.stack([trunk.trunk_output(hidden), *at_place]).reshape(depths + 1, -1, hidden.shape[-1]),
        params["lm_head"]["kernel"],
        labels.reshape(-1),
        weights.reshape(depths + 1, -1),
        experiment.head_loss,
        experiment.gradient_mode,
        experiment.cross_entropy_chunk,
    )

    def means(x: Float[Array, "predictors T"]) -> Float[Array, " predictors"]:
        return jnp.sum(x * per_target.reshape(x.shape), axis=1)

    routings = {
        f"{stack}/layers_{n}/mlp": routing
        for stack, by_layer in (("trunk", trunk_routings), ("mtp", head_routings))
        for n, routing in enumerate(by_layer)
        if routing is not None
    }
    balance = sum(map(balancing_loss, routings.values()), start=jnp.zeros(()))
    balance = balance / (max(1, len(routings)) * experiment.accumulate_steps)
    term_losses = means(by_token.loss)
    best = by_token.best
    mtp_loss = jnp.sum(depth_weights * term_losses[1:])
    report = Losses(
        loss=term_losses[0] + mtp_weight * mtp_loss,
        main_loss=term_losses[0],
        mtp_loss=mtp_loss,
        depth_losses=term_losses[1:],
        mtp_accuracy=means((best == labels.reshape(1, -1)).astype(jnp.float32))[1:],
        mtp_agreement=means((best == best[:1]).astype(jnp.float32))[1:],
        main_count=jnp.sum(mask[0], dtype=jnp.float32),
        mtp_count=jnp.sum(mask[1:], axis=(1, 2), dtype=jnp.float32),
        balance_loss=balance,
        expert_load={path: routing.load for path, routing in routings.items()},
    )
    return loss + experiment.balance_loss_weight * balance, jax.lax.stop_gradient(report)


def expert_figures(losses: Losses) -> dict[str, float]:
    """How even the layers' experts are loaded, by the names in metrics.jsonl; nothing without experts.

    `expert_load_max` is the most loaded expert's share over an even one's, mean over layers; `experts_unused` the share
    of experts that no token chose.
    """
    loads = [np.asarray(load, np.float64) for load in losses.expert_load.values()]
    if not loads:
        return {}
    return {
        "balance_loss": float(losses.balance_loss),
        "expert_load_max": float(np.mean([load.max() / max(load.mean(), 1e-9) for load in loads])),
        "experts_unused": float(np.mean([load == 0 for load in loads])),
    }


def mtp_figures(losses: Losses) -> dict[str, float]:
    """Accuracy and agreement by their names in metrics.jsonl; with more than one depth the loss of each too."""
    figures = {"mtp_accuracy": losses.mtp_accuracy[0], "mtp_agreement": losses.mtp_agreement[0]}
    num_depths = len(losses.depth_losses)
    for depth in range(1, num_depths + 1) if num_depths > 1 else ():
        figures[f"mtp_loss_d{depth}"] = losses.depth_losses[depth - 1]
    for depth in range(2, num_depths + 1):
        figures[f"mtp_accuracy_d{depth}"] = losses.mtp_accuracy[depth - 1]
        figures[f"mtp_agreement_d{depth}"] = losses.mtp_agreement[depth - 1]
    return {name: float(value) for name, value in figures.items()}
