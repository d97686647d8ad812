"""Prompts from held-out documents, to measure acceptance on text the model was not trained on."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from train.records import Completion, Conversation, Document, Text


def cut_prompts(documents: Iterable[Document], count: int, num_lines: int) -> list[dict[str, Any]]:
    """`count` prompts, evenly spaced over all that the documents offer, in order.

    A text offers every piece of `num_lines` whole lines, a conversation what comes before each turn of the assistant,
    a completion its prompt. Texts with fewer lines than a piece are passed over.

    Returns:
      rows `{"prompt", "source"}` or `{"messages", "source"}`; the source is the document's name and, for a text, the
      piece's first line, counted from 1.
    """
    offers: list[Callable[[], dict[str, Any]]] = []
    for document in documents:
        match document.content:
            case Text(text):
                lines = text.splitlines(keepends=True)
                starts = range(len(lines) - num_lines + 1)
                offers += [partial(_piece, document.name, lines, start, num_lines) for start in starts]
            case Completion(prompt) if prompt:
                offers.append(partial(dict, prompt=prompt, source=document.name))
            case Conversation(messages, None):
                turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
                offers += [partial(dict, messages=messages[:turn], source=document.name) for turn in turns]
    return [offers[i * len(offers) // count]() for i in range(count)] if offers else []


def _piece(name: str, lines: list[str], start: int, num_lines: int) -> dict[str, str]:
    return {"prompt": "".join(lines[start : start + num_lines]), "source": f"{name}:{start + 1}"}
