"""What the person at the terminal sees: log lines and progress bars, all on stderr."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

_SECONDS_BETWEEN_LINES = 10.0


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
        with self._bars(transient=True) as bars:
            shown = bars.add_task(name, total=total)
            yield lambda done: bars.update(shown, completed=done)
        self.say(f"{name}: {time.perf_counter() - start:.1f} s")

    @contextmanager
    def training(self, steps: int, done: int) -> Iterator[Callable[[int, dict[str, Any] | None], None]]:
        """Yields a function to call after each step with its number and, when it has one, its metrics row."""
        last_line = -float("inf")
        with self._bars() as bars:
            shown = bars.add_task("training", total=steps, completed=done)

            def update(step: int, row: dict[str, Any] | None) -> None:
                nonlocal last_line
                bars.update(shown, completed=step)
                if row is None:
                    return
                bars.update(shown, description=_brief(row))
                now = time.perf_counter()
                due = now - last_line >= _SECONDS_BETWEEN_LINES or step == steps or "eval_main_loss" in row
                if not self._console.is_terminal and due:
                    last_line = now
                    self.say(f"step {step}/{steps}  {_brief(row)}")

            yield update

    def _bars(self, *, transient: bool = False) -> Bars:
        return Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=transient,
            disable=not self._console.is_terminal,
        )


def _brief(row: dict[str, Any]) -> str:
    names = {
        "main_loss": "main",
        "mtp_loss": "mtp",
        "mtp_agreement": "agreement",
        "eval_main_loss": "held-out main",
        "eval_mtp_agreement": "held-out agreement",
    }
    parts = [f"{short} {row[key]:.3f}" for key, short in names.items() if row.get(key) is not None]
    return "  ".join([*parts, f"{row['tokens_per_second']:,.0f} tokens/s"])
