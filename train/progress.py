"""What the person at the terminal sees: log lines and progress bars, all on stderr."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from rich import box
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

_SECONDS_BETWEEN_LINES = 10.0
_Bars = TypeVar("_Bars", bound=Bars)


class Progress:
    """Bars on a terminal; elsewhere (a log file, a test) a plain line now and then. `quiet` shows neither."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(file=sys.stderr, quiet=quiet, highlight=False, soft_wrap=True, markup=False)

    def say(self, text: str) -> None:
        """One line in the log."""
        self._console.print(text)

    @contextmanager
    def task(self, name: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Shows that something takes its time. Yields a function to call with how much of `total` is done."""
        start = time.perf_counter()
        with self._bars(Bars, transient=True) as bars:
            shown = bars.add_task(name, total=total)
            yield lambda done: bars.update(shown, completed=done)
        self.say(f"{name}: {time.perf_counter() - start:.1f} s")

    @contextmanager
    def training(self, steps: int, done: int) -> Iterator[Callable[[int, dict[str, Any] | None], None]]:
        """Yields a function to call after each step with its number and, when it has one, its metrics row."""
        last_line = -float("inf")
        with self._bars(_RowsAndBar) as bars:
            shown = bars.add_task("training", total=steps, completed=done)

            def update(step: int, row: dict[str, Any] | None) -> None:
                nonlocal last_line
                bars.update(shown, completed=step)
                if row is None:
                    return
                bars.add_row(row)
                now = time.perf_counter()
                due = now - last_line >= _SECONDS_BETWEEN_LINES or step == steps or "eval_main_loss" in row
                if not self._console.is_terminal and due:
                    last_line = now
                    self.say(f"step {step}/{steps}  {_brief(row)}")

            yield update

    def _bars(self, kind: type[_Bars], *, transient: bool = False) -> _Bars:
        return kind(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=transient,
            disable=not self._console.is_terminal,
        )


# Figures, as people name them.
_BRIEF = {
    "main_loss": "main",
    "mtp_loss": "mtp",
    "mtp_agreement": "agreement",
    "eval_main_loss": "held-out main",
    "eval_mtp_agreement": "held-out agreement",
    "acceptance": "acceptance",
    "acceptance_control": "control",
    "acceptance_identical": "identical",
}
_ROWS_SHOWN = 8


class _RowsAndBar(Bars):
    """A table of the latest rows above the bar."""

    def __init__(self, *columns: Any, **options: Any) -> None:
        self._rows: list[dict[str, Any]] = []  # before the rest, which draws at once
        super().__init__(*columns, **options)

    def add_row(self, row: dict[str, Any]) -> None:
        """Shows a row, beside the last figures of evaluations before it."""
        known = {name: self._rows[-1][name] for name in _BRIEF if self._rows and name in self._rows[-1]}
        self._rows = [*self._rows, known | row][-_ROWS_SHOWN:]
        self.refresh()

    def get_renderables(self) -> Iterator[RenderableType]:
        """The table, if there are rows, and the bar."""
        if self._rows:
            yield rows_table(self._rows)
        yield from super().get_renderables()


def rows_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A line for each row, with the figures that any of them has."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    names = [name for name in _BRIEF if any(row.get(name) is not None for row in rows)]
    for heading in ("step", *(_BRIEF[name] for name in names), "tokens/s"):
        table.add_column(heading, justify="right")
    for row in rows:
        figures = ("-" if row.get(name) is None else f"{row[name]:.3f}" for name in names)
        table.add_row(f"{row['step']:,}", *figures, f"{row['tokens_per_second']:,.0f}")
    return table


def _brief(row: dict[str, Any]) -> str:
    parts = [f"{short} {row[key]:.3f}" for key, short in _BRIEF.items() if row.get(key) is not None]
    return "  ".join([*parts, f"{row['tokens_per_second']:,.0f} tokens/s"])
