"""How to decode: the choices that hold for all prompts of a call, told right from wrong before weights are read."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from infer.carry import Drafter
from infer.sampling import Rule, Sampling, checked_count
from mtp_jax.config import ModelConfig
from mtp_jax.errors import UserError
from mtp_jax.text import Tokenizer

DEFAULT_DRAFT_TOKENS = 3
MOST_DRAFT_TOKENS = 128  # each is a part of the compiled program: thousands would compile for hours
BATCH_SIZE = 8


@dataclass(frozen=True)
class Settings:
    """What `Generator` is asked to do with each prompt.

    Attributes:
      num_draft_tokens: J, drafts a round; 0 is plain decoding; `auto` chooses among several by measured speed; None is
        3, or 0 for a model without a head.
      sampling: the law of the next token, and the seed.
      ignore_eos: end ids are tokens like others, and end nothing.
      logprobs: alternatives to report with each token's log-probability, 0 for none; None reports nothing.
      raw_logprobs: of the model's own distribution, before penalties, temperature and the like.
      cache_length: most tokens of a row, prompt included; a full cache ends the row with `length`. None is the smallest
        bucket that holds prompt and new tokens, at most the model's `max_position_embeddings`.
      batch_size: rows decoded at a time, at most; further prompts take the place of finished ones.
      draft_vocabulary: ids that the head drafts over; None is all. Verification is over all in any case.
      drafter: another than the head; static, see `infer.carry.Drafter`.

    Raises:
      UserError: a value is of a wrong type, or a draft vocabulary is empty.
    """

    num_draft_tokens: int | Literal["auto"] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    ignore_eos: bool = False
    logprobs: int | None = None
    raw_logprobs: bool = False
    cache_length: int | None = None
    batch_size: int = BATCH_SIZE
    draft_vocabulary: Sequence[int] | None = None
    drafter: Drafter | None = None

    def __post_init__(self) -> None:
        """Checks types; integers become plain Python's, and the draft vocabulary distinct and ascending."""

        def store(name: str, value: object) -> None:
            object.__setattr__(self, name, value)  # frozen for everyone else

        for name in ("num_draft_tokens", "logprobs", "cache_length", "batch_size"):
            value = getattr(self, name)
            none, auto = value is None and name != "batch_size", name == "num_draft_tokens" and isinstance(value, str)
            if auto and value != "auto":
                raise UserError(f'num_draft_tokens must be an integer or "auto", got {value!r}')
            if not (none or auto):
                store(name, checked_count(name, value))
        for name in ("ignore_eos", "raw_logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.sampling, Sampling):
            raise UserError(f"sampling must be a Sampling, got {self.sampling!r}")
        if self.draft_vocabulary is not None:
            if isinstance(self.draft_vocabulary, str) or not isinstance(self.draft_vocabulary, Iterable):
                raise UserError(f"draft_vocabulary must be a list of ids, got {self.draft_vocabulary!r}")
            ids = {checked_count("an id of draft_vocabulary", i) for i in self.draft_vocabulary}
            if not ids:
                raise UserError("draft_vocabulary must hold at least one id, got none")
            store("draft_vocabulary", tuple(sorted(ids)))

    def draft_tokens(self, config: ModelConfig) -> int | Literal["auto"]:
        """J, with the default filled in."""
        if self.num_draft_tokens is None:
            return DEFAULT_DRAFT_TOKENS if config.num_mtp_layers else 0
        return self.num_draft_tokens

    def rule(self, config: ModelConfig, tokenizer: Tokenizer | None, end_ids: Iterable[int]) -> Rule:
        """The law of the next token, for one model: ids that no token has are never chosen.

        Raises:
          UserError: an id is outside the vocabulary, or none is left to choose.
        """
        vocab = config.vocab_size
        num_ids = vocab if tokenizer is None else min(len(tokenizer), vocab)
        return self.sampling.rule(vocab, num_ids, () if self.ignore_eos else end_ids)

    def check(self, config: ModelConfig) -> None:
        """Refuses what contradicts itself or the model.

        Raises:
          UserError: a number is out of range, two settings exclude each other, or drafts are asked of a model without a
            head.
        """
        drafts = self.draft_tokens(config)
        if drafts != "auto" and drafts > MOST_DRAFT_TOKENS:
            raise UserError(f"the number of draft tokens must be at most {MOST_DRAFT_TOKENS}, got {drafts}")
        if drafts and not config.num_mtp_layers:
            raise UserError(
                f"drafting {drafts} tokens needs the MTP head, and this model was loaded without one: load a "
                "checkpoint that has it (scripts/graft_head.py puts back one that was lost), not --trunk-only, or "
                "decode plainly with --num-draft-tokens 0"
            )
        if drafts == "auto" and self.sampling.verifier == "rejection":
            raise UserError(
                "the rejection verifier's tokens depend on the number of drafts, which `auto` chooses by the clock: "
                "one seed would not give one text; give a number of draft tokens or use shared_noise"
            )
        if self.draft_vocabulary is not None and drafts == 0:
            raise UserError("a draft vocabulary was given, and 0 draft tokens were asked for: drop one of the two")
        if self.draft_vocabulary is not None and (last := max(self.draft_vocabulary)) >= config.vocab_size:
            raise UserError(
                f"draft_vocabulary holds id {last}; expected ids from 0 to {config.vocab_size - 1}, the vocabulary"
            )
        if self.ignore_eos and self.sampling.min_new_tokens:
            raise UserError(
                f"a minimum of {self.sampling.min_new_tokens} new tokens bans end ids until then, and ignore_eos lets "
                "them pass as ordinary tokens: drop one of the two"
            )
        if self.batch_size < 1:
            raise UserError(f"the batch size must be at least 1, got {self.batch_size}")
        if self.raw_logprobs and self.logprobs is None:
            raise UserError("raw log-probabilities were asked for without log-probabilities: give their number too")
        if self.logprobs is not None and not 0 <= self.logprobs <= config.vocab_size:
            raise UserError(
                f"the number of alternatives must be between 0 and the vocabulary's {config.vocab_size}, "
                f"got {self.logprobs}"
            )
        most = config.max_position_embeddings
        if self.cache_length is not None and not 1 <= self.cache_length <= most:
            raise UserError(
                f"the cache length must be between 1 and the model's max_position_embeddings {most}, "
                f"got {self.cache_length}"
            )
