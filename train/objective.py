"""The training loss: next token, plus lambda times the token after it as the multi-token-prediction head sees it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from mtp_jax.mtp import MTPModel
from train.cross_entropy import weighted_cross_entropy
from train.data import PADDING


class Losses(NamedTuple):
    """What one batch gives; all float32. Each is a mean over its own unmasked targets, 0 if there are none."""

    loss: Float[Array, ""]  # main_loss + mtp_weight * mtp_loss
    main_loss: Float[Array, ""]
    mtp_loss: Float[Array, ""]
    mtp_accuracy: Float[Array, ""]  # share of depth-1 targets where the head's argmax is the label
    mtp_agreement: Float[Array, ""]  # share where it is the trunk's argmax for the same place
    main_count: Float[Array, ""]  # unmasked targets
    mtp_count: Float[Array, ""]


def shift_within_document(
    tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"], shift: int
) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """Targets `shift` tokens ahead, and where they belong to the same document without a break.

        targets[b, t] = tokens[b, t + shift],    mask[b, t] = no change of document between t and t + shift

    A document of n tokens has n - shift targets. Segment ids may come back in a row (1, 2, 1): every change starts a
    document. Where there is no target the mask is False and the target 0.
    """
    num_tokens = tokens.shape[1]
    after = [(0, 0), (0, min(shift, num_tokens))]
    targets = jnp.pad(tokens[:, shift:], after)
    changes = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], [(0, 0), (1, 0)])
    document = jnp.cumsum(changes.astype(jnp.int32), axis=1)
    later = jnp.pad(document[:, shift:], after, constant_values=-1)
    return targets, (later == document) & (segment_ids != PADDING)


def losses(
    model: MTPModel,
    params: PyTree,
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    mtp_weight: Float[Array, ""],
    chunk: int,
) -> tuple[Float[Array, ""], Losses]:
    """loss = main + lambda mtp, with main and mtp each a sum over unmasked targets divided by their own number.

        main = mean_t -log p(token t+1 | tokens <= t)              trunk
        mtp  = mean_t -log q(token t+2 | hidden t, token t+1)      head, through the same output matrix

    The gradient of both terms reaches trunk, head and vocabulary matrix (joint training).

    Args:
      mtp_weight: lambda.
      chunk: see `weighted_cross_entropy`.

    Returns:
      the loss to differentiate, and everything to report.

    Reference: DeepSeek-V3, arXiv:2412.19437, section 2.2, at depth 1.
    """
    next_tokens, main_mask = shift_within_document(tokens, segment_ids, 1)
    second_tokens, mtp_mask = shift_within_document(tokens, segment_ids, 2)

    bound = model.bind({"params": params})
    hidden = bound(tokens, segment_ids)
    head_hidden = bound.mtp(hidden, next_tokens, segment_ids)

    main_count = jnp.sum(main_mask, dtype=jnp.float32)
    mtp_count = jnp.sum(mtp_mask, dtype=jnp.float32)
    main_weights = main_mask.astype(jnp.float32) / jnp.maximum(main_count, 1.0)
    mtp_weights = mtp_mask.astype(jnp.float32) / jnp.maximum(mtp_count, 1.0)

    def flat(main: Array, mtp: Array) -> Array:
        both = jnp.concatenate([main, mtp])
        return both.reshape(-1, *both.shape[2:])

    # main and mtp in one pass over the output matrix: sum over tokens of (1 / count) CE and (lambda / count) CE.
    loss, per_token, best = weighted_cross_entropy(
        flat(hidden, head_hidden),
        params["lm_head"]["kernel"],
        flat(next_tokens, second_tokens),
        flat(main_weights, mtp_weight * mtp_weights),
        chunk,
    )
    main_per_token, mtp_per_token = per_token.reshape(2, *tokens.shape)
    trunk_best, head_best = best.reshape(2, *tokens.shape)

    main_loss = jnp.sum(main_per_token * main_weights)
    mtp_loss = jnp.sum(mtp_per_token * mtp_weights)
    # The head at index t and the trunk at index t+1 predict the same token.
    trunk_best_there = jnp.pad(trunk_best[:, 1:], [(0, 0), (0, 1)])
    report = Losses(
        loss=main_loss + mtp_weight * mtp_loss,
        main_loss=main_loss,
        mtp_loss=mtp_loss,
        mtp_accuracy=jnp.sum(jnp.where(head_best == second_tokens, mtp_weights, 0.0)),
        mtp_agreement=jnp.sum(jnp.where(head_best == trunk_best_there, mtp_weights, 0.0)),
        main_count=main_count,
        mtp_count=mtp_count,
    )
    return loss, jax.lax.stop_gradient(report)
