"""The values that cross calls, and how they move: forward by a number known afterwards, back, wider, into a row.

State is immutable: `probe` leaves it alone and returns a trail, and `commit(state, trail, n)` makes the state
that holds the first n probed tokens of each row. Rollback is therefore keeping the old value; where the old
buffers are donated away, a `Bookmark` keeps the little of it that going on overwrites.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from mtp_jax.config import DeltaNetConfig, LayerType, ModelConfig
from mtp_jax.sharding import ROWS, TENSOR, spread


class AttentionState(NamedTuple):
    """Keys (rotated) and values of the tokens so far; slots at or past `length` hold nothing of meaning."""

    k: Float[Array, "B G S K"]
    v: Float[Array, "B G S K"]


class DeltaState(NamedTuple):
    """What a Gated DeltaNet layer remembers."""

    memory: Float[Array, "B H K V"]  # float32 in every precision mode: rounding compounds over a long decode
    conv: Float[Array, "B w P"]  # inputs to the short convolution, oldest first


class State(NamedTuple):
    """State of a stack of layers: the trunk's or the MTP head's.

    Of a head with several layers, layer k holds k tokens fewer, since it reads what layer k - 1 says of a token only
    once the next one is known. What layer k - 1 said last, and before that, waits in `waiting[k - 1]`.
    """

    layers: tuple[AttentionState | DeltaState, ...]
    length: Int[Array, " B"]  # tokens held
    waiting: tuple[Float[Array, "B 2 D"], ...] = ()


class ChainState(NamedTuple):
    """What the chains of a packed row attend to in training: one chain starts at each of its T tokens."""

    k: Float[Array, "B G T K"]  # of depth 1: a chain sees those of its own document up to where it starts
    v: Float[Array, "B G T K"]
    own_k: Float[Array, "B G T C K"]  # of the C further depths: only the chain itself sees them
    own_v: Float[Array, "B G T C K"]

    @property
    def depth(self) -> int:
        """Depths that are in it."""
        return 1 + self.own_k.shape[3]

    @classmethod
    def start(cls, k: Float[Array, "B G T K"], v: Float[Array, "B G T K"]) -> "ChainState":
        """Depth 1."""
        return cls(k, v, k[:, :, :, None][..., :0, :], v[:, :, :, None][..., :0, :])

    def extended(self, k: Float[Array, "B G T K"], v: Float[Array, "B G T K"]) -> "ChainState":
        """With the next depth, of which every chain has one token."""
        return self._replace(
            own_k=jnp.concatenate([self.own_k, k[:, :, :, None]], axis=3),
            own_v=jnp.concatenate([self.own_v, v[:, :, :, None]], axis=3),
        )


class AttentionTrail(NamedTuple):
    """The buffers after a probe: T further slots are written, which `length` does not yet cover."""

    k: Float[Array, "B G S K"]
    v: Float[Array, "B G S K"]


class DeltaTrail(NamedTuple):
    """The rank-one writes k_i u_i^T of a probe's tokens, their log decays, and the convolution's inputs."""

    k: Float[Array, "B T H K"]
    u: Float[Array, "B T H V"]
    g: Float[Array, "B T H"]
    window: Float[Array, "B X P"]  # X = w + T inputs, oldest first


class Trail(NamedTuple):
    """What a probe leaves behind, one entry a layer."""

    layers: tuple[AttentionTrail | DeltaTrail, ...]


class Bookmark(NamedTuple):
    """What moving forward overwrites of a state: all but the attention layers' buffers, whose entry is None."""

    layers: tuple[DeltaState | None, ...]
    length: Int[Array, " B"]
    waiting: tuple[Float[Array, "B 2 D"], ...]


def empty_trunk_state(config: ModelConfig, batch: int, num_slots: int, dtype: DTypeLike) -> State:
    """Trunk state before the first token.

    Args:
      num_slots: S. A probe or a padded prefill writes past what it keeps, so leave room for that too.
      dtype: of keys, values and convolution inputs (the compute dtype).
    """
    return _empty_state(config, config.layer_types, batch, num_slots, dtype)


def empty_head_state(config: ModelConfig, batch: int, num_slots: int, dtype: DTypeLike) -> State:
    """State of the MTP head before its first (hidden, next token) pair; arguments as in `empty_trunk_state`."""
    state = _empty_state(config, (LayerType.FULL,) * config.num_mtp_layers, batch, num_slots, dtype)
    waiting = (jnp.zeros((batch, 2, config.width), dtype) for _ in range(config.num_mtp_layers - 1))
    return state._replace(waiting=tuple(waiting))


def _empty_state(
    config: ModelConfig, layer_types: tuple[LayerType, ...], batch: int, num_slots: int, dtype: DTypeLike
) -> State:
    attention = config.attention

    def empty_layer(layer_type: LayerType) -> AttentionState | DeltaState:
        if layer_type is LayerType.FULL:
            shape = (batch, attention.num_kv_heads, num_slots, attention.head_dim)
            return AttentionState(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
        assert config.delta is not None
        return empty_delta_state(config.delta, batch, dtype)

    return State(tuple(map(empty_layer, layer_types)), jnp.zeros((batch,), jnp.int32))


def empty_delta_state(config: DeltaNetConfig, batch: int, dtype: DTypeLike) -> DeltaState:
    """DeltaNet state before the first token."""
    memory = (batch, config.num_v_heads, config.head_k_dim, config.head_v_dim)
    conv = (batch, config.conv_width - 1, config.conv_channels)
    return DeltaState(jnp.zeros(memory, jnp.float32), jnp.zeros(conv, dtype))


def spread_rows(tree: PyTree) -> PyTree:
    """The same tree, a state or any whose leaves all begin with the batch axis, which under a mesh has its rows spread,
    and of layers' states the heads too."""

    def spread_leaf(leaf: AttentionState | DeltaState | Array) -> AttentionState | DeltaState | Array:
        match leaf:
            case AttentionState(k, v):
                return AttentionState(spread(k, ROWS, TENSOR), spread(v, ROWS, TENSOR))
            case DeltaState(memory, conv):
                return DeltaState(spread(memory, ROWS, TENSOR), spread(conv, ROWS, None, TENSOR))
        return spread(leaf, ROWS)

    return jax.tree.map(spread_leaf, tree, is_leaf=lambda x: isinstance(x, AttentionState | DeltaState))


def commit(state: State, trail: Trail, n: Int[Array, " B"]) -> State:
    """Keeps the first n probed tokens of each row, 0 <= n <= T.

    Nothing is recomputed: attention takes the trail's buffers and moves `length`; DeltaNet applies the first n
    rank-one writes to the memory it still holds.
    """
    layers = []
    for old, new in zip(state.layers, trail.layers, strict=True):
        if isinstance(new, AttentionTrail):
            layers.append(AttentionState(new.k, new.v))
        else:
            assert isinstance(old, DeltaState)
            layers.append(_commit_delta(old, new, n))
    return State(tuple(layers), state.length + n)


def _commit_delta(state: DeltaState, trail: DeltaTrail, n: Int[Array, " B"]) -> DeltaState:
    """M_n = exp(G_n) M_0 + sum_{i<=n} exp(G_n - G_i) k_i u_i^T, with G the running sum of g."""
    num_probed = trail.k.shape[1]
    kept = jnp.arange(num_probed)[None, :] < n[:, None]
    total = jnp.cumsum(jnp.where(kept[:, :, None], trail.g, 0.0), axis=1)  # stays at G_n past token n
    end = total[:, -1]
    # Masked before exp, so that nothing overflows.
    weight = jnp.exp(jnp.where(kept[:, :, None], end[:, None] - total, -jnp.inf))
    writes = jnp.einsum("BTHK,BTHV->BHKV", weight[..., None] * trail.k, trail.u, precision=jax.lax.Precision.HIGHEST)
    memory = jnp.exp(end)[:, :, None, None] * state.memory + writes
    return DeltaState(memory, last_inputs(trail.window, n, state.conv.shape[1]))


def last_inputs(window: Float[Array, "B X P"], n: Int[Array, " B"], count: int) -> Float[Array, "B w P"]:
    """The `count` convolution inputs that precede token n of a window which starts `count` before token 0."""
    return jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, count))(window, n)


def bookmark(state: State) -> Bookmark:
    """A place to `return_to` later. Copies, so that it outlives a state that is donated; no keys or values in it."""
    layers = (None if isinstance(layer, AttentionState) else layer for layer in state.layers)
    return jax.tree.map(jnp.copy, Bookmark(tuple(layers), state.length, state.waiting))


def return_to(state: State, bookmark: Bookmark) -> State:
    """The bookmarked state, with the buffers of one that it has been moved forward to since.

    Moving forward writes slots at or past `length` only, so the buffers still hold what the bookmark's tokens
    wrote. That ends once a row is replaced, or is moved forward from an earlier bookmark. The bookmark itself is
    copied and may be returned to again.
    """
    kept = jax.tree.map(jnp.copy, bookmark)
    layers = (
        current if earlier is None else earlier for current, earlier in zip(state.layers, kept.layers, strict=True)
    )
    return State(tuple(layers), kept.length, kept.waiting)


def pair_up(
    waiting: Shaped[Array, "B D"],
    hidden: Float[Array, "B T D"],
    following: Shaped[Array, "B T ..."],
    lengths: Int[Array, " B"],
    nothing_waits: Bool[Array, " B"],
) -> tuple[Float[Array, "B T D"], Shaped[Array, "B T ..."], Int[Array, " B"]]:
    """Pairs of hidden states and the tokens after theirs, for a layer that reads one token behind.

    The first token goes with the hidden state that waited for it, each further one with the one before it:

        (waiting, following[0]), (hidden[0], following[1]), ..       or, if nothing waits, from the second pair on

    Args:
      hidden: of T tokens, of which a row keeps the first `lengths`.
      following: those tokens, or their embeddings.

    Returns:
      hidden states and tokens of T pairs, and how many of them each row keeps.
    """
    begin = nothing_waits.astype(jnp.int32)
    take = jax.vmap(lambda row, i: jax.lax.dynamic_slice_in_dim(row, i, hidden.shape[1]))
    behind = take(jnp.concatenate([waiting[:, None], hidden], axis=1), begin)
    padding = [(0, 0), (0, 1), *[(0, 0)] * (following.ndim - 2)]
    return behind, take(jnp.pad(following, padding), begin), jnp.maximum(lengths - begin, 0)


def forget_newest(head: State) -> State:
    """The head before its newest pair. Once: what waited before that is not kept."""
    waiting = tuple(jnp.repeat(pair[:, :1], 2, axis=1) for pair in head.waiting)
    return head._replace(length=jnp.maximum(head.length - 1, 0), waiting=waiting)


def grow(state: State, num_slots: int) -> State:
    """The same state with room for more tokens.

    Raises:
      ValueError: if a buffer has more than `num_slots` slots already.
    """

    def widen(buffer: Float[Array, "B G S K"]) -> Float[Array, "B G X K"]:
        extra = num_slots - buffer.shape[2]
        if extra < 0:
            raise ValueError(f"num_slots must be at least the {buffer.shape[2]} slots there are, got {num_slots}")
        return jnp.pad(buffer, ((0, 0), (0, 0), (0, extra), (0, 0)))

    layers = (
        AttentionState(widen(layer.k), widen(layer.v)) if isinstance(layer, AttentionState) else layer
        for layer in state.layers
    )
    return state._replace(layers=tuple(layers))


def place(tree: PyTree, row: Int[Array, ""], fresh: PyTree) -> PyTree:
    """Replaces one row of a batch: a state, or any tree whose leaves all begin with the batch axis.

    Args:
      row: traced, so that another row does not compile again.
      fresh: the same tree for a batch of one.

    Raises:
      ValueError: if `fresh` has another shape, with fewer slots for instance: parts of the old row would stay.
    """

    def replace(old: Array, new: Array) -> Array:
        if new.shape != (1, *old.shape[1:]):
            raise ValueError(f"a row of {old.shape} must have shape {(1, *old.shape[1:])}, got {new.shape}")
        return jax.lax.dynamic_update_slice_in_dim(old, new, row, axis=0)

    return jax.tree.map(replace, tree, fresh)
