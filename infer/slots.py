"""The host's side of decoding: fills the slots of a batch, lets the jitted loop run some rounds, hands out what came.

A finished row makes room for the next prompt while the others go on. Shapes stay fixed, so nothing compiles again.
"""

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from infer.auto_drafts import AutoDrafts
from infer.carry import STOP, Context, DecodeCarry, Plan
from infer.completion import Completion
from infer.draft_vocabulary import DraftVocabulary
from infer.job import Job
from infer.programs import Programs
from infer.prompt_reading import padded, read_pieces
from infer.row import Piece, Row, View, view
from infer.sampling import Rule
from infer.speculative import decode, fill, idle, unread
from mtp_jax.text import Tokenizer


@dataclass(frozen=True)
class Reading:
    """A prompt is being read.

    Attributes:
      job: index of the row's job.
      done: of its tokens.
      total: all of its tokens.
    """

    job: int
    done: int
    total: int


@dataclass(frozen=True)
class Decoding:
    """What all rows of a run share.

    Attributes:
      rule: of which its minimum of new tokens also holds for stop strings.
      plan: with the number of drafts of each round, unless `auto` chooses it.
      rounds: run at a time before the host looks: few where a person watches, or a stop string may end a row.
    """

    rule: Rule
    plan: Plan
    vocabulary: DraftVocabulary | None
    auto: AutoDrafts | None
    rounds: int

    @property
    def max_drafts(self) -> int:
        """The largest number of drafts that a round may make."""
        return self.plan.num_drafts if self.auto is None else self.auto.sizes[-1]

    def run_rounds(self, programs: Programs, carry: DecodeCarry, until_one_finishes: bool) -> DecodeCarry:
        """Some rounds; `auto` chooses their number of drafts, and is told how they went."""
        limits = np.int32(self.rounds), np.bool_(until_one_finishes)
        if self.auto is None:
            return programs.call(decode, self.rule, self.vocabulary, carry, *limits, plan=self.plan)
        plan, before, clock = self.plan._replace(num_drafts=self.auto.num_draft_tokens), view(carry), Clock(programs)
        carry = programs.call(decode, self.rule, self.vocabulary, carry, *limits, plan=plan)
        after, (seconds, _) = view(carry), clock.read()
        _observe(self.auto, plan.num_drafts, before, after, seconds)
        return carry


def _observe(auto: AutoDrafts, num_drafts: int, before: View, after: View, seconds: float) -> None:
    """Counts what rounds of all rows brought."""
    index = np.arange(after.tokens.shape[1])[None]
    first, last = ((after.prompt_length + count)[:, None] for count in (before.num_new, after.num_new))
    is_new = (index >= first) & (index < last)
    rounds = int(np.sum(is_new & (after.trace.round_drafts >= 0), axis=1).max())
    positions = np.bincount(after.trace.draft_position[is_new], minlength=num_drafts + 1)
    auto.observe(num_drafts, rounds, int(is_new.sum()), positions[1:].tolist(), seconds)


class Clock:
    """Seconds since it was made, those spent compiling apart."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._started = time.perf_counter()
        self._compiled = programs.compile_seconds

    def read(self) -> tuple[float, float]:
        """Seconds without, and seconds of, compiling."""
        compiling = self._programs.compile_seconds - self._compiled
        return time.perf_counter() - self._started - compiling, compiling


class Slots:
    """Slots of one shape, through which any number of jobs can go."""

    def __init__(
        self,
        programs: Programs,
        tokenizer: Tokenizer | None,
        decoding: Decoding,
        num_rows: int,
        num_slots: int,
        cache_length: int,
    ) -> None:
        """Args: num_rows: decoded at a time; num_slots: S, for rows of at most `cache_length` tokens."""
        self._programs = programs
        self._tokenizer = tokenizer
        self._decoding = decoding
        self._rows: list[tuple[Row, Clock] | None] = [None] * num_rows
        self._num_slots = num_slots
        self._cache_length = cache_length
        self._read: tuple[Sequence[int], Context] | None = None  # the newest prompt: its other samples need it too

    def run(self, jobs: Sequence[tuple[int, Job]]) -> Generator[Reading | Piece, None, None]:
        """Decodes jobs, given with their indices, in this order; of each, the last piece has the completion.

        On Ctrl-C what there is of each row comes as its last piece, before KeyboardInterrupt is raised.
        """
        waiting = deque(jobs)
        programs, plan = self._programs, self._decoding.plan
        shape = {"batch": len(self._rows), "num_slots": self._num_slots, "num_logprobs": plan.num_logprobs}
        carry = programs.call(idle, **shape)
        try:
            while True:
                for slot in range(len(self._rows)):
                    if self._rows[slot] is None and waiting:
                        index, job = waiting.popleft()
                        row = Row(index, job, self._tokenizer, int(self._decoding.rule.min_new_tokens))
                        self._rows[slot] = row, Clock(programs)
                        yield from self._read_prompt(row)
                        carry = self._fill(carry, slot, job)
                        if not waiting or waiting[0][1].prompt != job.prompt:
                            self._read = None
                seen = view(carry)
                yield from self._look(seen)
                free = np.array([row is None for row in self._rows])
                if waiting and free.any():
                    continue
                if free.all():
                    return
                # A row that a stop string ended does not know of it.
                carry = carry._replace(finish=jnp.asarray(np.where(free, STOP, seen.finish)))
                carry = self._decoding.run_rounds(programs, carry, until_one_finishes=bool(waiting))
        except KeyboardInterrupt:
            for entry in self._rows:
                if entry is not None:
                    yield replace(entry[0].rest(), completion=self._completion(*entry))
            raise

    def _read_prompt(self, row: Row) -> Iterator[Reading]:
        prompt = row.job.prompt
        if self._read is not None and self._read[0] == prompt:
            return
        empty = self._programs.call(unread, batch=1, num_slots=self._num_slots)
        with_head = self._decoding.plan.with_head
        for context, done in read_pieces(self._programs, empty, 0, prompt, self._num_slots, with_head):
            self._read = prompt, context
            yield Reading(row.index, done, len(prompt))

    def _fill(self, carry: DecodeCarry, slot: int, job: Job) -> DecodeCarry:
        assert self._read is not None
        prompt, context = self._read
        max_new = min(job.max_new_tokens, self._cache_length - len(prompt))
        row = *padded(prompt, self._num_slots), np.array([max_new], np.int32), job.key[None]
        rule, plan = self._decoding.rule, self._decoding.plan.without_drafts()
        return self._programs.call(fill, rule, carry, np.int32(slot), context, *row, plan=plan)

    def _look(self, seen: View) -> Iterator[Piece]:
        """What came for each row; finished ones leave their slots."""
        for slot, entry in enumerate(self._rows):
            if entry is not None and (piece := entry[0].look(seen, slot)) is not None:
                if entry[0].finished:
                    piece = replace(piece, completion=self._completion(*entry))
                    self._rows[slot] = None
                yield piece

    def _completion(self, row: Row, clock: Clock) -> Completion:
        return row.completion(self._decoding.max_drafts, self._decoding.plan.num_logprobs, *clock.read())
