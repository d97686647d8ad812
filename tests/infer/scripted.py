"""A drafter that follows a script, and what decoding with it must report, computed from the definitions."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from infer.carry import Drafter, Drafts


def scripted_drafter(truth: Sequence[Sequence[int]], script: Sequence[Sequence[int]], vocab: int) -> Drafter:
    """In a row's r-th round the first script[row][r] drafts are what plain decoding gives, and the next is not.

    Scripts repeat. Past the end of `truth` the drafts are 0.
    """
    longest = max(map(len, truth)) + 16
    table = jnp.asarray(np.array([list(row) + [0] * (longest - len(row)) for row in truth], np.int32))
    rights = jnp.asarray(np.array(script, np.int32))

    def draft(model, rule, vocabulary, carry, noise, num_drafts):
        index = jnp.arange(carry.tokens.shape[1])[None, :]
        written = (index >= carry.prompt_length[:, None]) & (index < carry.length[:, None])
        rounds = jnp.sum(written & (carry.trace.round_drafts >= 0), axis=1) % rights.shape[1]
        right = jnp.take_along_axis(rights, rounds[:, None], axis=1)
        position = jnp.arange(num_drafts)[None, :]
        # The prefill's token is index 0; the newest token is at num_new - 1.
        drafts = jnp.take_along_axis(table, carry.num_new[:, None] + position, axis=1)
        return Drafts(jnp.where(position < right, drafts, (drafts + 1) % vocab), carry.context.head, None)

    return draft


def simulate(truth: Sequence[int], script: Sequence[int], num_drafts: int, limit: int, end_ids: Sequence[int]) -> dict:
    """One row, token by token; `truth` is what plain decoding gives without end ids, at least `limit` long."""
    stop = next((i for i, token in enumerate(truth[:limit]) if token in end_ids), None)
    tokens = list(truth[: limit if stop is None else stop + 1])
    made = min(1, len(tokens))
    positions = [0] * made
    rounds = drafted = accepted = 0
    per_position = [0] * num_drafts
    while made < len(tokens):
        right = script[rounds % len(script)]
        rounds += 1
        room = limit - made
        emitted = min(right + 1, len(tokens) - made)
        stood = min(right, emitted)
        end_was_a_draft = stop is not None and made + emitted == len(tokens) and emitted <= right
        drafted += min(num_drafts, room, emitted if end_was_a_draft else num_drafts)
        accepted += stood
        for position in range(stood):
            per_position[position] += 1
        positions += [*range(1, stood + 1), *[0] * (emitted - stood)]
        made += emitted
    return {
        "tokens": tokens,
        "draft_positions": positions,
        "finish_reason": "length" if stop is None else "stop",
        "rounds": rounds,
        "drafted": drafted,
        "accepted": accepted,
        "accepted_per_position": per_position,
    }
