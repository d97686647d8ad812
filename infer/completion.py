"""What decoding gave for one prompt, as a trace: every figure about it is counted from what is known of each token."""

import math
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probabilities at one token's place, of the distribution the token was chosen from.

    Attributes:
      logprob: of the token.
      top: the most probable ids with theirs, most probable first.
      rejected: the trunk's, of the draft that was refused here; None if none was.
    """

    logprob: float
    top: list[tuple[int, float]]
    rejected: float | None = None


@dataclass(frozen=True)
class Completion:
    """One continuation of one prompt. The lists that say "per token" are as long as `tokens`.

    Attributes:
      tokens: new ids, with the end id that stopped the row, or the token that completed a stop string.
      text: their text, cut before a stop string and without the end id; None without a tokenizer.
      finish_reason: `stop` (an end id or a stop string), `length` (the token limit or the cache) or `interrupted`.
      draft_positions: per token: 0 if the trunk chose it, k if it is an accepted draft at position k, 1 to J.
      round_drafts: per token: at a round's first token the drafts that could have been emitted in that round; -1 at
        its other tokens and at prefill's token, which belongs to no round.
      rejected: per token: the id of the draft that was refused at its place, or -1.
      num_draft_tokens: J, the largest used.
      logprobs: per token; None if they were not asked for.
      seconds: prefill to last token, without loading and compiling.
      compile_seconds: spent on preparing programs while the row was live: tracing, then compiling or loading.
    """

    tokens: list[int]
    text: str | None
    finish_reason: str
    draft_positions: list[int]
    round_drafts: list[int]
    rejected: list[int]
    num_draft_tokens: int
    logprobs: list[TokenLogprob] | None
    seconds: float
    compile_seconds: float

    @property
    def rounds(self) -> int:
        """Verifications while the row was live; prefill, which yields the first token, is not one."""
        return sum(drafts >= 0 for drafts in self.round_drafts)

    @property
    def drafted(self) -> int:
        """Drafts verified that could have been emitted."""
        return sum(drafts for drafts in self.round_drafts if drafts > 0)

    @property
    def accepted(self) -> int:
        """Drafts emitted."""
        return sum(position > 0 for position in self.draft_positions)

    @property
    def accepted_per_position(self) -> list[int]:
        """Of length J: how often the draft at that position was emitted."""
        return [self.draft_positions.count(position) for position in range(1, self.num_draft_tokens + 1)]

    @property
    def drafted_per_position(self) -> list[int]:
        """Of length J: rounds in which the draft at that position could have been emitted."""
        positions = range(1, self.num_draft_tokens + 1)
        return [sum(drafts >= position for drafts in self.round_drafts) for position in positions]

    @property
    def tokens_per_round(self) -> float | None:
        """(tokens - 1) / rounds, since prefill yields the first; None at 0 rounds."""
        return (len(self.tokens) - 1) / self.rounds if self.rounds else None

    @property
    def tokens_per_second(self) -> float:
        """Tokens over seconds; 0 where there was nothing to do."""
        return len(self.tokens) / self.seconds if self.tokens else 0.0

    def cut(self, num_tokens: int) -> "Completion":
        """The completion as if its token number `num_tokens` had been an end id: what came after was never emitted.

        If that token is an accepted draft at position k, drafts past it could not have been emitted, so the last round
        counts k. The text stays as it is: where it ends is not a matter of whole tokens.

        Args:
          num_tokens: tokens to keep, at least 1 and at most all.
        """
        round_drafts = self.round_drafts[:num_tokens]
        if last_position := self.draft_positions[num_tokens - 1]:
            # Drafts come first in a round, one a position, so its first token is k - 1 before its k-th.
            round_drafts[num_tokens - last_position] = last_position
        return replace(
            self,
            tokens=self.tokens[:num_tokens],
            finish_reason="stop",
            draft_positions=self.draft_positions[:num_tokens],
            round_drafts=round_drafts,
            rejected=self.rejected[:num_tokens],
            logprobs=None if self.logprobs is None else self.logprobs[:num_tokens],
        )

    def record(self) -> dict[str, Any]:
        """The completion as the command lines give it in JSON; `logprobs` only if they were asked for."""
        record = {
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "accepted_per_position": self.accepted_per_position,
            "tokens_per_round": self.tokens_per_round,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "compile_seconds": self.compile_seconds,
        }
        if self.logprobs is not None:
            # JSON has no infinity; an alternative that cannot be chosen is none.
            record["logprobs"] = [
                {"logprob": entry.logprob, "top": [[id_, value] for id_, value in entry.top if math.isfinite(value)]}
                for entry in self.logprobs
            ]
        return record
