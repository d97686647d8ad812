"""From settings to rows: what is held out, mixtures, what data.json says, what is refused."""

import json

import numpy as np
import pytest

from mtp_jax.errors import UserError
from train.corpus import new_tokenizer, packed_rows, read_corpus
from train.experiment import Experiment
from train.progress import Progress

QUIET = Progress(quiet=True)
SETTINGS = ["vocab_size=320", "sequence_length=16"]


@pytest.fixture
def folder(tmp_path):
    """Two texts, and ten rows."""
    (tmp_path / "a.txt").write_text("aaaa bbbb")
    (tmp_path / "b.txt").write_text("cccc dddd")
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(1, 11)))
    return tmp_path


def _read(paths, *settings):
    experiment = Experiment(data=tuple(map(str, paths))).override([*SETTINGS, *settings])
    corpus = read_corpus(experiment, QUIET)
    tokenizer = new_tokenizer(experiment, corpus, QUIET)
    return corpus, tokenizer, lambda: packed_rows(experiment, corpus, tokenizer, QUIET)


def _documents(rows, tokenizer):
    """The texts in some rows, sorted."""
    texts = []
    for packed in rows:
        for tokens, segments, _ in (packed[i] for i in range(len(packed))):
            texts += [tokenizer.decode(tokens[segments == n].tolist()) for n in range(1, segments.max() + 1)]
    return sorted(text.removesuffix("<|endoftext|>") for text in texts)


def test_files_and_every_so_many_rows_are_held_out(folder):
    corpus, tokenizer, pack = _read([folder], "held_out=b*", "held_out_every=4")
    rows = pack()
    held_out = ["cccc dddd", "row 4", "row 8"]
    training = ["aaaa bbbb", *(f"row {i}" for i in (1, 10, 2, 3, 5, 6, 7, 9))]
    assert _documents(rows.held_out, tokenizer) == held_out
    assert _documents(rows.training, tokenizer) == sorted(training)
    for chosen, expected in ((True, held_out), (False, training)):
        assert sorted(doc.as_text(tokenizer) for doc in corpus.documents(held_out=chosen)) == sorted(expected)
    assert rows.record["held_out"] == ["b.txt"]
    assert (rows.record["training_documents"], rows.record["held_out_documents"]) == (9, 3)
    assert rows.record["training_tokens"] == sum(len(tokenizer.encode(text)) + 1 for text in training)


def test_the_tokenizer_learns_nothing_from_what_is_held_out(folder):
    _, tokenizer, _ = _read([folder], "held_out=b*")
    assert len(tokenizer.encode("cccc")) > len(tokenizer.encode("aaaa"))


def test_paths_with_weights_are_sources_of_their_own(folder):
    paths = [folder / "a.txt", folder / "c.jsonl"]
    assert len(_read(paths)[2]().training) == 1
    _, tokenizer, pack = _read(paths, "data_weights=1,3", "held_out_every=5")
    rows = pack()
    assert [_documents([source], tokenizer)[0] for source in rows.training] == ["aaaa bbbb", "row 1"]
    assert _documents(rows.held_out, tokenizer) == ["row 10", "row 5"]


@pytest.mark.parametrize("weights", ["1", "1,2,3", "1,0", "1,-1"])
def test_weights_that_do_not_fit_the_paths_are_refused(folder, weights):
    with pytest.raises(UserError, match="setting data_weights: expected none, or 2 finite numbers above 0"):
        _read([folder / "a.txt", folder / "b.txt"], f"data_weights={weights}")


def test_all_held_out_is_refused(folder):
    with pytest.raises(UserError, match="matches every file"):
        _read([folder], "held_out=*")
    (folder / "one.jsonl").write_text('\n{"text": "x"}\n')
    with pytest.raises(UserError, match=r"one\.jsonl: no document is left to train on"):
        _read([folder / "one.jsonl"], "held_out_every=2")[2]()


def test_files_that_are_no_text_are_counted_unless_there_is_nothing_else(folder):
    (folder / "image.png").write_bytes(b"\0")
    assert _read([folder / "image.png", folder / "a.txt"])[2]().record["files_left_out"] == 1
    with pytest.raises(UserError, match=r"image\.png: expected UTF-8 text, found none \(1 other"):
        _read([folder / "image.png"])
    with pytest.raises(UserError, match=r"image\.png: expected UTF-8 text"):
        _read([folder / "image.png", folder / "a.txt"], "data_weights=1,1")


def test_the_fingerprint_follows_contents_and_tokens(folder):
    _, _, pack = _read([folder])
    first = pack().record["fingerprint"]
    assert pack().record["fingerprint"] == first
    (folder / "a.txt").write_text("aaaa bbbd")
    assert _read([folder])[2]().record["fingerprint"] != first


def test_conversations_too_long_are_counted(tmp_path):
    def row(length):
        turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a" * length}]
        return json.dumps({"messages": turns}) + "\n"

    (tmp_path / "c.jsonl").write_text(row(3) + row(80))
    settings = ["sequence_length=32", "vocab_size=289"]
    split = _read([tmp_path / "c.jsonl"], *settings)[2]()
    dropped = _read([tmp_path / "c.jsonl"], *settings, "long_conversations=drop")[2]()
    assert (split.record["conversations_split"], split.record["conversations_dropped"]) == (1, 0)
    assert (dropped.record["conversations_split"], dropped.record["conversations_dropped"]) == (0, 1)
    assert dropped.record["training_tokens"] < 32 < split.record["training_tokens"]
    mask = np.concatenate([split.training[0][i].loss_mask for i in range(len(split.training[0]))])
    assert mask.sum() == 3 + 80 + 2


def test_bad_rows_are_counted_where_they_are_skipped(folder):
    with open(folder / "c.jsonl", "a") as file:
        file.write("{\n")
    with pytest.raises(UserError, match=r"c\.jsonl:11"):
        _read([folder])
    assert _read([folder], "skip_bad=true")[2]().record["bad_rows"] == 1


def test_rows_are_the_same_again(folder):
    one, other = (_read([folder])[2]().training[0] for _ in range(2))
    np.testing.assert_array_equal(one[0].tokens, other[0].tokens)
