"""Text to ids and back, around a published tokenizer.json."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from mtp_jax.errors import UserError
from mtp_jax.files import read_json_object, read_text, write_json, write_text
from mtp_jax.text.chat_template import ChatTemplate, load_chat_templates

DOCUMENT_END = "<|endoftext|>"
_TEMPLATE_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")  # that templates may name


class Tokenizer:
    """A tokenizer with its settings and chat templates.

    Attributes:
      config: what tokenizer_config.json says; `eos_token` and the like are read from it.
      chat_templates: by name; the main one is `default`.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any] | None = None,
        chat_templates: Mapping[str, ChatTemplate] | None = None,
    ) -> None:
        self._backend = backend
        self.config = dict(config or {})
        self.chat_templates = dict(chat_templates or {})
        # Not the number of entries: ids may have holes.
        self._length = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @classmethod
    def from_folder(cls, folder: Path | str) -> "Tokenizer | None":
        """The tokenizer of a checkpoint folder, or None if the folder has no tokenizer.json.

        Reads tokenizer.json, tokenizer_config.json (optional) and the chat template from wherever it is.

        Raises:
          UserError: if there is no such folder, or one of the files is not what its name says.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise UserError(f"{folder}: expected a folder, got {'a file' if folder.exists() else 'nothing'}")
        path = folder / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            backend = tokenizers.Tokenizer.from_str(read_text(path))
        except UserError:
            raise
        except Exception as error:  # `tokenizers` raises bare Exception.
            raise UserError(f"{path}: expected a tokenizer, got something else: {error}") from error
        config_path = folder / "tokenizer_config.json"
        config = read_json_object(config_path) if config_path.is_file() else {}
        return cls(backend, config, load_chat_templates(folder, config))

    def save(self, folder: Path | str) -> None:
        """Writes tokenizer.json, tokenizer_config.json and the chat templates; makes the folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {key: value for key, value in self.config.items() if key != "chat_template"}
        write_json(folder / "tokenizer_config.json", config)
        for name, template in self.chat_templates.items():
            if name == "default":
                write_text(folder / "chat_template.jinja", template.source)
            else:
                named = folder / "additional_chat_templates"
                named.mkdir(exist_ok=True)
                write_text(named / f"{name}.jinja", template.source)
        write_text(folder / "tokenizer.json", self._backend.to_str(pretty=True))

    def __len__(self) -> int:
        """One more than the highest id. A model may have more rows than that: those ids are never chosen."""
        return self._length

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Nothing is put before or after it; special tokens spelled out in it are recognised.

        Raises:
          UserError: if the text has no UTF-8 form (a lone surrogate).
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """Ids of each text, as `encode` gives them, computed in parallel."""
        texts = list(texts)
        try:
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            raise UserError(f"expected text that has a UTF-8 form, got: {error}") from error
        return [encoding.ids for encoding in encodings]

    def encode_with_offsets(self, texts: Iterable[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Ids of each text, and for each id the characters it covers: the first, and the one past the last.

        Tokens that share a character each cover it.

        Raises:
          UserError: if a text has no UTF-8 form (a lone surrogate).
        """
        try:
            encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            raise UserError(f"expected text that has a UTF-8 form, got: {error}") from error
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens included.

        Bytes that are not (yet) UTF-8 become U+FFFD, and ids that no token has become nothing.
        """
        return self._backend.decode(list(map(int, ids)), skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        """The id of one token, or None if there is no such token."""
        return self._backend.token_to_id(token)

    def has_token(self, token_id: int) -> bool:
        """Whether some token has this id; ids may have holes."""
        return self._backend.id_to_token(token_id) is not None

    def fingerprint(self) -> str:
        """SHA-256 over all that decides which ids a text or a conversation becomes."""
        special = {name: _content(self.config.get(name)) for name in _TEMPLATE_TOKENS}
        templates = {name: template.source for name, template in sorted(self.chat_templates.items())}
        digest = hashlib.sha256(self._backend.to_str().encode())
        digest.update(json.dumps([special, templates]).encode())
        return digest.hexdigest()

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids of the tokens that are never split: special tokens and the like."""
        return frozenset(self._backend.get_added_tokens_decoder())

    @property
    def eos_id(self) -> int | None:
        """The id of `eos_token` in tokenizer_config.json, or None."""
        token = _content(self.config.get("eos_token"))
        return None if token is None else self.token_id(token)

    @property
    def end_id(self) -> int | None:
        """The id that ends a document: `<|endoftext|>` where there is one, else `eos_token`, else None.

        Training text ends with it. What stops decoding is `end_ids`, which holds more than this one.
        """
        end = self.token_id(DOCUMENT_END)
        return self.eos_id if end is None else end

    @property
    def end_of_turn_id(self) -> int | None:
        """The id with which the chat template ends an assistant's turn, or None.

        Found by rendering a turn and reading the first unsplittable token after it: `<|im_end|>` in ChatML,
        the header of the next turn in templates that have no end of turn.
        """
        if "default" not in self.chat_templates:
            return None
        turn = "mtp_jax_turn"
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": turn},
            {"role": "user", "content": "b"},
        ]
        try:
            rendered = self.render_chat(messages, add_generation_prompt=False)
        except UserError:  # A template may refuse these messages; then there is nothing to learn from it.
            return None
        ids = self.encode(rendered.rpartition(turn)[2])
        return next((i for i in ids if i in self.added_ids), None)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """A conversation as text for `encode`.

        Args:
          messages: `{"role": "user" | "assistant" | "system", "content": str}`.
          add_generation_prompt: end with the header of the assistant's next turn.
          template: name of the template; by default `tool_use` if there are `tools` and such a template, else
            `default`.
          variables: for the template, such as `enable_thinking=False` or `tools=[...]`.

        Raises:
          UserError: if there is no such template, or it refuses the messages.
        """
        if template is None:
            template = "tool_use" if variables.get("tools") and "tool_use" in self.chat_templates else "default"
        if template not in self.chat_templates:
            have = ", ".join(sorted(self.chat_templates)) or "none"
            raise UserError(f"the tokenizer has no chat template named {template} (it has: {have})")
        special = {
            name: content for name in _TEMPLATE_TOKENS if (content := _content(self.config.get(name))) is not None
        }
        values = {**special, "add_generation_prompt": add_generation_prompt, **variables}
        return self.chat_templates[template].render(messages, **values)


def _content(token: Any) -> str | None:
    """A special token's text: published as a string or as a description with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
