"""The short causal convolution in front of the delta rule, one filter a channel."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


@jax.custom_vjp
def short_conv(
    window: Float[Array, "B X P"], kernel: Float[Array, "W P"], visible: Bool[Array, "B T W"] | None
) -> Float[Array, "B T P"]:
    """y_t = sum_i kernel_i * window_{t+i}, over the taps i that token t may see.

    A sum of shifted products: on a CPU `lax`'s depthwise convolution is several times slower. The gradient of
    each tap is written out too, since autodiff of the shifted sum is ten times slower than this.

    Args:
      window: the W - 1 inputs before the first token, then the T tokens': X = W - 1 + T.
      kernel: W taps, oldest input first.
      visible: False where a tap would reach into another document; None if all are visible.
    """
    taps = kernel.shape[0]
    time = window.shape[1] - taps + 1
    return sum(kernel[None, None, i] * _seen(window[:, i : i + time], visible, i) for i in range(taps))  # pyright: ignore[reportReturnType]


def _seen(x: Float[Array, "B T P"], visible: Bool[Array, "B T W"] | None, tap: int) -> Float[Array, "B T P"]:
    return x if visible is None else jnp.where(visible[:, :, tap, None], x, jnp.zeros((), x.dtype))


def _forward(window, kernel, visible):
    return short_conv(window, kernel, visible), (window, kernel, visible)


def _backward(residuals, dy):
    window, kernel, visible = residuals
    taps = kernel.shape[0]
    time = dy.shape[1]
    d_window = jnp.zeros_like(window)
    d_kernel = []
    for i in range(taps):
        dy_seen = _seen(dy, visible, i)
        product = dy_seen * window[:, i : i + time]
        d_kernel.append(jnp.sum(product, axis=(0, 1), dtype=jnp.float32))
        d_window = d_window + jnp.pad(kernel[None, None, i] * dy_seen, ((0, 0), (i, taps - 1 - i), (0, 0)))
    return d_window, jnp.stack(d_kernel).astype(kernel.dtype), None


short_conv.defvjp(_forward, _backward)
