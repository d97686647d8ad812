"""Cross entropy over a large vocabulary, a chunk of tokens at a time.

The logits of all tokens never exist: a chunk's logits are made, used for the loss, the argmax and, when a gradient is
wanted, for that chunk's part of it, and dropped. Making the gradient in the forward pass costs three products with
the output matrix, where recomputing the logits in the backward pass would cost four.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def weighted_cross_entropy(
    hidden: Float[Array, "T D"],
    kernel: Float[Array, "D vocab"],
    labels: Int[Array, " T"],
    weights: Float[Array, " T"],
    chunk: int,
) -> tuple[Float[Array, ""], Float[Array, " T"], Int[Array, " T"]]:
    """Weighted sum of the tokens' cross entropies, and what each token gave.

        loss_t = logsumexp(hidden_t kernel) - (hidden_t kernel)[label_t],    total = sum_t weights_t loss_t

    One call serves any number of loss terms: a term's weight divided by its count goes into `weights`.

    Args:
      hidden: T tokens, of all rows, in the compute dtype. Products run in that dtype and accumulate in float32.
      labels: ids in [0, vocab), also where the weight is 0.
      weights: 0 leaves a token out of the total, not out of the other two results.
      chunk: tokens whose logits exist at one time; the last chunk is filled up with weight 0.

    Returns:
      total, differentiable in hidden, kernel and weights; the tokens' losses in nats and their argmax ids (the first
      of equals), both without a gradient. All losses are float32.
    """
    total, losses, best = _weighted(hidden, kernel, labels, weights, chunk)  # pyright: ignore[reportGeneralTypeIssues]
    return total, jax.lax.stop_gradient(losses), best


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _weighted(hidden, kernel, labels, weights, chunk):
    return _scan(hidden, kernel, labels, weights, chunk, with_gradient=False)[:3]


def _forward(hidden, kernel, labels, weights, chunk):
    *outputs, d_hidden, d_kernel = _scan(hidden, kernel, labels, weights, chunk, with_gradient=True)
    return tuple(outputs), (d_hidden, d_kernel, outputs[1])


def _backward(chunk, residuals, cotangents):
    d_hidden, d_kernel, losses = residuals
    d_total = cotangents[0]  # The other outputs are cut off above.
    return (
        d_hidden * d_total.astype(d_hidden.dtype),
        d_kernel * d_total.astype(d_kernel.dtype),
        None,
        losses * d_total,
    )


_weighted.defvjp(_forward, _backward)


def _scan(hidden, kernel, labels, weights, chunk, *, with_gradient) -> tuple[Array, ...]:
    """total, losses, best; with_gradient: also the gradients of total in hidden and kernel."""
    num_tokens = hidden.shape[0]
    chunk = min(chunk, num_tokens)
    num_chunks = -(-num_tokens // chunk)

    def chunks(x):
        filler = [(0, num_chunks * chunk - num_tokens)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, filler).reshape(num_chunks, chunk, *x.shape[1:])

    matrix = kernel.astype(hidden.dtype)
    ids = jnp.arange(kernel.shape[1], dtype=labels.dtype)[None, :]

    def body(d_kernel, inputs):
        h, label, weight = inputs
        logits = jnp.einsum("TD,Dv->Tv", h, matrix, preferred_element_type=jnp.float32)
        best = jnp.argmax(logits, axis=-1)
        top = jnp.max(logits, axis=-1, keepdims=True)
        exponentials = jnp.exp(logits - top)
        normaliser = jnp.sum(exponentials, axis=-1, keepdims=True)
        at_label = jnp.take_along_axis(logits, label[:, None], axis=-1)
        loss = (jnp.log(normaliser) + top - at_label)[:, 0]
        if not with_gradient:
            return d_kernel, (loss, best)
        scale = weight[:, None] / normaliser
        d_logits = exponentials * scale - jnp.where(ids == label[:, None], weight[:, None], 0.0)
        d_logits = d_logits.astype(hidden.dtype)
        d_h = jnp.einsum("Tv,Dv->TD", d_logits, matrix, preferred_element_type=jnp.float32)
        d_kernel += jnp.einsum("TD,Tv->Dv", h, d_logits, preferred_element_type=jnp.float32)
        return d_kernel, (loss, best, d_h.astype(hidden.dtype))

    start = jnp.zeros(kernel.shape if with_gradient else (), jnp.float32)
    d_kernel, per_chunk = jax.lax.scan(body, start, (chunks(hidden), chunks(labels), chunks(weights)))
    losses, best, *d_hidden = (x.reshape(-1, *x.shape[2:])[:num_tokens] for x in per_chunk)
    total = jnp.sum(losses * weights)
    return total, losses, best.astype(labels.dtype), *d_hidden, d_kernel.astype(kernel.dtype)
