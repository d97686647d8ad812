"""A run's rows for TensorBoard."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mtp_jax.errors import UserError

try:
    from tensorboard.summary import Writer
except ImportError as missing:
    raise UserError("training needs tensorboard: pip install 'mtp-jax[train]'") from missing


class Board:
    """Event files with a scalar for each figure of each row."""

    def __init__(self, folder: Path, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """Starts over: event files cannot be cut where a run continues, so they are made again from the rows so far."""
        shutil.rmtree(folder, ignore_errors=True)
        self._writer = Writer(str(folder))
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds a row's figures, those that are numbers, at its step."""
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        """Ends the thread that writes."""
        self._writer.close()
