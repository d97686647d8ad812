"""How the figures of an ablation are drawn: fonts, colours, and arms as places on an axis.

Made for print and for any colour vision: what differs in colour differs in marker and line style too.
"""

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from train.ablation.categories import Categories, is_crowded, printable
from train.ablation.statistics import CONFIDENCE, estimate
from train.curves import COLOURS, STYLES  # first: it says what to install where matplotlib is not

# isort: split
import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

MARKERS = "osD^vPX"
GREY = "#666666"
WIDTH = 6.8  # inches: of the text of a page
PANEL_HEIGHT = 2.5
_LEAST_SPAN = 1e-3  # of an axis of figures: what is nearer is one

_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": matplotlib.rcParamsDefault["font.sans-serif"],
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.labelsize": 9.0,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "legend.title_fontsize": 8.5,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.formatter.useoffset": False,
    "lines.linewidth": 1.2,
    "lines.markersize": 5.0,
    "errorbar.capsize": 3.0,
    "savefig.dpi": 200.0,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "ablation",  # the same names in every drawing
    "text.parse_math": False,  # labels come from files: a dollar is a dollar
}


@contextmanager
def style() -> Iterator[None]:
    """What is made or written within looks as described above."""
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # A label may hold characters that no font here has: a box is drawn for them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def render(figure: Figure, suffix: str) -> bytes:
    """A figure as "png" or "svg"; the same bytes for the same figure."""
    content = io.BytesIO()
    with style():
        figure.savefig(content, format=suffix, metadata={"Date": None} if suffix == "svg" else {})
    return content.getvalue()


def look(number: int) -> dict[str, Any]:
    """Colour, line style and marker of the number-th line; the first repetition of all three is the 84th."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": STYLES[number % len(STYLES)],
        "marker": MARKERS[number % len(MARKERS)],
    }


class Picture(NamedTuple):
    """A figure, the name of its files, and what it shows, in words."""

    name: str
    title: str
    caption: str
    figure: Figure


class Line(NamedTuple):
    """What is drawn for several arms in one look: by arm's label, each seed's value.

    Attributes:
      number: of the look, None for grey.
    """

    name: str
    number: int | None
    values: Mapping[str, Mapping[int, float]]

    def look(self) -> dict[str, Any]:
        return {"color": GREY, "linestyle": ":", "marker": "x"} if self.number is None else look(self.number)

    def handle(self) -> Line2D:
        """What stands for it in a legend."""
        return Line2D([], [], **self.look())


def draw_lines(axes: Axes, categories: Categories, lines: Sequence[Line], untrained: Sequence[str] = ()) -> None:
    """Means with their intervals, seeds as faint dots beside them, and the axis of arms.

    Args:
      untrained: labels of arms whose head was never trained. Where their means are so far from the others' that these
        could not be told apart, they are written at the edge instead.
    """
    off = _off_scale(lines, untrained)
    spread = min(0.3, 0.05 * len(categories.ticks), 0.8 / max(1, len(lines)))  # a marker and a half, if there is room
    for index, line in enumerate(lines):
        shift = (index - (len(lines) - 1) / 2) * spread
        drawn = line.look()
        means = {}
        for label, values in line.values.items():
            place, mean = categories.places[label], estimate(values)
            if label in off or mean is None:
                continue
            means[place] = mean
            axes.plot(
                [place + shift + spread / 2] * len(values),
                list(values.values()),
                color=drawn["color"],
                linestyle="none",
                marker="o",
                markersize=2.2,
                markeredgewidth=0,
                alpha=0.5,
                zorder=1,
                gid=f"seeds of {printable(label)}",
            )
        places = sorted(means)
        axes.errorbar(
            [place + shift for place in places],
            [means[place].mean for place in places],
            yerr=[means[place].half_width or 0.0 for place in places],
            color=drawn["color"],
            marker=drawn["marker"],
            linestyle="none",
            label=line.name,
            zorder=3,
        )
        for joined in categories.joined:
            there = [place for place in places if place in joined]
            axes.plot(
                [place + shift for place in there],
                [means[place].mean for place in there],
                color=drawn["color"],
                linestyle=drawn["linestyle"],
                alpha=0.7,
                zorder=2,
            )
    low, high = axes.get_ylim()
    if high - low < _LEAST_SPAN:
        axes.set_ylim((low + high - _LEAST_SPAN) / 2, (low + high + _LEAST_SPAN) / 2)
    _write_off_scale(axes, categories, lines, off)
    draw_categories(axes, categories)


def draw_categories(axes: Axes, categories: Categories) -> None:
    """The axis of arms."""
    crowded = is_crowded(categories)
    ticks = [tick if crowded else "\nthen ".join(tick.split(" then ")) for tick in categories.ticks]
    axes.set_xticks(range(len(ticks)), labels=ticks)
    if crowded:
        axes.tick_params(axis="x", labelrotation=40)
        for tick in axes.get_xticklabels():
            tick.set(horizontalalignment="right", rotation_mode="anchor")
    axes.set_xlim(-0.6, len(categories.ticks) - 0.4)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel(categories.title)
    if categories.divided is not None:
        axes.axvline(categories.divided, color=GREY, linewidth=0.8, linestyle=(0, (1, 3)))


def _off_scale(lines: Sequence[Line], untrained: Sequence[str]) -> set[str]:
    """Labels among `untrained` whose means would take more than half of the axis for themselves."""
    of_label: dict[str, list[float]] = {}
    for line in lines:
        for label, values in line.values.items():
            mean = estimate(values)
            if mean is not None:
                half = mean.half_width or 0.0
                of_label.setdefault(label, []).extend((mean.mean - half, mean.mean + half))
    others = [value for label, values in of_label.items() if label not in untrained for value in values]
    low, high = min(others, default=0.0), max(others, default=0.0)
    if high - low < _LEAST_SPAN:  # there is nothing to tell apart
        return set()
    return {
        label
        for label, values in of_label.items()
        if label in untrained and max(low - min(values), max(values) - high) > high - low
    }


def _write_off_scale(axes: Axes, categories: Categories, lines: Sequence[Line], off: set[str]) -> None:
    if not off:
        return
    low, high = axes.get_ylim()
    of_place: dict[int, list[tuple[float, str]]] = {}
    for line in lines:
        for label in sorted(off & line.values.keys()):
            mean = estimate(line.values[label])
            if mean is not None:
                of_place.setdefault(categories.places[label], []).append((mean.mean, line.look()["color"]))
    for place, means in of_place.items():
        above = means[0][0] > (low + high) / 2
        rows = [(f"{mean:.3g}", colour) for mean, colour in (means if above else means[::-1])]
        for row, (text, colour) in enumerate([("↑" if above else "↓", GREY), *rows]):
            axes.annotate(
                text,
                (place, 1.0 if above else 0.0),
                xycoords=("data", "axes fraction"),
                xytext=(0, (-1 - 10 * row) if above else (2 + 10 * row)),
                textcoords="offset points",
                horizontalalignment="center",
                verticalalignment="top" if above else "bottom",
                fontsize=8,
                color=colour,
            )


def panels_figure(num_panels: int, categories: Categories) -> tuple[Figure, list[Axes]]:
    """Panels, two a row, and with room below each for the axis of arms."""
    columns = min(2, num_panels)
    rows = -(-num_panels // columns)
    leaning = 0.05 * max(map(len, categories.ticks)) if is_crowded(categories) else 0.0
    figure = new_figure(rows * (PANEL_HEIGHT + leaning))
    return figure, [figure.add_subplot(rows, columns, place + 1) for place in range(num_panels)]


def new_figure(height: float) -> Figure:
    """Args: height: inches, without a legend."""
    return Figure(figsize=(WIDTH, height), layout=ConstrainedLayoutEngine(w_pad=0.09, h_pad=0.06))


def add_legend(figure: Figure, handles: Mapping[str, Artist], title: str | None = None) -> None:
    """Makes the figure higher and names what is in it below the panels, in one row if there is room."""
    if not handles:
        return
    room = WIDTH * 72 / 8.5 - 2  # ems of its font; a name's characters take about half of one, its sign and gaps 5
    columns = len(handles)
    if sum(5 + 0.56 * len(name) for name in handles) > room:
        columns = max(1, int(room / (5 + 0.56 * max(map(len, handles)))))
    figure.set_figheight(figure.get_figheight() + 0.2 * (-(-len(handles) // columns) + (title is not None)))
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=columns, title=title)


def seed_handles(with_intervals: bool) -> dict[str, Artist]:
    """Of the legend: what a mean with its interval is, and a faint dot."""
    dot = Line2D([], [], color=GREY, marker="o", markersize=2.2, markeredgewidth=0, alpha=0.6, linestyle="none")
    if not with_intervals:
        return {"one seed each: no interval": dot}
    bar = Line2D([], [], color=GREY, marker="|", markersize=9, linestyle="none")
    return {f"mean, {CONFIDENCE:.0%} interval": bar, "a seed": dot}
