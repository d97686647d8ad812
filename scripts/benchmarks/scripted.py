"""Drafts that stand at a given rate, though the head that makes them knows nothing.

The head drafts as ever, and then its drafts are replaced: at the places where they are to stand by what plain decoding
gives, elsewhere by something else. So a round costs what it costs with a head that is right that often.
"""

from collections.abc import Sequence
from functools import partial

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from infer.carry import Drafter
from infer.noise import row_key
from infer.speculative import draft_with_head


def standing(rate: float, count: int, seed: int) -> Bool[np.ndarray, " count"]:
    """At which of `count` places a draft stands: a share of them as near to the rate as can be, in random order.

    A draft is judged only once all before it stand, so the rate at each position of a round is the same.
    """
    stands = np.arange(count) < round(rate * count)
    return np.random.default_rng(seed).permutation(stands)


def scripted_drafter(truth: Sequence[int], scripts: Sequence[Bool[np.ndarray, " count"]], vocab: int) -> Drafter:
    """Follows `scripts[seed]` in a row decoded with that seed, so that one program serves all rates.

    Args:
      truth: what plain decoding gives, the first token included; at least as long as the scripts.
    """
    rights = jnp.asarray(np.stack(scripts))
    table = jnp.asarray(np.asarray(truth[: rights.shape[1]], np.int32))
    keys = jnp.asarray(np.stack([row_key(seed, 0, 0) for seed in range(len(scripts))]))

    def draft(model, rule, vocabulary, carry, noise, num_drafts):
        made = draft_with_head(model, rule, vocabulary, carry, noise, num_drafts)
        script = jnp.argmax(jnp.all(carry.key[:, None, :] == keys[None], axis=2), axis=1)
        # The first token is chosen before the first round; the newest is at num_new - 1.
        place = carry.num_new[:, None] + jnp.arange(num_drafts)[None, :]
        take = partial(jnp.take, mode="clip")
        right = take(table, place)
        tokens = jnp.where(rights[script[:, None], place], right, (right + 1) % vocab)
        # No draft is -1, which a compiler does not know: it cannot leave out what makes them.
        return made._replace(tokens=jnp.where(made.tokens == -1, made.tokens, tokens), laws=None)

    return draft
