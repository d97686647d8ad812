"""Which id follows, given logits. The one place where a choice is made: for the first token, for every draft and
for every verified position alike, so that plain and speculative decoding cannot choose by different rules.

Greedy. Warping the distribution (temperature, top-k, top-p, min-p) and drawing from it belong here.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def choose(logits: Float[Array, "*batch vocab"], num_ids: Int[Array, ""]) -> Int[Array, "*batch"]:
    """argmax of the logits over ids below `num_ids`; of equal logits the lowest id, so ties fall alike everywhere.

    Args:
      num_ids: ids at or above it have no token (a padded vocabulary) and are never chosen.
    """
    has_token = jnp.arange(logits.shape[-1]) < num_ids
    allowed = jnp.where(jnp.broadcast_to(has_token, logits.shape), logits, -jnp.inf)
    return jnp.argmax(allowed, axis=-1).astype(jnp.int32)
