"""The ids that end a reply, gathered from everything in a checkpoint folder that names one."""

from pathlib import Path
from typing import Any

from mtp_jax.errors import UserError
from mtp_jax.files import read_json_object
from mtp_jax.text.tokenizer import Tokenizer


def end_ids(folder: Path | str, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Ids at which decoding stops; none is allowed.

    The union of `eos_token_id` in generation_config.json and config.json (also inside `text_config`), the
    tokenizer's `eos_token`, its end of a document, and the chat template's end of a turn. The union, because
    released configs name the end of a document only, and a chat turn ends with another token.

    Raises:
      UserError: if an `eos_token_id` is not an integer, a list of them, or null.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        if path.is_file():
            values = read_json_object(path)
            found.update(_ids(values, f"{path}: eos_token_id"))
            if isinstance(inner := values.get("text_config"), dict):
                found.update(_ids(inner, f"{path}: text_config.eos_token_id"))
    if tokenizer is not None:
        ids = (tokenizer.eos_id, tokenizer.end_id, tokenizer.end_of_turn_id)
        found.update(i for i in ids if i is not None)
    return frozenset(found)


def _ids(values: dict[str, Any], where: str) -> list[int]:
    value = values.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for i in ids:
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < 2**31:
            raise UserError(f"{where}: expected an id, a list of ids or null, got {value!r}")
    return ids
