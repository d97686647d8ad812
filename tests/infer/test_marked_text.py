"""Accepted drafts, marked."""

import dataclasses
import io

import pytest
from made_up import completion
from rich.console import Console

from infer.marked_text import MarkedWriter, marked_text, segments, summary
from mtp_jax.text import train_bpe


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(["ab\n"], 300)


def test_runs_are_joined_and_the_end_id_is_left_out(tokenizer):
    tokens = [*tokenizer.encode("xyz["), tokenizer.end_id]
    got = segments(completion([2, 1], 2, tokens, finish_reason="stop", text="xyz["), tokenizer)
    assert list(got) == [("x", False), ("yz", True), ("[", False)]


def test_bytes_of_one_character_stay_together(tokenizer):
    tokens = tokenizer.encode("a江b")
    assert len(tokens) == 5
    got = segments(completion([1, 1], 1, tokens), tokenizer)
    assert list(got) == [("a", False), ("江", True), ("b", False)]


def test_an_unfinished_character_is_shown_as_one(tokenizer):
    tokens = tokenizer.encode("a江")[:-1]
    got = list(segments(completion([0, 1], 1, tokens), tokenizer))
    assert "".join(text for text, _ in got) == "a\ufffd"


def test_the_text_ends_where_a_stop_string_began(tokenizer):
    stopped = completion([2, 1], 2, tokenizer.encode("xyz["), finish_reason="stop", text="xy")
    assert list(segments(stopped, tokenizer)) == [("x", False), ("y", True)]


def test_ids_without_a_tokenizer():
    assert list(segments(completion([1], 1, [5, 6]), None)) == [("5 ", False), ("6 ", True)]


@pytest.mark.parametrize(
    ("colours", "marks", "expected"),
    [(None, "auto", "x‹y›["), ("standard", "auto", "x\x1b[1;32my\x1b[0m["), ("standard", "none", "xy[")],
)
def test_marks_work_with_and_without_colour(tokenizer, monkeypatch, colours, marks, expected):
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = io.StringIO()
    console = Console(file=out, force_terminal=colours is not None, color_system=colours)
    text = marked_text(completion([1], 1, tokenizer.encode("xy[")), tokenizer, console, marks)
    console.print(text, end="")
    assert out.getvalue() == expected


def test_summary_is_one_line():
    text = summary(completion([2, 0], 2))
    assert text == (
        "5 tokens in 2 rounds (2.00 a round), 2 of 4 drafts accepted (by position: 0.50 0.50), "
        "10.0 tokens/s, ended by length"
    )


def test_a_share_is_of_the_rounds_that_drafted_so_far():
    """As with `auto`: of three rounds one drafted nothing and one a single token; position 3 was never tried."""
    made = completion([2, 0, 1], 3)
    drafts = [-1, 2, -1, -1, 0, 1, -1]
    made = dataclasses.replace(made, round_drafts=drafts)
    assert made.drafted_per_position == [2, 1, 0]
    assert "3 of 3 drafts accepted (by position: 1.00 1.00 -)" in summary(made)


@pytest.mark.parametrize(
    ("marks", "expected"), [("brackets", "a‹b\tc›d\n"), ("none", "ab\tcd\n"), ("colour", "a\x1b[1;32mb\tc\x1b[0md\n")]
)
def test_text_is_written_as_it_comes(marks, expected):
    """Tabs stay tabs wherever a piece begins; what a terminal would obey is left out."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=marks == "colour", color_system="standard", soft_wrap=True)
    writer = MarkedWriter(console, marks)
    writer.write([("a", 0), ("b\t", 1), ("c\x1b", 2)])
    writer.write([("d\x07", 0), ("\n", 0)])
    assert file.getvalue() == expected
