"""Losses over a large vocabulary, a chunk of tokens at a time, for trunk and head in one pass.

The logits of all tokens never exist: a chunk's logits are made, used for the losses, the argmax and, when a gradient is
wanted, for that chunk's part of it, and dropped. Making the gradient in the forward pass costs three products with
the output matrix, where recomputing the logits in the backward pass would cost four. Since all predictors of a
place stand side by side, the trunk's distribution there, which the head may be trained on, is made once.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.argmax import argmax
from mtp_jax.sharding import ROWS, TENSOR, axis_size, spread


class TokenLosses(NamedTuple):
    """What each predictor (the trunk, then the head at each depth) gives at each place."""

    loss: Float[Array, "predictors T"]  # nats; total variation in [0, 1]
    best: Int[Array, "predictors T"]  # argmax id, the first of equals


class _How(NamedTuple):
    head_loss: str
    gradient_mode: str
    chunk: int

    def first_learner(self) -> int:
        """Predictors from this one on pass a gradient to their hidden states."""
        return 1 if self.gradient_mode == "head_only" else 0

    def num_teachers(self, predictors: int) -> int:
        """As many of the first predictors pass a gradient to the output matrix."""
        return {"joint": predictors, "detached": 1, "head_only": 0}[self.gradient_mode]


def vocabulary_losses(
    hidden: Float[Array, "predictors T D"],
    kernel: Float[Array, "D vocab"],
    labels: Int[Array, " T"],
    weights: Float[Array, "predictors T"],
    head_loss: str,
    gradient_mode: str,
    chunk: int,
) -> tuple[Float[Array, ""], TokenLosses]:
    """Weighted sum of losses, and what each token gave.

    With a = hidden[0] kernel the trunk's logits, b those of the head at any depth, p and q their softmax:

        trunk       -log p[label]
        head  ce    -log q[label]
              kl    sum_v p (log p - log q)                    gradient in b: q - p
              tv    1 - sum_v min(p, q) = sum_v max(p - q, 0)  gradient in q: -1 where q < p, else 0

    p counts as given in kl and tv: nothing of them reaches the trunk's logits. A term's weight divided by its count
    goes into `weights`, so one call serves all.

    Args:
      hidden: T places by predictor, in the compute dtype: entry [d, t] predicts the label of place t. Products run in
        that dtype and accumulate in float32.
      labels: ids in [0, vocab), also where the weights are 0.
      weights: 0 leaves an entry out of the total, not out of the other results.
      head_loss: ce, kl or tv.
      gradient_mode: joint: the total's gradient. detached: the head's terms count the output matrix as given.
        head_only: the trunk's term counts its hidden states as given, and all terms the output matrix.
      chunk: rows of logits that exist at one time, on each device.

    Returns:
      total, differentiable in hidden, kernel and weights, and results by token without a gradient. Losses are float32.
    """
    how = _How(head_loss, gradient_mode, chunk)
    total, losses, best = _weighted(hidden, kernel, labels, weights, how)  # pyright: ignore[reportGeneralTypeIssues]
    return total, TokenLosses(jax.lax.stop_gradient(losses), best)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _weighted(hidden, kernel, labels, weights, how):
    return _scan(hidden, kernel, labels, weights, how, with_gradient=False)[:3]


def _forward(hidden, kernel, labels, weights, how):
    *outputs, d_hidden, d_kernel = _scan(hidden, kernel, labels, weights, how, with_gradient=True)
    return tuple(outputs), (d_hidden, d_kernel, outputs[1])


def _backward(how, residuals, cotangents):
    d_hidden, d_kernel, losses = residuals
    d_total = cotangents[0]  # The other outputs are cut off above.
    return (
        d_hidden * d_total.astype(d_hidden.dtype),
        d_kernel * d_total.astype(d_kernel.dtype),
        None,
        losses * d_total,
    )


_weighted.defvjp(_forward, _backward)


def _scan(hidden, kernel, labels, weights, how: _How, *, with_gradient) -> tuple[Array, ...]:
    """total, losses, best; with_gradient: also the gradients of total in hidden and kernel."""
    outputs, d_hidden, d_kernel = _scan_parts(
        hidden, spread(kernel.astype(hidden.dtype), None, TENSOR), labels, weights, how, with_gradient
    )
    if d_hidden is None:
        return outputs
    d_hidden = jnp.pad(d_hidden, [(how.first_learner(), 0), (0, 0), (0, 0)])
    return *outputs, d_hidden, jnp.broadcast_to(d_kernel, kernel.shape).astype(kernel.dtype)


def _scan_parts(hidden, matrix, labels, weights, *static):
    """Results of `_scan_part`.

    Under a mesh every part of the rows goes through its own tokens, and the parts' gradients in the kernel are added up
    at the end: left to the partitioner, chunks would be what is spread, and each be worked on by all.
    """
    parts, places = axis_size(ROWS), labels.shape[0]
    if parts == 1 or places % parts:
        return _scan_part(hidden, matrix, labels, weights, *static)

    def split(x, axis):
        return spread(x.reshape(*x.shape[:axis], parts, -1, *x.shape[axis + 1 :]), *[None] * axis, ROWS)

    def joined(x):
        return x.reshape(x.shape[0], places, *x.shape[3:])

    of_part = jax.vmap(lambda *part: _scan_part(*part, *static), in_axes=(1, None, 0, 1), out_axes=((0, 1, 1), 1, 0))
    (total, losses, best), d_hidden, d_kernel = of_part(split(hidden, 1), matrix, split(labels, 0), split(weights, 1))
    d_hidden = None if d_hidden is None else joined(d_hidden)
    return (jnp.sum(total), joined(losses), joined(best)), d_hidden, jnp.sum(d_kernel, axis=0)


def _scan_part(hidden, matrix, labels, weights, how: _How, with_gradient: bool):
    """(total, losses, best), and the gradients of total in the hidden states of those that learn, and in the matrix."""
    predictors, num_tokens = weights.shape
    chunk = min(max(1, how.chunk // predictors), num_tokens)
    num_chunks = -(-num_tokens // chunk)
    first, teachers = how.first_learner(), how.num_teachers(predictors)

    def chunks(x, axis):
        """[.. T ..] -> [M .. C ..]; the last chunk is filled up with weight 0."""
        filler = [(0, 0)] * x.ndim
        filler[axis] = (0, num_chunks * chunk - num_tokens)
        shape = (*x.shape[:axis], num_chunks, chunk, *x.shape[axis + 1 :])
        return jnp.moveaxis(jnp.pad(x, filler).reshape(shape), axis, 0)

    def whole(x):
        """[M p C ..] -> [p T ..]"""
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :num_tokens]

    ids = jnp.arange(matrix.shape[1], dtype=labels.dtype)[None, None, :]

    def body(d_kernel, inputs):
        h, label, weight = inputs  # [p C D], [C], [p C]: p predictors of C places
        logits = jnp.einsum("pCD,Dv->pCv", h, matrix, preferred_element_type=jnp.float32)
        best = argmax(logits)
        loss, d_logits = _losses(logits, label[None, :, None], ids, how.head_loss)
        if not with_gradient:
            return d_kernel, (loss, best)
        d_logits = (d_logits * weight[:, :, None]).astype(hidden.dtype)
        d_h = jnp.einsum("pCv,Dv->pCD", d_logits[first:], matrix, preferred_element_type=jnp.float32)
        if teachers:
            d_kernel += jnp.einsum("pCD,pCv->Dv", h[:teachers], d_logits[:teachers], preferred_element_type=jnp.float32)
        return d_kernel, (loss, best, d_h.astype(hidden.dtype))

    start = jnp.zeros(matrix.shape if with_gradient and teachers else (), jnp.float32)
    inputs = (chunks(hidden, 1), chunks(labels, 0), chunks(weights, 1))
    d_kernel, per_chunk = jax.lax.scan(body, start, inputs)
    losses, best, *d_hidden = map(whole, per_chunk)
    outputs = (jnp.sum(losses * weights), losses, best.astype(labels.dtype))
    return outputs, d_hidden[0] if with_gradient else None, d_kernel


def _losses(
    logits: Float[Array, "p C vocab"], label: Int[Array, "1 C 1"], ids: Int[Array, "1 1 vocab"], head_loss: str
) -> tuple[Float[Array, "p C"], Float[Array, "p C vocab"]]:
    """Losses and their gradients in the logits; row 0 is the trunk."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    exponentials = jnp.exp(logits - top)
    normaliser = jnp.sum(exponentials, axis=-1, keepdims=True)
    log_normaliser = (jnp.log(normaliser) + top)[..., 0]
    at_label = jnp.take_along_axis(logits, jnp.broadcast_to(label, top.shape), axis=-1)[..., 0]
    cross_entropy = log_normaliser - at_label
    q = exponentials / normaliser
    d_cross_entropy = q - (ids == label).astype(jnp.float32)
    if head_loss == "ce":
        return cross_entropy, d_cross_entropy
    p = q[:1]
    if head_loss == "kl":
        gap = jnp.sum(p * (logits[:1] - logits), axis=-1)
        loss, d_logits = gap + log_normaliser - log_normaliser[:1], q - p
    else:
        loss = jnp.sum(jnp.maximum(p - q, 0.0), axis=-1)
        d_q = -(q < p).astype(jnp.float32)
        d_logits = q * (d_q - jnp.sum(q * d_q, axis=-1, keepdims=True))
    is_trunk = (jnp.arange(logits.shape[0]) == 0)[:, None]
    return jnp.where(is_trunk, cross_entropy, loss), jnp.where(is_trunk[..., None], d_cross_entropy, d_logits)
