"""Tokenised documents on disk, made once for the same files and the same tokenizer.

    KEY/tokens.npy, loss_mask.npy    of all documents, end to end
    KEY/starts.npy                   document d is tokens[starts[d] : starts[d + 1]]
    KEY/files.npy, rows.npy          where each document came from
    KEY/index.json                   how many there are, checksums, rows that could not be used

KEY is a hash of the files' contents, the tokenizer with its chat templates, and the version of the rules. Entries are
written beside their name and renamed; nothing in them is ever changed, so any may be deleted at any time.
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from mtp_jax.errors import UserError
from mtp_jax.files import read_json_object, write_json
from mtp_jax.text import Tokenizer
from train.progress import Progress
from train.records import BadRows, read_documents, with_hint
from train.sources import SourceFile
from train.tokenizing import RULES_VERSION, DocumentTokenizer, Tokenized

FOLDER_VARIABLE = "MTP_JAX_CACHE"
_ARRAYS = {
    "tokens": np.dtype(np.int32),
    "loss_mask": np.dtype(bool),
    "starts": np.dtype(np.int64),
    "files": np.dtype(np.int32),
    "rows": np.dtype(np.int64),
}
_HEADER = 128  # bytes that numpy's header of such an array takes
_LEFTOVER_SECONDS = 24 * 3600


class TokenStore(NamedTuple):
    """Documents as ids, end to end, read from disk as they are needed."""

    tokens: Int[np.ndarray, " num_tokens"]
    loss_mask: Bool[np.ndarray, " num_tokens"]  # which tokens may be targets
    starts: Int[np.ndarray, " num_documents_and_one"]
    files: Int[np.ndarray, " num_documents"]  # index of the file
    rows: Int[np.ndarray, " num_documents"]  # row in it from 1; 0: the whole file
    num_bad: int  # rows that could not be used
    checksum: str  # of all of it


def cache_folder() -> Path:
    """`$MTP_JAX_CACHE`, else mtp_jax/tokens in the user's cache, where all runs on the same data find it."""
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mtp_jax" / "tokens"


def tokenized(
    label: str, files: Sequence[SourceFile], tokenizer: Tokenizer, skip_bad: bool, progress: Progress
) -> TokenStore:
    """The documents of some files as ids, from the cache if they are in it.

    Args:
      label: what the files are, for the log.

    Raises:
      UserError: if a row cannot be used and `skip_bad` does not say to leave it out, there is no document at all, or
        the cache cannot be written.
    """
    folder = cache_folder() / _key(files, tokenizer)
    if folder.exists():
        try:
            store, first_bad = _load(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:  # a UserError is a ValueError
            progress.say(f"{folder}: the cached tokens are damaged ({error}); made anew")
            shutil.rmtree(folder, ignore_errors=True)
        else:
            if first_bad and not skip_bad:
                raise UserError(with_hint(first_bad))
            progress.say(f"{label}: tokens read from {folder}")
            return store
    documents = DocumentTokenizer(tokenizer)
    bad = BadRows(skip=skip_bad)
    try:
        _build(folder, label, files, documents, bad, progress)
        return _load(folder)[0]
    except OSError as error:
        raise UserError(
            f"{folder.parent}: cannot be written: {error.strerror or error}; set {FOLDER_VARIABLE} to a folder that can"
        ) from error


def _key(files: Iterable[SourceFile], tokenizer: Tokenizer) -> str:
    contents = [[file.digest, file.kind.value, file.compressed] for file in files]
    parts = [RULES_VERSION, tokenizer.fingerprint(), contents]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _build(
    folder: Path,
    label: str,
    files: Sequence[SourceFile],
    documents: DocumentTokenizer,
    bad: BadRows,
    progress: Progress,
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder.parent)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial.", dir=folder.parent))
    try:
        with progress.task(f"{label}: tokenizing", sum(file.size for file in files)) as advance:
            index = _write(partial, files, documents, bad, advance)
        if not index["lengths"]["files"]:
            raise UserError(f"--data {label}: expected at least one document, found none ({bad.count} bad rows)")
        write_json(partial / "index.json", index)
        with suppress(OSError):  # another process was faster with the same
            os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(
    partial: Path, files: Sequence[SourceFile], documents: DocumentTokenizer, bad: BadRows, advance: Any
) -> dict[str, Any]:
    arrays = {name: _ArrayFile(partial / f"{name}.npy", dtype) for name, dtype in _ARRAYS.items()}
    end = 0
    arrays["starts"].append([0])
    try:
        before = 0
        for number, file in enumerate(files):
            reading = read_documents(file, bad, lambda done, before=before: advance(before + done))
            item: Tokenized
            for item in documents.tokenize(reading, bad):
                end += len(item.ids)
                arrays["tokens"].append(item.ids)
                arrays["loss_mask"].append(item.loss_mask)
                arrays["starts"].append([end])
                arrays["files"].append([number])
                arrays["rows"].append([item.document.row])
            before += file.size
    finally:
        for array in arrays.values():
            array.close()
    return {
        "lengths": {name: array.length for name, array in arrays.items()},
        "checksums": {name: array.checksum for name, array in arrays.items()},
        "bad_rows": bad.count,
        "first_bad_row": bad.first,
    }


def _load(folder: Path) -> tuple[TokenStore, str | None]:
    """An entry, and the message of the first row that could not be used.

    Raises:
      OSError, ValueError, KeyError, TypeError: if it is not as it was written.
    """
    index = read_json_object(folder / "index.json")
    arrays = {}
    for name, dtype in _ARRAYS.items():
        array = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        if array.dtype != dtype or array.shape != (index["lengths"][name],):
            raise ValueError(f"{name}.npy has another type or length")
        if _checksum(array) != index["checksums"][name]:
            raise ValueError(f"{name}.npy has another checksum")
        arrays[name] = array
    checksum = hashlib.sha256(json.dumps(index["checksums"], sort_keys=True).encode()).hexdigest()
    return TokenStore(**arrays, num_bad=index["bad_rows"], checksum=checksum), index["first_bad_row"]


def _checksum(array: np.ndarray) -> int:
    """CRC-32, a part of the array in memory at a time."""
    value = 0
    for first in range(0, len(array), 1 << 22):
        value = zlib.crc32(array[first : first + (1 << 22)].view(np.uint8).data, value)
    return value


class _ArrayFile:
    """A one-dimensional .npy file that grows; the header is written at the end, when its length is known."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._file = open(path, "wb")  # noqa: SIM115  (closed by `close`)
        self._dtype = dtype
        self._file.write(bytes(_HEADER))
        self.length = 0
        self.checksum = 0

    def append(self, values: Any) -> None:
        content = np.ascontiguousarray(values, self._dtype)
        self.length += len(content)
        self.checksum = zlib.crc32(content.view(np.uint8).data, self.checksum)
        self._file.write(content.data)

    def close(self) -> None:
        with self._file as file:
            file.seek(0)
            description = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.length,)}
            np.lib.format.write_array_header_1_0(file, description)
            assert file.tell() == _HEADER


def _remove_leftovers(folder: Path) -> None:
    """What runs killed while they wrote have left, a day later: another process may be writing now."""
    for path in folder.glob("*.partial.*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _LEFTOVER_SECONDS:
                shutil.rmtree(path)
