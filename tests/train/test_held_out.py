"""Prompts from held-out documents: whole lines, turns and prompts, evenly spaced."""

from train.held_out import cut_prompts
from train.records import Completion, Conversation, Document, Text

TEXTS = [
    Document(Text("".join(f"a{i}\n" for i in range(10))), "a.py"),
    Document(Text("one\ntwo\n"), "short.py"),
    Document(Text("".join(f"b{i}\n" for i in range(6)) + "end"), "b.py"),
]


def test_pieces_are_whole_lines_evenly_spaced_over_all_documents():
    rows = cut_prompts(TEXTS, count=3, num_lines=3)
    assert rows == [
        {"prompt": "a0\na1\na2\n", "source": "a.py:1"},
        {"prompt": "a4\na5\na6\n", "source": "a.py:5"},
        {"prompt": "b0\nb1\nb2\n", "source": "b.py:1"},
    ]


def test_documents_shorter_than_a_piece_are_passed_over():
    assert cut_prompts(TEXTS[1:2], count=3, num_lines=3) == []


def test_conversations_and_completions_are_cut_where_the_model_begins():
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user", "assistant")]
    documents = [Document(Conversation(messages), "c.jsonl", 4), Document(Completion("p", "c"), "d.jsonl", 2)]
    assert cut_prompts(documents, count=3, num_lines=3) == [
        {"messages": messages[:2], "source": "c.jsonl:4"},
        {"messages": messages[:4], "source": "c.jsonl:4"},
        {"prompt": "p", "source": "d.jsonl:2"},
    ]
