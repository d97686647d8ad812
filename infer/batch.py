"""Requests of a file (or of one prompt) as jobs, and what comes of them in order."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from infer.completion import Completion
from infer.generator import Updates
from infer.job import Job
from infer.noise import row_key
from infer.requests import Request
from infer.row import Piece
from infer.slots import Reading


def jobs_for(
    requests: Sequence[Request],
    targets: Sequence[tuple[int, int]],
    *,
    max_new_tokens: int,
    seed: int,
    stop: tuple[str, ...] = (),
) -> list[Job]:
    """A job for each target (p, i), sample i of request p; the request's own settings come before those given here.

    Its noise is seeded from (seed, p, i), or from (s, 0, i) if the request has a seed s of its own: then it does not
    depend on where in the file the request is.
    """
    jobs = []
    for p, i in targets:
        request = requests[p]
        jobs.append(
            Job(
                request.ids,
                max_new_tokens if request.max_new_tokens is None else request.max_new_tokens,
                row_key(seed, p, i) if request.seed is None else row_key(request.seed, 0, i),
                stop if request.stop is None else request.stop,
            )
        )
    return jobs


@dataclass
class Totals:
    """Sums over completions."""

    rows: int = 0
    tokens: int = 0
    rounds: int = 0
    later_tokens: int = 0  # without those that prompts yield
    drafted: int = 0
    accepted: int = 0

    def add(self, completion: Completion) -> None:
        """Counts one in."""
        self.rows += 1
        self.tokens += len(completion.tokens)
        self.rounds += completion.rounds
        self.later_tokens += len(completion.tokens) - 1 if completion.rounds else 0
        self.drafted += completion.drafted
        self.accepted += completion.accepted

    def summary(self, seconds: float) -> str:
        """One line for people. Args: seconds: that all of it took, without preparing programs."""
        text = f"{self.tokens} tokens in {seconds:.1f} s ({self.tokens / seconds:.1f} tokens/s)"
        if self.rounds:
            text += f", {self.later_tokens / self.rounds:.2f} a round"
        if self.drafted:
            text += f", {self.accepted} of {self.drafted} drafts accepted"
        return text


class InOrder:
    """Passes on what comes of the first unfinished job at once, and keeps what comes of others until their turn."""

    def __init__(self, handle: Callable[[Piece], None]) -> None:
        self._handle = handle
        self._current = 0
        self._kept: dict[int, list[Piece]] = {}

    def add(self, piece: Piece) -> None:
        """Takes a piece of any job."""
        self._kept.setdefault(piece.job, []).append(piece)
        while self._current in self._kept:
            pieces = self._kept.pop(self._current)
            for piece in pieces:
                self._handle(piece)
            if pieces[-1].completion is None:
                return
            self._current += 1

    def flush(self) -> None:
        """Passes on what is left: after an interruption, jobs that come after one that never began."""
        for job in sorted(self._kept):
            for piece in self._kept.pop(job):
                self._handle(piece)


@dataclass
class Outcome:
    """What decoding came to.

    Attributes:
      totals: over all completions, also those that were interrupted.
      seconds: that it took, with the preparing of programs.
      completions: by index of the job, if they were to be kept.
      interrupted: by Ctrl-C.
    """

    totals: Totals
    seconds: float
    completions: dict[int, Completion]
    interrupted: bool


def follow(
    events: Updates,
    reading: Callable[[Reading], None],
    came: Callable[[Piece], None],
    *,
    keep: bool,
) -> Outcome:
    """Hands out all events of `Generator.run`; after Ctrl-C too, which does not raise but ends it with what there is.

    Args: keep: completions for the outcome.
    """
    outcome, started = Outcome(Totals(), 0.0, {}, False), time.perf_counter()

    def handle(event: Reading | Piece) -> None:
        with _undisturbed():
            if isinstance(event, Reading):
                reading(event)
                return
            if event.completion is not None:
                outcome.totals.add(event.completion)
                if keep:
                    outcome.completions[event.job] = event.completion
            came(event)

    try:
        for event in events:
            handle(event)
    except KeyboardInterrupt:
        outcome.interrupted = True
        with suppress(KeyboardInterrupt):
            # If it came while an event was handled, the decoding has yet to hear of it; if not, this raises at once.
            handle(events.throw(KeyboardInterrupt()))
            for event in events:
                handle(event)
    outcome.seconds = time.perf_counter() - started
    return outcome


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Puts Ctrl-C off until the end of the block: nothing is shown or written by halves. A second one does not wait."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # a job in the background, say, which is not to hear of it
        yield
        return
    came = []

    def put_off(number: int, frame: FrameType | None) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)

    signal.signal(signal.SIGINT, put_off)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
