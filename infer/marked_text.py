"""A generation as text in which accepted drafts are marked."""

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from infer.generator import Generation
from mtp_jax.text import Tokenizer

DRAFT_STYLE = "bold green"
OPEN, CLOSE = "‹", "›"
UNFINISHED = "\ufffd"  # what a decoder makes of bytes that are not a whole character


def segments(generation: Generation, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """The generation's text in pieces, each with whether it came from accepted drafts; the end id is left out.

    Tokens that share a character are kept in one piece, which counts as drafted if its last token was.
    """
    tokens = generation.tokens[:-1] if generation.finish_reason == "stop" else generation.tokens
    pending: list[int] = []
    piece, marked = "", False
    for token, drafted in zip(tokens, generation.from_draft, strict=False):
        pending.append(token)
        text = tokenizer.decode(pending)
        if text.endswith(UNFINISHED):
            continue
        if drafted != marked and piece:
            yield piece, marked
            piece = ""
        piece, marked, pending = piece + text, drafted, []
    if piece:
        yield piece, marked
    if pending:
        yield tokenizer.decode(pending), generation.from_draft[len(tokens) - 1]


def marked_text(generation: Generation, tokenizer: Tokenizer, console: Console) -> Text:
    """Accepted drafts in colour, or between ‹ and › where the console shows none."""
    coloured = console.color_system is not None and not console.no_color
    text = Text()
    for piece, drafted in segments(generation, tokenizer):
        if not drafted:
            text.append(piece)
        elif coloured:
            text.append(piece, DRAFT_STYLE)
        else:
            text.append(OPEN + piece + CLOSE)
    return text
