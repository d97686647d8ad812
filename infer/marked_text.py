"""Text in which accepted drafts are marked: of a whole completion, or as it comes."""

import unicodedata
from collections.abc import Iterable, Iterator
from itertools import groupby

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from infer.completion import Completion
from infer.text_stream import TextStream
from mtp_jax.text import Tokenizer

DRAFT_STYLE = "bold green"
OPEN, CLOSE = "‹", "›"


def segments(completion: Completion, tokenizer: Tokenizer | None) -> Iterator[tuple[str, bool]]:
    """The completion's text in pieces, each with whether it came from accepted drafts.

    The end id, and what a stop string cut off, are left out. Tokens that share a character are kept in one piece, which
    counts as drafted if its last token was. Without a tokenizer the text is the ids.
    """
    left = len(completion.text) if completion.text is not None else None
    for drafted, run in groupby(_texts(completion, tokenizer), lambda piece: piece[1]):
        text = "".join(text for text, _ in run)
        if left is not None:
            text, left = text[:left], max(0, left - len(text))
        if text:
            yield text, drafted


def _texts(completion: Completion, tokenizer: Tokenizer | None) -> Iterator[tuple[str, bool]]:
    """What each token makes certain of the text, where that is anything."""
    stream, last = TextStream(tokenizer), len(completion.tokens) - 1
    for index, (token, position) in enumerate(zip(completion.tokens, completion.draft_positions, strict=True)):
        text = f"{token} " if tokenizer is None else stream.push([token])
        text += stream.finish() if index == last else ""
        if text:
            yield text, position > 0


class MarkedWriter:
    """Writes text to a console as it comes, with accepted drafts in colour, between ‹ and ›, or unmarked.

    Control characters other than line ends and tabs are left out: a terminal would obey them.
    """

    def __init__(self, console: Console, marks: str = "auto") -> None:
        """Args: marks: colour, brackets or none; auto is colour where the console shows it, else brackets."""
        self._console = console
        self._marks = _resolved(marks, console)

    def write(self, spans: Iterable[tuple[str, int]]) -> None:
        """Args: spans: texts, each with its draft position, 0 for what the trunk chose."""
        segments = []
        for drafted, group in groupby(spans, lambda span: span[1] > 0):
            text, style = _marked("".join(text for text, _ in group), drafted, self._marks)
            segments.append(Segment(text, Style.parse(style)))
        # Not as Text, which turns a tab into spaces as if every piece began a line.
        self._console.print(Segments(segments), soft_wrap=True, end="")


def marked_text(completion: Completion, tokenizer: Tokenizer | None, console: Console, marks: str = "auto") -> Text:
    """The completion's text as `MarkedWriter` shows it."""
    marks = _resolved(marks, console)
    text = Text()
    for piece, drafted in segments(completion, tokenizer):
        text.append(*_marked(piece, drafted, marks))
    return text


def _resolved(marks: str, console: Console) -> str:
    if marks != "auto":
        return marks
    return "colour" if console.color_system is not None and not console.no_color else "brackets"


def _marked(text: str, drafted: bool, marks: str) -> tuple[str, str]:
    """What is shown, and its style."""
    text = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")
    if drafted and marks == "brackets":
        text = OPEN + text + CLOSE
    return text, DRAFT_STYLE if drafted and marks == "colour" else ""


def summary(completion: Completion) -> str:
    """One line: how many tokens, how they came about, how fast.

    The share at a position is of the rounds that drafted so far; near the token limit, and with `auto`, not all do.
    """
    text = f"{len(completion.tokens)} tokens"
    if completion.rounds:
        text += f" in {completion.rounds} rounds ({completion.tokens_per_round:.2f} a round)"
    if completion.drafted:
        counts = zip(completion.accepted_per_position, completion.drafted_per_position, strict=True)
        shares = " ".join(f"{stood / made:.2f}" if made else "-" for stood, made in counts)
        text += f", {completion.accepted} of {completion.drafted} drafts accepted (by position: {shares})"
    return text + f", {completion.tokens_per_second:.1f} tokens/s, ended by {completion.finish_reason}"


def prepared(seconds: float) -> str:
    """What `Programs.compile_seconds` says, for people: tracing, then compiling or loading from the cache."""
    return f"prepared in {seconds:.1f} s"
