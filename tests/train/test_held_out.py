"""Prompts from held-out documents: whole lines, evenly spaced, within one document."""

from train.data import Document
from train.held_out import cut_prompts

DOCUMENTS = [
    Document("a.py", "".join(f"a{i}\n" for i in range(10))),
    Document("short.py", "one\ntwo\n"),
    Document("b.py", "".join(f"b{i}\n" for i in range(6)) + "end"),
]


def test_pieces_are_whole_lines_evenly_spaced_over_all_documents():
    rows = cut_prompts(DOCUMENTS, count=3, num_lines=3)
    assert rows == [
        {"prompt": "a0\na1\na2\n", "source": "a.py:1"},
        {"prompt": "a4\na5\na6\n", "source": "a.py:5"},
        {"prompt": "b0\nb1\nb2\n", "source": "b.py:1"},
    ]


def test_documents_shorter_than_a_piece_are_passed_over():
    assert cut_prompts(DOCUMENTS[1:2], count=3, num_lines=3) == []
