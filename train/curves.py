"""A picture of what a run's metrics.jsonl says."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mtp_jax.errors import UserError

try:
    import matplotlib

    matplotlib.use("agg")  # files only: no window, no display
    from matplotlib import pyplot
    from matplotlib.axes import Axes
except ImportError as missing:
    raise UserError("drawing needs matplotlib: pip install 'mtp-jax[train]'") from missing

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's, told apart with any colour vision (and each figure has a line style of its own)."""
STYLES = ("-", "--", ":", "-.")

Row = Mapping[str, Any]


class Panel(NamedTuple):
    """One set of axes: figures of the rows that share a unit."""

    title: str
    unit: str
    figures: tuple[str, ...]


PANELS = (
    Panel("Loss in training", "nats a token", ("main_loss", "mtp_loss")),
    Panel("Loss on held-out documents", "nats a token", ("eval_main_loss", "eval_mtp_loss")),
    Panel("The head's argmax is the trunk's", "share", ("mtp_agreement", "mtp_agreement_d2", "eval_mtp_agreement")),
    Panel("Drafts that stand", "share", ("acceptance", "acceptance_d2", "acceptance_d3", "acceptance_control")),
)


def read_metrics(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl; a last line that was cut short is passed over.

    Raises:
      UserError: if there is no such file, it has no rows, or a line is none.
    """
    if not path.is_file():
        raise UserError(f"{path}: expected a run's metrics.jsonl, there is no such file")
    lines = path.read_bytes().splitlines(keepends=True)  # of text it would also part lines at characters of other kinds
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            break
        try:
            row = json.loads(line)
            if not (isinstance(row, dict) and type(row.get("step")) is int and 0 <= row["step"] < 2**63):
                raise ValueError("no step")
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: expected a row of metrics: {error}") from error
        rows.append(row)
    if not rows:
        raise UserError(f"{path}: expected rows of metrics, there are none yet")
    return rows


def series(rows: Sequence[Row], figure: str) -> tuple[list[int], list[float]]:
    """Steps and values of the rows that have the figure; a step whose value is null is left out."""
    points = [(row["step"], row[figure]) for row in rows if isinstance(row.get(figure), int | float)]
    return [step for step, _ in points], [value for _, value in points]


def weight_switches(rows: Sequence[Row]) -> list[int]:
    """Steps at which `mtp_weight` is another than in the row before."""
    steps, weights = series(rows, "mtp_weight")
    return [step for step, before, now in zip(steps[1:], weights, weights[1:], strict=False) if before != now]


def draw(runs: Mapping[str, Sequence[Row]], out: Path) -> None:
    """Writes a picture with the panels that any run has figures for, and a column for each run.

    Args:
      runs: rows by the run's name.
      out: .png or .svg.

    Raises:
      UserError: if the rows have nothing to draw, or the file cannot be written.
    """
    panels = [
        panel for panel in PANELS if any(series(rows, name)[0] for rows in runs.values() for name in panel.figures)
    ]
    if not panels:
        raise UserError(f"{', '.join(runs)}: the rows have none of the figures that are drawn")
    figure, grid = pyplot.subplots(
        len(panels), len(runs), squeeze=False, sharex="col", sharey="row", figsize=(6.4 * len(runs), 2.6 * len(panels))
    )
    for column, (name, rows) in enumerate(runs.items()):
        grid[0, column].set_title(name, fontsize="medium", loc="left")
        for axes, panel in zip(grid[:, column], panels, strict=True):
            _draw_panel(axes, panel, rows)
        grid[-1, column].set_xlabel("step")
    figure.tight_layout()
    try:
        # Text stays text; without date and random names an unchanged run gives an unchanged file.
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "curves"}):
            undated = {"Date": None} if out.suffix.lower() == ".svg" else {}
            figure.savefig(out, dpi=150, metadata=undated)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}") from error
    finally:
        pyplot.close(figure)


def _draw_panel(axes: Axes, panel: Panel, rows: Sequence[Row]) -> None:
    for number, name in enumerate(panel.figures):
        steps, values = series(rows, name)
        if steps:
            few = len(steps) <= 30
            axes.plot(
                steps,
                values,
                color=COLOURS[number % len(COLOURS)],
                linestyle=STYLES[number % len(STYLES)],
                marker="o" if few else None,
                markersize=3,
                label=name,
            )
    for step in weight_switches(rows):
        axes.axvline(step, color="#777777", linewidth=0.8, linestyle=(0, (1, 3)))
    axes.set_ylabel(f"{panel.title},\n{panel.unit}", fontsize="small")
    if panel.unit == "share":
        axes.set_ylim(-0.03, 1.03)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="x-small", frameon=False)
    axes.grid(alpha=0.25)
