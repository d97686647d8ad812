"""The figures of an ablation. Each is drawn only if runs have what it shows."""

from collections.abc import Sequence
from textwrap import fill
from typing import NamedTuple

from train.ablation.arms import Ablation
from train.ablation.categories import Categories, categories_of, printable, series_name
from train.ablation.comparison import (
    ACCEPTANCE,
    AGREEMENT,
    CONTROL,
    HEAD_LOSS,
    MAIN_LOSS,
    TOKENS_PER_ROUND,
    Quantity,
    References,
    at,
    head_loss_unit,
)
from train.ablation.drawing import (
    GREY,
    Line,
    Picture,
    add_legend,
    draw_lines,
    panels_figure,
    seed_handles,
    style,
)
from train.ablation.loss_curves import loss_curves
from train.ablation.statistics import paired
from train.ablation.trade_off import trade_off

# isort: split
from matplotlib.artist import Artist
from matplotlib.figure import Figure


class _Panel(NamedTuple):
    """`of_head`: figures of the head, off the axis where it was never trained. `whole`: 0 to 1 is on the axis."""

    title: str
    unit: str
    lines: list[Line]
    of_head: bool = True
    whole: bool = False


def pictures(ablation: Ablation, references: References) -> list[Picture]:
    """All figures that the runs have something for."""
    with style():
        drawn = (
            _main_loss(ablation, references),
            _head(ablation),
            _drafting(ablation),
            trade_off(ablation, references),
            loss_curves(ablation),
        )
    return [picture for picture in drawn if picture is not None]


def _main_loss(ablation: Ablation, references: References) -> Picture:
    categories = categories_of(ablation.arms)
    lines = _by_series(ablation, categories, MAIN_LOSS)
    base = references.trunk.values(MAIN_LOSS.figure)
    less = [
        line._replace(values={label: paired(values, base) for label, values in line.values.items()}) for line in lines
    ]
    panels = [_Panel("Held-out main loss", "nats a token", lines, of_head=False)]
    if len(ablation.arms) > 1:
        label = printable(references.trunk.label)
        title = fill(f"Difference to λ = {label},", 38)
        panels.append(
            _Panel(f"{title}{chr(10) if len(title) > 26 else ' '}same seed", "nats a token", less, of_head=False)
        )
    figure = _draw(ablation, categories, panels)
    for axes in figure.axes[1:]:
        axes.axhline(0, color=GREY, linewidth=0.8)
    return Picture(
        "main_loss",
        "Held-out main loss",
        "The trunk's loss on held-out text, and its difference to that of "
        f"λ = {printable(references.trunk.label)} with the same seed, from which what a seed does to all arms alike is "
        "gone.",
        figure,
    )


def _head(ablation: Ablation) -> Picture | None:
    categories = categories_of(ablation.arms)
    panels = []
    unit = head_loss_unit(ablation.arms)
    if unit is not None:
        panels += _of_depths(ablation, categories, HEAD_LOSS._replace(unit=unit), "Head loss", "depth")
    panels += _of_depths(ablation, categories, AGREEMENT, "Head's argmax is the trunk's", "depth")
    if not panels:
        return None
    other = "" if unit is not None else " Losses of different kinds are not drawn beside each other."
    return Picture(
        "head",
        "Head loss and agreement",
        "On held-out text: the head's loss at each depth, and how often its most probable token is the trunk's."
        + other,
        _draw(ablation, categories, panels),
    )


def _drafting(ablation: Ablation) -> Picture | None:
    categories = categories_of(ablation.arms)
    several = len(categories.series) > 1
    panels = _of_depths(ablation, categories, ACCEPTANCE, "Drafts that stand", "position")
    control = _by_series(ablation, categories, CONTROL)
    if panels and control and not several:
        control = [line._replace(name="control", number=None) for line in control]
        panels = [panels[0]._replace(lines=[*panels[0].lines, *control], whole=True)]  # the control is near 0
    elif panels and control:
        panels.append(_Panel("Control: drafts for the place after", CONTROL.unit, control))
    tokens = _by_series(ablation, categories, TOKENS_PER_ROUND)
    if tokens:
        panels.append(_Panel("Tokens per round", "tokens", tokens))
    if not panels:
        return None
    return Picture(
        "drafting",
        "Acceptance and tokens per round",
        "Greedy decoding of held-out prompts: of the rounds that could emit a draft at a position, the share that did, "
        "and tokens per round of the trunk. The control's drafts are meant for the place after, and should hardly ever "
        "stand.",
        _draw(ablation, categories, panels),
    )


def _by_series(ablation: Ablation, categories: Categories, quantity: Quantity) -> list[Line]:
    lines = []
    for index, series in enumerate(categories.series):
        arms = categories.in_series(ablation.arms, series)
        values = {arm.label: found for arm in arms if (found := arm.values(quantity.figure))}
        if values:
            name = series_name(series) if len(categories.series) > 1 else ""  # the only one needs no name
            lines.append(Line(name, index, values))
    return lines


def _of_depths(
    ablation: Ablation, categories: Categories, quantity: Quantity, title: str, depth_word: str
) -> list[_Panel]:
    """One panel with a line a depth, or, of several series, one panel a depth."""
    panels = []
    depths = ablation.depths(quantity.figure)
    for depth in depths:
        lines = _by_series(ablation, categories, at(quantity, depth))
        panels.append(_Panel(f"{title}, {depth_word} {depth}", quantity.unit, lines))
    if len(categories.series) > 1 or not panels:
        return panels
    lines = [
        line._replace(name=f"{depth_word} {depth}", number=depth - 1)
        for depth, panel in zip(depths, panels, strict=True)
        for line in panel.lines
    ]
    return [_Panel(title, quantity.unit, lines)]


def _draw(ablation: Ablation, categories: Categories, panels: Sequence[_Panel]) -> Figure:
    figure, grid = panels_figure(len(panels), categories)
    untrained = [arm.label for arm in ablation.arms if not any(arm.weights)]
    handles: dict[str, Artist] = {}
    for axes, panel in zip(grid, panels, strict=True):
        axes.set_title(panel.title, loc="left")
        axes.set_ylabel(panel.unit)
        draw_lines(axes, categories, panel.lines, untrained if panel.of_head and not panel.whole else ())
        if panel.unit.startswith("share"):  # Student's intervals know nothing of 0 and 1
            low, high = axes.get_ylim()
            axes.set_ylim(-0.03 if panel.whole else max(low, -0.03), 1.03 if panel.whole else min(high, 1.03))
        handles |= {line.name: line.handle() for line in panel.lines if line.name}
    several = any(len(values) > 1 for panel in panels for line in panel.lines for values in line.values.values())
    add_legend(figure, {**handles, **seed_handles(several)})
    return figure
