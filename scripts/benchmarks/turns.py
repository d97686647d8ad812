"""Measurements taken in turns, told on stderr as they go, and shown as a table."""

from collections.abc import Callable, Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console

from infer.step_time import alternate
from scripts._tables import new_table

if TYPE_CHECKING:
    from rich.table import Table


def take_turns(measurements: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """`alternate`, which has one turn that is not counted; says which measurement runs."""
    turn = dict.fromkeys(measurements, 0)
    with Console(stderr=True).status("measuring") as status:

        def told(name: str, measure: Callable[[], float]) -> Callable[[], float]:
            def measured() -> float:
                what = f"turn {turn[name]} of {repeats}" if turn[name] else "compiling and warming up"
                status.update(f"{what}: {name}")
                turn[name] += 1
                return measure()

            return measured

        return alternate({name: told(name, measure) for name, measure in measurements.items()}, repeats)


def fastest(taken: Mapping[str, list[float]]) -> float:
    """The least median."""
    return min(map(median, taken.values()))


def time_table(title: str, spread: Mapping[str, Mapping[str, float]], unit: str, each: Mapping[str, str]) -> "Table":
    """Medians and ranges in milliseconds.

    Args:
      spread: `infer.step_time.summary` of each measurement.
      unit: heading of what `each` says of a measurement in its last column.
    """
    table = new_table(title, "", "ms", "from", "to", unit)
    for name, values in spread.items():
        table.add_row(name, *(f"{1e3 * values[key]:,.2f}" for key in ("median", "min", "max")), each.get(name, ""))
    return table


def print_result(tables: list["Table"], lines: list[str]) -> None:
    """On stdout."""
    console: Any = Console(highlight=False, soft_wrap=True)
    for table in tables:
        console.print(table)
    for line in lines:
        console.print(line)
