"""Documents to ids, and which of the ids are trained on."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from mtp_jax.errors import UserError
from mtp_jax.text import Tokenizer
from train.conversations import Turns, target_mask
from train.records import BadRows, Completion, Conversation, Document, Text

RULES_VERSION = 2
"""To be raised when the same documents and tokenizer give other ids or another mask: cached ones are then not used."""

_BATCH_CHARACTERS = 1 << 20  # of documents that are tokenised at one time, in parallel


class Tokenized(NamedTuple):
    """A document's ids, and which of them may be targets."""

    document: Document
    ids: Int[np.ndarray, " num_tokens"]
    loss_mask: Bool[np.ndarray, " num_tokens"]


class DocumentTokenizer:
    """Turns documents into ids.

    A text, and a completion after its prompt, are followed by the end token. A conversation is what the chat template
    makes of it, no more; targets are the assistant's turns with the token that ends them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises:
        UserError: if the tokenizer has no end token.
        """
        if tokenizer.end_id is None:
            raise UserError(
                "the tokenizer has no token that ends a document: expected <|endoftext|> among its tokens, or an "
                "eos_token that is one of them in tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        self._end = tokenizer.end_id
        self._turns: dict[str, Turns] = {}

    def tokenize(self, documents: Iterable[Document], bad: BadRows) -> Iterator[Tokenized]:
        """Ids of documents, in order; those that cannot be used are left to `bad`, and empty texts left out.

        Raises:
          UserError: if the chat template cannot be used at all, or as `BadRows` says.
        """
        batch: list[Document] = []
        size = 0
        for document in documents:
            batch.append(document)
            size += sum(map(len, document.pieces()))
            if size >= _BATCH_CHARACTERS:
                yield from self._tokenize_batch(batch, bad)
                batch, size = [], 0
        yield from self._tokenize_batch(batch, bad)

    def _tokenize_batch(self, documents: list[Document], bad: BadRows) -> Iterator[Tokenized]:
        plain: list[str] = []  # texts, prompts, completions
        rendered: list[str] = []
        spans: list[list[tuple[int, int]]] = []
        good: list[Document] = []
        for document in documents:
            try:
                match document.content:
                    case Text(text):
                        if not text:
                            continue
                        plain.append(_encodable(text))
                    case Completion(prompt, completion):
                        plain += [_encodable(prompt), _encodable(completion)]
                    case Conversation():
                        text, found = self._render(document.content, document.where)
                        rendered.append(text)
                        spans.append(found)
            except _Unusable as error:
                bad.add(document.where, error.reason)
            else:
                good.append(document)

        ids = iter(self._tokenizer.encode_batch(plain))
        conversations = iter(zip(self._tokenizer.encode_with_offsets(rendered), spans, strict=True))
        for document in good:
            match document.content:
                case Text():
                    tokens = [*next(ids), self._end]
                    mask = np.ones(len(tokens), bool)
                case Completion():
                    before, after = next(ids), next(ids)
                    tokens = [*before, *after, self._end]
                    mask = np.arange(len(tokens)) >= len(before)
                case Conversation():
                    (tokens, offsets), found = next(conversations)
                    mask = target_mask(found, np.asarray(offsets, np.int64).reshape(-1, 2))
            yield Tokenized(document, np.asarray(tokens, np.int32), mask)

    def _render(self, conversation: Conversation, where: str) -> tuple[str, list[tuple[int, int]]]:
        messages, tools = conversation
        templates = self._tokenizer.chat_templates
        if not templates:
            raise UserError(f"{where}: a conversation needs a chat template, and the tokenizer has none")
        name = "tool_use" if tools and "tool_use" in templates else "default"
        if name not in self._turns:
            self._turns[name] = Turns(self._tokenizer, name)
        try:
            text = self._tokenizer.render_chat(messages, add_generation_prompt=False, template=name, tools=tools)
            return _encodable(text), self._turns[name].spans(messages, text)
        except UserError as error:
            raise _Unusable(error) from error


class _Unusable(Exception):
    """A mistake in one document, told apart from those that concern all."""

    def __init__(self, reason: UserError) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _encodable(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _Unusable(UserError(f"expected text that has a UTF-8 form, got {error}")) from error
    return text
