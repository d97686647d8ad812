"""One row that is being decoded, as the host sees it: text as it becomes certain, and in the end a completion."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from infer.carry import LENGTH, RUNNING, STOP, DecodeCarry, Trace
from infer.completion import Completion, TokenLogprob
from infer.job import Job
from infer.text_stream import TextStream
from mtp_jax.text import Tokenizer


@dataclass(frozen=True)
class Piece:
    """What came for one row since its last piece.

    Attributes:
      job: index of the row's job.
      tokens: new ids.
      draft_positions: for each, 0 if the trunk chose it, k if it was an accepted draft at position k.
      spans: what is now certain of the text, in order: whole characters, none of which may still become a stop string,
        with the draft position of the token that made them certain.
      completion: in the row's last piece, all of it.
    """

    job: int
    tokens: list[int]
    draft_positions: list[int]
    spans: list[tuple[str, int]]
    completion: Completion | None

    @property
    def text(self) -> str:
        """The text of all spans."""
        return "".join(text for text, _ in self.spans)


class View(NamedTuple):
    """What the host looks at: the carry without its states."""

    prompt_length: Int[np.ndarray, " B"]
    num_new: Int[np.ndarray, " B"]
    finish: Int[np.ndarray, " B"]
    tokens: Int[np.ndarray, "B S"]
    trace: Trace


def view(carry: DecodeCarry) -> View:
    """Waits for the rounds that make the carry, and fetches it in one transfer."""
    return View(*jax.device_get((carry.prompt_length, carry.num_new, carry.finish, carry.tokens, carry.trace)))


class Row:
    """Follows one slot of a batch from its first token to its completion.

    Attributes:
      index: of the job.
      finished: by an end id, the limit, or a stop string.
    """

    def __init__(self, index: int, job: Job, tokenizer: Tokenizer | None, min_new_tokens: int) -> None:
        self.index = index
        self.job = job
        self.finished = False
        self._stream = TextStream(tokenizer, job.stop, min_new_tokens)
        self._has_text = tokenizer is not None
        self._seen = 0
        self._latest: tuple[View, int] | None = None

    def look(self, view: View, slot: int) -> Piece | None:
        """What is new in the row's slot, but for the completion; None if nothing is new."""
        count, finish = int(view.num_new[slot]), int(view.finish[slot])
        first = len(self.job.prompt)
        new = slice(first + self._seen, first + count)
        ids = view.tokens[slot, new].tolist()
        positions = view.trace.draft_position[slot, new].tolist()
        with_text = len(ids) - (finish == STOP)  # an end id has none
        spans = [(self._stream.push([i]), k) for i, k in zip(ids[:with_text], positions[:with_text], strict=True)]
        if finish != RUNNING:
            spans.append((self._stream.finish(), positions[with_text - 1] if with_text > 0 else 0))
        spans = [span for span in spans if span[0]]
        if self._stream.stopped is not None:
            # What came after the token that completed a stop string was never emitted.
            kept = self._stream.stopped - self._seen
            ids, positions = ids[:kept], positions[:kept]
        self.finished = finish != RUNNING or self._stream.stopped is not None
        self._seen, self._latest = count, (view, slot)
        return Piece(self.index, ids, positions, spans, None) if ids or self.finished else None

    def rest(self) -> Piece:
        """The text held back so far, of a row that goes no further."""
        text = self._stream.finish()
        return Piece(self.index, [], [], [(text, 0)] if text else [], None)

    def completion(
        self, num_drafts: int, num_logprobs: int | None, seconds: float, compile_seconds: float
    ) -> Completion:
        """All that came, from the last look; a row that is not finished was interrupted."""
        if self._latest is None:
            logprobs = None if num_logprobs is None else []
            return Completion([], self._text, "interrupted", [], [], [], num_drafts, logprobs, seconds, compile_seconds)
        view, slot = self._latest
        whole = slice(len(self.job.prompt), len(self.job.prompt) + self._seen)
        trace = jax.tree.map(lambda values: values[slot, whole].tolist(), view.trace)
        reason = {STOP: "stop", LENGTH: "length", RUNNING: "interrupted"}[int(view.finish[slot])]
        completion = Completion(
            tokens=view.tokens[slot, whole].tolist(),
            text=self._text,
            finish_reason=reason,
            draft_positions=trace.draft_position,
            round_drafts=trace.round_drafts,
            rejected=trace.rejected,
            num_draft_tokens=num_drafts,
            logprobs=None if num_logprobs is None else _logprobs(trace),
            seconds=seconds,
            compile_seconds=compile_seconds,
        )
        return completion if self._stream.stopped is None else completion.cut(self._stream.stopped)

    @property
    def _text(self) -> str | None:
        return self._stream.text if self._has_text else None


def _logprobs(trace: Trace) -> list[TokenLogprob]:
    """Of a trace in lists, one entry a token; ids that cannot be chosen are no alternatives."""
    entries = zip(trace.logprob, trace.top_ids, trace.top_logprobs, trace.rejected, trace.rejected_logprob, strict=True)
    return [
        TokenLogprob(
            logprob,
            [(i, value) for i, value in zip(ids, values, strict=True) if value > -math.inf],
            None if rejected < 0 else rejected_logprob,
        )
        for logprob, ids, values, rejected, rejected_logprob in entries
    ]
