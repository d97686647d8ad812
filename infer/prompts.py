"""Prompts as people write them: text, chat questions, ids, files of several."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_jax.errors import UserError
from mtp_jax.files import read_text
from mtp_jax.text import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """What is continued.

    Attributes:
      ids: read by the model.
      text: as it was given, for display; the ids where there was no text.
    """

    ids: list[int]
    text: str


def prompt_from_text(text: str, tokenizer: Tokenizer | None, chat: bool = False) -> Prompt:
    """A text as it is or, with `chat`, as a user's question in the checkpoint's chat template.

    Raises:
      UserError: there is no tokenizer, or no chat template for a question.
    """
    if chat:
        return prompt_from_messages([{"role": "user", "content": text}], tokenizer)
    return Prompt(_required(tokenizer).encode(text), text)


def prompt_from_messages(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer | None) -> Prompt:
    """A conversation in the checkpoint's chat template, up to where the assistant begins."""
    tokenizer = _required(tokenizer)
    text = messages[-1]["content"] if messages else ""
    return Prompt(tokenizer.encode(tokenizer.render_chat(messages)), str(text))


def _required(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise UserError("text needs a tokenizer, and the checkpoint has no tokenizer.json; give ids instead")
    return tokenizer


def parse_ids(text: str) -> list[int]:
    """Comma-separated integers, spaces allowed; nothing but spaces is no ids.

    Raises:
      UserError: something between two commas is not an integer.
    """
    if not text.strip():
        return []
    ids = []
    for item in text.split(","):
        if not re.fullmatch(r"\s*-?[0-9]+\s*", item):
            raise UserError(f"expected integers separated by commas, got {item.strip()!r} in {text!r}")
        try:
            ids.append(int(item))
        except ValueError:
            raise UserError(f"expected ids, got one of {len(item.strip())} digits") from None
    return ids


def read_prompts(path: Path, tokenizer: Tokenizer | None, chat: bool = False) -> list[Prompt]:
    """Several prompts: a `.jsonl` file with `prompt`, `prompt_ids` or `messages` a row, else one text a line.

    Blank lines are skipped.

    Raises:
      UserError: the file or a row is not of this form, or there is no prompt in it.
    """
    # Not splitlines: it also cuts at form feeds and at U+2028, which JSON may hold as they are.
    whole = enumerate(read_text(path).replace("\r\n", "\n").split("\n"), 1)
    lines = [(n, line) for n, line in whole if line.strip()]
    if not lines:
        raise UserError(f"{path}: expected at least one prompt, got an empty file")
    if path.suffix != ".jsonl":
        return [prompt_from_text(line, tokenizer, chat) for _, line in lines]
    return [_prompt_from_row(line, f"{path}:{n}", tokenizer, chat) for n, line in lines]


def _prompt_from_row(line: str, where: str, tokenizer: Tokenizer | None, chat: bool) -> Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # not JSONDecodeError alone: integers may be too long
        raise UserError(f"{where}: expected a JSON object, got a line that is not JSON ({error})") from error
    match row:
        case {"prompt": str(text)}:
            return prompt_from_text(text, tokenizer, chat)
        case {"prompt_ids": list(ids)} if all(type(i) is int for i in ids):
            return Prompt(ids, ",".join(map(str, ids)))
        case {"messages": list(messages)} if all(isinstance(m, dict) and "content" in m for m in messages):
            return prompt_from_messages(messages, tokenizer)
    raise UserError(
        f'{where}: expected {{"prompt": text}}, {{"prompt_ids": [ids]}} or {{"messages": [...]}}, got {line.strip()}'
    )
