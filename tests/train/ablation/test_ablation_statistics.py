"""Statistics of an ablation, on numbers worked out by hand."""

import math

import pytest
from ablation_records import record, small_ablation, three_seeds

from mtp_jax.errors import UserError
from train.ablation.arms import arms_of, figure_of
from train.ablation.comparison import ACCEPTANCE, HEAD_LOSS, MAIN_LOSS, choose_references, compared, differences
from train.ablation.statistics import Estimate, estimate, paired_difference

# Student's t at 97.5 %, from the printed table, by degrees of freedom.
T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262}


@pytest.mark.parametrize(
    ("values", "mean", "deviation"),
    [
        ([1.0, 3.0], 2.0, math.sqrt(2)),
        ([1.0, 2.0, 3.0], 2.0, 1.0),
        ([2.0, 4.0, 4.0, 6.0], 4.0, math.sqrt(8 / 3)),
        ([0.0, 1.0, 2.0, 3.0, 4.0], 2.0, math.sqrt(2.5)),
        ([0.0] * 5 + [1.0] * 5, 0.5, math.sqrt(2.5 / 9)),
    ],
)
def test_interval_is_that_of_the_printed_table(values, mean, deviation):
    n = len(values)
    got = estimate(dict(enumerate(values)))
    assert got is not None
    assert got.mean == pytest.approx(mean)
    assert got.half_width == pytest.approx(T[n - 1] * deviation / math.sqrt(n), rel=2e-4)
    assert (got.n, got.seeds) == (n, tuple(range(n)))


def test_one_seed_has_no_interval_and_none_no_mean():
    assert estimate({7: 1.5}) == Estimate(1.5, None, (7,))
    assert estimate({7: 1.5}).excludes_zero is None
    assert estimate({}) is None


def test_differences_are_paired_over_common_seeds():
    # Means differ by 9.75; over seeds 1 and 2, which both have, by 1 and 2.
    got = paired_difference({0: 40.0, 1: 11.0, 2: 22.0}, {1: 10.0, 2: 20.0, 3: 14.0})
    assert got is not None
    assert got.seeds == (1, 2)
    assert got.mean == pytest.approx(1.5)
    assert got.half_width == pytest.approx(12.706 * math.sqrt(0.5) / math.sqrt(2), rel=1e-4)  # 6.353
    assert got.excludes_zero is False
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_pairing_tells_apart_what_means_do_not():
    base = {0: 1.0, 1: 5.0, 2: 9.0}
    above = {0: 1.1, 1: 5.2, 2: 9.3}
    a, b = estimate(base), estimate(above)
    assert a.mean + a.half_width > b.mean - b.half_width  # the intervals overlap by far
    paired = paired_difference(above, base)
    assert paired.mean == pytest.approx(0.2)
    assert paired.half_width == pytest.approx(4.303 * 0.1 / math.sqrt(3), rel=1e-4)  # 0.248
    assert paired.excludes_zero is False
    assert paired_difference({seed: value + 0.2 for seed, value in base.items()}, base).excludes_zero is True


def test_arms_are_in_order_and_differ_as_worked_out_by_hand():
    ablation = arms_of(small_ablation())
    assert [arm.label for arm in ablation.arms] == ["0", "0.1", "0.3", "0.3-then-0.1"]
    assert [arm.is_constant for arm in ablation.arms] == [True, True, True, False]
    references = choose_references(ablation)
    assert (references.trunk.label, references.head.label) == ("0", "0.1")
    got = {one.arm.label: one.estimate for one in differences(ablation, references, MAIN_LOSS)}
    assert list(got) == ["0.1", "0.3", "0.3-then-0.1"]
    half = 4.303 * 0.1 / math.sqrt(3)
    assert got["0.1"].mean == pytest.approx(-0.1)
    assert got["0.1"].half_width == pytest.approx(0, abs=1e-9)
    assert got["0.3"].mean == pytest.approx(0.2)
    assert got["0.3"].half_width == pytest.approx(half, rel=1e-4)
    assert got["0.3-then-0.1"].mean == pytest.approx(0.0)
    assert got["0.3-then-0.1"].half_width == pytest.approx(half, rel=1e-4)
    assert [got[label].excludes_zero for label in got] == [True, False, False]
    drafts = {one.arm.label: one.estimate.mean for one in differences(ablation, references, ACCEPTANCE)}
    assert drafts == pytest.approx({"0": -0.6, "0.3": 0.2, "0.3-then-0.1": 0.1})


@pytest.mark.parametrize(
    ("schedules", "label", "expected"),
    [
        (["0.3", "0.03", "1"], None, ("0.03", "0.03")),
        (["0", "0.3"], None, ("0", "0.3")),
        (["0", "0.3-then-0.1"], None, ("0", "0.3-then-0.1")),
        (["1-then-0.1", "0.3-then-0.1"], None, ("0.3-then-0.1", "0.3-then-0.1")),
        (["0"], None, ("0", "0")),
        (["0", "0.1", "0.3"], "0.3", ("0.3", "0.3")),
    ],
)
def test_references(schedules, label, expected):
    ablation = arms_of([record(schedule, 0, 3.0) for schedule in schedules])
    references = choose_references(ablation, label)
    assert (references.trunk.label, references.head.label) == expected


def test_a_reference_that_is_no_arm():
    with pytest.raises(UserError, match=r"--reference 0.2: expected one of the arms 0, 0.1, 0.3, 0.3-then-0.1$"):
        choose_references(arms_of(small_ablation()), "0.2")


def test_runs_that_do_not_count_are_named_with_the_reason():
    late = record("0.1", 1, 6.0)  # as good as a unigram model is not better
    unknown = {**record("0.3", 0, 3.0), "unigram_loss": None}
    runs = [record("0", 0, 3.0), record("0", 1, 5.99), record("0.1", 0, float("nan")), late, unknown]
    ablation = arms_of(runs, ["0-seed0", "1-seed0"])
    assert [arm.label for arm in ablation.arms] == ["0"]
    assert dict(ablation.left_out) == {
        "1-seed0": "it has no record: it failed, or is not finished",
        "0.1-seed0": "it has no finite held-out main loss",
        "0.1-seed1": "its held-out main loss 6.0000 is not below the unigram model's 6.0000",
        "0.3-seed0": "the unigram model's held-out loss, which it must be below, was not recorded",
        "0.3-seed1": "it has no record, though other arms have this seed",
    }


def test_varied_values_go_by_size_and_else_as_recorded():
    runs = [record("0.3", 0, 3.0, {"depths": depths, "head_loss": loss}) for depths in (10, 2) for loss in ("kl", "ce")]
    assert [arm.combination for arm in arms_of(runs).arms] == [
        "depths=2 head_loss=kl",
        "depths=2 head_loss=ce",
        "depths=10 head_loss=kl",
        "depths=10 head_loss=ce",
    ]


def test_losses_of_different_kinds_are_not_compared():
    runs = [record("0.3", 0, 3.0, {"head_loss": loss}, eval_mtp_loss=1.0) for loss in ("ce", "kl")]
    ablation = arms_of(runs)
    assert differences(ablation, choose_references(ablation), HEAD_LOSS) == []
    same = arms_of([record("0.3", 0, 3.0, {"depths": depths}, eval_mtp_loss=1.0 * depths) for depths in (1, 2)])
    (one,) = differences(same, choose_references(same), HEAD_LOSS)
    assert one.estimate == Estimate(1.0, None, (0,))


def test_head_loss_is_that_of_the_first_depth_where_several_are_measured():
    assert figure_of(record("0.3", 0, 3.0, eval_mtp_loss=5.0, eval_mtp_loss_d1=4.0), "eval_mtp_loss") == 4.0
    assert figure_of(record("0.3", 0, 3.0, eval_mtp_loss=5.0), "eval_mtp_loss") == 5.0


@pytest.mark.parametrize("value", [None, True, "3", float("nan"), float("inf"), 10**400, [1]])
def test_what_is_no_number_is_no_figure(value):
    assert figure_of(record("0.3", 0, 3.0, acceptance=value), "acceptance") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": 3}, "run 0-seed0: label: expected a name, got 3"),
        ({"mtp_weights": []}, "mtp_weights: expected one or more numbers, got \\[\\]"),
        ({"mtp_weights": [float("nan")]}, "mtp_weights: expected one or more numbers, got \\[NaN\\]"),
        ({"mtp_switch_tokens": [5]}, "mtp_switch_tokens: expected one fewer than mtp_weights"),
        ({"figures": None}, "figures: expected an object, got null"),
        ({"seed": -1}, "seed: expected a whole number, got -1"),
        ({"rows": [{"tokens": 1}]}, "rows: expected rows of metrics"),
        ({"versions": []}, "versions: expected an object"),
        ({"name": "0.3-seed0"}, "run 0.3-seed0: expected one record of it, there are two"),
        ({"label": "0.3"}, "expected the schedule of 0-seed0, which has the same label, 0, got 0.3"),
    ],
)
def test_records_that_are_none_are_named(change, message):
    with pytest.raises(UserError, match=message):
        arms_of([{**record("0", 0, 3.0), **change}, record("0.3", 0, 3.0)])


def test_without_a_run_that_counts_there_is_nothing_to_say():
    with pytest.raises(UserError, match=r"none of 3 runs counts; 0-seed0: its held-out main loss 7\.0000 is not below"):
        arms_of(three_seeds("0", (7.0, 8.0, 9.0), 1.0))


@pytest.mark.parametrize(
    ("varied", "depths"), [({"depths": [1, 2]}, (1, 2)), ({"depth_weights": ["equal"]}, (1, 2)), ({}, (1,))]
)
def test_depths_are_compared_where_it_is_they_that_differ(varied, depths):
    values = next(iter(varied.values()), [None])
    first = {"eval_mtp_loss_d1": 4.0, "eval_mtp_agreement": 0.2, "acceptance": 0.3}
    more = first | {"eval_mtp_loss_d2": 4.5, "eval_mtp_agreement_d2": 0.1, "acceptance_d2": 0.2}
    records = [
        record("0.3", seed, 3.0, {key: value for key in varied}, **more) for seed in range(2) for value in values
    ]
    titles = [quantity.title for quantity in compared(arms_of(records))]
    expected = ["held-out main loss"]
    for name, word in (
        ("held-out head loss", "depth"),
        ("held-out agreement", "depth"),
        ("decoded acceptance", "position"),
    ):
        expected += [f"{name}, {word} {depth}" for depth in depths]
    assert titles == [*expected, "tokens per round"]
