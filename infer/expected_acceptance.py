"""How often a round's first draft should stand, from the two laws themselves, by reading a finished text once more."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from infer.buckets import bucket
from infer.completion import Completion
from infer.logits import all_logits
from infer.sampling import Past, Rule, log_probabilities, warp
from mtp_jax.mtp import MTPModel


@dataclass(frozen=True)
class ExpectedAcceptance:
    """Sums over the rounds of a completion whose first draft could have been emitted.

    Attributes:
      rounds: how many those are.
      overlap: of 1 - TV, the probability that the draft stands under rejection; TV is the total variation distance of
        the head's law and the trunk's at its place.
      coupling: of (1 - TV) / (1 + TV), which it is at least under shared noise.
    """

    rounds: int
    overlap: float
    coupling: float


def expected_acceptance(
    model: MTPModel, params: dict, rule: Rule, prompt: list[int], completion: Completion
) -> ExpectedAcceptance:
    """Of the drafts that a completion's rounds began with. Holds two times all logits of prompt and text at once.

    Args:
      rule: the tokens were chosen under it, at a temperature above 0.
    """
    text = [*prompt, *completion.tokens]
    # Padding comes after the text, where nothing before it sees it.
    ids = np.zeros((1, bucket(len(text), 64)), np.int32)
    ids[0, : len(text)] = text
    logits = all_logits(model, params, ids)
    distance = np.asarray(_distances(rule, logits["main_logits"], logits["mtp_logits"], ids, np.int32(len(prompt))))
    begins = len(prompt) + np.flatnonzero(np.array(completion.round_drafts) > 0)
    of_rounds = distance[begins - 2].astype(np.float64)
    return ExpectedAcceptance(
        len(of_rounds), float(np.sum(1 - of_rounds)), float(np.sum((1 - of_rounds) / (1 + of_rounds)))
    )


@jax.jit
def _distances(
    rule: Rule,
    trunk: Float[Array, "1 T vocab"],
    head: Float[Array, "1 T-1 vocab"],
    ids: Int[Array, "1 T"],
    prompt_length: Int[Array, ""],
) -> Float[Array, " T-2"]:
    """Total variation distances of the laws of tokens 2, 3, ...: the trunk chooses token i after token i - 1, and the
    head drafts it from what the trunk says after token i - 2."""
    p_logits, q_logits = trunk[0, 1:-1, None], head[0, :-1, None]
    places = p_logits.shape[0]
    # A row for each place, which has all tokens before it as its past.
    past = Past(
        tokens=jnp.broadcast_to(ids, (places, ids.shape[1])),
        prompt_length=jnp.broadcast_to(prompt_length, (places,)),
        num_new=jnp.maximum(jnp.arange(2, places + 2) - prompt_length, 0),
        drafts=jnp.zeros((places, 0), jnp.int32),
    )
    p, q = (jnp.exp(log_probabilities(warp(logits, rule, past))) for logits in (p_logits, q_logits))
    return jnp.sum(jnp.abs(p - q), axis=-1)[:, 0] / 2
