"""Comparing plain and speculative decoding."""

import io

import pytest
from made_up import completion
from rich.console import Console

from infer.comparison import (
    Comparison,
    compare,
    comparison_table,
    describe_control,
    distinct_ngrams,
    first_difference,
    totals,
)
from infer.completion import Completion


def test_compare_reports_each_number_of_drafts(generator, prompts):
    one, three = compare(generator, prompts[0], [1, 3], 45, repeats=2)
    assert (one.num_draft_tokens, three.num_draft_tokens) == (1, 3)
    assert one.identical
    assert three.identical
    assert one.first_difference is None
    record = three.record()
    assert record["plain_tokens_per_second"] == one.plain.tokens_per_second
    assert record["speedup"] == pytest.approx(record["tokens_per_second"] / record["plain_tokens_per_second"])
    assert len(record["accepted_per_position"]) == 3


@pytest.mark.parametrize("index", [0, 6])
def test_first_difference_names_the_place_the_ids_and_the_logits(generator, prompts, index):
    plain = generator.generate(prompts[:1], max_new_tokens=45, num_draft_tokens=0)[0].tokens
    other = [*plain[:index], (plain[index] + 1) % 61, *plain[index + 1 :]]
    found = first_difference(generator, prompts[0], plain, other, 45)
    logits = generator.next_logits(prompts[0], index, 45)
    assert found is not None
    assert found.record() == {
        "index": index,
        "ids": [plain[index], other[index]],
        "logits": [float(logits[plain[index]]), float(logits[other[index]])],
    }
    assert found.plain_logit == logits.max()


def test_the_end_of_one_continuation_is_a_difference(generator, prompts):
    plain = generator.generate(prompts[:1], max_new_tokens=45, num_draft_tokens=0)[0].tokens
    found = first_difference(generator, prompts[0], plain, plain[:5], 45)
    assert found is not None
    assert found.record()["ids"] == [plain[5], None]


@pytest.mark.parametrize(
    ("tokens", "share"), [([1, 2, 3], None), ([1, 2, 3, 4], 1.0), ([7] * 8, 0.2), ([1, 2] * 4, 0.4)]
)
def test_distinct_ngrams(tokens, share):
    assert distinct_ngrams(tokens, 4) == share


def test_the_table_shows_a_prompt_as_it_is():
    """Square brackets are markup to the terminal library, and common in code."""
    generation = completion([1] * 4, 1)
    out = io.StringIO()
    table = comparison_table([("x[/b] =\n [0]", [Comparison(1, generation, generation, None)])], width=130)
    Console(file=out, width=120).print(table)
    assert "x[/b] = [0]" in out.getvalue()


def test_totals_weigh_rounds_and_not_prompts():
    short, long = completion([0, 0], 1), completion([1] * 4, 1)
    (row,) = totals([[Comparison(1, g, g, None)] for g in (short, long)])
    assert (row["tokens_per_round"], row["accepted_share"], row["identical"]) == (10 / 6, 4 / 6, True)


def test_shares_by_position_are_of_the_rounds_that_had_room_and_vary_by_prompt():
    """Rounds after prefill's token; of one prompt: both drafts stand, the first does, none; of the other: none."""
    count = 7
    one = Completion(
        [1] * count, None, "length", [0, 1, 2, 0, 1, 0, 0], [-1, 2, -1, -1, 2, -1, 2], [-1] * count, 2, None, 1.0, 0.0
    )
    other = Completion([1] * 3, None, "length", [0, 0, 0], [-1, 2, 1], [-1] * 3, 2, None, 1.0, 0.0)
    (row,) = totals([[Comparison(2, g, g, None, control=other)] for g in (one, other)])
    assert row["position_shares"] == [2 / 5, 1 / 4]
    # Of (stood, drafted) (2, 3) and (0, 2): residuals 2 - 3 * 2/5 and -2 * 2/5; of (1, 3) and (0, 1) likewise.
    assert row["position_share_errors"] == pytest.approx([(2 * 2 * 0.8**2) ** 0.5 / 5, (2 * 2 * 0.25**2) ** 0.5 / 4])
    assert (row["control_share"], row["control_share_error"]) == (0.0, 0.0)
    assert (row["first_accepted_share"], row["accepted_share"]) == (2 / 5, 3 / 9)
    assert "stood by position 0.400 ± 0.320, 0.250 ± 0.125; " in describe_control(row)
    (row,) = totals([[Comparison(2, one, one, None)]])
    assert (row["control_share"], row["position_share_errors"]) == (None, [None, None])


@pytest.mark.parametrize("width", [80, 130])
def test_what_the_table_is_for_shows_in_a_narrow_terminal(generator, width):
    results = [("class Stack:", compare(generator, [3, 1, 4], [1, 3], 20, 1))]
    console = Console(width=width, file=io.StringIO())
    console.print(comparison_table(results, console.width))
    shown = console.file.getvalue()
    assert "…" not in shown
    assert all(heading in shown for heading in ("a round", "accepted", "tokens/s", "speedup", "identical"))
    assert shown.count("yes") == 4
