"""A prompt as people write it: text, a chat question, ids. Files of several are read in `requests.py`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtp_jax.errors import UserError
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


def prompt_from_ids(ids: Sequence[int]) -> Prompt:
    """Ids, which need no tokenizer."""
    return Prompt(list(ids), ",".join(map(str, ids)))


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
