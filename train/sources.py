"""Which files a run reads: paths, folders and patterns to files whose content is known by its hash."""

import fnmatch
import glob
import gzip
import hashlib
import os
import sysconfig
import zlib
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from mtp_jax.errors import UserError

# Folders of the standard library that hold tests, installed packages or build leftovers.
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_GZIP = b"\x1f\x8b"


class Kind(Enum):
    """How a file is read."""

    TEXT = "text"  # the whole file is one document
    JSONL = "jsonl"  # a document a line
    PARQUET = "parquet"  # a document a row


class SourceFile(NamedTuple):
    """A file as it was when the run looked at it."""

    path: Path
    name: str  # relative to the data path that it was found under, with forward slashes
    kind: Kind
    compressed: bool  # by gzip
    digest: str  # SHA-256 of its bytes
    size: int
    modified_ns: int

    def check_unchanged(self) -> None:
        """Raises:
        UserError: if the file is another one by now: what was read of it does not belong to the hash.
        """
        if stamp(self.path) != (self.size, self.modified_ns):
            raise UserError(f"--data {self.path}: changed while it was being read")


class Source(NamedTuple):
    """What one data path holds."""

    label: str
    files: list[SourceFile]
    others: int  # files that are empty or are not text


def find_source(path: Path, leave_out: Path | None = None) -> Source:
    """The files of a data path: a file, a folder (recursively, sorted), or a pattern of either (`data/*.jsonl`).

    `.jsonl` and `.parquet` files hold a document a row; of the others those are documents that are UTF-8 without NUL.
    Text and `.jsonl` may be compressed (`.gz`).

    Args:
      leave_out: a folder that is not read where it lies in one of the folders: the run's own, which changes.

    Raises:
      UserError: if there is nothing at the path, or a file cannot be read.
    """
    found: list[tuple[str, Path]] = []
    for base, match in _expand(path):
        if match.is_dir():
            files = files_below(match)
            if leave_out is not None:
                below = leave_out.resolve()
                files = [file for file in files if not file.parent.resolve().is_relative_to(below)]
        else:
            files = [match]
        found += [(file.relative_to(base).as_posix(), file) for file in files]
    return _looked_at(str(path), found)


def standard_library(patterns: Sequence[str]) -> Source:
    """The running Python's own library sources, without tests and without installed packages.

    Args:
      patterns: see `matches`.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [(file.relative_to(root).as_posix(), file) for file in files_below(root, leave_out=_NOT_LIBRARY)]
    wanted = [(name, file) for name, file in names if file.suffix == ".py" and matches(name, patterns)]
    if not wanted:
        raise UserError(f"stdlib_files {','.join(patterns)}: no source in {root} matches; name a path with --data")
    return _looked_at("standard library sources", wanted)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches one of the shell-style patterns and none of those after a `!`.

    `*` also crosses `/`: `json/*` is a package with all that is in it.
    """
    wanted = [pattern for pattern in patterns if not pattern.startswith("!")]
    unwanted = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    return any(fnmatch.fnmatchcase(name, p) for p in wanted) and not any(fnmatch.fnmatchcase(name, p) for p in unwanted)


def fingerprint(sources: Iterable[Source]) -> str:
    """SHA-256 over names and contents, in order: a run continues only on the data it began with."""
    digest = hashlib.sha256()
    for source in sources:
        for file in source.files:
            # Names of files may be any bytes. The lengths keep borders apart.
            for part in (file.name.encode("utf-8", "surrogateescape"), file.digest.encode()):
                digest.update(len(part).to_bytes(8, "little") + part)
        digest.update(b"end")
    return digest.hexdigest()


def files_below(root: Path, leave_out: Iterable[str] = ()) -> list[Path]:
    """All files in a folder, recursively and sorted, without folders of some names.

    Raises:
      UserError: if a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"--data {error.filename}: cannot be read: {error.strerror}") from error

    found = []
    for folder, subfolders, files in os.walk(root, onerror=refuse):
        subfolders[:] = sorted(set(subfolders) - set(leave_out))
        found += [Path(folder, name) for name in files]
    return sorted(file for file in found if file.is_file())


def stamp(path: Path) -> tuple[int, int]:
    """Size and time of the last change."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _expand(path: Path) -> list[tuple[Path, Path]]:
    """What a path stands for, each with the folder that names are relative to."""
    if path.is_dir():
        return [(path, path)]
    if path.exists():
        return [(path.parent, path)]
    if not glob.has_magic(str(path)):
        raise UserError(f"--data {path}: expected a file or a folder, there is none")
    base = next(parent for parent in path.parents if not glob.has_magic(str(parent)))
    found = sorted(map(Path, glob.glob(str(path), recursive=True)))
    # `**` gives folders and all that is in them.
    inside = {folder for folder in found if folder.is_dir()}
    top = [match for match in found if not inside.intersection(match.parents)]
    if not top:
        raise UserError(f"--data {path}: expected a pattern of files or folders, nothing matches it")
    return [(base, match) for match in top]


def _looked_at(label: str, found: Sequence[tuple[str, Path]]) -> Source:
    files, others = [], 0
    for name, path in found:
        file = _look_at(name, path)
        if file is None:
            others += 1
        else:
            files.append(file)
    return Source(label, files, others)


def _look_at(name: str, path: Path) -> SourceFile | None:
    """The file with its hash; None if it is empty, or is no rows and not text."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    compressed = suffixes[-1:] == [".gz"]
    last = suffixes[-2:-1] if compressed else suffixes[-1:]
    kind = Kind.JSONL if last == [".jsonl"] else Kind.TEXT
    if suffixes[-1:] == [".parquet"]:
        kind = Kind.PARQUET
    try:
        size, modified = stamp(path)
        if size == 0:
            return None
        if kind is Kind.TEXT:
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            if _as_text(path, content, compressed) is None:
                return None
        else:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"--data {path}: cannot be read: {error.strerror}") from error
    return SourceFile(path, name, kind, compressed, digest, size, modified)


def read_text_file(file: SourceFile) -> str:
    """The text of a file of kind TEXT."""
    try:
        text = _as_text(file.path, file.path.read_bytes(), file.compressed)
    except OSError as error:
        raise UserError(f"--data {file.path}: cannot be read: {error.strerror}") from error
    file.check_unchanged()
    assert text is not None  # it was looked at, and is the same
    return text


def _as_text(path: Path, content: bytes, compressed: bool) -> str | None:
    """None if this is empty, holds a NUL, is not UTF-8, or was said to be compressed and is not."""
    if compressed:
        if not content.startswith(_GZIP):
            return None
        try:
            content = gzip.decompress(content)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"--data {path}: the compressed file is damaged: {error}") from error
    if not content or b"\0" in content:
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return None
