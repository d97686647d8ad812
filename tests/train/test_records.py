"""Rows to documents: the three forms, JSONL and parquet, and every kind of bad row."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from mtp_jax.errors import UserError
from train.records import BadRows, Completion, Conversation, Document, Text, parse_row, read_documents
from train.sources import find_source

MESSAGES = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
ROWS = [
    {"text": "t", "id": 3},
    {"prompt": "p", "completion": "c"},
    {"messages": MESSAGES},
    {"messages": MESSAGES, "tools": [{"type": "function"}]},
]
CONTENTS = [Text("t"), Completion("p", "c"), Conversation(MESSAGES), Conversation(MESSAGES, [{"type": "function"}])]


def _read(path, *, skip=False, progress=lambda _: None):
    bad = BadRows(skip=skip)
    (file,) = find_source(path).files
    return list(read_documents(file, bad, progress)), bad


def _jsonl(path, rows):
    content = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_lines_become_documents(tmp_path, name):
    path = _jsonl(tmp_path / name, [*ROWS[:2], "", "  ", *ROWS[2:]])
    documents, _ = _read(path)
    assert [document.content for document in documents] == CONTENTS
    assert [document.row for document in documents] == [1, 2, 5, 6]
    assert documents[2].name == f"{name}:5"
    assert documents[2].where == f"{path}:5"


def test_parquet_rows_become_documents(tmp_path):
    extra = [{"role": "user", "content": "u", "name": "n"}, {"role": "assistant", "content": "a"}]
    columns = {
        "score": [1.5] * 4,
        "text": ["t", None, None, None],
        "prompt": [None, "p", None, None],
        "completion": [None, "c", None, None],
        "messages": [None, None, MESSAGES, extra],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet", row_group_size=3)
    documents, _ = _read(tmp_path / "a.parquet")
    assert [document.content for document in documents] == [*CONTENTS[:3], Conversation(extra)]
    assert [document.row for document in documents] == [1, 2, 3, 4]


def test_a_bad_parquet_row_is_named(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["t", None]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: row 2: expected {"):
        _read(tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"content": ["t"]}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"b\.parquet: expected a column text, messages or prompt, got content"):
        _read(tmp_path / "b.parquet")


def test_what_is_no_parquet_file_is_named(tmp_path):
    (tmp_path / "a.parquet").write_text("text")
    with pytest.raises(UserError, match=r"a\.parquet: expected a parquet file"):
        _read(tmp_path / "a.parquet")


def test_whole_texts_keep_their_line_ends(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("é\r\nb\n".encode()))
    assert _read(tmp_path / "a.txt.gz")[0] == [
        Document(Text("é\r\nb\n"), "a.txt.gz", 0, str(tmp_path / "a.txt.gz")),
    ]


def test_progress_ends_with_the_files_size(tmp_path):
    path = _jsonl(tmp_path / "a.jsonl", ROWS[:1] * 3000)
    seen = []
    _read(path, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == path.stat().st_size
    assert len(seen) == 3


BAD_LINES = {
    "not json": ("{", "not JSON"),
    "bytes": (b"\xff", "not JSON"),
    "deep": ("[" * 100000, "not JSON"),
    "number": ('{"text": ' + "1" * 5000 + "}", "not JSON"),
    "list": ("[1]", r"expected an object, got \[1\]"),
    "no form": ('{"content": "x"}', 'expected {"text"'),
    "text of another type": ('{"text": 5}', 'expected {"text"'),
    "two forms": ('{"text": "t", "messages": []}', "got text and messages"),
    "prompt alone": ('{"prompt": "p"}', 'expected {"text"'),
    "empty completion": ('{"prompt": "p", "completion": ""}', "nothing to train on"),
    "no messages": ('{"messages": []}', "no"),
    "tools": (json.dumps({"messages": MESSAGES, "tools": "x"}), "tools: expected a list"),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_named_or_counted(tmp_path, kind):
    line, message = BAD_LINES[kind]
    content = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "t"}\n' + content + b'\n{"text": "u"}')
    with pytest.raises(UserError, match=rf"a\.jsonl:2: .*{message}") as caught:
        _read(tmp_path / "a.jsonl")
    assert "--skip-bad" in str(caught.value)
    documents, bad = _read(tmp_path / "a.jsonl", skip=True)
    assert [document.content for document in documents] == [Text("t"), Text("u")]
    assert bad.count == 1
    assert "a.jsonl:2: " in bad.first


def test_a_compressed_file_cut_short_is_named_even_where_bad_rows_are_skipped(tmp_path):
    path = _jsonl(tmp_path / "a.jsonl.gz", ROWS)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: the compressed file is damaged"):
        _read(path, skip=True)


def test_nulls_are_as_if_not_given():
    nulls = {"text": None, "tools": None, "messages": [{**message, "tool_calls": None} for message in MESSAGES]}
    assert parse_row(nulls) == Conversation(MESSAGES)


def test_a_byte_order_mark_is_passed_over(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "t"}')
    assert _read(tmp_path / "a.jsonl")[0][0].content == Text("t")


SYSTEM, USER, ASSISTANT, TOOL = ({"role": role, "content": "x"} for role in ("system", "user", "assistant", "tool"))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([ASSISTANT, USER], "message 1: expected system or developer or user first, got 'assistant'"),
        ([USER, USER, ASSISTANT], "message 2: expected assistant after user, got 'user'"),
        ([USER, ASSISTANT, ASSISTANT], "message 3: expected user or tool after assistant, got 'assistant'"),
        ([USER, SYSTEM, ASSISTANT], "message 2: expected assistant after user, got 'system'"),
        ([USER, TOOL], "message 2: .* got 'tool'"),
        ([SYSTEM, ASSISTANT], "message 2: expected user after system"),
        ([{"role": "human", "content": "x"}], "message 1: .* got 'human'"),
        ([SYSTEM, USER], "expected an assistant's turn"),
        (["x"], "message 1: expected {"),
        ([{"content": "x"}], "message 1: expected {"),
        ([{"role": "user"}, ASSISTANT], "message 1: content: expected text"),
        ([USER, {"role": "assistant", "content": None}], "message 2: content: expected text"),
        (
            [{"role": "user", "content": [{"type": "image", "url": "x"}]}, ASSISTANT],
            "message 1: expected parts of text",
        ),
    ],
)
def test_roles_out_of_order_and_bad_messages(messages, message):
    with pytest.raises(UserError, match=message):
        parse_row({"messages": messages})


@pytest.mark.parametrize("calls", ["x", [1], [{"a": 1}], [{"function": "f"}], [{"function": {"name": 1}}]])
def test_calls_of_tools_that_name_none(calls):
    with pytest.raises(UserError, match="message 2: tool_calls: expected "):
        parse_row({"messages": [USER, {**ASSISTANT, "tool_calls": calls}]})


def test_roles_in_order():
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    part = {"role": "user", "content": [{"type": "text", "text": "x"}]}
    for messages in ([USER, ASSISTANT], [SYSTEM, part, call, TOOL, TOOL, ASSISTANT], [USER, ASSISTANT, USER]):
        assert parse_row({"messages": messages}) == Conversation(messages)
