"""Which token a model chooses: what a user may ask, and logits -> the scores that a token is drawn from.

One traced program serves all settings. Parts that are off are skipped while it runs, not while it compiles.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from infer.buckets import bucket
from mtp_jax.argmax import argmax
from mtp_jax.errors import UserError

VERIFIERS = ("shared_noise", "rejection")
# Scales and shifts of logits lie within it (scales also above its inverse): no float32 in `warp` overflows to nan.
LARGEST = 1e30
MIN_IDS = 8  # the smallest bucket of id lists


class Rule(NamedTuple):
    """`Sampling` for one vocabulary. Host arrays; traced in a program: other values do not compile again."""

    temperature: Float[Array | np.ndarray, ""]  # 0: greedy
    top_k: Int[Array | np.ndarray, ""]  # 0: off
    top_p: Float[Array | np.ndarray, ""]
    min_p: Float[Array | np.ndarray, ""]
    repetition_penalty: Float[Array | np.ndarray, ""]
    presence_penalty: Float[Array | np.ndarray, ""]
    frequency_penalty: Float[Array | np.ndarray, ""]
    bias_ids: Int[Array | np.ndarray, " biased"]  # the vocabulary's size is padding
    bias: Float[Array | np.ndarray, " biased"]  # added to the logits; -inf for a banned id
    min_new_tokens: Int[Array | np.ndarray, ""]
    end_ids: Int[Array | np.ndarray, " ends"]  # negative entries are padding
    num_ids: Int[Array | np.ndarray, ""]  # ids at or above it are never chosen


class Past(NamedTuple):
    """What comes before the T positions of some logits: the sequence so far, then drafts.

    Position t has before it the first D - (T - 1) + t drafts: none to all in a verification (D = J,
    T = J + 1), all when one more token is drafted (T = 1).
    """

    tokens: Int[Array, "B S"]  # prompt, then new tokens; what follows them is meaningless
    prompt_length: Int[Array, " B"]
    num_new: Int[Array, " B"]
    drafts: Int[Array, "B D"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; greedy by default. Applied in the order of `warp`.

    Attributes:
      temperature: logits are divided by it; 0 takes the most probable token.
      top_k: keep the k most probable ids, with all that tie with the last; 0 is off.
      top_p: keep the fewest most probable ids that together reach this probability, with ties; 1 is off.
      min_p: keep ids at least this times as probable as the most probable one; 0 is off.
      repetition_penalty: logits of ids in prompt or output are divided by it if positive, else multiplied.
      presence_penalty: subtracted from the logits of ids in the output.
      frequency_penalty: subtracted from the logits once for each time that the id is in the output.
      logit_bias: added to the logits of these ids.
      banned_ids: never chosen.
      min_new_tokens: end ids are not chosen before so many new tokens.
      seed: any non-negative integer; the same seed gives the same tokens.
      verifier: `shared_noise` (the tokens do not depend on the number of drafts) or `rejection` (more drafts
        stand, and other tokens of the same distribution are drawn).

    Raises:
      UserError: a value is out of its range or of a wrong type, or two contradict each other.
    """

    temperature: float | int = 0.0
    top_k: int = 0
    top_p: float | int = 1.0
    min_p: float | int = 0.0
    repetition_penalty: float | int = 1.0
    presence_penalty: float | int = 0.0
    frequency_penalty: float | int = 0.0
    logit_bias: Mapping[int, float | int] = field(default_factory=dict)
    banned_ids: Sequence[int] = ()
    min_new_tokens: int = 0
    seed: int = 0
    verifier: str = "shared_noise"

    def __post_init__(self) -> None:
        """Checks all values; numbers become plain Python's."""

        def store(name: str, value: object) -> None:
            object.__setattr__(self, name, value)  # frozen for everyone else

        def store_number(name: str, lowest: float, highest: float, expected: str) -> None:
            value = _number(name, getattr(self, name))
            if not lowest <= value <= highest:
                raise UserError(f"{name} must be {expected}, got {value}")
            store(name, value)

        smallest = 1 / LARGEST
        if self.temperature != 0:
            store_number("temperature", smallest, LARGEST, f"0 (greedy) or between {smallest:g} and {LARGEST:g}")
        store_number("temperature", 0.0, LARGEST, "")
        store_number("top_p", math.ulp(0.0), 1.0, "above 0 and at most 1")
        store_number("min_p", 0.0, 1.0, "between 0 and 1")
        store_number("repetition_penalty", smallest, LARGEST, f"between {smallest:g} and {LARGEST:g}")
        for name in ("presence_penalty", "frequency_penalty"):
            store_number(name, -LARGEST, LARGEST, f"between {-LARGEST:g} and {LARGEST:g}")
        for name in ("top_k", "min_new_tokens", "seed"):
            store(name, checked_count(name, getattr(self, name)))
        if not isinstance(self.logit_bias, Mapping):
            raise UserError(f"logit_bias must be a mapping from ids to numbers, got {self.logit_bias!r}")
        if isinstance(self.banned_ids, str) or not isinstance(self.banned_ids, Iterable):
            raise UserError(f"banned_ids must be a list of ids, got {self.banned_ids!r}")
        bias = {checked_count("an id of logit_bias", i): _number("logit_bias", x) for i, x in self.logit_bias.items()}
        for i, x in bias.items():
            if abs(x) > LARGEST:
                raise UserError(f"logit_bias of id {i} must be between {-LARGEST:g} and {LARGEST:g}, got {x}")
        store("logit_bias", bias)
        store("banned_ids", tuple(sorted({checked_count("an id of banned_ids", i) for i in self.banned_ids})))
        self._check_contradictions()

    def _check_contradictions(self) -> None:
        if self.verifier not in VERIFIERS:
            raise UserError(f"verifier must be one of {', '.join(VERIFIERS)}, got {self.verifier!r}")
        if self.temperature == 0:
            off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "verifier": "shared_noise"}
            for name, value in off.items():
                if getattr(self, name) != value:
                    raise UserError(
                        f"{name} {getattr(self, name)} needs a temperature above 0: at temperature 0 the most probable "
                        "token is taken and nothing is drawn"
                    )
        if both := sorted(set(self.banned_ids) & set(self.logit_bias)):
            raise UserError(f"id {both[0]} is in both logit_bias and banned_ids; expected one of them")

    def rule(self, vocab_size: int, num_ids: int, end_ids: Iterable[int]) -> Rule:
        """These settings for one model, on the host. Id lists are padded: others of similar size compile nothing.

        Args:
          vocab_size: of the logits.
          num_ids: ids at or above it are never chosen; at most `vocab_size`.
          end_ids: banned before `min_new_tokens`.

        Raises:
          UserError: an id is outside the vocabulary, or no id is left to choose.
        """
        ends = sorted(set(end_ids))
        for name, ids in (("logit_bias", self.logit_bias), ("banned_ids", self.banned_ids)):
            if outside := [i for i in ids if i >= num_ids]:
                raise UserError(f"{name} holds id {outside[0]}; expected ids from 0 to {num_ids - 1}, the vocabulary")
        never = set(self.banned_ids) | {i for i in ends if i < num_ids and self.min_new_tokens}
        if len(never) >= num_ids:
            raise UserError(
                f"no id is left to choose: of {num_ids}, {len(self.banned_ids)} are in banned_ids"
                + (", and the others end the text before min_new_tokens" if len(self.banned_ids) < num_ids else "")
            )
        bias = {**self.logit_bias, **dict.fromkeys(self.banned_ids, -math.inf)}
        int32 = np.iinfo(np.int32)
        return Rule(
            **{
                name: np.asarray(getattr(self, name), np.float32)
                for name in (
                    "temperature",
                    "top_p",
                    "min_p",
                    "repetition_penalty",
                    "presence_penalty",
                    "frequency_penalty",
                )
            },
            top_k=np.asarray(min(self.top_k, vocab_size), np.int32),
            bias_ids=_padded(bias, vocab_size, np.int32),
            bias=_padded(bias.values(), 0, np.float32),
            min_new_tokens=np.asarray(min(self.min_new_tokens, int32.max), np.int32),
            end_ids=_padded(ends, -1, np.int32),
            num_ids=np.asarray(num_ids, np.int32),
        )


def warp(logits: Float[Array, "B T vocab"], rule: Rule, past: Past) -> Float[Array, "B T vocab"]:
    """Scores x of the law that tokens are drawn from, softmax(x); -inf for ids that cannot be chosen.

    In this order: ids without a token; repetition, presence and frequency penalties; biases and bans; end
    ids before the least number of new tokens. Then, if the temperature is above 0: x = (logits - max) /
    temperature, top-k, top-p of what top-k kept, min-p. Ties with the last id kept are kept.

    Every step is elementwise, an integer sum, a maximum or a sum of fixed order, so that a position's scores
    have the same bits whatever B and T are: plain and speculative decoding draw from one law.

    Source: the order and meaning of transformers' logits processors, of which top-p drops ties by their
    place in a sort; presence and frequency as in OpenAI's API.
    """
    width, vocab = logits.shape[1:]
    ids = jnp.arange(vocab)
    logits = jnp.where((ids < rule.num_ids)[None, None, :], logits, -jnp.inf)

    penalized = (rule.repetition_penalty != 1) | (rule.presence_penalty != 0) | (rule.frequency_penalty != 0)
    logits = jax.lax.cond(penalized, lambda x: _penalize(x, rule, past), lambda x: x, logits)

    def add_bias(x: Array) -> Array:
        bias = jnp.zeros((vocab,), jnp.float32).at[rule.bias_ids].add(rule.bias, mode="drop")
        return x + bias[None, None, :]

    logits = jax.lax.cond(jnp.any(rule.bias_ids < vocab), add_bias, lambda x: x, logits)

    def ban_ends(x: Array) -> Array:
        # Negative ids would count from the back.
        ends = jnp.where(rule.end_ids < 0, vocab, rule.end_ids)
        is_end = jnp.zeros((vocab,), jnp.bool_).at[ends].set(True, mode="drop")
        new_before = past.num_new[:, None] + _drafts_before(past, width)[None, :]
        too_early = new_before < rule.min_new_tokens
        return jnp.where(too_early[:, :, None] & is_end[None, None, :], -jnp.inf, x)

    logits = jax.lax.cond(rule.min_new_tokens > 0, ban_ends, lambda x: x, logits)
    return jax.lax.cond(rule.temperature > 0, lambda x: _truncate(x, rule), lambda x: x, logits)


def draw(warped: Float[Array, "B T vocab"], noise: Float[Array, "B T vocab"]) -> Int[Array, "B T"]:
    """argmax(warped + noise): with Gumbel noise a draw from softmax(warped), with none the most probable id.

    Of equal scores the lowest id.
    """
    return argmax(warped + noise)


def log_probabilities(warped: Float[Array, "*B vocab"]) -> Float[Array, "*B vocab"]:
    """log softmax(warped); -inf where an id cannot be chosen."""
    return jax.nn.log_softmax(warped, axis=-1)


def _penalize(logits: Float[Array, "B T vocab"], rule: Rule, past: Past) -> Float[Array, "B T vocab"]:
    """Repetition, then presence and frequency penalties, each position with the drafts before it as its past."""
    batch, width, vocab = logits.shape
    slot = jnp.arange(past.tokens.shape[1])[None, :]
    is_new = (slot >= past.prompt_length[:, None]) & (slot < (past.prompt_length + past.num_new)[:, None])
    is_prompt = slot < past.prompt_length[:, None]

    def count(ids: Int[Array, "B S"], counted: Bool[Array, "B S"]) -> Int[Array, "B vocab"]:
        row = jnp.arange(batch)[:, None]
        zeros = jnp.zeros((batch, vocab), jnp.int32)
        return zeros.at[row, jnp.where(counted, ids, vocab)].add(1, mode="drop")

    is_before = jnp.arange(past.drafts.shape[1])[None, :] < _drafts_before(past, width)[:, None]
    drafted = jnp.stack([count(past.drafts, jnp.broadcast_to(b, past.drafts.shape)) for b in is_before], axis=1)
    new = count(past.tokens, is_new)[:, None, :] + drafted
    seen = (new > 0) | (count(past.tokens, is_prompt) > 0)[:, None, :]

    repeated = jnp.where(logits > 0, logits / rule.repetition_penalty, logits * rule.repetition_penalty)
    logits = jnp.where(seen, repeated, logits)
    logits = jnp.where(new > 0, logits - rule.presence_penalty, logits)
    return logits - rule.frequency_penalty * new.astype(jnp.float32)


def _drafts_before(past: Past, width: int) -> Int[Array, " T"]:
    """How many drafts come before each of `width` positions."""
    return jnp.arange(width) + (past.drafts.shape[1] - (width - 1))


def _truncate(logits: Float[Array, "B T vocab"], rule: Rule) -> Float[Array, "B T vocab"]:
    """Temperature, top-k, top-p, min-p. In terms of the gap >= 0 of each score below the best one."""
    vocab = logits.shape[-1]
    gap = (jnp.max(logits, axis=-1, keepdims=True) - logits) / rule.temperature

    def top_k(gap: Array) -> Array:
        return _keep(gap, lambda closer: jnp.sum(closer, axis=-1, dtype=jnp.int32) < rule.top_k)

    def top_p(gap: Array) -> Array:
        weight = jnp.exp(-gap)
        enough = rule.top_p * _total(weight)
        return _keep(gap, lambda closer: _total(jnp.where(closer, weight, 0.0)) < enough)

    def min_p(gap: Array) -> Array:
        return jnp.where(jnp.exp(-gap) >= rule.min_p, gap, jnp.inf)

    gap = jax.lax.cond((rule.top_k > 0) & (rule.top_k < vocab), top_k, lambda x: x, gap)
    gap = jax.lax.cond(rule.top_p < 1, top_p, lambda x: x, gap)
    gap = jax.lax.cond(rule.min_p > 0, min_p, lambda x: x, gap)
    return -gap


def _keep(gap: Float[Array, "B T vocab"], too_few: Callable[[Array], Array]) -> Float[Array, "B T vocab"]:
    """The gaps up to the largest threshold for which those strictly closer are too few; inf beyond.

    The threshold is found bit by bit: bits of floats >= 0 are ordered like the floats, so 31 passes end at
    exactly one of the gaps (at the largest number, which keeps all, if all are too few). A sort of 250,000
    scores takes longer.

    Args:
      too_few: of a mask [B, T, vocab], whether [B, T] what it marks is not enough; true of the empty mask, and
        if true of a mask then also of each part of it.
    """
    bits = jax.lax.bitcast_convert_type(gap, jnp.int32)

    def set_bit(i: Int[Array, ""], threshold: Int[Array, "B T"]) -> Int[Array, "B T"]:
        candidate = threshold | jnp.left_shift(jnp.int32(1), 30 - i)
        return jnp.where(too_few(bits < candidate[:, :, None]), candidate, threshold)

    threshold = jax.lax.fori_loop(0, 31, set_bit, jnp.zeros(gap.shape[:2], jnp.int32))
    return jnp.where(bits <= threshold[:, :, None], gap, jnp.inf)


def _total(x: Float[Array, "B T vocab"]) -> Float[Array, "B T"]:
    """The sum over the last axis in an order that depends on its length alone.

    A reduction's order may change with the other axes. This one is made of additions of 16 slices, until
    one number is left; its rounding error grows with the logarithm of the length.
    """
    while x.shape[-1] > 1:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[-1] % 16)))
        slices = jnp.split(x, 16, axis=-1)
        x = slices[0]
        for part in slices[1:]:
            x = x + part
    return x[:, :, 0]


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise UserError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise UserError(f"{name} must be a finite number, got {value}")
    return number


def checked_count(name: str, value: object) -> int:
    """The value as a plain integer.

    Raises:
      UserError: it is none (booleans are not), or negative.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise UserError(f"{name} must be an integer, got {value!r}")
    if value < 0:
        raise UserError(f"{name} must be at least 0, got {value}")
    return int(value)


def _padded(values: Iterable[int | float], filler: int, dtype: type) -> np.ndarray:
    """The values in an array whose size is a bucket."""
    values = list(values)
    padded = np.full((bucket(len(values), MIN_IDS),), filler, dtype)
    padded[: len(values)] = values
    return padded
