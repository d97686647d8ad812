"""Chat templates: untrusted jinja2 programs that turn messages into one string.

A template comes with a checkpoint, so it runs in jinja2's immutable sandbox, may not reach Python's
internals, and may not write more than `MAX_RENDERED` characters.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mtp_jax.errors import UserError
from mtp_jax.files import read_json_object, read_text

MAX_RENDERED = 1 << 25
"""Characters a template may write; a longest context is a quarter of it."""

_MAX_POWER = 1 << 16


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, in which one short expression cannot fill the memory either."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if abs(left) > _MAX_POWER or abs(right) > 64:
                raise SecurityError(f"power of large numbers: {left} ** {right}")
        else:
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, Sequence) and len(sequence) * count > MAX_RENDERED:
                    raise SecurityError(f"a repetition longer than {MAX_RENDERED}")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own: keeps non-ASCII and does not escape HTML, since the text is for a model."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled template.

    Attributes:
      source: the template's text.
      name: where it came from, for error messages.

    Raises:
      UserError: if the template is not jinja2.
    """

    def __init__(self, source: str, name: str) -> None:
        self.source = source
        self.name = name
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise UserError(f"{name}: the chat template does not compile: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The conversation as the model reads it.

        Args:
          messages: `{"role": ..., "content": ...}` and whatever else the template reads.
          variables: for the template, such as `add_generation_prompt`, `tools`, `enable_thinking`.

        Raises:
          UserError: if the template refuses the messages (`raise_exception`), fails, tries to leave its
            sandbox, or writes too much.
        """
        pieces, length = [], 0
        try:
            for piece in self._template.generate(messages=messages, **variables):
                length += len(piece)
                if length > MAX_RENDERED:
                    raise SecurityError(f"more than {MAX_RENDERED} characters written")
                pieces.append(piece)
        except Exception as error:  # The program is not ours: it may raise anything.
            reason = str(error) or type(error).__name__
            raise UserError(f"{self.name}: the chat template failed on these messages: {reason}") from error
        return "".join(pieces)


def load_chat_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, ChatTemplate]:
    """Templates by name, the main one as `default`; empty if the folder has none.

    `chat_template.jinja` comes first, then `chat_template` in tokenizer_config.json (a string, or a list of
    `{"name", "template"}`), then chat_template.json; `additional_chat_templates/NAME.jinja` add named ones.

    Raises:
      UserError: if a template is of another form or does not compile.
    """
    templates: dict[str, ChatTemplate] = {}
    main = folder / "chat_template.jinja"
    old = folder / "chat_template.json"
    if main.is_file():
        templates["default"] = ChatTemplate(read_text(main), str(main))
    elif tokenizer_config.get("chat_template") is not None:
        source = folder / "tokenizer_config.json"
        templates.update(_named(tokenizer_config["chat_template"], f"{source}: chat_template"))
    elif old.is_file():
        templates.update(_named(read_json_object(old).get("chat_template"), f"{old}: chat_template"))
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = ChatTemplate(read_text(path), str(path))
    return templates


def _named(value: Any, where: str) -> dict[str, ChatTemplate]:
    if isinstance(value, str):
        return {"default": ChatTemplate(value, where)}
    good = isinstance(value, list) and all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
        for entry in value
    )
    if not good:
        raise UserError(f'{where}: expected a template or a list of {{"name", "template"}}, got {type(value).__name__}')
    return {entry["name"]: ChatTemplate(entry["template"], f"{where} ({entry['name']})") for entry in value}
