"""Losses of an ablation's runs as they were trained."""

from collections.abc import Mapping, Sequence

from train.ablation.arms import Ablation, Arm, number
from train.ablation.categories import categories_of, printable, series_name
from train.ablation.comparison import MAIN_LOSS, head_loss_unit
from train.ablation.drawing import (
    GREY,
    Line,
    Picture,
    add_legend,
    look,
    panels_figure,
)

# isort: split
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

_SWITCH = (0, (1, 2))
"""Line style of the places where schedules go on."""


def loss_curves(ablation: Ablation) -> Picture | None:
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
            if unit is not None and any(len(curve) > 1 for curve in curves.values()):  # a point is no curve
                named = f"{title}, {series_name(series)}" if len(categories.series) > 1 else title
                untrained = [] if "main" in figure else [arm.label for arm in arms if not any(arm.weights)]
                panels.append((named, unit, arms, curves, untrained))
    if not panels:
        return None
    most = max(arm.runs[seed]["tokens"] for arm in ablation.arms for seed in arm.runs)
    scale, word = (1e6, "million tokens seen") if most >= 1e6 else (1e3, "thousand tokens seen")
    figure, grid = panels_figure(len(panels), categories)
    for axes, (title, unit, arms, curves, untrained) in zip(grid, panels, strict=True):
        axes.set_title(title, loc="left")
        for arm in arms:
            drawn = look(categories.places[arm.label])  # by the weight: the same in every series
            for tokens in arm.switch_tokens:
                axes.axvline(tokens / scale, color=drawn["color"], linewidth=1.0, linestyle=_SWITCH, zorder=1)
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
        _show_late(axes, untrained, curves)
        axes.set_xlabel(word)
        axes.set_ylabel(unit)
    handles: dict[str, Artist] = {tick: Line(tick, place, {}).handle() for place, tick in enumerate(categories.ticks)}
    if any(arm.switch_tokens for arm in ablation.arms):
        handles["next weight"] = Line2D([], [], color=GREY, linewidth=1.0, linestyle=_SWITCH)
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
