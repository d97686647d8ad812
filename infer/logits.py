"""Everything the model says about given tokens: for comparing with other implementations, number by number."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mtp_jax.config import HeadReads
from mtp_jax.errors import UserError
from mtp_jax.mtp import MTPModel
from mtp_jax.state import empty_head_state

CHAINED = 4
"""Drafts after the last position."""

_TOKENS_AT_ONCE = 2048


def check_ids(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """The ids as int32 [B, T].

    Raises:
      UserError: if they are not integers, not of rank 2, empty along T, or outside the vocabulary.
    """
    if not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"ids must be integers, got {ids.dtype}")
    if ids.ndim != 2 or ids.shape[1] == 0:
        raise UserError(f"ids must have shape [B, T] with T of at least 1, got {list(ids.shape)}")
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        row, column = np.argwhere(outside)[0]
        raise UserError(f"ids must be in 0..{vocab_size - 1}, got {ids[row, column]} at row {row}, column {column}")
    return ids.astype(np.int32)


def all_logits(model: MTPModel, params: dict, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Logits and hidden states of trunk and head at every position, all float32.

    With h_t the trunk's hidden state after the final norm, e the embedding and W the output matrix:

        main_logits[t]    = h_t W
        mtp_logits[t]     = head(h_t, e(ids[t+1])) W
        chained_logits[0] = head(h_{T-1}, e(argmax main_logits[T-1])) W
        chained_logits[k] = head(own normed output of entry k-1, e(argmax chained_logits[k-1])) W

    The head's cache is primed with the T-1 pairs that come before the chain. With `head_reads` BEFORE_NORM the head
    reads the streams before these norms; of several layers, entry k is that of layer k, or the last. No id is masked.

    Args:
      ids: integers [B, T], T >= 1, of full rows: nothing is padding.

    Returns:
      main_logits [B,T,vocab], hidden [B,T,D], hidden_before_norm [B,T,D] and, if the model has a head,
      mtp_logits [B,T-1,vocab] and chained_logits [B,4,vocab].

    Raises:
      UserError: as `check_ids`.
    """
    ids = check_ids(ids, model.config.vocab_size)
    rows, length = ids.shape
    step = max(1, _TOKENS_AT_ONCE // length)
    shapes = jax.eval_shape(partial(_forward, model), params, jax.ShapeDtypeStruct((1, length), jnp.int32))
    result = {name: np.zeros((rows, *leaf.shape[1:]), np.float32) for name, leaf in shapes.items()}
    # An accelerator's default precision of a float32 product is lower.
    with jax.default_matmul_precision("highest"):
        for start in range(0, rows, step):
            for name, value in _forward(model, params, jnp.asarray(ids[start : start + step])).items():
                result[name][start : start + step] = np.asarray(value)
    return result


@partial(jax.jit, static_argnames="model")
def _forward(model: MTPModel, params: dict, ids: Int[Array, "B T"]) -> dict[str, Float[Array, "B ..."]]:
    bound = model.bind({"params": params})
    document = jnp.zeros_like(ids)
    before = bound.hidden_before_norm(ids, document)
    hidden = bound.final_norm(before)
    main = bound.logits(hidden)
    result = {"main_logits": main, "hidden": hidden, "hidden_before_norm": before}
    if model.config.num_mtp_layers:
        read = hidden if model.config.head_reads is HeadReads.AFTER_NORM else before
        drafted, chained = _head(model, params, ids, read, main)
        result |= {"mtp_logits": drafted, "chained_logits": chained}
    return {name: value.astype(jnp.float32) for name, value in result.items()}


def _head(
    model: MTPModel,
    params: dict,
    ids: Int[Array, "B T"],
    hidden: Float[Array, "B T D"],
    main: Float[Array, "B T vocab"],
) -> tuple[Float[Array, "B T-1 vocab"], Float[Array, "B chained vocab"]]:
    """Logits of the head at the T - 1 given pairs, and of the chained drafts after them."""
    bound = model.bind({"params": params})
    rows, length = ids.shape
    state = empty_head_state(model.config, rows, length - 1 + CHAINED, model.dtype)
    drafted = jnp.zeros((rows, 0, model.config.vocab_size), jnp.float32)
    if length > 1:
        kept = jnp.full((rows,), length - 1, jnp.int32)
        out, state = bound.mtp_extend(hidden[:, :-1], ids[:, 1:], state, kept)
        drafted = bound.logits(bound.head_output(out))
    one = jnp.ones((rows,), jnp.int32)

    def draft(depth: int, carry: tuple, _: None) -> tuple[tuple, Array]:
        own, logits, state = carry
        own, state = bound.mtp_extend(own, jnp.argmax(logits, axis=-1).astype(jnp.int32), state, one, depth)
        logits = bound.logits(bound.head_output(own, depth))
        return (own, logits, state), logits

    # The last layer drafts the rest. A scan, not a Python loop: it is compiled once.
    carry, last = (hidden[:, -1:], main[:, -1:], state), min(model.config.num_mtp_layers, CHAINED)
    by_layer = []
    for depth in range(1, last):
        carry, logits = draft(depth, carry, None)
        by_layer.append(logits)
    _, rest = jax.lax.scan(partial(draft, last), carry, length=CHAINED + 1 - last)
    return drafted, jnp.concatenate([*by_layer, jnp.moveaxis(rest[:, :, 0], 0, 1)], axis=1)
