"""The gated delta rule: its definition token by token, and the same result chunk by chunk."""

from enum import Enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.layers.triangular import BLOCK, unit_lower_inverse

CHUNK = 64  # tokens a chunk at most; the sequential part of a call is T / CHUNK long


class DeltaAlgorithm(Enum):
    """How `gated_delta_rule` computes; the result is the same."""

    RECURRENT = "recurrent"  # the definition: one token at a time
    CHUNKED = "chunked"  # training and prefill: matrix products over chunks


def gated_delta_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    memory: Float[Array, "B H K V"],
    document: Int[Array, "B T"] | None = None,
    algorithm: DeltaAlgorithm = DeltaAlgorithm.CHUNKED,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Reads and rewrites the associative memory.

        M_t = exp(g_t) M_{t-1} + k_t u_t^T,    u_t = beta_t (v_t - exp(g_t) M_{t-1}^T k_t),    o_t = M_t^T q_t

    Everything is float32. A token with beta = 0 and g = 0 leaves the memory as it is.

    Args:
      k: keys of unit norm.
      g: log decay, <= 0.
      beta: write strength in [0, 1].
      memory: state left by the previous call; zeros at the start of a sequence.
      document: never falls along T; where it rises the memory starts again from zero. `memory` belongs to
        the first token's document.

    Raises:
      TypeError: if any input is in a lower precision than float32 (float64 passes, for reference results).

    Reference: Yang et al. 2024, arXiv:2412.06464. Their state is our memory transposed.
    """
    for name, value in {"q": q, "k": k, "v": v, "g": g, "beta": beta, "memory": memory}.items():
        if value.dtype not in (jnp.float32, jnp.float64):
            raise TypeError(f"the delta rule needs float32, got {name} in {value.dtype}")
    rule = _recurrent if algorithm is DeltaAlgorithm.RECURRENT else _chunked
    return rule(q, k, v, g, beta, memory, document)


def probe_delta_rule(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    memory: Float[Array, "B H K V"],
) -> tuple[Float[Array, "B T H V"], Float[Array, "B T H V"]]:
    """The outputs o and the writes u of a few tokens, reading the memory once and leaving it alone.

    The T tokens are one chunk, so T should be small: the cost of pairs grows as T^2.
    """
    time = q.shape[1]
    q, k, v, g, beta = (jnp.swapaxes(x, 1, 2) for x in (q, k, v, g, beta))
    pairs = _pairs(q, k, g, beta, None)
    carried = jnp.exp(pairs.total.value)[..., None]
    read = _product(jnp.concatenate([q, k], axis=-2), memory)
    u = _product(pairs.inverse, beta[..., None] * (v - carried * read[..., time:, :]))
    o = carried * read[..., :time, :] + _product(pairs.scores, u)
    return jnp.swapaxes(o, 1, 2), jnp.swapaxes(u, 1, 2)


class _RunningSum(NamedTuple):
    """G, the running sum of log decays, as an unevaluated sum of two float32.

    Strong decays add up to thousands within a chunk, where one float32 is off by 1e-4, and so would be every
    exp(G_i - G_j) between tokens that hardly decay; the second float keeps differences at rounding error.
    """

    high: Float[Array, "... C"]
    low: Float[Array, "... C"]

    @property
    def value(self) -> Float[Array, "... C"]:
        return self.high + self.low

    def at(self, *index) -> "_RunningSum":
        return _RunningSum(self.high[index], self.low[index])

    def minus(self, other: "_RunningSum") -> Float[Array, "..."]:
        return (self.high - other.high) + (self.low - other.low)


def _running_sum(g: Float[Array, "... C"]) -> _RunningSum:
    high = jnp.cumsum(g, axis=-1)
    before = jnp.concatenate([jnp.zeros_like(high[..., :1]), high[..., :-1]], axis=-1)
    step = high - before
    # What rounding lost at each token: g less the step that `high` really took (Knuth's two-sum, exact).
    taken = high - step
    step_error = (high - (taken + step)) + (taken - before)
    low = jnp.cumsum((g - step) - step_error, axis=-1)
    return _RunningSum(high, jax.lax.stop_gradient(low))  # the gradient of `high` is already the sum's


class _Pairs(NamedTuple):
    """What the tokens of a chunk are to each other, before the memory is known."""

    total: _RunningSum  # G
    inverse: Float[Array, "... C C"]  # (I + S)^-1, S_ij = beta_i exp(G_i - G_j) k_i . k_j for j < i
    scores: Float[Array, "... C C"]  # exp(G_i - G_j) q_i . k_j for j <= i


def _pairs(
    q: Float[Array, "... C K"],
    k: Float[Array, "... C K"],
    g: Float[Array, "... C"],
    beta: Float[Array, "... C"],
    document: Int[Array, "... C"] | None,
) -> _Pairs:
    """Writing out the recurrence gives (I + S) u = beta (v - exp(G) M_0^T k) and o = exp(G) M_0^T q + scores u."""
    total = _running_sum(g)
    time = jnp.arange(g.shape[-1])
    joined = jnp.broadcast_to(time[:, None] >= time[None, :], (*g.shape, g.shape[-1]))
    if document is not None:
        joined = joined & (document[..., :, None] == document[..., None, :])
    # Masked before exp: above the diagonal the difference is positive and may overflow.
    passed = total.at(..., slice(None), None).minus(total.at(..., None, slice(None)))
    decay = jnp.exp(jnp.where(joined, passed, -jnp.inf))
    strict = jnp.where(time[:, None] > time[None, :], decay * _product(k, jnp.swapaxes(k, -1, -2)), 0.0)
    inverse = unit_lower_inverse(beta[..., None] * strict)
    return _Pairs(total, inverse, decay * _product(q, jnp.swapaxes(k, -1, -2)))


def _chunk_length(time: int) -> int:
    """The shortest chunk that holds `time` tokens, up to CHUNK; sizes the triangular inverse likes."""
    if time <= BLOCK:
        return time
    length = BLOCK
    while length < min(time, CHUNK):
        length *= 2
    return length


def _chunked(q, k, v, g, beta, memory, document):
    """Within a chunk all pairs at once; from chunk to chunk only the memory, so no per-token state exists.

    Chunks come first throughout, as the scan over them takes them: transposing them for it took a quarter of the time.
    """
    batch, time, heads = g.shape
    length = _chunk_length(time)
    chunks = -(-time // length)

    def split(x: Array) -> Array:
        """[B T H ...] -> [M B H C ...]; padding has beta = 0 and g = 0, so it writes nothing."""
        x = jnp.pad(x, [(0, 0), (0, chunks * length - time)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, chunks, length, *x.shape[2:]), (1, 3), (0, 2))

    q, k, v, g, beta = map(split, (q, k, v, g, beta))
    reached, kept = None, None
    if document is None:
        pairs = _pairs(q, k, g, beta, None)
    else:
        document = jnp.pad(document, ((0, 0), (0, chunks * length - time)), mode="edge")
        document = jnp.swapaxes(document.reshape(batch, chunks, length), 0, 1)[:, :, None]
        last = document[..., -1:]
        before = jnp.concatenate([document[:1, ..., :1], last[:-1]], axis=0)
        pairs = _pairs(q, k, g, beta, document)
        reached = document == before  # tokens that the incoming memory belongs to
        kept = document == last  # tokens whose writes, and through token 0 whose memory, survive the chunk

    end = pairs.total.at(..., slice(-1, None))
    from_start = _exp_where(pairs.total.value, reached)[..., None]
    to_end = _exp_where(end.minus(pairs.total), kept)[..., None]
    whole = from_start[..., -1:, :]
    # What u would be without the memory, and what the memory takes from it.
    fresh = _product(pairs.inverse, beta[..., None] * v)
    taken = _product(pairs.inverse, beta[..., None] * from_start * k)

    def step(memory, chunk):
        q_in, k_out, scores, fresh, taken, whole = chunk
        u = fresh - _product(taken, memory)
        o = _product(q_in, memory) + _product(scores, u)
        return whole * memory + _product(jnp.swapaxes(k_out, -1, -2), u), o

    memory, o = jax.lax.scan(step, memory, (from_start * q, to_end * k, pairs.scores, fresh, taken, whole))
    o = jnp.moveaxis(o, (0, 3), (1, 2))  # [M B H C V] -> [B M C H V]
    return o.reshape(batch, chunks * length, heads, -1)[:, :time], memory


def _exp_where(x: Float[Array, "..."], keep: Bool[Array, "..."] | None) -> Float[Array, "..."]:
    return jnp.exp(x) if keep is None else jnp.where(keep, jnp.exp(x), 0.0)


def _recurrent(q, k, v, g, beta, memory, document):
    if document is None:
        starts = jnp.zeros(q.shape[:2], bool)
    else:
        starts = jnp.pad(document[:, 1:] != document[:, :-1], ((0, 0), (1, 0)))

    def step(memory, token):
        q, k, v, g, beta, starts = token
        memory = jnp.where(starts[:, None, None, None], 0.0, memory)
        memory = jnp.exp(g)[:, :, None, None] * memory
        u = beta[:, :, None] * (v - _read(memory, k))
        memory = memory + k[..., :, None] * u[..., None, :]
        return memory, _read(memory, q)

    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta, starts))
    memory, o = jax.lax.scan(step, memory, tokens)
    return jnp.moveaxis(o, 0, 1), memory


def _read(memory: Float[Array, "B H K V"], x: Float[Array, "B H K"]) -> Float[Array, "B H V"]:
    return jnp.einsum("BHKV,BHK->BHV", memory, x, precision=jax.lax.Precision.HIGHEST)


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
