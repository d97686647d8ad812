"""Files of prompts: JSONL rows with settings of their own, or one text a line."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from infer.prompts import Prompt, prompt_from_ids, prompt_from_messages, prompt_from_text
from infer.text_stream import stop_strings
from mtp_jax.errors import UserError
from mtp_jax.files import read_text
from mtp_jax.text import Tokenizer

PROMPT_KEYS = ("prompt", "prompt_ids", "messages")


@dataclass(frozen=True)
class Request:
    """One row of a file of prompts.

    Attributes:
      ids: what the model reads.
      text: the prompt as it was given, for display.
      max_new_tokens, seed, stop: of this row; None where the row does not say.
      row: as it was read, for the results' row; `{"prompt": line}` for a line of text.
      where: file and line, for messages.
    """

    ids: list[int]
    text: str
    max_new_tokens: int | None
    seed: int | None
    stop: tuple[str, ...] | None
    row: dict[str, Any]
    where: str


def read_requests(path: Path, tokenizer: Tokenizer | None, vocab_size: int, chat: bool = False) -> list[Request]:
    """Reads a file: JSONL if its name ends so, else one text a line.

    A JSONL row is an object with one of `prompt` (text), `prompt_ids` and `messages`, and optionally
    `max_new_tokens`, `seed` and `stop` (a string or several); other keys are kept. Blank lines at the end of the file
    are nothing. Elsewhere they are skipped between texts, but a mistake between rows: something may be missing there.

    Args:
      vocab_size: the model's; ids at or above it are refused.
      chat: texts are questions, put in the chat template.

    Raises:
      UserError: the file or a row is not of this form, or there is no prompt in it; names file and line.
    """
    # Not splitlines: it also cuts at form feeds and at U+2028, which JSON may hold as they are.
    lines = read_text(path).replace("\r\n", "\n").split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise UserError(f"{path}: expected at least one prompt, got an empty file")
    rows = path.suffix.lower() == ".jsonl"
    requests = []
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        if not rows and not line.strip():
            continue
        try:
            row = _parse_row(line) if rows else {"prompt": line}
            request = _request(row, where, tokenizer, chat)
            _check_ids(request.ids, vocab_size)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        requests.append(request)
    return requests


def _request(row: dict[str, Any], where: str, tokenizer: Tokenizer | None, chat: bool) -> Request:
    prompt = _prompt(row, tokenizer, chat)
    stop = None
    if "stop" in row:
        given = row["stop"]
        if not (isinstance(given, str) or (isinstance(given, list) and all(isinstance(item, str) for item in given))):
            raise UserError(f"stop: expected a string or a list of strings, got {_shown(given)}")
        stop = stop_strings(given)
        if stop and tokenizer is None:
            raise UserError("stop: strings need a tokenizer, and the checkpoint has no tokenizer.json")
    max_new_tokens, seed = _count(row, "max_new_tokens"), _count(row, "seed")
    return Request(prompt.ids, prompt.text, max_new_tokens, seed, stop, row, where)


def _prompt(row: Mapping[str, Any], tokenizer: Tokenizer | None, chat: bool) -> Prompt:
    given = [key for key in PROMPT_KEYS if key in row]
    if len(given) > 1:
        raise UserError(f"expected one prompt, got {' and '.join(given)}")
    match row:
        case {"prompt": str(text)}:
            return prompt_from_text(text, tokenizer, chat)
        case {"prompt_ids": list(ids)} if all(type(i) is int for i in ids):
            return prompt_from_ids(ids)
        case {"messages": list(messages)} if messages and all(map(_is_message, messages)):
            return prompt_from_messages(messages, tokenizer)
    raise UserError(
        'expected {"prompt": text}, {"prompt_ids": [ids]} or {"messages": [{"role": text, "content": text}, ...]}, '
        f"got {_shown(row)}"
    )


def _is_message(message: Any) -> bool:
    """Contents in parts are left to the template."""
    match message:
        case {"role": str(), "content": str() | list()}:
            return True
    return False


def _check_ids(ids: list[int], vocab_size: int) -> None:
    if not ids:
        raise UserError("the prompt is empty: expected at least one token")
    outside = next((i for i in ids if not 0 <= i < vocab_size), None)
    if outside is not None:
        raise UserError(f"the prompt holds id {outside}; expected ids from 0 to {vocab_size - 1}, the vocabulary")


def _count(row: Mapping[str, Any], key: str) -> int | None:
    if key not in row:
        return None
    value = row[key]
    if type(value) is not int or value < 0:  # not isinstance: True is no number
        raise UserError(f"{key}: expected an integer that is at least 0, got {_shown(value)}")
    return value


def _parse_row(line: str) -> dict[str, Any]:
    """The object in one line. What could not be written again as it was read is refused: keys given twice, NaN."""
    if not line.strip():
        raise UserError("expected a JSON object, got a blank line")
    try:
        row = json.loads(line, object_pairs_hook=_object, parse_constant=_no_number, parse_float=_finite)
    except UserError:
        raise
    except (ValueError, RecursionError) as error:  # not JSONDecodeError alone: integers may be too long
        raise UserError(f"expected a JSON object, got a line that is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise UserError(f"expected a JSON object, got {_shown(row)}")
    return row


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise UserError(f"expected each key once, got {next(key for key in keys if keys.count(key) > 1)} twice")
    return value


def _no_number(name: str) -> NoReturn:
    raise UserError(f"expected a JSON object, got a line with {name}, which JSON does not have")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise UserError(f"expected numbers that a float can hold, got {digits}")
    return value


def _shown(value: Any) -> str:
    """A value in a message, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else text[:200] + "..."
