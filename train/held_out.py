"""Prompts cut from held-out documents, to measure acceptance on text the model was not trained on."""

from collections.abc import Sequence

from train.data import Document


def cut_prompts(documents: Sequence[Document], count: int, num_lines: int) -> list[dict[str, str]]:
    """`count` pieces of `num_lines` whole lines, evenly spaced over all documents laid end to end.

    A piece stays within its document; documents with fewer lines than a piece are passed over.

    Returns:
      rows `{"prompt", "source"}`, the source being the document's name and first line, counted from 1.
    """
    starts = [
        (document.name, lines, start)
        for document in documents
        for lines in [document.text.splitlines(keepends=True)]
        for start in range(len(lines) - num_lines + 1)
    ]
    chosen = [starts[i * len(starts) // count] for i in range(count)] if starts else []
    return [
        {"prompt": "".join(lines[start : start + num_lines]), "source": f"{name}:{start + 1}"}
        for name, lines, start in chosen
    ]
