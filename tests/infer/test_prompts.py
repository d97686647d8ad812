"""Prompts as people write them."""

import pytest

from infer.prompts import parse_ids, prompt_from_text, read_prompts
from mtp_jax.errors import UserError
from mtp_jax.files import read_text
from mtp_jax.text import train_bpe


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(["some text\n"], 300)


@pytest.mark.parametrize(("text", "ids"), [("1,2,3", [1, 2, 3]), (" 1 , 2", [1, 2]), ("", []), (" ", []), ("-1", [-1])])
def test_parse_ids(text, ids):
    assert parse_ids(text) == ids


@pytest.mark.parametrize("text", ["1,,2", "1,", "1 2", "1.0", "1_0", "a", "١"])
def test_parse_ids_refuses_anything_else(text):
    with pytest.raises(UserError, match="expected integers separated by commas"):
        parse_ids(text)


def test_lines(tmp_path, tokenizer):
    (tmp_path / "p.txt").write_text("one\n\n two\n", encoding="utf-8")
    got = read_prompts(tmp_path / "p.txt", tokenizer)
    assert [prompt.text for prompt in got] == ["one", " two"]
    assert got[1].ids == tokenizer.encode(" two")


def test_a_file_is_read_as_it_is_and_cut_at_line_ends_only(tmp_path, tokenizer):
    (tmp_path / "p.txt").write_bytes("one\r\ntwo\x0c\u2028three\r\n".encode())
    assert read_text(tmp_path / "p.txt") == "one\r\ntwo\x0c\u2028three\r\n"
    assert [prompt.text for prompt in read_prompts(tmp_path / "p.txt", tokenizer)] == ["one", "two\x0c\u2028three"]
    (tmp_path / "p.jsonl").write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
    assert [prompt.text for prompt in read_prompts(tmp_path / "p.jsonl", tokenizer)] == ["a\u2028b"]


def test_rows(tmp_path, tokenizer):
    rows = '{"prompt": "a\\nb"}\n{"prompt_ids": [3, 4], "extra": 1}\n{"messages": [{"role": "user", "content": "q"}]}\n'
    (tmp_path / "p.jsonl").write_text(rows, encoding="utf-8")
    text, ids, chat = read_prompts(tmp_path / "p.jsonl", tokenizer)
    assert text.ids == tokenizer.encode("a\nb")
    assert (ids.ids, ids.text) == ([3, 4], "3,4")
    assert chat == prompt_from_text("q", tokenizer, chat=True)
    assert tokenizer.decode(chat.ids) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "row",
    [
        *("{", "[1]", "{}", '{"prompt": 1}', '{"prompt_ids": [1.5]}', '{"messages": [1]}'),
        *('{"prompt_ids": [' + "9" * 5000 + "]}", "[" * 100_000),
    ],
    ids=range(8),
)
def test_a_row_of_another_form_is_named(tmp_path, tokenizer, row):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' + row, encoding="utf-8")
    with pytest.raises(UserError, match=r"p\.jsonl:2: expected"):
        read_prompts(tmp_path / "p.jsonl", tokenizer)


def test_files_that_cannot_be_read_are_named(tmp_path, tokenizer):
    (tmp_path / "bytes").write_bytes(b"\xff")
    (tmp_path / "blank").write_text("\n \n")
    with pytest.raises(UserError, match="bytes: expected UTF-8 text"):
        read_text(tmp_path / "bytes")
    with pytest.raises(UserError, match="missing: cannot be read"):
        read_text(tmp_path / "missing")
    with pytest.raises(UserError, match="blank: expected at least one prompt"):
        read_prompts(tmp_path / "blank", tokenizer)


def test_text_without_a_tokenizer():
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        prompt_from_text("a", None)


def test_an_id_of_thousands_of_digits_is_refused():
    with pytest.raises(UserError, match="one of 5000 digits"):
        parse_ids("1," + "9" * 5000)
