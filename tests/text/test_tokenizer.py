"""Round trips through a tokenizer trained here, and what is read from a folder."""

import json

import pytest

from mtp_jax.errors import UserError
from mtp_jax.text import SPECIAL_TOKENS, ChatTemplate, Tokenizer, end_ids, train_bpe

TEXTS = [
    "def add(left, right):\n    return left + right\n" * 9,
    "the cat isn't on the mat; 1234 mice are\n" * 9,
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(iter(TEXTS), 330)


def test_special_tokens_are_the_last_ids_in_the_published_order(tokenizer):
    ids = [tokenizer.token_id(token) for token in SPECIAL_TOKENS]
    assert ids == list(range(len(tokenizer) - len(SPECIAL_TOKENS), len(tokenizer)))
    assert len(tokenizer) == 330


def test_same_texts_give_the_same_tokenizer(tokenizer, tmp_path):
    for name, one in (("a", tokenizer), ("b", train_bpe(TEXTS, 330))):
        one.save(tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    "text", ["", " ", "return left", "  \n\n\t x", "12345", "isn't", "汉字 é 🙂\u200b", "<|im_end|>\n<think>"]
)
def test_decode_gives_back_what_was_encoded(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_is_normalised_and_digits_stand_alone(tokenizer):
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")
    assert len(tokenizer.encode("1234")) == 4
    assert tokenizer.encode("<|im_end|>") == [tokenizer.token_id("<|im_end|>")]


def test_a_batch_is_encoded_like_its_texts(tokenizer):
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


def test_part_of_a_character_decodes_to_the_replacement_sign(tokenizer):
    assert tokenizer.decode(tokenizer.encode("汉")[:1]) == "\ufffd"


def test_a_lone_surrogate_is_refused(tokenizer):
    with pytest.raises(UserError, match="UTF-8"):
        tokenizer.encode("\ud800")


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(UserError, match=r"at least 289.*got 288"):
        train_bpe(TEXTS, 288)


def test_few_texts_give_fewer_ids_and_no_texts_the_bytes():
    assert len(train_bpe([], 4096)) == 289


def test_save_and_load_keep_everything(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    loaded = Tokenizer.from_folder(tmp_path)
    messages = [{"role": "user", "content": " hi "}]
    assert len(loaded) == len(tokenizer)
    assert loaded.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])
    assert loaded.render_chat(messages) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert loaded.render_chat(messages) == tokenizer.render_chat(messages)


def test_no_tokenizer_json_is_no_tokenizer(tmp_path):
    assert Tokenizer.from_folder(tmp_path) is None
    with pytest.raises(UserError, match="expected a folder"):
        Tokenizer.from_folder(tmp_path / "absent")


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"model": 3}'])
def test_a_broken_tokenizer_json_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer\.json(:1)?: expected"):
        Tokenizer.from_folder(tmp_path)


def test_end_ids_are_the_union_of_all_sources(tokenizer, tmp_path):
    document, turn = tokenizer.token_id("<|endoftext|>"), tokenizer.token_id("<|im_end|>")
    assert (tokenizer.end_id, tokenizer.eos_id, tokenizer.end_of_turn_id) == (document, document, turn)
    assert end_ids(tmp_path, None) == frozenset()
    assert end_ids(tmp_path, tokenizer) == {document, turn}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 5, "text_config": {"eos_token_id": 6}}')
    assert end_ids(tmp_path, tokenizer) == {3, 4, 5, 6, document, turn}


@pytest.mark.parametrize("value", ["x", True, -1, [1, "2"], 1.5, 2**31])
def test_an_end_id_of_another_kind_is_refused_by_file_and_key(tmp_path, value):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(UserError, match=r"config\.json: eos_token_id: expected"):
        end_ids(tmp_path, None)


def test_eos_token_may_be_a_description(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "eos_token": {"content": "<|im_end|>", "lstrip": False}}))
    assert Tokenizer.from_folder(tmp_path).eos_id == tokenizer.token_id("<|im_end|>")


def test_offsets_are_the_characters_that_each_id_covers():
    tokenizer = train_bpe(["hello hello"], 320)
    text = "hello <|im_end|>e\u0301\u6c5f"
    ((ids, offsets),) = tokenizer.encode_with_offsets([text])
    assert ids == tokenizer.encode(text)
    assert offsets[:3] == [(0, 5), (5, 6), (6, 16)]
    # Two bytes of a letter that is composed first (its offset is that of its base), three of another.
    assert offsets[3:] == [(16, 17)] * 2 + [(18, 19)] * 3
    with pytest.raises(UserError, match="UTF-8"):
        tokenizer.encode_with_offsets(["\ud800"])


def test_the_fingerprint_follows_all_that_decides_ids(tmp_path):
    tokenizer = train_bpe(["abab"], 290)
    tokenizer.save(tmp_path)
    assert Tokenizer.from_folder(tmp_path).fingerprint() == tokenizer.fingerprint()
    others = [train_bpe(["acac"], 290), *(train_bpe(["abab"], 290) for _ in range(3))]
    others[1].config["bos_token"] = "<s>"
    others[2].chat_templates["default"] = ChatTemplate("x", "x")
    others[3].config["clean_up_tokenization_spaces"] = True
    prints = [other.fingerprint() for other in others]
    assert len({tokenizer.fingerprint(), *prints[:3]}) == 4
    assert prints[3] == tokenizer.fingerprint()
