"""How many drafts stand, which token follows them, and how many of those tokens a row may still emit."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from infer.noise import Role, gumbel, uniform
from infer.sampling import draw, log_probabilities


class Verdict(NamedTuple):
    """What verification says, before limits and end ids: the first `accepted` + 1 of `tokens` count."""

    tokens: Int[Array, "B J+1"]  # the drafts that stand, then the token that follows them
    accepted: Int[Array, " B"]  # drafts that stand, 0 to J


class Outcome(NamedTuple):
    """What a round does to each row. All zero for a row that may emit nothing."""

    num_tokens: Int[Array, " B"]  # tokens emitted, and tokens committed to the trunk
    ended: Bool[Array, " B"]  # the last of them is an end id
    drafted: Int[Array, " B"]  # drafts that could have been emitted
    accepted: Int[Array, " B"]  # drafts that were


def verify_shared_noise(
    drafts: Int[Array, "B J"], warped: Float[Array, "B J+1 vocab"], noise: Float[Array, "B J+1 vocab"]
) -> Verdict:
    """A draft stands if it and all before it are what the trunk draws itself.

    With x_i = argmax(warped_i + noise_i), n is the length of the longest prefix with d_i = x_i. The tokens are
    x_0..x_n: up to n they are the drafts, and x_n is what plain decoding draws next, since warped_n has read
    accepted drafts only. So the tokens do not depend on the drafts at all. Drafts drawn with the same noise
    stand with probability (1 - TV) / (1 + TV) or more, TV the distance of the two laws.

    Args:
      drafts: d_0..d_{J-1}.
      warped: the trunk's scores, after the last token and after each draft.
      noise: Gumbel noise of these positions; 0 for greedy decoding.

    Reference: Daliri, Musco and Suresh, arXiv:2408.07978 (coupling without communication).
    """
    tokens = draw(warped, noise)
    stands = (tokens[:, :-1] == drafts).astype(jnp.int32)
    return Verdict(tokens, jnp.sum(jnp.cumprod(stands, axis=1), axis=1))


def verify_rejection(
    drafts: Int[Array, "B J"],
    warped_p: Float[Array, "B J+1 vocab"],
    warped_q: Float[Array, "B J vocab"],
    keys: UInt32[Array, "B 2"],
    position: Int[Array, "B J+1"],
) -> Verdict:
    """A draft stands with probability min(1, p(d) / q(d)), if all before it do.

    The token that follows is drawn from max(p_n - q_n, 0) normalised if draft n fell, from p_J if none did. Then
    tokens have exactly the trunk's law p, and a draft stands with probability 1 - TV(p, q).

    Where p - q has no positive part, p = q but for rounding, and the token is drawn from p.

    Args:
      drafts: d_0..d_{J-1}, d_i drawn from softmax(warped_q_i) with noise of its own role.
      warped_p: the trunk's scores, after the last token and after each draft.
      keys: of the rows.
      position: of the tokens in the sequence.

    Reference: Leviathan, Kalman and Matias, arXiv:2211.17192; Chen et al., arXiv:2302.01318.
    """
    batch, num_drafts = drafts.shape
    p = jnp.exp(log_probabilities(warped_p))
    # A head may have nothing to choose from (a draft vocabulary that is banned as a whole): such a q is 0, not nan.
    possible = jnp.any(warped_q > -jnp.inf, axis=2, keepdims=True)
    q = jnp.where(possible, jnp.exp(log_probabilities(warped_q)), 0.0)

    def of_draft(law: Float[Array, "B J vocab"]) -> Float[Array, "B J"]:
        return jnp.take_along_axis(law, drafts[:, :, None], axis=2)[:, :, 0]

    # Where q is 0 the draft is not one of q's, and p / q would be infinite: it falls.
    u = uniform(keys, position[:, :-1], Role.ACCEPT)
    stands = (u * of_draft(q) < of_draft(p[:, :-1])) & (of_draft(q) > 0)
    accepted = jnp.sum(jnp.cumprod(stands.astype(jnp.int32), axis=1), axis=1)

    def at_end(values: Array) -> Array:
        """Of what there is per position, that of the token that follows."""
        return jnp.take_along_axis(values, accepted.reshape(batch, *[1] * (values.ndim - 1)), axis=1)

    p_next = at_end(p)
    # After J accepted drafts there is nothing to subtract.
    q_next = at_end(jnp.pad(q, ((0, 0), (0, 1), (0, 0))))
    rest = jnp.maximum(p_next - q_next, 0.0)
    rest = jnp.where(jnp.any(rest > 0, axis=2, keepdims=True), rest, p_next)
    following = draw(jnp.log(rest), gumbel(keys, at_end(position), p.shape[2], Role.RESAMPLE))
    is_draft = jnp.arange(num_drafts + 1)[None, :] < accepted[:, None]
    return Verdict(jnp.where(is_draft, jnp.pad(drafts, ((0, 0), (0, 1))), following), accepted)


def settle(verdict: Verdict, remaining: Int[Array, " B"], end_ids: Int[Array, " ends"]) -> Outcome:
    """Cuts a verdict to what each row may still emit, and after its first end id.

    A draft past the limit is not counted as drafted, nor is one past an accepted end id: neither could have
    been emitted however good it was.

    Args:
      remaining: tokens that the row may still emit; 0 for a finished row.
      end_ids: in any order; negative entries are padding.
    """
    num_drafts = verdict.tokens.shape[1] - 1
    position = jnp.arange(num_drafts + 1)[None, :]
    available = jnp.minimum(verdict.accepted + 1, remaining)
    is_end = jnp.any(verdict.tokens[:, :, None] == end_ids[None, None, :], axis=2)
    is_end = is_end & (position < available[:, None])
    ended = jnp.any(is_end, axis=1)
    up_to_end = jnp.where(ended, jnp.argmax(is_end, axis=1).astype(jnp.int32) + 1, num_drafts + 1)
    num_tokens = jnp.minimum(available, up_to_end)
    end_was_drafted = ended & (up_to_end <= verdict.accepted)
    possible = jnp.where(end_was_drafted, up_to_end, num_drafts)
    return Outcome(
        num_tokens=num_tokens,
        ended=ended,
        drafted=jnp.minimum(possible, remaining),
        accepted=jnp.minimum(verdict.accepted, num_tokens),
    )
