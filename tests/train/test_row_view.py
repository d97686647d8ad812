"""A row as a person sees it: runs of what is trained on, segments, padding, whatever is in the text."""

import io

import numpy as np
import pytest
from rich.console import Console

from mtp_jax.text import train_bpe
from train.packing import PackedRows, cut
from train.row_view import num_padding, row_text, segments
from train.token_cache import TokenStore


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe([], 289)


def _row(tokenizer, *documents, length=24):
    """Documents as texts, in each of which what is trained on follows a `|`."""
    ids = [[tokenizer.encode(part) for part in document.split("|")] for document in documents]
    mask = [bit for before, after in ids for bit in [False] * len(before) + [True] * len(after)]
    lengths = [len(before) + len(after) for before, after in ids]
    store = TokenStore(
        tokens=np.array([i for pair in ids for part in pair for i in part], np.int32),
        loss_mask=np.array(mask),
        starts=np.concatenate([[0], np.cumsum(lengths)]),
        files=np.zeros(len(documents), np.int32),
        rows=np.ones(len(documents), np.int64),
        num_bad=0,
        checksum="",
    )
    pieces = cut(store, np.arange(len(documents)), length, split_conversations=True)
    return PackedRows(store, pieces, length)[0]


def test_runs_and_counts(tokenizer):
    row = _row(tokenizer, "ab|cd", "|xyz")
    first, second = segments(row, tokenizer)
    assert first == (4, 2, [("ab", False), ("cd", True)])
    assert second == (3, 2, [("x", False), ("yz", True)])  # nothing comes before its first token
    assert num_padding(row) == 17


def test_a_character_of_several_tokens_stays_whole(tokenizer):
    (segment,) = segments(_row(tokenizer, "|江a"), tokenizer)
    assert "".join(text for text, _ in segment.runs) == "江a"


def _shown(row, tokenizer, marks, **console):
    console = Console(file=io.StringIO(), soft_wrap=True, highlight=False, **console)
    console.print(row_text(row, tokenizer, console, marks))
    return console.file.getvalue()


def test_without_colour_there_are_brackets(tokenizer):
    row = _row(tokenizer, "ab|cd", "|x\x1b[31m\u009b[y\n")
    text = _shown(row, tokenizer, "auto", force_terminal=True, no_color=True, color_system="truecolor")
    assert "ab‹cd›" in text
    assert "x‹␛[31m\ufffd[y\n›" in text
    assert "── segment 2: 11 tokens, 10 trained on ──" in text
    assert "── padding: " in text


def test_in_colour_context_is_dim_and_targets_are_bright(tokenizer):
    text = _shown(_row(tokenizer, "ab|cd"), tokenizer, "auto", force_terminal=True, color_system="standard")
    assert "\x1b[2mab\x1b[0m\x1b[1;32mcd\x1b[0m" in text
    assert "‹" not in text
