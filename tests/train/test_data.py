"""Which files become documents, and how documents become rows."""

import numpy as np
import pytest

from mtp_jax.errors import UserError
from mtp_jax.text import Tokenizer
from train import data
from train.data import Document, PackedRows, TokenStream, matches


class LetterTokenizer(Tokenizer):
    """One id a letter, 99 ends a document."""

    def __init__(self):
        pass

    @property
    def end_id(self):
        return 99

    def encode_batch(self, texts):
        return [[ord(letter) - ord("a") + 1 for letter in text] for text in texts]


def _stream(*lengths):
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.int32)
    return TokenStream(tokens, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def test_folders_are_read_recursively_and_sorted(tmp_path):
    (tmp_path / "b" / "c").mkdir(parents=True)
    for name, content in {"z.txt": b"last", "b/y.md": b"middle", "b/c/x": "ü".encode(), "a": b"first"}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "nul").write_bytes(b"a\0b")
    (tmp_path / "latin").write_bytes(b"\xfc")
    (tmp_path / "empty").write_bytes(b"")
    documents, others = data.read_documents([tmp_path])
    assert [document.name for document in documents] == ["a", "b/c/x", "b/y.md", "z.txt"]
    assert others == 3


def test_the_runs_own_folder_is_no_data(tmp_path):
    (tmp_path / "run" / "tokenizer").mkdir(parents=True)
    for name in ("a", "run/config.json", "run/tokenizer/tokenizer.json", "runs"):
        (tmp_path / name).write_text("text")
    documents, _ = data.read_documents([tmp_path], leave_out=tmp_path / "run")
    assert [document.name for document in documents] == ["a", "runs"]


def test_files_and_folders_keep_their_order(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("two")
    (tmp_path / "one.txt").write_text("one")
    documents, _ = data.read_documents([tmp_path / "one.txt", tmp_path / "folder"])
    assert documents == [Document("one.txt", "one"), Document("a.txt", "two")]


def test_paths_without_text_are_mistakes(tmp_path):
    (tmp_path / "binary").write_bytes(b"\0")
    with pytest.raises(UserError, match=r"expected UTF-8 text, found none \(1 other"):
        data.read_documents([tmp_path])
    with pytest.raises(UserError, match="there is none"):
        data.read_documents([tmp_path / "absent"])


def test_standard_library_has_no_tests_and_no_packages():
    documents, _ = data.read_standard_library(("*", "!encodings/*"))
    names = [document.name for document in documents]
    assert {"json/decoder.py", "heapq.py"} <= set(names)
    assert not [n for n in names if "site-packages" in n or "/test" in n or n.startswith(("test", "encodings/"))]
    assert names == sorted(names, key=lambda name: name.split("/"))


def test_patterns():
    assert matches("json/tool.py", ("json/*",))
    assert not matches("json/tool.py", ("*", "!json/*"))
    assert not matches("json/tool.py", ())


def test_held_out_documents_are_not_trained_on():
    documents = [Document("a.py", "x"), Document("b.py", "y")]
    training, held_out = data.split_held_out(documents, ("b.*",))
    assert (training, held_out) == (documents[:1], documents[1:])
    with pytest.raises(UserError, match="every document"):
        data.split_held_out(documents, ("*",))


def test_fingerprint_knows_names_texts_and_their_borders():
    one = data.fingerprint([Document("a", "bc")])
    assert one == data.fingerprint([Document("a", "bc")])
    assert one != data.fingerprint([Document("\udcff", "bc")])  # as Python reads a name that is not UTF-8
    assert len({one, data.fingerprint([Document("ab", "c")]), data.fingerprint([Document("a", "bd")])}) == 3


def test_documents_end_with_the_end_token():
    stream = data.tokenize(LetterTokenizer(), [Document("1", "abc"), Document("2", "z")])
    np.testing.assert_array_equal(stream.tokens, [1, 2, 3, 99, 26, 99])
    np.testing.assert_array_equal(stream.starts, [0, 4, 6])


def test_rows_hold_every_token_once_and_split_documents_become_segments():
    rows = PackedRows(_stream(5, 1, 7), 4, seed=0, shuffle=False)
    assert rows.rows_per_epoch == 4
    tokens, segments, loss_mask = rows.batch(0, 4)
    np.testing.assert_array_equal(tokens, [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 0, 0, 0]])
    np.testing.assert_array_equal(segments, [[1, 1, 1, 1], [1, 2, 3, 3], [3, 3, 3, 3], [3, 0, 0, 0]])
    np.testing.assert_array_equal(loss_mask, segments > 0)
    assert rows.batch(0, 4).num_tokens == 13


def test_shuffled_epochs_hold_the_same_tokens_in_other_orders():
    rows = PackedRows(_stream(*range(1, 12)), 5, seed=1)
    epochs = [rows.batch(epoch * rows.rows_per_epoch, rows.rows_per_epoch) for epoch in range(3)]
    for batch in epochs:
        kept = batch.tokens[batch.segment_ids > 0]
        np.testing.assert_array_equal(np.sort(kept), np.arange(1, 67))
    assert not np.array_equal(epochs[0].tokens, epochs[1].tokens)


def test_a_segment_is_a_piece_of_one_document():
    lengths = (3, 8, 1, 6)
    stream = _stream(*lengths)
    owner = np.repeat(np.arange(4), lengths)
    tokens, segments, _ = PackedRows(stream, 4, seed=3).batch(0, 5)
    for row, ids in zip(tokens, segments, strict=True):
        for piece in (row[ids == i] for i in set(ids.tolist()) - {0}):
            np.testing.assert_array_equal(np.diff(piece), 1)
            assert len(set(owner[piece - 1].tolist())) == 1


def test_position_is_all_that_resuming_needs():
    stream = _stream(*range(1, 9))
    straight = PackedRows(stream, 4, seed=5)
    batches = [straight.batch(position, 3) for position in range(0, 60, 3)]
    for position in (0, 9, 27, 57):
        fresh = PackedRows(stream, 4, seed=5).batch(position, 3)
        np.testing.assert_array_equal(fresh.tokens, batches[position // 3].tokens)
        np.testing.assert_array_equal(fresh.segment_ids, batches[position // 3].segment_ids)


def test_seeds_give_other_orders():
    stream = _stream(*range(1, 9))
    one, other = (PackedRows(stream, 4, seed=seed).batch(0, 9).tokens for seed in (0, 1))
    assert not np.array_equal(one, other)


def test_data_shorter_than_a_row_repeats():
    tokens, segments, _ = PackedRows(_stream(2), 5, seed=0).batch(0, 3)
    np.testing.assert_array_equal(tokens, [[1, 2, 0, 0, 0]] * 3)
    np.testing.assert_array_equal(segments, [[1, 1, 0, 0, 0]] * 3)
