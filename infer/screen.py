"""What a person at a terminal sees of decoding: how far it is, and texts as they come."""

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.text import Text

from infer.completion import Completion
from infer.marked_text import MarkedWriter, prepared, summary
from infer.row import Piece
from infer.slots import Reading

DECODING_SOON = "compiling, decoding"


class PromptStatus:
    """A line that says what is waited for, until there is text. Nothing where the console is no terminal."""

    def __init__(self, console: Console, *, until_text: bool) -> None:
        """Args: until_text: text will be written to the same terminal, where the line would be in its way."""
        self._until_text = until_text
        self._status = Status("loading the model", console=console)

    def __enter__(self) -> "PromptStatus":
        self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()

    def loaded(self) -> None:
        """The model is there; programs come next, compiled or from their cache."""
        self._status.update("compiling, reading the prompt")

    def reading(self, event: Reading) -> None:
        """So much of a prompt was read; after the whole of it programs may be made before there is text."""
        left = event.done < event.total
        self._status.update(f"reading the prompt: {event.done} of {event.total} tokens" if left else DECODING_SOON)

    def came(self, piece: Piece) -> None:
        """There is text."""
        self._status.update("decoding")
        if self._until_text:
            self._status.stop()


class RowsBar:
    """A bar of finished rows. Nothing where the console is no terminal."""

    def __init__(self, console: Console, num_rows: int, num_finished: int, *, hidden: bool) -> None:
        """Args: num_finished: rows that were there before; hidden: show nothing."""
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rows, {task.fields[tokens]} tokens"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(
            TextColumn("{task.description}"), *columns, console=console, disable=hidden or not console.is_terminal
        )
        self._task = self._bar.add_task("loading the model", total=num_rows, completed=num_finished, tokens=0)
        self._tokens = 0

    def __enter__(self) -> "RowsBar":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def loaded(self) -> None:
        """The model is there."""
        self._bar.update(self._task, description="compiling")

    def reading(self, event: Reading) -> None:
        """So much of a prompt was read; only of a long one a person would see it."""
        soon = "decoding" if self._tokens else DECODING_SOON
        left = event.done < event.total
        self._bar.update(self._task, description=f"reading {event.done} of {event.total}" if left else soon)

    def came(self, piece: Piece) -> None:
        """New tokens, and perhaps a finished row."""
        self._tokens += len(piece.tokens)
        finished = piece.completion is not None
        self._bar.update(self._task, description="decoding", advance=int(finished), tokens=self._tokens)


class Transcript:
    """Completions of one prompt as text on a console, accepted drafts marked, each with a line of figures below it."""

    def __init__(self, console: Console, marks: str, prompt: str, num_samples: int, *, has_text: bool) -> None:
        """Args: prompt: shown before each on a terminal; has_text: False without a tokenizer, when ids are shown."""
        self._console = console
        self._writer = MarkedWriter(console, marks)
        self._prompt = prompt
        self._num_samples = num_samples
        self._has_text = has_text
        self._job: int | None = None

    def show(self, piece: Piece) -> None:
        """Pieces of one job after the other."""
        if piece.job != self._job:
            self._job = piece.job
            if self._num_samples > 1:
                self._console.rule(f"sample {piece.job + 1} of {self._num_samples}", style="dim")
            if self._console.is_terminal:
                self._console.print(Text(self._prompt), style="dim", end="", soft_wrap=True)
        self._writer.write(piece.spans if self._has_text else _ids(piece))
        if piece.completion is not None:
            self._figures(piece.completion)

    def finish(self, compile_seconds: float) -> None:
        """Args: compile_seconds: of the whole run, which samples share."""
        if self._num_samples > 1:
            self._console.print(prepared(compile_seconds), style="dim", markup=False, soft_wrap=True)

    def _figures(self, completion: Completion) -> None:
        text = summary(completion)
        if self._num_samples == 1:
            text += f"; {prepared(completion.compile_seconds)}"
        self._console.print()
        self._console.print(text, style="dim", markup=False, soft_wrap=True)


def _ids(piece: Piece) -> Sequence[tuple[str, int]]:
    return [(f"{token} ", k) for token, k in zip(piece.tokens, piece.draft_positions, strict=True)]
