"""Files of prompts: rows with settings, lines of text, and what is refused."""

import json

import pytest

from infer.prompts import prompt_from_text
from infer.requests import read_requests
from mtp_jax.errors import UserError
from mtp_jax.files import read_text
from mtp_jax.text import train_bpe

VOCAB = 1000


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(["some text\n"], 300)


@pytest.fixture
def read(tmp_path, tokenizer):
    """Reads a file of this content."""

    def read(content, name="p.jsonl", tokenizer=tokenizer, **flags):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_requests(tmp_path / name, tokenizer, VOCAB, **flags)

    return read


def test_lines(read, tokenizer):
    got = read("one\n\n two\n", "p.txt")
    assert [(request.text, request.where[-7:]) for request in got] == [("one", "p.txt:1"), (" two", "p.txt:3")]
    assert got[1].ids == tokenizer.encode(" two")
    assert got[1].row == {"prompt": " two"}


def test_a_file_is_read_as_it_is_and_cut_at_line_ends_only(read, tmp_path):
    got = read("one\r\ntwo\x0c\u2028three\r\n", "p.txt")
    assert read_text(tmp_path / "p.txt") == "one\r\ntwo\x0c\u2028three\r\n"
    assert [request.text for request in got] == ["one", "two\x0c\u2028three"]
    assert [request.text for request in read('{"prompt": "a\u2028b"}\r\n')] == ["a\u2028b"]


def test_rows(read, tokenizer):
    rows = '{"prompt": "a\\nb"}\n{"prompt_ids": [3, 4], "extra": 1}\n{"messages": [{"role": "user", "content": "q"}]}\n'
    text, ids, chat = read(rows)
    assert text.ids == tokenizer.encode("a\nb")
    assert (ids.ids, ids.text, ids.row) == ([3, 4], "3,4", {"prompt_ids": [3, 4], "extra": 1})
    assert chat.ids == prompt_from_text("q", tokenizer, chat=True).ids
    assert tokenizer.decode(chat.ids) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert (text.max_new_tokens, text.seed, text.stop) == (None, None, None)


def test_chat_makes_texts_questions(read, tokenizer):
    for name, content in (("p.txt", "q"), ("p.jsonl", '{"prompt": "q"}')):
        assert read(content, name, chat=True)[0].ids == prompt_from_text("q", tokenizer, chat=True).ids


def test_settings_of_a_row(read):
    huge = 10**30
    for row, wanted in (
        ({"max_new_tokens": 0, "seed": huge, "stop": "x"}, (0, huge, ("x",))),
        ({"max_new_tokens": huge, "stop": ["x", "yz"]}, (huge, None, ("x", "yz"))),
        ({"seed": 0, "stop": []}, (None, 0, ())),
    ):
        (got,) = read(json.dumps({"prompt": "a", **row}))
        assert (got.max_new_tokens, got.seed, got.stop) == wanted
        assert got.row == {"prompt": "a", **row}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "expected a JSON object, got a line that is not JSON"),
        ("[1]", r"expected a JSON object, got \[1\]"),
        ("null", "expected a JSON object, got null"),
        ("{}", r'expected \{"prompt": text\}, .* got \{\}'),
        ('{"promt": "a"}', r'expected \{"prompt": text\}'),
        ('{"prompt": 1}', r'expected \{"prompt": text\}'),
        ('{"prompt": null}', r'expected \{"prompt": text\}'),
        ('{"prompt": ["a"]}', r'expected \{"prompt": text\}'),
        ('{"prompt_ids": [1.5]}', r'expected \{"prompt": text\}'),
        ('{"prompt_ids": [true]}', r'expected \{"prompt": text\}'),
        ('{"prompt_ids": 5}', r'expected \{"prompt": text\}'),
        ('{"prompt_ids": "5"}', r'expected \{"prompt": text\}'),
        ('{"prompt_ids": [' + "9" * 5000 + "]}", "expected a JSON object, got a line that is not JSON"),
        ("[" * 100_000, "expected a JSON object, got a line that is not JSON"),
        ('{"prompt_ids": [0, -1]}', "the prompt holds id -1; expected ids from 0 to 999"),
        ('{"prompt_ids": [1000]}', "the prompt holds id 1000; expected ids from 0 to 999"),
        ('{"prompt_ids": [' + "9" * 30 + "]}", "the prompt holds id 9{30}"),
        ('{"prompt": ""}', "the prompt is empty"),
        ('{"prompt_ids": []}', "the prompt is empty"),
        ('{"prompt": "\\ud800"}', "expected text that has a UTF-8 form"),
        ('{"messages": [1]}', r'expected \{"prompt": text\}'),
        ('{"messages": []}', r'expected \{"prompt": text\}'),
        ('{"messages": "a"}', r'expected \{"prompt": text\}'),
        ('{"messages": [{"role": "user"}]}', r'expected \{"prompt": text\}'),
        ('{"messages": [{"content": "a"}]}', r'expected \{"prompt": text\}'),
        ('{"messages": [{"role": "user", "content": 5}]}', r'expected \{"prompt": text\}'),
        ('{"prompt": "a", "prompt_ids": [1]}', "expected one prompt, got prompt and prompt_ids"),
        ('{"prompt": null, "messages": []}', "expected one prompt, got prompt and messages"),
        ('{"prompt": "a", "prompt": "b"}', "expected each key once, got prompt twice"),
        ('{"prompt": "a", "x": {"y": 1, "y": 1}}', "expected each key once, got y twice"),
        ('{"prompt": "a", "x": NaN}', "expected a JSON object, got a line with NaN, which JSON does not have"),
        (
            '{"prompt": "a", "x": -Infinity}',
            "expected a JSON object, got a line with -Infinity, which JSON does not have",
        ),
        ('{"prompt": "a", "x": 1e999}', "expected numbers that a float can hold, got 1e999"),
        *(
            (f'{{"prompt": "a", "{key}": {value}}}', f"{key}: expected an integer that is at least 0, got ")
            for key in ("max_new_tokens", "seed")
            for value in ("-1", "1.0", "true", '"1"', "null", "[1]")
        ),
        *(
            (f'{{"prompt": "a", "stop": {value}}}', "stop: expected a string or a list of strings, got ")
            for value in ("1", "null", "[1]", '["a", null]', '{"a": 1}')
        ),
        *((f'{{"prompt": "a", "stop": {value}}}', "expected stop strings of at least one") for value in ('""', '[""]')),
        ("", "expected a JSON object, got a blank line"),
        (" \t", "expected a JSON object, got a blank line"),
    ],
    ids=lambda text: text[:40],
)
def test_a_row_of_another_form_is_named(read, row, message):
    with pytest.raises(UserError, match=rf"p\.jsonl:2: {message}") as caught:
        read('{"prompt": "a"}\n' + row + '\n{"prompt": "b"}\n')
    assert len(str(caught.value)) < 1000 or "9999" in row


def test_blank_lines_at_the_end_are_nothing(read):
    assert len(read('{"prompt": "a"}\n\n \n')) == 1


def test_files_that_cannot_be_read_are_named(read, tmp_path, tokenizer):
    with pytest.raises(UserError, match=r"p\.jsonl:2: expected UTF-8 text, got other bytes at offset 16"):
        read(b'{"prompt": "a"}\n\xff\n')
    with pytest.raises(UserError, match=r"missing\.jsonl: cannot be read"):
        read_requests(tmp_path / "missing.jsonl", tokenizer, VOCAB)
    for name in ("blank.txt", "blank.jsonl"):
        with pytest.raises(UserError, match=f"{name}: expected at least one prompt"):
            read("\n \n", name)


def test_without_a_tokenizer(read):
    assert read('{"prompt_ids": [1], "stop": []}', tokenizer=None)[0].ids == [1]
    for row in (
        '{"prompt": "a"}',
        '{"messages": [{"role": "user", "content": "a"}]}',
        '{"prompt_ids": [1], "stop": "a"}',
    ):
        with pytest.raises(UserError, match=r"p\.jsonl:1: .*need.? a tokenizer"):
            read(row, tokenizer=None)
