"""Random numbers of a row, by its key, the position in its sequence and what they are for.

They depend on nothing else: not on batch mates, on the shape of the call or on how many tokens a round gave.
So one seed gives one text, and a position that is drafted again meets the same noise. That is harmless:
whether a token stands does not depend on the noise of positions after it.
"""

from enum import IntEnum

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32


class Role(IntEnum):
    """What a random number is for; numbers for different roles are independent."""

    SHARED = 0  # Gumbel noise of the draft and of the choice that verifies it
    DRAFT = 1  # Gumbel noise of a draft that rejection verifies
    ACCEPT = 2  # the uniform number that decides whether a draft stands
    RESAMPLE = 3  # Gumbel noise of the token after the drafts that stand


def row_key(seed: int, prompt: int, sample: int) -> UInt32[np.ndarray, "2"]:
    """Key of one row: sample number `sample` of prompt number `prompt`. All non-negative, of any size.

    The numbers are kept apart as numpy's `spawn_key`: in one list, seed 2^32 of prompt 0 would be seed 0 of
    prompt 1, since an integer takes as many words as it needs and missing words are zeros.
    """
    return np.random.SeedSequence(seed, spawn_key=(prompt, sample)).generate_state(2)


def gumbel(
    keys: UInt32[Array, "B 2"], position: Int[Array, "B T"], vocab: int, role: Role
) -> Float[Array, "B T {vocab}"]:
    """Gumbel noise g with P(g <= x) = exp(-exp(-x)); argmax(x + g) is a draw from softmax(x).

    A token of probability p needs noise near -log p to be drawn. JAX's default makes g from 23 random bits:
    nothing above 16, and the largest values far apart. Up to vocab 2^-23 of the probability may then be drawn
    wrongly, 3 % at 250,000 tokens; ids less probable than e^-19 never are. Mode `high` has 46 bits, values up to
    32, and an error below vocab 2^-46 in that tail. It costs a second hash per value.

    Args:
      position: of the token that is chosen, counted from the beginning of the sequence.
    """
    make = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32, mode="high")))
    return make(_keys(keys, position, role))


def uniform(keys: UInt32[Array, "B 2"], position: Int[Array, "B T"], role: Role) -> Float[Array, "B T"]:
    """A number in [0, 1) per position."""
    return jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32)))(_keys(keys, position, role))


def _keys(keys: UInt32[Array, "B 2"], position: Int[Array, "B T"], role: Role) -> Array:
    """A typed key [B, T] per position."""

    def fold(key: Array, positions: Int[Array, " T"]) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), int(role))
        return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, positions)

    return jax.vmap(fold)(keys, position)
