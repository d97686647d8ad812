"""Speculative decoding: one jitted loop over one carry. Plain decoding is the same loop with J = 0 drafts.

A prompt is read piece by piece (`read`), the first new token is chosen (`start`), and rounds follow (`decode`): in each
the head drafts, the trunk verifies, and what stands is committed. Nothing goes to the host in between.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree, UInt

from infer.carry import (
    LENGTH,
    RUNNING,
    STOP,
    Context,
    DecodeCarry,
    Drafts,
    Plan,
    Trace,
    empty_context,
    idle_carry,
    row_at,
)
from infer.draft_vocabulary import DraftVocabulary, subset_logits
from infer.noise import Role, gumbel
from infer.sampling import Past, Rule, draw, log_probabilities, warp
from infer.verify import Outcome, Verdict, settle, verify_rejection, verify_shared_noise
from mtp_jax.mtp import MTPModel
from mtp_jax.sharding import gathered_after
from mtp_jax.state import commit, pair_up, place, spread_rows


@partial(jax.jit, static_argnames=("model", "batch", "num_slots"))
def unread(model: MTPModel, params: PyTree, *, batch: int, num_slots: int) -> Context:
    """Rows that have read nothing; see `empty_context`."""
    return spread_rows(empty_context(model, batch, num_slots))


@partial(jax.jit, static_argnames=("model", "batch", "num_slots", "num_logprobs"))
def idle(model: MTPModel, params: PyTree, *, batch: int, num_slots: int, num_logprobs: int | None) -> DecodeCarry:
    """Slots for `fill`: rows that have read nothing and are finished."""
    return spread_rows(idle_carry(empty_context(model, batch, num_slots), num_slots, num_logprobs))


@partial(jax.jit, static_argnames=("model", "with_head"), donate_argnames=("context",))
def read(
    model: MTPModel,
    params: PyTree,
    context: Context,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    with_head: bool,
) -> Context:
    """Reads the first `lengths` tokens of each row, 0 <= lengths <= T, after those that the context holds. Donated.

    The head reads pairs (hidden_i, token i+1): the first token here goes with the hidden state that waited for it. No
    token enters the trunk twice, since a recurrent memory cannot unlearn one.

    Args:
      with_head: False leaves the head unread (stale), for decoding with J = 0 only.
    """
    bound = model.bind({"params": params})
    hidden, trunk = bound.extend(tokens, context.trunk, lengths)
    head = context.head
    if with_head:
        # Nothing waits for a row's very first token.
        pairs = pair_up(context.hidden, hidden, tokens, lengths, context.trunk.length == 0)
        _, head = bound.mtp_extend(*pairs[:2], head, pairs[2])
    newest = row_at(hidden, jnp.maximum(lengths - 1, 0))
    return spread_rows(Context(trunk, head, jnp.where((lengths > 0)[:, None], newest, context.hidden)))


def _start(
    model: MTPModel,
    params: PyTree,
    rule: Rule,
    context: Context,
    tokens: Int[Array, "B S"],
    prompt_length: Int[Array, " B"],
    max_new: Int[Array, " B"],
    key: UInt[Array, "B 2"],
    plan: Plan,
) -> DecodeCarry:
    """Chooses the token that follows what a context has read; the carry from which rounds go on.

    Args:
      tokens: those that the context has read, padded to its S slots.
      prompt_length: how many those are.
      max_new: tokens that a row may emit: at most S - J_max - 1 - prompt_length.
    """
    bound = model.bind({"params": params})
    carry = idle_carry(context, tokens.shape[1], plan.num_logprobs)
    running = jnp.full_like(carry.finish, RUNNING)
    carry = carry._replace(key=key, tokens=tokens, prompt_length=prompt_length, max_new=max_new, finish=running)
    # The first token goes through the same door as all others: limits and end ids hold for it too.
    hidden = context.hidden[:, None]
    judged, verdict, outcome = _judge(
        bound, rule, carry, _no_drafts(carry), hidden, _noise(bound, rule, carry, plan), plan
    )
    # It is of no round.
    carry = judged._replace(trace=judged.trace._replace(round_drafts=carry.trace.round_drafts))
    return _read_pairs(bound, carry, hidden, verdict, outcome) if plan.with_head else carry


@partial(jax.jit, static_argnames=("model", "plan"), donate_argnames=("context",))
def start(model, params, rule, context, tokens, prompt_length, max_new, key, *, plan) -> DecodeCarry:
    """`_start` on a context that is not needed again: it is donated."""
    return spread_rows(_start(model, params, rule, context, tokens, prompt_length, max_new, key, plan))


@partial(jax.jit, static_argnames=("model", "plan"), donate_argnames=("carry",))
def fill(model, params, rule, carry, slot, context, tokens, prompt_length, max_new, key, *, plan) -> DecodeCarry:
    """The carry, donated, with row `slot` replaced by `_start` of a context of one row; other rows are untouched."""
    fresh = _start(model, params, rule, context, tokens, prompt_length, max_new, key, plan)
    return spread_rows(place(carry, slot, fresh))


@partial(jax.jit, static_argnames=("model", "plan"), donate_argnames=("carry",))
def decode(
    model: MTPModel,
    params: PyTree,
    rule: Rule,
    vocabulary: DraftVocabulary | None,
    carry: DecodeCarry,
    max_rounds: Int[Array, ""],
    until_one_finishes: Bool[Array, ""],
    *,
    plan: Plan,
) -> DecodeCarry:
    """Runs rounds until every row has met an end id or its limit. The carry is donated.

    Args:
      vocabulary: ids that the head drafts over; None is all. Verification is over all in any case.
      max_rounds: return after so many, to be called again.
      until_one_finishes: return as soon as a row finishes, so that its slot can be filled.
      plan: J > 0 needs a head that has read along, here and in `read` and `start`.

    Raises:
      ValueError: the plan drafts with a head that it leaves unread.
    """
    if plan.num_drafts and not plan.with_head:
        raise ValueError(f"a plan that leaves the head unread cannot draft {plan.num_drafts} tokens")
    finish = carry.finish

    def goes_on(loop: tuple[Array, DecodeCarry]) -> Array:
        rounds, carry = loop
        freed = until_one_finishes & jnp.any(carry.finish != finish)
        return (rounds < max_rounds) & jnp.any(carry.finish == RUNNING) & ~freed

    def body(loop: tuple[Array, DecodeCarry]) -> tuple[Array, DecodeCarry]:
        rounds, carry = loop
        before, held = gathered_after(carry.finish, params)
        bound, carry = model.bind({"params": held}), carry._replace(finish=before)
        return rounds + 1, spread_rows(advance(bound, rule, vocabulary, carry, plan))

    return spread_rows(jax.lax.while_loop(goes_on, body, (jnp.zeros((), jnp.int32), carry))[1])


def advance(
    model: MTPModel, rule: Rule, vocabulary: DraftVocabulary | None, carry: DecodeCarry, plan: Plan
) -> DecodeCarry:
    """One round: draft J tokens, verify them in one pass, commit those that stand and the one that follows.

    Rows differ in how many tokens they keep; a finished row keeps none.
    """
    noise = _noise(model, rule, carry, plan)
    drafts = _no_drafts(carry)
    if plan.num_drafts:
        drafter = plan.drafter or draft_with_head
        drafts = drafter(model, rule, vocabulary, carry, noise, plan.num_drafts)
    old = carry.context
    hidden, trail = model.probe(jnp.concatenate([carry.newest[:, None], drafts.tokens], axis=1), old.trunk)
    carry, verdict, outcome = _judge(model, rule, carry, drafts, hidden, noise, plan)
    kept = outcome.num_tokens
    newest = jnp.where((kept > 0)[:, None], row_at(hidden, jnp.maximum(kept - 1, 0)), old.hidden)
    carry = carry._replace(context=Context(commit(old.trunk, trail, kept), drafts.head, newest))
    return _read_pairs(model, carry, hidden, verdict, outcome) if plan.with_head else carry


def draft_with_head(
    model: MTPModel,
    rule: Rule,
    vocabulary: DraftVocabulary | None,
    carry: DecodeCarry,
    noise: Float[Array, "B T V"],
    num_drafts: int,
) -> Drafts:
    """Drafts with the MTP head: the first from `draft_hidden`, the others by chaining its own output.

    A chained pass reads (own hidden state, embedding of the newest draft), one token at a time. Each
    draft is drawn as the trunk draws: under the same rule, with the drafts before it as further history.
    """
    hidden, head = carry.draft_hidden[:, None, :], carry.context.head
    one = jnp.ones_like(head.length)
    tokens, laws = _no_drafts(carry).tokens, []
    for i in range(num_drafts):
        if i:
            hidden, head = model.mtp_extend(hidden, tokens[:, -1:], head, one, depth=i + 1)
        output = model.head_output(hidden, depth=i + 1)
        logits = model.logits(output) if vocabulary is None else subset_logits(output, vocabulary, noise.shape[-1])
        law = warp(logits, rule, Past(carry.tokens, carry.prompt_length, carry.num_new, tokens))
        tokens = jnp.concatenate([tokens, draw(law, noise[:, i : i + 1])], axis=1)
        laws.append(law)
    old = carry.context.head
    return Drafts(tokens, head._replace(length=old.length, waiting=old.waiting), jnp.concatenate(laws, axis=1))


def _no_drafts(carry: DecodeCarry) -> Drafts:
    return Drafts(jnp.zeros((carry.finish.shape[0], 0), jnp.int32), carry.context.head, None)


def _noise(model: MTPModel, rule: Rule, carry: DecodeCarry, plan: Plan) -> Float[Array, "B T V"]:
    """Gumbel noise of the next J + 1 places, for drafts and, under shared noise, the trunk's choices; 0 if greedy."""
    position = _positions(carry, plan.num_drafts + 1)
    vocab = model.config.vocab_size
    role = Role.SHARED if plan.verifier == "shared_noise" else Role.DRAFT
    return jax.lax.cond(
        rule.temperature > 0,
        lambda: gumbel(carry.key, position, vocab, role),
        lambda: jnp.zeros((*position.shape, vocab), jnp.float32),
    )


def _positions(carry: DecodeCarry, count: int) -> Int[Array, "B T"]:
    return carry.length[:, None] + jnp.arange(count)[None, :]


def _judge(
    model: MTPModel,
    rule: Rule,
    carry: DecodeCarry,
    drafts: Drafts,
    hidden: Float[Array, "B T D"],
    noise: Float[Array, "B T V"],
    plan: Plan,
) -> tuple[DecodeCarry, Verdict, Outcome]:
    """Decides which drafts stand, given what the trunk says after the newest token and after each draft, and appends
    them and the token that follows."""
    logits = model.logits(model.trunk_output(hidden))
    warped = warp(logits, rule, Past(carry.tokens, carry.prompt_length, carry.num_new, drafts.tokens))
    if plan.verifier == "rejection":
        laws = warped[:, :0] if drafts.laws is None else drafts.laws
        position = _positions(carry, hidden.shape[1])
        verdict = verify_rejection(drafts.tokens, warped, laws, carry.key, position)
    else:
        verdict = verify_shared_noise(drafts.tokens, warped, noise)
    remaining = jnp.where(carry.finish == RUNNING, carry.max_new - carry.num_new, 0)
    outcome = settle(verdict, remaining, jnp.asarray(rule.end_ids))
    scores = None
    if plan.num_logprobs is not None:
        scores = log_probabilities(logits if plan.raw_logprobs else warped)
    return _emit(carry, drafts.tokens, verdict, outcome, scores), verdict, outcome


def _emit(
    carry: DecodeCarry,
    drafts: Int[Array, "B J"],
    verdict: Verdict,
    outcome: Outcome,
    scores: Float[Array, "B T V"] | None,
) -> DecodeCarry:
    """Appends the outcome's tokens and how they came about to each row, and says which rows are finished.

    All J + 1 entries are written; those past the outcome's are overwritten by the next round or never read.
    """
    index = jnp.arange(verdict.tokens.shape[1])[None, :]
    accepted = verdict.accepted[:, None]
    refused = jnp.pad(drafts, ((0, 0), (0, 1)))  # after the last draft there is none to refuse
    logprob, rejected_logprob, top_ids, top_logprobs = _recorded(scores, verdict.tokens, refused, carry.trace)
    entries = Trace(
        draft_position=jnp.where(index < accepted, index + 1, 0),
        round_drafts=jnp.where(index == 0, outcome.drafted[:, None], -1),
        rejected=jnp.where((index == accepted) & (index < drafts.shape[1]), refused, -1),
        logprob=logprob,
        rejected_logprob=rejected_logprob,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )
    num_new = carry.num_new + outcome.num_tokens
    full = jnp.where(num_new >= carry.max_new, LENGTH, RUNNING)
    return carry._replace(
        tokens=_write(carry.tokens, verdict.tokens, carry.length),
        trace=jax.tree.map(lambda buffer, new: _write(buffer, new, carry.length), carry.trace, entries),
        num_new=num_new,
        finish=jnp.where(carry.finish == RUNNING, jnp.where(outcome.ended, STOP, full), carry.finish),
    )


def _recorded(
    scores: Float[Array, "B T V"] | None, tokens: Int[Array, "B T"], refused: Int[Array, "B T"], trace: Trace
) -> tuple[Array, Array, Array, Array]:
    """Log-probabilities of tokens and refused drafts, and the most probable ids with theirs; empty without scores."""
    count = trace.top_ids.shape[2]
    if scores is None:
        nothing = jnp.zeros((tokens.shape[0], 0), jnp.float32)
        top = jnp.zeros((tokens.shape[0], 0, count), jnp.float32)
        return nothing, nothing, top.astype(jnp.int32), top
    top_logprobs, top_ids = jax.lax.top_k(scores, count)
    of_tokens, of_refused = (
        jnp.take_along_axis(scores, ids[:, :, None], axis=-1)[:, :, 0] for ids in (tokens, refused)
    )
    return of_tokens, of_refused, top_ids, top_logprobs


def _read_pairs(
    model: MTPModel, carry: DecodeCarry, hidden: Float[Array, "B T D"], verdict: Verdict, outcome: Outcome
) -> DecodeCarry:
    """Feeds the head the pairs (hidden_i, token i+1) of the tokens that were just appended."""
    kept = outcome.num_tokens
    own, head = model.mtp_extend(hidden, verdict.tokens, carry.context.head, kept)
    newest = row_at(own, jnp.maximum(kept - 1, 0))
    return carry._replace(
        context=carry.context._replace(head=head),
        draft_hidden=jnp.where((kept > 0)[:, None], newest, carry.draft_hidden),
    )


def _write(buffer: Array, values: Array, start: Int[Array, " B"]) -> Array:
    """The buffer [B, S, ...] with values [B, T, ...] from start[b] on in each row."""
    return jax.vmap(lambda row, new, i: jax.lax.dynamic_update_slice_in_dim(row, new, i, 0))(buffer, values, start)


@partial(jax.jit, static_argnames=("model",))
def logits_of(model: MTPModel, params: PyTree, context: Context) -> Float[Array, "B vocab"]:
    """Logits that the first token after the context is chosen from."""
    bound = model.bind({"params": params})
    return bound.logits(bound.trunk_output(context.hidden))


@partial(jax.jit, static_argnames=("model",))
def next_token_logits(model: MTPModel, params: PyTree, carry: DecodeCarry) -> Float[Array, "B vocab"]:
    """Logits that the next round of plain decoding would choose from; the carry stays as it is."""
    bound = model.bind({"params": params})
    hidden, _ = bound.probe(carry.newest[:, None], carry.context.trunk)
    return bound.logits(bound.trunk_output(hidden[:, 0]))
