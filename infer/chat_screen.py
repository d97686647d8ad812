"""A conversation as a person at a terminal sees it."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console

from infer.conversation import END_THINK, THINK, Turn
from infer.marked_text import MarkedWriter, prepared, summary

THINKING_STYLE = "dim"


def split_thinking(spans: Iterable[tuple[str, int]], before: str) -> Iterator[tuple[tuple[str, int], bool]]:
    """Spans of a reply, each with whether it belongs to its thinking; one in which that ends is cut there.

    Args:
      before: the reply's text before them, with what its template opened.
    """
    text = before
    for piece, position in spans:
        begin, text = len(text), text + piece
        if not text.lstrip().startswith(THINK):
            yield (piece, position), False
            continue
        end = text.find(END_THINK)
        cut = len(piece) if end < 0 else max(0, end + len(END_THINK) - begin)
        for part, thinking in ((piece[:cut], True), (piece[cut:], False)):
            if part:
                yield (part, position), thinking


class ReplyWriter:
    """Writes replies as they come: accepted drafts marked, thinking dimmed."""

    def __init__(self, marks: str) -> None:
        """Args: marks: see `MarkedWriter`."""
        consoles = (Console(highlight=False, style=style) for style in ("none", THINKING_STYLE))
        self._answer, self._thinking = (MarkedWriter(console, marks) for console in consoles)
        self._text = ""

    def begin(self, opened: str) -> None:
        """A reply. Args: opened: what the template put before it as its first part."""
        self._text = ""
        self.write([(opened, 0)] if opened else [])

    def write(self, spans: Sequence[tuple[str, int]]) -> None:
        """More of it."""
        for span, thinking in split_thinking(spans, self._text):
            (self._thinking if thinking else self._answer).write([span])
        self._text += "".join(text for text, _ in spans)


def turn_summary(turn: Turn, most: int) -> str:
    """Two lines: the context and how much of it was read for the last turn; the reply.

    Args:
      most: tokens that the context can have.
    """
    total = turn.kept + turn.read + len(turn.completion.tokens)
    again = f"; {turn.forgotten} read before were given up" if turn.forgotten else ""
    context = f"context: {total} of {most} tokens; the last turn kept {turn.kept} and read {turn.read}{again}"
    return f"{context}\nreply: {summary(turn.completion)}; {prepared(turn.completion.compile_seconds)}"
