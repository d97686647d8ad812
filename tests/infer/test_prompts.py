"""Prompts as people write them."""

import pytest

from infer.prompts import parse_ids, prompt_from_text
from mtp_jax.errors import UserError


@pytest.mark.parametrize(("text", "ids"), [("1,2,3", [1, 2, 3]), (" 1 , 2", [1, 2]), ("", []), (" ", []), ("-1", [-1])])
def test_parse_ids(text, ids):
    assert parse_ids(text) == ids


@pytest.mark.parametrize("text", ["1,,2", "1,", "1 2", "1.0", "1_0", "a", "١"])
def test_parse_ids_refuses_anything_else(text):
    with pytest.raises(UserError, match="expected integers separated by commas"):
        parse_ids(text)


def test_text_without_a_tokenizer():
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        prompt_from_text("a", None)


def test_an_id_of_thousands_of_digits_is_refused():
    with pytest.raises(UserError, match="one of 5000 digits"):
        parse_ids("1," + "9" * 5000)
