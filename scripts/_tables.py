"""Tables in the terminal."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def new_table(title: str, first: str, *columns: str) -> "Table":
    """Without rows; numbers to the right of their names."""
    from rich.table import Table

    table = Table(first, title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def memory_amount(number: float) -> str:
    """12.3 MiB, say."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:,.2f} {unit}"
    return f"{number:.0f} B"
