"""A generation as text in which accepted drafts are marked."""

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from infer.generator import Generation
from mtp_jax.text import Tokenizer

DRAFT_STYLE = "bold green"
OPEN, CLOSE = "‹", "›"
UNFINISHED = "\ufffd"  # what a decoder makes of bytes that are not a whole character


def segments(generation: Generation, tokenizer: Tokenizer | None) -> Iterator[tuple[str, bool]]:
    """The generation's text in pieces, each with whether it came from accepted drafts; the end id is left out.

    Tokens that share a character are kept in one piece, which counts as drafted if its last token was. Without a
    tokenizer the text is the ids.
    """
    tokens = generation.tokens[:-1] if generation.finish_reason == "stop" else generation.tokens
    pending: list[int] = []
    piece, marked = "", False
    for index, (token, drafted) in enumerate(zip(tokens, generation.from_draft, strict=False)):
        pending.append(token)
        text = f"{token} " if tokenizer is None else tokenizer.decode(pending)
        if text.endswith(UNFINISHED) and index + 1 < len(tokens):
            continue
        if drafted != marked and piece:
            yield piece, marked
            piece = ""
        piece, marked, pending = piece + text, drafted, []
    if piece:
        yield piece, marked


def marked_text(generation: Generation, tokenizer: Tokenizer | None, console: Console, marks: str = "auto") -> Text:
    """The generation's text with accepted drafts in colour, between ‹ and ›, or unmarked.

    Args:
      marks: colour, brackets or none; auto is colour where the console shows it, else brackets.
    """
    if marks == "auto":
        marks = "colour" if console.color_system is not None and not console.no_color else "brackets"
    text = Text()
    for piece, drafted in segments(generation, tokenizer):
        if drafted and marks == "brackets":
            text.append(OPEN + piece + CLOSE)
        else:
            text.append(piece, DRAFT_STYLE if drafted and marks == "colour" else None)
    return text


def summary(generation: Generation) -> str:
    """One line: how many tokens, how they came about, how fast."""
    text = f"{len(generation.tokens)} tokens"
    if generation.rounds:
        text += f" in {generation.rounds} rounds ({generation.tokens_per_round:.2f} a round)"
    if generation.drafted:
        shares = " ".join(f"{n / generation.rounds:.2f}" for n in generation.accepted_per_position)
        text += f", {generation.accepted} of {generation.drafted} drafts accepted (a round, by position: {shares})"
    text += f", {generation.tokens_per_second:.1f} tokens/s, ended by {generation.finish_reason}"
    return text + f"; compiled in {generation.compile_seconds:.1f} s"
