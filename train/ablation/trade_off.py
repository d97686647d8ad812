"""What drafting costs the trunk, or gives it: held-out main loss against tokens per round."""

from collections.abc import Mapping
from textwrap import fill

from train.ablation.arms import Ablation
from train.ablation.categories import Categories, categories_of, printable, series_name
from train.ablation.comparison import MAIN_LOSS, TOKENS_PER_ROUND, References
from train.ablation.drawing import (
    Line,
    Picture,
    add_legend,
    look,
    new_figure,
)
from train.ablation.labels import place_labels
from train.ablation.statistics import CONFIDENCE, estimate, paired

# isort: split
from matplotlib.axes import Axes

_Label = tuple[str, float, float, str]  # text, x, y, colour
_Bar = tuple[float, float, float, float]  # left, bottom, right, top


def trade_off(ablation: Ablation, references: References) -> Picture | None:
    """Once as measured, and once with the losses' differences to the reference, whose intervals are narrower."""
    measured = {arm.label: arm.values(MAIN_LOSS.figure) for arm in ablation.arms}
    base = references.trunk.values(MAIN_LOSS.figure)
    less = {label: paired(values, base) for label, values in measured.items()}
    panels = [("Held-out main loss, nats a token (lower is better)", measured)]
    if len(ablation.arms) > 1:
        label = printable(references.trunk.label)
        title = f"Difference of the held-out main loss to λ = {label}, same seed, nats a token"
        panels.append((fill(title, 84), less))
    if not any(arm.values(TOKENS_PER_ROUND.figure) for arm in ablation.arms):
        return None
    figure = new_figure(3.4 * len(panels))
    categories = categories_of(ablation.arms)
    grid = [figure.add_subplot(len(panels), 1, row + 1) for row in range(len(panels))]
    labels = []
    for axes, (title, losses) in zip(grid, panels, strict=True):
        labels.append(_draw_arms(axes, ablation, categories, losses))
        axes.set_xlabel(title)
        axes.set_ylabel("Tokens per round\n(higher is better)")
    if len(categories.series) > 1:
        lines = [Line(series_name(series), index, {}) for index, series in enumerate(categories.series)]
        add_legend(figure, {line.name: line.handle() for line in lines})
    for axes, (texts, bars) in zip(grid, labels, strict=True):  # once all that takes room is there
        place_labels(axes, texts, bars)
    return Picture(
        "trade_off",
        "Main loss against tokens per round",
        f"Each arm's mean with its {CONFIDENCE:.0%} intervals both ways. Lines join constant weights in order; "
        "schedules are hollow. Below, the loss is taken less that of the reference with the same seed.",
        figure,
    )


def _draw_arms(
    axes: Axes, ablation: Ablation, categories: Categories, losses: Mapping[str, Mapping[int, float]]
) -> tuple[list[_Label], list[_Bar]]:
    texts, bars = [], []
    for index, series in enumerate(categories.series):
        drawn = look(index)
        joined: list[tuple[float, float]] = []
        for arm in categories.in_series(ablation.arms, series):
            x, y = estimate(losses[arm.label]), estimate(arm.values(TOKENS_PER_ROUND.figure))
            if x is None or y is None:
                continue
            across, up = x.half_width or 0.0, y.half_width or 0.0
            axes.errorbar(
                x.mean,
                y.mean,
                xerr=across,
                yerr=up,
                color=drawn["color"],
                elinewidth=0.8,
                capsize=2,
                marker=drawn["marker"],
                markerfacecolor=drawn["color"] if arm.is_constant else "white",
                zorder=3,
                label=arm.label,
            )
            if len(categories.series) > 1:  # colour and legend say the rest
                texts.append((printable(arm.schedule), x.mean, y.mean, drawn["color"]))
            else:
                texts.append((printable(arm.label), x.mean, y.mean, "black"))
            bars += [(x.mean - across, y.mean, x.mean + across, y.mean), (x.mean, y.mean - up, x.mean, y.mean + up)]
            if any(categories.places[arm.label] in places for places in categories.joined):
                joined.append((x.mean, y.mean))
        axes.plot(
            [x for x, _ in joined],
            [y for _, y in joined],
            color=drawn["color"],
            linestyle=drawn["linestyle"],
            alpha=0.4,
        )
    axes.margins(0.08)
    return texts, bars
