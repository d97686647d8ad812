"""The figures of an ablation. Each is drawn only if runs have what it shows."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import NamedTuple

from train.ablation.arms import Ablation, Arm, number
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
    Categories,
    Line,
    add_legend,
    categories_of,
    draw_lines,
    look,
    new_figure,
    panels_figure,
    printable,
    seed_handles,
    series_name,
    style,
)
from train.ablation.labels import place_labels
from train.ablation.statistics import CONFIDENCE, estimate

# isort: split
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D


class Picture(NamedTuple):
    """A figure, the name of its files, and what it shows, in words."""

    name: str
    title: str
    caption: str
    figure: Figure


SWITCH = (0, (1, 2))
"""Line style of the places where schedules go on."""

_Label = tuple[str, float, float]  # text, x, y
_Bar = tuple[float, float, float, float]  # left, bottom, right, top


class _Panel(NamedTuple):
    title: str
    unit: str
    lines: list[Line]


def pictures(ablation: Ablation, references: References) -> list[Picture]:
    """All figures that the runs have something for."""
    with style():
        drawn = (
            _main_loss(ablation, references),
            _head(ablation),
            _drafting(ablation),
            _trade_off(ablation, references),
            _curves(ablation),
        )
    return [picture for picture in drawn if picture is not None]


def _main_loss(ablation: Ablation, references: References) -> Picture:
    categories = categories_of(ablation.arms)
    lines = _by_series(ablation, categories, MAIN_LOSS)
    base = references.trunk.values(MAIN_LOSS.figure)
    paired = [
        line._replace(values={label: _minus(values, base) for label, values in line.values.items()}) for line in lines
    ]
    panels = [_Panel("Held-out main loss", "nats a token", lines)]
    if len(ablation.arms) > 1:
        label = printable(references.trunk.label)
        panels.append(_Panel(fill(f"Difference to λ = {label}, same seed", 38), "nats a token", paired))
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
    return Picture(
        "head",
        "Head loss and agreement",
        "On held-out text: the head's loss at each depth, and how often its most probable token is the trunk's.",
        _draw(ablation, categories, panels),
    )


def _drafting(ablation: Ablation) -> Picture | None:
    categories = categories_of(ablation.arms)
    several = len(categories.series) > 1
    panels = _of_depths(ablation, categories, ACCEPTANCE, "Drafts that stand", "position")
    control = _by_series(ablation, categories, CONTROL)
    if panels and control and not several:
        control = [line._replace(name="control", number=None) for line in control]
        panels = [panels[0]._replace(lines=[*panels[0].lines, *control])]
    elif panels and control:
        panels.append(_Panel("Control: drafts for the place after", CONTROL.unit, control))
    tokens = _by_series(ablation, categories, TOKENS_PER_ROUND)
    if tokens:
        panels.append(_Panel("Tokens per round", "tokens", tokens))
    if not panels:
        return None
    figure = _draw(ablation, categories, panels)
    for axes, panel in zip(figure.axes, panels, strict=True):
        if panel.unit == ACCEPTANCE.unit and not several:  # with the control, which is near 0
            low, high = axes.get_ylim()
            axes.set_ylim(min(low, -0.03), max(high, 1.0))
    return Picture(
        "drafting",
        "Acceptance and tokens per round",
        "Greedy decoding of held-out prompts: of the rounds that could emit a draft at a position, the share that did, "
        "and tokens per round of the trunk. The control's drafts are meant for the place after, and should hardly ever "
        "stand.",
        figure,
    )


def _trade_off(ablation: Ablation, references: References) -> Picture | None:
    """Once as measured, and once with the losses' differences to the reference, whose intervals are narrower."""
    measured = {arm.label: arm.values(MAIN_LOSS.figure) for arm in ablation.arms}
    base = references.trunk.values(MAIN_LOSS.figure)
    paired = {label: _minus(values, base) for label, values in measured.items()}
    panels = [("Held-out main loss, nats a token (lower is better)", measured)]
    if len(ablation.arms) > 1:
        label = printable(references.trunk.label)
        title = f"Difference of the held-out main loss to λ = {label}, same seed, nats a token"
        panels.append((fill(title, 84), paired))
    if not any(arm.values(TOKENS_PER_ROUND.figure) for arm in ablation.arms):
        return None
    figure = new_figure(3.4 * len(panels))
    categories = categories_of(ablation.arms)
    grid = [figure.add_subplot(len(panels), 1, row + 1) for row in range(len(panels))]
    labels = []
    for axes, (title, losses) in zip(grid, panels, strict=True):
        labels.append(_draw_trade_off(axes, ablation, categories, losses))
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


def _draw_trade_off(
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
            # The legend says the rest where there are several series.
            several = len(categories.series) > 1
            texts.append((printable(arm.schedule if several else arm.label), x.mean, y.mean))
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


def _curves(ablation: Ablation) -> Picture | None:
    """Losses against tokens, mean over seeds; of several series each in panels of its own."""
    categories = categories_of(ablation.arms)
    wanted = (
        ("Main loss in training", "main_loss"),
        ("Main loss on held-out text", "eval_main_loss"),
        ("Head loss in training", "mtp_loss"),
        ("Head loss on held-out text", "eval_mtp_loss"),
    )
    panels = []
    for series in categories.series:
        arms = categories.in_series(ablation.arms, series)
        for title, figure in wanted:
            unit = MAIN_LOSS.unit if "main" in figure else head_loss_unit(arms)
            curves = {arm.label: curve for arm in arms if (curve := mean_curve(arm, figure))}
            if curves and unit is not None:
                named = f"{title}, {series_name(series)}" if len(categories.series) > 1 else title
                panels.append((named, unit, arms, curves))
    if not panels:
        return None
    most = max(arm.runs[seed]["tokens"] for arm in ablation.arms for seed in arm.runs)
    scale, word = (1e6, "million tokens seen") if most >= 1e6 else (1e3, "thousand tokens seen")
    figure, grid = panels_figure(len(panels), categories)
    for axes, (title, unit, arms, curves) in zip(grid, panels, strict=True):
        axes.set_title(title, loc="left")
        for arm in arms:
            drawn = look(categories.places[arm.label])  # by the weight: the same in every series
            for tokens in arm.switch_tokens:
                axes.axvline(tokens / scale, color=drawn["color"], linewidth=1.0, linestyle=SWITCH, zorder=1)
            if arm.label in curves:
                tokens, values = zip(*curves[arm.label], strict=True)
                axes.plot(
                    [count / scale for count in tokens],
                    values,
                    **drawn,
                    linewidth=1.0,
                    markersize=3.5,
                    markevery=max(1, len(tokens) // 6),
                    label=arm.label,
                )
        _show_late(axes, [arm.label for arm in arms if not any(arm.weights)], curves)
        axes.set_xlabel(word)
        axes.set_ylabel(unit)
    handles: dict[str, Artist] = {tick: Line(tick, place, {}).handle() for place, tick in enumerate(categories.ticks)}
    if any(arm.switch_tokens for arm in ablation.arms):
        handles["a schedule's next weight"] = Line2D([], [], color=GREY, linewidth=1.0, linestyle=SWITCH)
    add_legend(figure, handles, categories.title)
    return Picture(
        "curves",
        "Loss curves",
        "Mean over seeds, against tokens seen; a dotted line in an arm's colour is where it goes on to its next "
        "weight. The axes are fitted to the last four fifths of the run: the first losses lie above.",
        figure,
    )


def _show_late(axes: Axes, untrained: Sequence[str], curves: Mapping[str, list[tuple[float, float]]]) -> None:
    """Fits the axis to what comes after a fifth of the tokens, and writes where heads never trained are beyond it."""
    start = max(curve[-1][0] for curve in curves.values()) / 5
    late = {label: [loss for tokens, loss in curve if tokens >= start] for label, curve in curves.items()}
    fitted = [loss for label, losses in late.items() if label not in untrained for loss in losses]
    if not fitted:
        return
    low, high = min(fitted), max(fitted)
    room = 0.06 * (high - low) or 0.1
    beyond = [label for label in untrained if late.get(label) and min(late[label]) > high + (high - low)]
    shown = [loss for label in untrained if label not in beyond for loss in late.get(label, [])]
    axes.set_ylim(min([low, *shown]) - room, max([high, *shown]) + room)
    for row, label in enumerate(beyond):
        axes.annotate(
            f"{printable(label)}: {late[label][-1]:.3g} ↑",
            (1.0, 1.0),
            xycoords="axes fraction",
            xytext=(-2, -2 - 10 * row),
            textcoords="offset points",
            horizontalalignment="right",
            verticalalignment="top",
            fontsize=8,
            color=GREY,
        )


def mean_curve(arm: Arm, figure: str) -> list[tuple[float, float]]:
    """Tokens seen and the mean over seeds, at the steps at which every run of the arm has the figure."""
    by_step: dict[int, list[tuple[float, float]]] = {}
    for record in arm.runs.values():
        for row in record["rows"]:
            tokens, value = number(row.get("tokens")), number(row.get(figure))
            if tokens is not None and value is not None:
                by_step.setdefault(row["step"], []).append((tokens, value))
    whole = [points for _, points in sorted(by_step.items()) if len(points) == len(arm.runs)]
    return [(_mean([t for t, _ in points]), _mean([v for _, v in points])) for points in whole]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _minus(values: Mapping[int, float], base: Mapping[int, float]) -> dict[int, float]:
    return {seed: value - base[seed] for seed, value in values.items() if seed in base}


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
        draw_lines(axes, categories, panel.lines, untrained)
        handles |= {line.name: line.handle() for line in panel.lines if line.name}
    several = any(len(values) > 1 for panel in panels for line in panel.lines for values in line.values.values())
    add_legend(figure, {**handles, **seed_handles(several)})
    return figure
