"""Tokens of texts and completions, and their cache: hits, misses, damage, concurrent and interrupted writers."""

import contextlib
import gzip
import json
import os

import numpy as np
import pytest

from mtp_jax.errors import UserError
from mtp_jax.text import ChatTemplate, train_bpe
from train import token_cache
from train.progress import Progress
from train.sources import find_source
from train.token_cache import tokenized

ROWS = [{"text": "ab"}, {"text": ""}, {"prompt": "q:", "completion": " é"}, {"prompt": "", "completion": "x"}]


class Log(Progress):
    """Keeps what is said, and how far tasks have come."""

    def __init__(self):
        super().__init__(quiet=True)
        self.said = []
        self.seen = []

    def say(self, text):
        self.said.append(text)

    @contextlib.contextmanager
    def task(self, name, total=None):
        self.seen.append(total)
        yield self.seen.append


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(["abab"], 290)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MTP_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "b.txt").write_text("abc")
    return folder


def _store(folder, tokenizer, *, skip_bad=False):
    log = Log()
    return tokenized("label", find_source(folder).files, tokenizer, skip_bad, log), log


def _is_hit(log):
    assert (not log.seen) == any("tokens read from" in line for line in log.said)
    return not log.seen


def _entries(cache):
    return sorted(path.name for path in cache.iterdir())


def test_documents_end_with_the_end_token_and_prompts_are_masked(folder, cache, tokenizer):
    store, _ = _store(folder, tokenizer)
    end = tokenizer.end_id
    expected = [
        (tokenizer.encode("ab"), 0, 0, 1),
        (tokenizer.encode("q:") + tokenizer.encode(" é"), 2, 0, 3),
        (tokenizer.encode("x"), 0, 0, 4),
        (tokenizer.encode("abc"), 0, 1, 0),
    ]
    for i, (ids, context, file, row) in enumerate(expected):
        inside = slice(store.starts[i], store.starts[i + 1])
        assert store.tokens[inside].tolist() == [*ids, end]
        assert store.loss_mask[inside].tolist() == [False] * context + [True] * (len(ids) + 1 - context)
        assert (store.files[i], store.rows[i]) == (file, row)
    assert len(store.starts) == 5


def test_a_second_run_reads_what_the_first_wrote(folder, cache, tokenizer):
    first, log = _store(folder, tokenizer)
    assert not _is_hit(log)
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert (log.seen[0], log.seen[-1]) == (size, size)  # the total, and how far it came
    second, log = _store(folder, tokenizer)
    assert _is_hit(log)
    for one, other in zip(first[:5], second[:5], strict=True):
        np.testing.assert_array_equal(one, other)
    assert first.checksum == second.checksum
    assert isinstance(second.tokens, np.memmap)


def test_content_counts_and_names_and_times_do_not(folder, cache, tokenizer):
    _store(folder, tokenizer)
    os.utime(folder / "b.txt", (1, 1))
    (folder / "b.txt").rename(folder / "c.txt")
    assert _is_hit(_store(folder, tokenizer)[1])
    (folder / "c.txt").write_text("abd")
    assert not _is_hit(_store(folder, tokenizer)[1])
    (folder / "d.txt").write_text("new")
    assert not _is_hit(_store(folder, tokenizer)[1])


def test_how_a_file_is_read_counts(folder, cache, tokenizer):
    _store(folder, tokenizer)
    (folder / "a.jsonl").rename(folder / "a.txt")
    assert not _is_hit(_store(folder, tokenizer)[1])
    (folder / "b.txt").rename(folder / "b.txt.gz")
    (folder / "b.txt.gz").write_bytes(gzip.compress(b"abc"))
    assert not _is_hit(_store(folder, tokenizer)[1])


def test_tokenizer_template_and_rules_count(folder, cache, tokenizer, monkeypatch):
    _store(folder, tokenizer)
    other = train_bpe(["acac"], 290)
    assert not _is_hit(_store(folder, other)[1])
    same = train_bpe(["abab"], 290)
    assert _is_hit(_store(folder, same)[1])
    same.chat_templates["default"] = ChatTemplate("x", "x")
    assert not _is_hit(_store(folder, same)[1])
    monkeypatch.setattr(token_cache, "RULES_VERSION", 0)
    assert not _is_hit(_store(folder, tokenizer)[1])
    assert len(_entries(cache)) == 4


def _cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "cut": lambda entry: _cut(entry / "tokens.npy"),
    "flipped bit": lambda entry: _flip(entry / "loss_mask.npy"),
    "flipped bit in the header": lambda entry: (entry / "rows.npy").write_bytes(b"x" + bytes(300)),
    "missing array": lambda entry: (entry / "starts.npy").unlink(),
    "missing index": lambda entry: (entry / "index.json").unlink(),
    "index of something else": lambda entry: (entry / "index.json").write_text('{"lengths": {}}'),
    "no json": lambda entry: (entry / "index.json").write_text("x"),
    "other type": lambda entry: np.save(entry / "tokens.npy", np.zeros(3)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_made_anew(folder, cache, tokenizer, damage):
    first, _ = _store(folder, tokenizer)
    tokens = first.tokens.tolist()
    (entry,) = cache.iterdir()
    DAMAGES[damage](entry)
    second, log = _store(folder, tokenizer)
    assert "damaged" in log.said[0]
    assert not _is_hit(log)
    assert second.tokens.tolist() == tokens
    assert _is_hit(_store(folder, tokenizer)[1])
    assert len(_entries(cache)) == 1


def test_an_interrupted_writer_leaves_no_entry(folder, cache, tokenizer, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(token_cache, "write_json", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _store(folder, tokenizer)
    assert _entries(cache) == []


def test_leftovers_of_killed_writers_go_after_a_day(folder, cache, tokenizer):
    for name in ("old.partial.x", "new.partial.x"):
        (cache / name).mkdir(parents=True)
    os.utime(cache / "old.partial.x", (1, 1))
    _store(folder, tokenizer)
    names = _entries(cache)
    assert "new.partial.x" in names
    assert "old.partial.x" not in names


def test_the_faster_of_two_writers_counts(folder, cache, tokenizer, monkeypatch):
    """Another process finishes the same entry just before this one would."""
    made, _ = _store(folder, tokenizer)
    (entry,) = cache.iterdir()
    entry.rename(cache / "aside")
    rename = os.rename

    def late(source, target):
        rename(cache / "aside", target)
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    again, _ = _store(folder, tokenizer)
    assert again.tokens.tolist() == made.tokens.tolist()
    assert _entries(cache) == [entry.name]


def test_bad_rows_are_an_error_or_counted_also_from_the_cache(folder, cache, tokenizer):
    with open(folder / "a.jsonl", "a") as file:
        file.write("{\n" + json.dumps({"text": "\ud800"}) + "\n")
    with pytest.raises(UserError, match=r"a\.jsonl:5: .*not JSON.*--skip-bad"):
        _store(folder, tokenizer)
    assert _entries(cache) == []
    store, _ = _store(folder, tokenizer, skip_bad=True)
    assert (store.num_bad, len(store.rows)) == (2, 4)
    store, log = _store(folder, tokenizer, skip_bad=True)
    assert _is_hit(log)
    assert store.num_bad == 2
    with pytest.raises(UserError, match=r"a\.jsonl:5: .*not JSON.*--skip-bad"):
        _store(folder, tokenizer)


def test_no_document_at_all_is_an_error(tmp_path, cache, tokenizer):
    (tmp_path / "a.jsonl").write_text('\n{"text": ""}\n')
    with pytest.raises(UserError, match="expected at least one document, found none"):
        _store(tmp_path / "a.jsonl", tokenizer)
    (tmp_path / "a.jsonl").write_text("{\n")
    with pytest.raises(UserError, match=r"found none \(1 bad rows\)"):
        _store(tmp_path / "a.jsonl", tokenizer, skip_bad=True)
    assert _entries(cache) == []


def test_a_cache_that_cannot_be_written_says_what_to_do(folder, tmp_path, tokenizer, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("MTP_JAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot be written.*set MTP_JAX_CACHE to a folder"):
        _store(folder, tokenizer)


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("MTP_JAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert token_cache.cache_folder() == tmp_path / "mtp_jax" / "tokens"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert token_cache.cache_folder() == tmp_path / ".cache" / "mtp_jax" / "tokens"
