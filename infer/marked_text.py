"""A completion as text in which accepted drafts are marked."""

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from infer.completion import Completion
from mtp_jax.text import Tokenizer

DRAFT_STYLE = "bold green"
OPEN, CLOSE = "‹", "›"
UNFINISHED = "\ufffd"  # what a decoder makes of bytes that are not a whole character


def segments(completion: Completion, tokenizer: Tokenizer | None) -> Iterator[tuple[str, bool]]:
    """The completion's text in pieces, each with whether it came from accepted drafts.

    The end id, and what a stop string cut off, are left out. Tokens that share a character are kept in one piece, which
    counts as drafted if its last token was. Without a tokenizer the text is the ids.
    """
    left = len(completion.text) if completion.text is not None else None
    for text, drafted in _runs(completion, tokenizer):
        if left is not None:
            text, left = text[:left], max(0, left - len(text))
        if text:
            yield text, drafted


def _runs(completion: Completion, tokenizer: Tokenizer | None) -> Iterator[tuple[str, bool]]:
    pending: list[int] = []
    run, marked = "", False
    for index, (token, position) in enumerate(zip(completion.tokens, completion.draft_positions, strict=True)):
        pending.append(token)
        text = f"{token} " if tokenizer is None else tokenizer.decode(pending)
        if text.endswith(UNFINISHED) and index + 1 < len(completion.tokens):
            continue
        if (position > 0) != marked and run:
            yield run, marked
            run = ""
        run, marked, pending = run + text, position > 0, []
    if run:
        yield run, marked


def marked_text(completion: Completion, tokenizer: Tokenizer | None, console: Console, marks: str = "auto") -> Text:
    """The completion's text with accepted drafts in colour, between ‹ and ›, or unmarked.

    Args:
      marks: colour, brackets or none; auto is colour where the console shows it, else brackets.
    """
    if marks == "auto":
        marks = "colour" if console.color_system is not None and not console.no_color else "brackets"
    text = Text()
    for piece, drafted in segments(completion, tokenizer):
        if drafted and marks == "brackets":
            text.append(OPEN + piece + CLOSE)
        else:
            text.append(piece, DRAFT_STYLE if drafted and marks == "colour" else None)
    return text


def summary(completion: Completion) -> str:
    """One line: how many tokens, how they came about, how fast."""
    text = f"{len(completion.tokens)} tokens"
    if completion.rounds:
        text += f" in {completion.rounds} rounds ({completion.tokens_per_round:.2f} a round)"
    if completion.drafted:
        shares = " ".join(f"{n / completion.rounds:.2f}" for n in completion.accepted_per_position)
        text += f", {completion.accepted} of {completion.drafted} drafts accepted (a round, by position: {shares})"
    text += f", {completion.tokens_per_second:.1f} tokens/s, ended by {completion.finish_reason}"
    return text + f"; compiled in {completion.compile_seconds:.1f} s"
