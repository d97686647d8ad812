"""How a published tensor lies, seen from the parameters that it holds."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

Shape = tuple[int, ...]

ROWS_AT_ONCE = 128
"""Rows of a matrix that are transposed in one go."""

_PADDING_BYTES = 64


class Layout(ABC):
    """Takes a published tensor apart into parameters (or parts of them), and puts it together again."""

    @abstractmethod
    def split(self, tensor: np.ndarray) -> list[np.ndarray]:
        """What the tensor holds, as views of it where that is possible."""

    @abstractmethod
    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The tensor that holds these, as a view of them where that is possible."""

    @abstractmethod
    def published_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Shape of the tensor that holds parts of these shapes."""

    def row_axis(self, ndim: int) -> int | None:
        """Which axis of each parameter the tensor's first one is, where both have so many; None if none of them."""
        return None


@dataclass(frozen=True)
class Same(Layout):
    """As ours."""

    def split(self, tensor: np.ndarray) -> list[np.ndarray]:
        return [tensor]

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return parts[0]

    def published_shape(self, shapes: Sequence[Shape]) -> Shape:
        return shapes[0]

    def row_axis(self, ndim: int) -> int:
        return 0


@dataclass(frozen=True)
class Rows(Layout):
    """Published [..., out, in], ours [..., in, out]; of several parameters, one's rows follow the other's, as many."""

    parameters: int = 1

    def split(self, tensor: np.ndarray) -> list[np.ndarray]:
        return np.split(tensor.swapaxes(-1, -2), self.parameters, axis=-1)

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        return joined.swapaxes(-1, -2)

    def published_shape(self, shapes: Sequence[Shape]) -> Shape:
        *stack, num_in, num_out = shapes[0]
        return (*stack, self.parameters * num_out, num_in)

    def row_axis(self, ndim: int) -> int | None:
        if ndim > 2:
            return 0
        return 1 if self.parameters == 1 else None


@dataclass(frozen=True)
class Convolution(Layout):
    """Published [P, 1, w+1], ours [w+1, P]."""

    def split(self, tensor: np.ndarray) -> list[np.ndarray]:
        return [tensor[:, 0].T]

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return parts[0].T[:, None]

    def published_shape(self, shapes: Sequence[Shape]) -> Shape:
        taps, channels = shapes[0]
        return (channels, 1, taps)


@dataclass(frozen=True)
class RowsByHead(Layout):
    """Published rows are grouped by heads; ours are transposed, and all heads of one kind of row stand together.

    Attributes:
      heads: groups.
      rows: for each parameter, how many rows a group has of each kind. A parameter's kinds follow one another.
    """

    heads: int
    rows: tuple[tuple[int, ...], ...]

    def split(self, tensor: np.ndarray) -> list[np.ndarray]:
        width = tensor.shape[1]
        kinds = np.split(tensor.reshape(self.heads, -1, width), self._ends(1), axis=1)
        columns = iter([kind.reshape(-1, width).T for kind in kinds])
        return [np.concatenate([next(columns) for _ in rows], axis=1) for rows in self.rows]

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        width = parts[0].shape[0]
        kinds = np.split(np.concatenate(parts, axis=1).T, self._ends(self.heads))
        return np.concatenate([kind.reshape(self.heads, -1, width) for kind in kinds], axis=1).reshape(-1, width)

    def published_shape(self, shapes: Sequence[Shape]) -> Shape:
        return (self.heads * sum(map(sum, self.rows)), shapes[0][0])

    def _ends(self, heads: int) -> list[int]:
        """Where each kind of row but the last ends, over so many heads."""
        return list(accumulate(heads * kind for rows in self.rows for kind in rows))[:-1]


def converted(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A C-ordered copy in another type."""
    result = np.empty(values.shape, dtype)
    write(values, result)
    return result


def write(values: np.ndarray, target: np.ndarray) -> None:
    """Copies into an array of another type.

    A transposed matrix goes a few rows of its source at a time through a buffer that stays in the cache. The buffer's
    rows are a little longer than what they hold: entries of a column whose distance is a power of two would evict each
    other. Five times as fast as numpy by itself.
    """
    if values.shape != target.shape:
        raise ValueError(f"expected values of shape {target.shape}, got {values.shape}")
    if values.ndim not in (2, 3) or values.strides[-1] <= values.strides[-2]:
        target[...] = values
    elif values.ndim == 3:
        for matrix, place in zip(values, target, strict=True):
            write(matrix, place)
    else:
        width, num_rows = values.shape
        buffer = np.empty((ROWS_AT_ONCE, width + _PADDING_BYTES // target.itemsize), target.dtype)[:, :width]
        for start in range(0, num_rows, ROWS_AT_ONCE):
            rows = values.T[start : start + ROWS_AT_ONCE]
            buffer[: len(rows)] = rows
            target[:, start : start + len(rows)] = buffer[: len(rows)].T
