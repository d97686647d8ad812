"""A page that shows how each token of a completion came about: `report.html.jinja` and `report.css` beside this file.

The page is one file and asks for nothing: no script, no font, no image, and a content security policy under which it
could not. Whatever it shows (prompts, token text, settings) is escaped by the template.
"""

import base64
import hashlib
import math
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2
from markupsafe import Markup

from infer.completion import Completion
from infer.text_stream import MOST_UNFINISHED, UNFINISHED, TextStream
from mtp_jax.text import Tokenizer

NUM_COLOURS = 7  # of positions; deeper ones share the last
MAX_COLUMNS = 120  # of the chart over time; more rounds than that are averaged
EXCERPT = 110  # characters of a prompt in the table of all completions; less is seen where there is less room
SHOWN_PROMPT = 600  # characters; what is before the last so many of a prompt is folded away

Chunk = tuple[str, str]
"""A class and a text: `control` for a character that would not show, `newline` for a mark before one, else none."""


class Alternative(NamedTuple):
    """A token that could have been there."""

    text: list[Chunk]
    id: int
    probability: str | None


class Token(NamedTuple):
    """What is said of one token when the pointer or the focus is on it."""

    text: list[Chunk]
    id: int
    position: int  # as in Completion.draft_positions
    round: int  # from 1; 0 is prefill
    probability: str | None
    refused: Alternative | None
    refused_position: int
    others: list[Alternative]


class Piece(NamedTuple):
    """A stretch of text that can be told apart: one token, or several that share a character."""

    classes: str
    text: list[Chunk]
    tokens: list[Token]


class Bar(NamedTuple):
    """Acceptance at one draft position."""

    position: int
    emitted: int
    made: int

    @property
    def percent(self) -> float:
        return 100 * self.emitted / self.made if self.made else 0.0


class Skyline(NamedTuple):
    """Tokens per round over time, one column a round or, of long texts, a few rounds: SVG paths, from the ground up."""

    paths: list[tuple[str, str]]  # class and outline
    num_columns: int
    height: int  # J + 1
    rounds_per_column: int
    mean: float


class Section(NamedTuple):
    """One completion."""

    completion: Completion
    excerpt: list[Chunk]  # of the prompt, in one line
    prompt_start: list[Chunk]  # folded away
    prompt_end: list[Chunk]
    rounds: list[list[Piece]]
    bars: list[Bar]
    skyline: Skyline | None


def report_html(
    completions: Sequence[Completion],
    tokenizer: Tokenizer | None,
    prompts: Sequence[str],
    settings: Mapping[str, str],
) -> str:
    """The page as text.

    Args:
      completions: one or more.
      tokenizer: None shows ids.
      prompts: the text before each completion.
      settings: names and values as people should read them, for the table at the end.
    """
    folder = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), autoescape=True, undefined=jinja2.StrictUndefined
    )
    style = "\n" + (folder / "report.css").read_text(encoding="utf-8")
    num_drafts = max(completion.num_draft_tokens for completion in completions)
    return environment.get_template("report.html.jinja").render(
        sections=[_section(*pair, tokenizer) for pair in zip(completions, prompts, strict=True)],
        settings={name: visible(value) for name, value in settings.items()},
        positions=range(1, min(num_drafts, NUM_COLOURS) + 1),
        num_colours=NUM_COLOURS,
        num_drafts=num_drafts,
        style=Markup(style),
        style_hash=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        any_refused=any(token >= 0 for completion in completions for token in completion.rejected),
    )


def visible(text: str, *, keep_lines: bool = True) -> list[Chunk]:
    """Text in which everything can be seen.

    A character that controls, hides, or turns the direction of writing becomes its number. Joiners stay: emoji and
    several scripts need them.

    Args:
      keep_lines: lines still end where they did. False shows spaces, tabs and line ends as signs.
    """
    chunks: list[Chunk] = []
    plain = ""
    for character in text:
        code = ord(character)
        if not keep_lines and character in " \t\n":
            kind, shown = "control", {" ": "␣", "\t": "⇥", "\n": "↵"}[character]
        elif character == "\n":
            kind, shown = "newline", ""
        elif character == "\t" or character in "\u200c\u200d":
            kind, shown = "", character
        elif code < 0x20 or code == 0x7F:
            kind, shown = "control", f"\\x{code:02x}"
        elif unicodedata.category(character) in {"Cc", "Cf", "Cs", "Zl", "Zp"}:
            kind, shown = "control", f"U+{code:04X}"
        else:
            kind, shown = "", character
        if kind:
            chunks += [("", plain)] * bool(plain) + [(kind, shown)]
            plain = "\n" if kind == "newline" else ""
        else:
            plain += shown
    return chunks + [("", plain)] * bool(plain)


def _section(completion: Completion, prompt: str, tokenizer: Tokenizer | None) -> Section:
    rounds: list[list[Piece]] = []
    for piece in _pieces(completion, tokenizer):
        if not rounds or rounds[-1][-1].tokens[-1].round != piece.tokens[-1].round:
            rounds.append([])
        rounds[-1].append(piece)
    cut = max(0, len(prompt) - SHOWN_PROMPT)
    if cut:
        cut = prompt.find("\n", cut, cut + SHOWN_PROMPT // 2) + 1 or cut  # rather between lines
    bars = [
        Bar(position, emitted, made)
        for position, (emitted, made) in enumerate(
            zip(completion.accepted_per_position, completion.drafted_per_position, strict=True), start=1
        )
    ]
    return Section(
        completion=completion,
        excerpt=visible(_excerpt(prompt)),
        prompt_start=visible(prompt[:cut]),
        prompt_end=visible(prompt[cut:]),
        rounds=rounds,
        bars=bars,
        skyline=_skyline(completion),
    )


def _excerpt(prompt: str) -> str:
    """Its beginning, in one line."""
    line = " ".join(prompt.split())
    return line if len(line) <= EXCERPT else line[:EXCERPT] + "…"


def _pieces(completion: Completion, tokenizer: Tokenizer | None) -> Iterator[Piece]:
    """The completion in order. Tokens that share a character are one piece, which looks like the last of them."""
    special = frozenset() if tokenizer is None else tokenizer.added_ids
    stream = TextStream(tokenizer)
    tokens = list(_tokens(completion, tokenizer))
    text, shared = "", []
    for index, token in enumerate(tokens):
        shared.append(token)
        last = index + 1 == len(tokens)
        if tokenizer is None:
            text = f"{token.id} "
        else:
            text += stream.push([token.id]) + (stream.finish() if last else "")
            unfinished = tokenizer.decode([t.id for t in shared]).endswith(UNFINISHED)
            if unfinished and not last and len(shared) < MOST_UNFINISHED:
                continue
        classes = [f"p{min(token.position, NUM_COLOURS)}"]
        classes += ["prefill"] * (token.round == 0)
        classes += ["refused"] * any(t.refused is not None for t in shared)
        classes += ["special"] * (token.id in special)
        # Ids without a token have no text.
        shown = visible(text) if text else [("control", " ".join(str(t.id) for t in shared))]
        yield Piece(" ".join(classes), shown, shared)
        text, shared = "", []


def _tokens(completion: Completion, tokenizer: Tokenizer | None) -> Iterator[Token]:
    names: dict[int, list[Chunk]] = {}

    def name(token_id: int) -> list[Chunk]:
        """What a token looks like by itself; with spaces and line ends as signs."""
        if token_id not in names:
            text = str(token_id) if tokenizer is None else tokenizer.decode([token_id])
            names[token_id] = visible(text if len(text) <= 40 else text[:40] + "…", keep_lines=False)
        return names[token_id]

    round_number, round_start = 0, 0
    for index, token_id in enumerate(completion.tokens):
        if completion.round_drafts[index] >= 0:
            round_number, round_start = round_number + 1, index
        logprobs = None if completion.logprobs is None else completion.logprobs[index]
        refused_id = completion.rejected[index]
        refused = None
        if refused_id >= 0:
            given = None if logprobs is None else logprobs.rejected
            refused = Alternative(name(refused_id), refused_id, None if given is None else _probability(given))
        others = [] if logprobs is None else [entry for entry in logprobs.top if entry[0] not in (token_id, refused_id)]
        yield Token(
            text=name(token_id),
            id=token_id,
            position=completion.draft_positions[index],
            round=round_number,
            probability=None if logprobs is None else _probability(logprobs.logprob),
            refused=refused,
            refused_position=index - round_start + 1,
            others=[Alternative(name(i), i, _probability(value)) for i, value in others if math.isfinite(value)],
        )


def _probability(logprob: float) -> str:
    percent = 100 * math.exp(logprob)
    return f"{percent:.3g} %" if percent >= 0.001 or percent == 0 else "under 0.001 %"


def _skyline(completion: Completion) -> Skyline | None:
    """One path a position; None if there was no draft in any round."""
    if not completion.drafted:
        return None
    starts = [i for i, drafts in enumerate(completion.round_drafts) if drafts >= 0]
    ends = [*starts[1:], len(completion.tokens)]
    positions = [completion.draft_positions[start:end] for start, end in zip(starts, ends, strict=True)]
    rounds_per_column = math.ceil(len(positions) / MAX_COLUMNS)
    columns = [positions[i : i + rounds_per_column] for i in range(0, len(positions), rounds_per_column)]
    height = completion.num_draft_tokens + 1
    ground = [0.0] * len(columns)
    paths = []
    for position in range(height):
        outline = ""
        for x, column in enumerate(columns):
            tall = sum(position in tokens for tokens in column) / len(column)
            if tall:
                outline += f"M{x + 0.08:g} {height - ground[x]:.4g}h.84v{-tall:.4g}h-.84z"
                ground[x] += tall
        paths.append((f"p{min(position, NUM_COLOURS)}", outline))
    mean = (len(completion.tokens) - 1) / len(positions)
    return Skyline(paths, len(columns), height, rounds_per_column, mean)
