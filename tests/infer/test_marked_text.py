"""Accepted drafts, marked."""

import io

import pytest
from rich.console import Console

from infer.generator import Generation
from infer.marked_text import marked_text, segments, summary
from mtp_jax.text import train_bpe


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(["ab\n"], 300)


def generation(tokens, from_draft, finish_reason="length"):
    return Generation(tokens, from_draft, None, finish_reason, 2, 4, sum(from_draft), [1, 1], 0.5, 1.5)


def test_runs_are_joined_and_the_end_id_is_left_out(tokenizer):
    tokens = [*tokenizer.encode("xyz["), tokenizer.end_id]
    got = segments(generation(tokens, [False, True, True, False, True], "stop"), tokenizer)
    assert list(got) == [("x", False), ("yz", True), ("[", False)]


def test_bytes_of_one_character_stay_together(tokenizer):
    tokens = tokenizer.encode("a江b")
    assert len(tokens) == 5
    got = segments(generation(tokens, [False, True, False, True, False]), tokenizer)
    assert list(got) == [("a", False), ("江", True), ("b", False)]


def test_an_unfinished_character_is_shown_as_one(tokenizer):
    tokens = tokenizer.encode("a江")[:-1]
    got = list(segments(generation(tokens, [False, False, True]), tokenizer))
    assert "".join(text for text, _ in got) == "a\ufffd"


def test_ids_without_a_tokenizer():
    assert list(segments(generation([5, 6], [False, True]), None)) == [("5 ", False), ("6 ", True)]


@pytest.mark.parametrize(
    ("colours", "marks", "expected"),
    [(None, "auto", "x‹y›["), ("standard", "auto", "x\x1b[1;32my\x1b[0m["), ("standard", "none", "xy[")],
)
def test_marks_work_with_and_without_colour(tokenizer, monkeypatch, colours, marks, expected):
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = io.StringIO()
    console = Console(file=out, force_terminal=colours is not None, color_system=colours)
    text = marked_text(generation(tokenizer.encode("xy["), [False, True, False]), tokenizer, console, marks)
    console.print(text, end="")
    assert out.getvalue() == expected


def test_summary_is_one_line():
    text = summary(generation([1, 2, 3, 4, 5], [False, True, True, False, False]))
    assert text == (
        "5 tokens in 2 rounds (2.00 a round), 2 of 4 drafts accepted (a round, by position: 0.50 0.50), "
        "10.0 tokens/s, ended by length; compiled in 1.5 s"
    )
