"""What the figures of a small stored ablation show: places, means, intervals, seeds, names."""

import itertools
import math
import xml.etree.ElementTree

import numpy as np
import pytest
from ablation_records import record, small_ablation, three_seeds
from matplotlib.text import Text

from train.ablation.arms import arms_of
from train.ablation.categories import printable
from train.ablation.comparison import choose_references
from train.ablation.drawing import look, render
from train.ablation.figures import pictures


def drawn(records):
    ablation = arms_of(records)
    return {one.name: one.figure for one in pictures(ablation, choose_references(ablation))}


def points(axes):
    """Of every line with intervals: its name, and x, mean, half width of its points."""
    found = {}
    for container in axes.containers:
        line, _, (bars,) = container.lines
        halves = [(top - bottom) / 2 for (_, bottom), (_, top) in bars.get_segments()]
        found[container.get_label()] = [
            (round(float(x), 6), float(y), float(half)) for x, y, half in zip(*line.get_data(), halves, strict=True)
        ]
    return found


def texts(artist):
    return [text.get_text() for text in artist.texts]


@pytest.fixture(scope="module")
def small():
    return drawn(small_ablation())


def test_main_loss_stands_at_evenly_spaced_weights_and_schedules_after_them(small):
    absolute, paired = small["main_loss"].axes
    assert [tick.get_text() for tick in absolute.get_xticklabels()] == ["0", "0.1", "0.3", "0.3\nthen 0.1"]
    assert absolute.get_xlabel() == "λ, weight of the MTP loss"
    assert absolute.get_ylabel() == "nats a token"
    (got,) = points(absolute).values()
    assert [x for x, _, _ in got] == [0, 1, 2, 3]
    assert [mean for _, mean, _ in got] == pytest.approx([3.2, 3.1, 3.4, 3.2])
    third = 4.303 / math.sqrt(3)
    assert [half for _, _, half in got] == pytest.approx(
        [0.2 * third, 0.2 * third, 0.3 * third, math.sqrt(0.03) * third], rel=1e-4
    )
    (got,) = points(paired).values()
    assert [mean for _, mean, _ in got] == pytest.approx([0, -0.1, 0.2, 0], abs=1e-9)
    assert [half for _, _, half in got] == pytest.approx([0, 0, 0.1 * third, 0.1 * third], rel=1e-4, abs=1e-9)
    assert paired.get_title(loc="left") == "Difference to λ = 0, same seed"


def test_seeds_are_faint_dots_beside_the_mean(small):
    absolute = small["main_loss"].axes[0]
    dots = {line.get_gid(): line for line in absolute.lines if line.get_gid()}
    assert list(dots) == [f"seeds of {label}" for label in ("0", "0.1", "0.3", "0.3-then-0.1")]
    line = dots["seeds of 0.3"]
    assert list(line.get_ydata()) == [3.1, 3.4, 3.7]
    assert all(2 < x < 2.3 for x in line.get_xdata())
    assert line.get_alpha() <= 0.5


def test_only_constant_weights_are_joined(small):
    absolute = small["main_loss"].axes[0]
    joined = [line for line in absolute.lines if line.get_linestyle() == "-" and not line.get_gid()]
    assert [list(line.get_xdata()) for line in joined if len(line.get_xdata()) > 2] == [[0, 1, 2]]


def test_control_is_drawn_with_acceptance_and_an_untrained_head_apart(small):
    acceptance, rounds = small["drafting"].axes
    assert list(points(acceptance)) == ["position 1", "control"]
    assert [mean for _, mean, _ in points(acceptance)["control"]] == pytest.approx([0.02] * 4)
    low, high = acceptance.get_ylim()
    assert low < 0
    assert high >= 1
    # Tokens per round of weight 0 would leave the others a corner of the axis: it is written at its edge.
    (got,) = points(rounds).values()
    assert [x for x, _, _ in got] == [1, 2, 3]
    assert [mean for _, mean, _ in got] == pytest.approx([1.61, 1.81, 1.71])
    assert texts(rounds) == ["↓", "1.01"]
    assert texts(small["head"].axes[0]) == ["↑", "4"]


def test_only_figures_of_the_head_are_written_at_the_edge():
    runs = [record(weight, 0, loss, eval_mtp_loss=loss) for weight, loss in (("0", 5.0), ("0.1", 3.0), ("0.3", 3.01))]
    figures = drawn(runs)
    assert [texts(axes) for axes in figures["main_loss"].axes] == [[], []]
    assert texts(figures["head"].axes[0]) == ["↑", "5"]
    main, main_held_out, _, head_held_out = figures["curves"].axes
    assert [texts(main), texts(main_held_out), texts(head_held_out)] == [[], [], ["0: 6 ↑"]]


def test_axes_of_shares_end_where_shares_do():
    runs = [
        record(weight, seed, 3.0, eval_mtp_agreement=0.1 + 0.8 * seed) for weight in ("0.1", "0.3") for seed in (0, 1)
    ]
    (axes,) = drawn(runs)["head"].axes
    assert next(iter(points(axes).values()))[0][2] == pytest.approx(12.706 * 0.4, rel=1e-4)
    assert axes.get_ylim() == (-0.03, 1.03)


def test_one_evaluation_is_no_curve():
    runs = [record(weight, 0, 3.0) for weight in ("0.1", "0.3")]
    for run in runs:
        del run["rows"][0]["eval_main_loss"], run["rows"][0]["eval_mtp_loss"]
    titles = [axes.get_title(loc="left") for axes in drawn(runs)["curves"].axes]
    assert titles == ["Main loss in training", "Head loss in training"]


def test_heads_that_are_all_alike_make_no_axis_of_rounding_errors():
    def agreement(weight, seed):
        return 1.0 - 1e-9 * seed if weight != "0" else 0.05

    runs = [
        record(weight, seed, 3.0, eval_mtp_agreement=agreement(weight, seed), tokens_per_round=2.0)
        for weight in ("0", "0.1", "0.3")
        for seed in range(2)
    ]
    figures = drawn(runs)
    (axes,) = figures["head"].axes
    assert texts(axes) == []  # the untrained head is no further away than the axis is long
    (axes,) = figures["drafting"].axes
    low, high = axes.get_ylim()
    assert high - low >= 1e-3


def test_depths_are_lines_and_with_several_series_panels():
    def figures(shift):
        return {"eval_mtp_agreement": 0.6 + shift, "eval_mtp_agreement_d2": 0.3 + shift}

    runs = [record(weight, seed, 3.0, **figures(0.01 * seed)) for weight in ("0.1", "0.3") for seed in range(2)]
    (axes,) = drawn(runs)["head"].axes
    got = points(axes)
    assert list(got) == ["depth 1", "depth 2"]
    assert [mean for _, mean, _ in got["depth 2"]] == pytest.approx([0.305, 0.305])
    assert [half for _, _, half in got["depth 2"]] == pytest.approx([12.706 * 0.005] * 2, rel=1e-4)
    assert got["depth 1"][0][0] != got["depth 2"][0][0]  # beside each other

    runs = [
        record(weight, 0, 3.0, {"gradient_mode": mode}, **figures(0.1 * (mode == "joint")))
        for weight in ("0.1", "0.3")
        for mode in ("joint", "detached")
    ]
    first, second = drawn(runs)["head"].axes
    assert [axes.get_title(loc="left")[-7:] for axes in (first, second)] == ["depth 1", "depth 2"]
    assert list(points(first)) == ["gradient_mode=joint", "gradient_mode=detached"]
    assert [mean for _, mean, _ in points(second)["gradient_mode=joint"]] == pytest.approx([0.4, 0.4])


def test_of_one_schedule_the_varied_values_are_the_axis():
    runs = [one for depths in (1, 2, 3) for one in three_seeds("0.3", (3.0, 3.1, 3.2), 1.5, varied={"depths": depths})]
    axes = drawn(runs)["main_loss"].axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "2", "3"]
    assert axes.get_xlabel() == "depths (λ = 0.3)"
    assert [len(line.get_xdata()) for line in axes.lines if line.get_linestyle() == "-" and not line.get_gid()] == [3]
    # Names have no order that a line could stand for.
    runs = [
        one for loss in ("ce", "kl") for one in three_seeds("0.3", (3.0, 3.1, 3.2), 1.5, varied={"head_loss": loss})
    ]
    figures = drawn(runs)
    axes = figures["main_loss"].axes[0]
    assert [line for line in axes.lines if line.get_linestyle() == "-" and not line.get_gid()] == []
    assert [axes.get_title(loc="left") for axes in figures["head"].axes] == ["Head's argmax is the trunk's"]


def test_trade_off_has_every_arm_with_its_name_and_bars_both_ways(small):
    absolute, paired = small["trade_off"].axes
    for axes in (absolute, paired):
        assert sorted(texts(axes)) == ["0", "0.1", "0.3", "0.3-then-0.1"]
    assert [container.get_label() for container in absolute.containers] == ["0", "0.1", "0.3", "0.3-then-0.1"]
    line, _, (across, up) = absolute.containers[2].lines
    assert (line.get_xdata()[0], line.get_ydata()[0]) == (pytest.approx(3.4), pytest.approx(1.81))
    ((left, _), (right, _)) = across.get_segments()[0]
    assert (right - left) / 2 == pytest.approx(4.303 * 0.3 / math.sqrt(3), rel=1e-4)
    ((_, bottom), (_, top)) = up.get_segments()[0]
    assert (top - bottom) / 2 == pytest.approx(4.303 * 0.01 / math.sqrt(3), rel=1e-4)


@pytest.mark.parametrize("num_arms", [6, 20])
def test_names_in_the_trade_off_cover_neither_each_other_nor_the_edge(num_arms):
    runs = [
        one
        for index in range(num_arms)
        for one in three_seeds(f"{0.05 * index:g}", (3.0, 3.1 + 0.003 * index, 3.2), 1 + math.log1p(index) / 5)
    ]
    figure = drawn(runs)["trade_off"]
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [Text.get_window_extent(text) for text in axes.texts]  # without the lines that lead to points
        assert len(boxes) == num_arms
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
        inside = axes.get_window_extent()
        assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 for box in boxes)


def test_curves_are_means_over_seeds_with_switch_points(small):
    training, held_out, *_ = small["curves"].axes
    lines = {line.get_label(): line for line in training.lines}
    assert list(lines["0.3"].get_xdata()) == [0.5, 2.0]
    assert list(lines["0.3"].get_ydata()) == pytest.approx([4.4, 3.4])
    assert training.get_xlabel() == "thousand tokens seen"
    switches = [line for line in training.lines if len(set(line.get_xdata())) == 1]
    assert [line.get_xdata()[0] for line in switches] == [1.0]
    assert switches[0].get_color() == lines["0.3-then-0.1"].get_color()
    assert [axes.get_title(loc="left") for axes in small["curves"].axes] == [
        "Main loss in training",
        "Main loss on held-out text",
        "Head loss in training",
        "Head loss on held-out text",
    ]
    assert "next weight" in texts_of_legend(small["curves"])
    assert list(held_out.lines[0].get_ydata()) == pytest.approx([3.7, 3.2])


def texts_of_legend(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_what_was_not_measured_is_not_drawn_and_one_seed_has_no_interval():
    figures = drawn([record(weight, 0, 3.0) for weight in ("0.1", "0.3")])
    assert list(figures) == ["main_loss", "curves"]
    assert list(points(figures["main_loss"].axes[0]).values()) == [[(0, 3.0, 0), (1, 3.0, 0)]]
    assert texts_of_legend(figures["main_loss"]) == ["one seed each: no interval"]
    one_arm = drawn(three_seeds("0.3", (3.0, 3.1, 3.2), 1.5))
    assert [len(one_arm[name].axes) for name in ("main_loss", "trade_off")] == [1, 1]


def test_looks_differ_in_more_than_colour():
    looks = [look(number) for number in range(12)]
    for key in ("linestyle", "marker"):
        assert all(a[key] != b[key] for a, b in itertools.pairwise(looks))
    assert len({(one["linestyle"], one["marker"]) for one in looks}) == 12
    assert len({tuple(one.values()) for one in map(look, range(84))}) == 84


def test_the_same_records_give_the_same_bytes_and_svg_keeps_its_text(small):
    again = drawn(small_ablation())
    for name in ("main_loss", "trade_off"):
        content = render(small[name], "svg")
        assert content == render(again[name], "svg")
        assert b"<dc:date>" not in content
        xml.etree.ElementTree.fromstring(content)
    assert "λ, weight of the MTP loss".encode() in render(small["main_loss"], "svg")
    png = render(small["main_loss"], "png")
    assert png == render(again["main_loss"], "png")
    assert int.from_bytes(png[16:20]) == 1360  # 6.8 inches at 200 dots


def test_nothing_is_cut(small):
    for figure in small.values():
        figure.draw_without_rendering()
        whole = figure.get_tightbbox()  # inches, of all that is drawn
        assert np.all(whole.min >= 0)
        assert np.all(whole.max <= figure.get_size_inches())


def test_names_of_any_kind_are_drawn_as_text():
    names = ["$x$", "a_b", "_hidden", "<b>&amp;", "line\nbreak", "\x00\x1b[31m", "\ud800", "日本", "x" * 500]
    runs = [record("0.3", 0, 3.0, {"_$key$": name}, tokens_per_round=1.5) for name in names]
    figures = drawn(runs)
    content = render(figures["main_loss"], "svg")
    xml.etree.ElementTree.fromstring(content)
    assert b"<b>" not in content
    assert "日本".encode() in content
    render(figures["trade_off"], "png")
    ticks = [tick.get_text() for tick in figures["main_loss"].axes[0].get_xticklabels()]
    assert ticks[:5] == ["$x$", "a_b", " _hidden", "<b>&amp;", "line�break"]
    assert ticks[-1] == "x" * 21 + "…"
    assert len(printable("x" * 500)) == 48
