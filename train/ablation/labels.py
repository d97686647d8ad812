"""Names beside points, where there is room for them."""

import math
from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

_RADII = (4, 12, 22, 34, 48, 64, 84)  # points, from the point to the text
_FAR = 20  # from where on a line leads from the point to its name


def place_labels(
    axes: Axes, labels: Sequence[tuple[str, float, float, str]], bars: Sequence[tuple[float, float, float, float]]
) -> list[Annotation]:
    """Writes each text near its point: within the axes, over no other text or point, and over few bars.

    Args:
      labels: text, x, y, colour.
      bars: left, bottom, right and top of the lines that better stay free.
    """
    figure = axes.figure
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()  # settles where the axes are
    scale = figure.dpi / 72
    inside = axes.get_window_extent()
    dots = [
        (float(left), float(bottom)) for left, bottom in (axes.transData.transform((x, y)) for _, x, y, _ in labels)
    ]
    points = [Bbox.from_bounds(x - 4 * scale, y - 4 * scale, 8 * scale, 8 * scale) for x, y in dots]
    lines = [Bbox(axes.transData.transform([(left, bottom), (right, top)])) for left, bottom, right, top in bars]
    taken: list[Bbox] = []
    written = []
    for (text, x, y, colour), (dot_x, dot_y) in zip(labels, dots, strict=True):
        note = axes.annotate(
            text,
            (x, y),
            xytext=(0, 0),
            textcoords="offset points",
            horizontalalignment="center",
            verticalalignment="center",
            fontsize=8.5,
            color=colour,
            zorder=5,
            arrowprops={"arrowstyle": "-", "color": "#666666", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3},
        )
        note.set_in_layout(False)
        size = Text.get_window_extent(note)  # without the line to it

        best = math.inf, 0, 0.0, 0.0, size
        for radius, dx, dy in _around(size.width / scale, size.height / scale):
            left, bottom = dot_x + dx * scale - size.width / 2, dot_y + dy * scale - size.height / 2
            box = Bbox.from_bounds(left, bottom, size.width, size.height)
            outside = not (inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1)
            covered = 100 * box.count_overlaps(taken) + 30 * box.count_overlaps(points) + 3 * box.count_overlaps(lines)
            cost = 200 * outside + covered + radius / 10
            if cost < best[0]:
                best = cost, radius, dx, dy, box
        _, radius, dx, dy, box = best
        note.xyann = (dx, dy)
        if note.arrow_patch is not None:
            note.arrow_patch.set_visible(radius >= _FAR)
        taken.append(box)
        written.append(note)
    return written


def _around(width: float, height: float) -> Iterator[tuple[float, float, float]]:
    """Distances, and places of a text's middle at them, near ones first; right above and right below come last."""
    for radius in _RADII:
        for step in range(16):
            angle = math.pi * (1 / 4 + step / 8)
            x, y = math.cos(angle), math.sin(angle)
            yield radius, x * (radius + width / 2), y * (radius + height / 2)
