"""The published templates and vocabulary: our text and ids against the peer's."""

import json
from pathlib import Path

import published_text
import pytest

from mtp_jax.text import ChatTemplate, Tokenizer

FOLDER = Path(__file__).parent.parent / "goldens" / "text"
ROWS = json.loads((FOLDER / "rendered.json").read_text())["rows"]
HELLO = [248045, 846, 198, 9419, 11, 1204, 513, 488, 30, 248046, 198, 248045, 74455, 198, 248068, 271, 248069, 271]

all_rows = pytest.mark.parametrize("row", ROWS, ids=[f"{row['template']}-{row['name']}" for row in ROWS])
whole_vocabulary = pytest.mark.skipif(
    not (published_text.TOKENIZER / "tokenizer.json").exists(),
    reason="the whole published vocabulary is absent: python tests/published_text.py fetches it",
)


def with_template(folder, name):
    tokenizer = Tokenizer.from_folder(folder)
    source = (FOLDER / f"{name}.jinja").read_text()
    return Tokenizer(tokenizer._backend, tokenizer.config, {"default": ChatTemplate(source, name)})


@all_rows
def test_rendered_and_encoded_as_the_peer_does(row):
    tokenizer = with_template(FOLDER, row["template"])
    text = tokenizer.render_chat(row["messages"], **row["variables"])
    assert text == row["text"]
    assert tokenizer.encode(text) == row["ids"]
    assert tokenizer.decode(row["ids"]) == text


def test_the_18_tokens_of_hello():
    rows = [row for row in ROWS if row["name"] == "hello"]
    assert [row["ids"] for row in rows] == [HELLO, HELLO]


@pytest.mark.parametrize("name", published_text.TEMPLATES)
def test_a_turn_ends_with_its_own_token(name):
    tokenizer = with_template(FOLDER, name)
    assert (tokenizer.end_id, tokenizer.end_of_turn_id, len(tokenizer)) == (248044, 248046, 248077)


@pytest.mark.parametrize("name", published_text.TEMPLATES)
@pytest.mark.parametrize("messages", [[], [{"role": "wizard", "content": "x"}], [{"role": "system", "content": "x"}]])
def test_what_a_template_refuses_is_the_users_mistake(name, messages):
    with pytest.raises(ValueError, match=f"{name}: the chat template failed"):
        with_template(FOLDER, name).render_chat(messages)


@whole_vocabulary
@all_rows
def test_the_whole_vocabulary_gives_the_same_ids_as_its_part(row):
    whole = with_template(published_text.TOKENIZER, row["template"])
    assert whole.encode(row["text"]) == row["ids"]


@whole_vocabulary
def test_merges_rebuilt_from_ranks_are_the_published_ones():
    ranks = published_text.ranks()
    backend = json.loads((published_text.TOKENIZER / "tokenizer.json").read_text())
    assert len(ranks) == 248044
    assert len(backend["model"]["merges"]) == 247587
    whole = Tokenizer.from_folder(published_text.TOKENIZER)
    for word in [
        "internationalisation",
        "Wassertemperatur",
        "長江大橋",
        "привет",
        "مرحبا",
        "xylophonically",
        "\n\n\n\n",
        "🙂🙂",
    ]:
        assert whole.encode(word) == [ranks[part] for part in published_text.split_by_rank(word.encode(), ranks)]
