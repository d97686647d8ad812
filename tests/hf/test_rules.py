"""The tables: each tensor once, each parameter whole. At the sizes of released models: tests/configs."""

import pytest

from mtp_jax.hf.layouts import Rows
from mtp_jax.hf.rules import Piece, Rule, Slot, expanded, inside, kernel, whole

SHAPES = {"a/kernel": (3, 5), "stack": (2, 3, 5)}
MATRICES = [Rule(f"e.{n}", (Piece("stack", n),), Rows()) for n in range(2)]


def test_rules_give_the_published_shapes():
    slots = expanded([kernel("a", "a"), *MATRICES], SHAPES)
    assert {name: slot.shape for name, slot in slots.items()} == {"a.weight": (5, 3), "e.0": (5, 3), "e.1": (5, 3)}
    assert slots["e.1"] == Slot((Piece("stack", 1),), Rows(), (5, 3))


def test_a_module_keeps_its_rules_inside_another():
    (rule,) = inside([MATRICES[1]], "layers.7.", "trunk/")
    assert (rule.published, rule.pieces, rule.layout) == ("layers.7.e.1", (Piece("trunk/stack", 1),), Rows())


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([kernel("a", "a"), *MATRICES, MATRICES[0]], "each parameter once"),
        ([kernel("a", "a"), MATRICES[0]], "whole.*stack"),
        ([*MATRICES], "whole.*a/kernel"),
        ([kernel("a", "a"), *MATRICES, whole("b", "b")], "there is no.*b"),
        ([kernel("a", "a"), MATRICES[0], Rule("e.0", (Piece("stack", 1),), Rows())], "each tensor once"),
    ],
)
def test_a_table_that_is_not_one_to_one_and_total_is_a_mistake_of_ours(rules, message):
    with pytest.raises(AssertionError, match=message):
        expanded(rules, SHAPES)
