"""A packed row as a person reads it: what is trained on, what is only read, where documents meet."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from mtp_jax.text import Tokenizer
from train.batch import PADDING
from train.packing import Row

TRAINED, CONTEXT, BORDER = "bold green", "dim", "cyan"
OPEN, CLOSE = "‹", "›"
_UNFINISHED = "\ufffd"  # what a decoder makes of bytes that are not a whole character
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
_VISIBLE |= dict.fromkeys(range(128, 160), 0xFFFD)


class Segment(NamedTuple):
    """One document, or a piece of one, in a row."""

    num_tokens: int
    num_targets: int
    runs: list[tuple[str, bool]]  # text, and whether it is trained on


def segments(row: Row, tokenizer: Tokenizer) -> list[Segment]:
    """The row's documents. A segment's first token is no target: nothing comes before it."""
    found = []
    for number in range(1, int(row.segment_ids.max()) + 1):
        inside = row.segment_ids == number
        trained = row.loss_mask[inside]
        trained[0] = False
        runs = list(_runs(row.tokens[inside].tolist(), trained.tolist(), tokenizer))
        found.append(Segment(len(trained), int(trained.sum()), runs))
    return found


def _runs(ids: list[int], trained: list[bool], tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """Neighbours that are alike, as one text. A character of several tokens counts as its last one does."""
    pending: list[int] = []
    run, mark = "", False
    for index, (token, now) in enumerate(zip(ids, trained, strict=True)):
        pending.append(token)
        text = tokenizer.decode(pending)
        if text.endswith(_UNFINISHED) and index + 1 < len(ids) and len(pending) < 4:
            continue
        if now != mark and run:
            yield run, mark
            run = ""
        run, mark, pending = run + text, now, []
    if run:
        yield run, mark


def num_padding(row: Row) -> int:
    """Places that hold no token."""
    return int(np.count_nonzero(row.segment_ids == PADDING))


def row_text(row: Row, tokenizer: Tokenizer, console: Console, marks: str = "auto") -> Text:
    """The row's documents, each under a line of its own; what is trained on is bright, or between ‹ and ›.

    Args:
      marks: colour or brackets; auto is colour where the console shows it, else brackets.
    """
    if marks == "auto":
        marks = "colour" if console.color_system is not None and not console.no_color else "brackets"

    def styled(style: str) -> str | None:
        return style if marks == "colour" else None

    text = Text()
    for number, segment in enumerate(segments(row, tokenizer), 1):
        border = f"── segment {number}: {segment.num_tokens} tokens, {segment.num_targets} trained on ──\n"
        text.append(border, styled(BORDER))
        for run, trained in segment.runs:
            shown = run.translate(_VISIBLE)
            if trained and marks == "brackets":
                shown = OPEN + shown + CLOSE
            text.append(shown, styled(TRAINED if trained else CONTEXT))
        text.append("\n")
    if padding := num_padding(row):
        text.append(f"── padding: {padding} ──\n", styled(BORDER))
    return text
