"""Drafting over a part of the vocabulary: its file, and logits against the whole product."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bent_model import CONFIG, VOCAB

from infer.draft_vocabulary import (
    FILE_NAME,
    load_draft_vocabulary,
    most_frequent,
    read_ids,
    subset_logits,
    take_columns,
    write_ids,
)
from mtp_jax.errors import UserError
from mtp_jax.mtp import MTPModel, init_params
from mtp_jax.text import train_bpe


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_the_models_at_the_ids_and_minus_infinity_elsewhere(dtype, tied):
    model = MTPModel(dataclasses.replace(CONFIG, tie_embeddings=tied), jnp.dtype(dtype))
    params = init_params(model, jax.random.key(3))
    hidden = jax.random.normal(jax.random.key(4), (2, 3, CONFIG.width)).astype(dtype)
    ids = np.array([0, 5, 17, 42, VOCAB - 1], np.int32)
    vocabulary = take_columns(params, ids, model.dtype)
    got = np.asarray(jax.jit(subset_logits, static_argnums=2)(hidden, vocabulary, VOCAB))
    whole = np.asarray(model.bind({"params": params}).logits(hidden))
    assert (vocabulary.kernel.shape, vocabulary.kernel.dtype) == ((CONFIG.width, 5), jnp.dtype(dtype))
    assert (got.shape, got.dtype) == ((2, 3, VOCAB), np.float32)
    np.testing.assert_allclose(got[..., ids], whole[..., ids], rtol=1e-6, atol=1e-6)
    assert np.isneginf(np.delete(got, ids, axis=-1)).all()


def test_one_hidden_state_and_the_whole_vocabulary(model, params):
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(CONFIG.width,)), jnp.float32)
    vocabulary = take_columns(params, np.arange(VOCAB, dtype=np.int32), model.dtype)
    expected = model.bind({"params": params}).logits(hidden)
    np.testing.assert_allclose(subset_logits(hidden, vocabulary, VOCAB), expected, rtol=1e-6, atol=1e-6)


def test_ids_come_by_frequency_and_ties_by_id(tmp_path):
    tokenizer = train_bpe(["abc"], 295)
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    ids, num_tokens = most_frequent(["b b a", "b c b"], tokenizer)
    counted = {i: [*tokenizer.encode("b b a"), *tokenizer.encode("b c b")].count(i) for i in set(ids)}
    assert (counted[b], counted[a], counted[c]) == (4, 1, 1)
    counted[tokenizer.end_id] = 2
    assert ids == sorted(counted, key=lambda i: (-counted[i], i))
    assert num_tokens == sum(counted.values())

    write_ids(tmp_path / FILE_NAME, ids, "two\nlines")
    assert read_ids(tmp_path / FILE_NAME, len(tokenizer)) == ids
    loaded = load_draft_vocabulary(2, tmp_path, len(tokenizer), [tokenizer.end_id, 10**9])
    assert loaded.tolist() == sorted({*ids[:2], tokenizer.end_id})


def test_a_file_of_ids_is_taken_whole_with_end_ids_added(tmp_path):
    (tmp_path / "ids.txt").write_text("# counted by hand\n\n 7 # seven\n3\n")
    for source in (tmp_path / "ids.txt", str(tmp_path / "ids.txt")):
        loaded = load_draft_vocabulary(source, tmp_path / "elsewhere", 61, [60, 3])
        assert loaded.dtype == np.int32
        assert loaded.tolist() == [3, 7, 60]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3\n61\n", ":2: expected an id from 0 to 60, got '61'"),
        ("-1\n", ":1: expected an id from 0 to 60, got '-1'"),
        ("1 2\n", ":1: expected an id"),
        ("٣\n", ":1: expected an id"),
        ("9" * 5000, ":1: expected an id"),
        ("4\n# then\n4\n", ":3: id 4 was in line 1 already"),
        ("# nothing\n", ": expected at least one id, found none"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, text, expected):
    path = tmp_path / FILE_NAME
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_draft_vocabulary(path, tmp_path, 61, [])
    assert str(caught.value).startswith(f"{path}{expected}")
    assert len(str(caught.value)) < 300


def test_too_many_ids_and_a_missing_file_say_what_to_do(tmp_path):
    with pytest.raises(UserError, match=r"scripts/draft_vocabulary.py --checkpoint .* --data TEXTS"):
        load_draft_vocabulary(8, tmp_path, 61, [])
    (tmp_path / FILE_NAME).write_text("1\n2\n")
    with pytest.raises(UserError, match="at least the 3 ids asked for, got 2"):
        load_draft_vocabulary(3, tmp_path, 61, [])
    with pytest.raises(UserError, match="at least 1 token, got 0"):
        load_draft_vocabulary(0, tmp_path, 61, [])
