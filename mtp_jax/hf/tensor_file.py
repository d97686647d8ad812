"""One safetensors file: its header read and checked, its tensors as raw bytes.

Format: 8 bytes of header length (little-endian), the header as JSON, `{name: {dtype, shape, data_offsets}}` with an
optional `__metadata__`, then the tensors' bytes without gaps. Written here and not left to the `safetensors` library
since a saved file keeps the very header it was loaded with, and what is carried along is never interpreted.

Reference: https://github.com/huggingface/safetensors#format (the same limits apply).
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import jax.numpy as jnp
import numpy as np

from mtp_jax.errors import UserError

MAX_HEADER = 100_000_000
"""Bytes a header may have, so that a broken length does not fill the memory."""

COPY_BYTES = 1 << 24

NUMPY_DTYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(jnp.bfloat16),
    "F16": np.dtype(np.float16),
}
"""What the model's own tensors may be stored as."""

_ITEM_BYTES = {
    **{name: 1 for name in ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0")},
    **{name: 2 for name in ("I16", "U16", "F16", "BF16")},
    **{name: 4 for name in ("I32", "U32", "F32")},
    **{name: 8 for name in ("I64", "U64", "F64", "C64")},
}


@dataclass(frozen=True)
class Entry:
    """Where a tensor is: `begin` and `end` count bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class TensorFile:
    """A file's header.

    Attributes:
      name: path relative to the checkpoint's folder.
      header: the JSON as it stands in the file, padding included.
      entries: tensors by name, in the order of their bytes.
    """

    name: str
    header: bytes
    entries: Mapping[str, Entry]

    @property
    def data_start(self) -> int:
        """Bytes before the first tensor."""
        return 8 + len(self.header)


def read_header(path: Path, name: str) -> TensorFile:
    """Reads and checks the header of a safetensors file.

    Raises:
      UserError: if the file is missing, truncated, too long, or its header is not what the format says.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise UserError(f"{path}: truncated: a safetensors file has at least 8 bytes, got {size}")
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER:
                raise UserError(
                    f"{path}: not a safetensors file, or a damaged one: a header of at most {MAX_HEADER} bytes "
                    f"was expected, got {length}"
                )
            if size < 8 + length:
                raise UserError(f"{path}: truncated: a header of {length} bytes, but {size} bytes in all")
            header = file.read(length)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    return TensorFile(name, header, _parse(path, header, size - 8 - length))


def _parse(path: Path, header: bytes, data_bytes: int) -> dict[str, Entry]:
    def reject_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            names = [key for key, _ in pairs]
            repeated = sorted({name for name in names if names.count(name) > 1})
            raise UserError(f"{path}: written twice in the header: {', '.join(repeated)}")
        return values

    try:
        values = json.loads(header.decode("utf-8"), object_pairs_hook=reject_repeats)
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: a damaged header, expected JSON: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: a damaged header, expected a JSON object, got {type(values).__name__}")
    metadata = values.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise UserError(f"{path}: a damaged header, __metadata__ must be an object")
    entries = {name: _entry(path, name, value) for name, value in values.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    end = 0
    for name, entry in entries.items():
        if entry.begin != end:
            raise UserError(f"{path}: {name}: expected its bytes to start at {end}, got {entry.begin}")
        end = entry.end
    if end > data_bytes:
        raise UserError(f"{path}: truncated: expected {end} bytes of tensors, got {data_bytes}")
    if end < data_bytes:
        raise UserError(f"{path}: expected {end} bytes of tensors, got {data_bytes}: some belong to none")
    return entries


def _entry(path: Path, name: str, value: Any) -> Entry:
    def counts(value: Any) -> TypeGuard[list[int]]:
        return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)

    if not (isinstance(value, dict) and isinstance(value.get("dtype"), str)):
        raise UserError(f"{path}: {name}: a damaged header, expected dtype, shape and data_offsets")
    shape, offsets = value.get("shape"), value.get("data_offsets")
    if not counts(shape) or not counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise UserError(f"{path}: {name}: a damaged header, got shape {shape} and data_offsets {offsets}")
    entry = Entry(value["dtype"], tuple(shape), *offsets)
    # A type unknown here may still be carried along.
    expected = math.prod(shape) * _ITEM_BYTES.get(entry.dtype, 0)
    if entry.dtype in _ITEM_BYTES and entry.end - entry.begin != expected:
        raise UserError(
            f"{path}: {name}: {entry.dtype} of shape {list(shape)} has {expected} bytes, "
            f"the header gives it {entry.end - entry.begin}"
        )
    return entry


class Reader:
    """Reads tensors from a file whose header is known, one at a time."""

    def __init__(self, path: Path, tensors: TensorFile) -> None:
        self._path = path
        self._tensors = tensors
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def check_header(self) -> None:
        """Raises:
        UserError: if the file is not the one whose header was read before.
        """
        self._file.seek(0)
        expected = len(self._tensors.header).to_bytes(8, "little") + self._tensors.header
        if self._file.read(len(expected)) != expected:
            raise UserError(f"{self._path}: the file was changed after it was loaded")

    def entry(self, name: str) -> Entry:
        """Where the tensor is."""
        return self._tensors.entries[name]

    def chunks(self, name: str) -> Iterator[bytes]:
        """The tensor's bytes, a bounded number at a time."""
        entry = self._tensors.entries[name]
        self._file.seek(self._tensors.data_start + entry.begin)
        left = entry.end - entry.begin
        while left:
            chunk = self._file.read(min(left, COPY_BYTES))
            if not chunk:
                raise UserError(f"{self._path}: truncated inside {name}")
            left -= len(chunk)
            yield chunk

    def middle(self, name: str, num_bytes: int) -> bytes:
        """At most so many bytes from the middle of the tensor."""
        entry = self._tensors.entries[name]
        size = min(num_bytes, entry.end - entry.begin)
        self._file.seek(self._tensors.data_start + (entry.begin + entry.end - size) // 2)
        return self._file.read(size)

    def mapped(self, name: str) -> np.ndarray:
        """The tensor as it lies in the file, of which only what is read comes into memory."""
        entry = self._tensors.entries[name]
        begin, end = (self._tensors.data_start + place for place in (entry.begin, entry.end))
        if os.fstat(self._file.fileno()).st_size < end:
            raise UserError(f"{self._path}: truncated inside {name}")
        values = np.memmap(self._file, np.uint8, "r", begin, (end - begin,)) if end > begin else np.empty(0, np.uint8)
        return values.view(NUMPY_DTYPES[entry.dtype]).reshape(entry.shape)

    def array(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """The tensor, or these rows of it (one after the other), in its stored type, which must be in `NUMPY_DTYPES`.
        Several threads may read at once."""
        entry = self._tensors.entries[name]
        num_rows, *rest = entry.shape or (1,)
        start, stop, _ = rows.indices(num_rows)
        row_bytes = (entry.end - entry.begin) // max(num_rows, 1)
        content = np.empty((stop - start) * row_bytes, np.uint8)
        left, place = content.data, self._tensors.data_start + entry.begin + start * row_bytes
        while left:
            read = os.preadv(self._file.fileno(), [left], place)
            if not read:
                raise UserError(f"{self._path}: truncated inside {name}")
            left, place = left[read:], place + read
        return content.view(NUMPY_DTYPES[entry.dtype]).reshape((stop - start, *rest) if entry.shape else ())


def make_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, Entry]]:
    """Header and places for tensors of given dtype and shape; `metadata` beside the published `format`.

    Wider types come first, then names in order, as the `safetensors` library does: each stays aligned.
    """
    order = sorted(tensors, key=lambda name: (-_ITEM_BYTES[tensors[name][0]], name))
    entries, begin = {}, 0
    for name in order:
        dtype, shape = tensors[name]
        end = begin + math.prod(shape) * _ITEM_BYTES[dtype]
        entries[name] = Entry(dtype, shape, begin, end)
        begin = end
    values: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    for name, entry in entries.items():
        offsets = [entry.begin, entry.end]
        values[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
    header = json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode()
    return header + b" " * (-len(header) % 8), entries
