"""Text to packed batches: which files, which of them are held out, how documents become rows.

Rule of packing: an epoch's documents, shuffled, each followed by the end token, are laid end to end and cut every
`sequence_length` tokens; the rows are then shuffled too, so that a batch mixes documents. A document that is cut
goes on in another row as a segment of its own, which starts from an empty memory. The last row of an epoch is filled
up with padding, segment 0.
"""

import fnmatch
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from mtp_jax.errors import UserError
from mtp_jax.text import Tokenizer

PADDING = 0  # segment id of padding; documents count from 1

# Folders of the standard library that hold tests, installed packages or build leftovers.
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Document(NamedTuple):
    """A text and its name: the path relative to the data path that it was found under, with forward slashes."""

    name: str
    text: str


class Batch(NamedTuple):
    """Packed rows. A change of segment id within a row starts a new document; segment 0 is padding."""

    tokens: Int[np.ndarray, "B T"]
    segment_ids: Int[np.ndarray, "B T"]
    loss_mask: Bool[np.ndarray, "B T"]  # whether a token may be a target; False on padding

    @property
    def num_tokens(self) -> int:
        """Input tokens that are not padding."""
        return int(np.count_nonzero(self.segment_ids != PADDING))


class TokenStream(NamedTuple):
    """Documents as ids, end to end; document d is `tokens[starts[d] : starts[d + 1]]` and ends with the end token."""

    tokens: Int[np.ndarray, " num_tokens"]
    starts: Int[np.ndarray, " num_documents_and_one"]


def read_documents(paths: Sequence[str | Path], leave_out: Path | None = None) -> tuple[list[Document], int]:
    """Every UTF-8 text without NUL among some files and, recursively and sorted, in some folders.

    Args:
      leave_out: a folder that is not read where it lies in one of the folders: the run's own, which changes.

    Returns:
      the documents that are not empty, and the number of other files.

    Raises:
      UserError: if a path does not exist or cannot be read, or there is no text under any of them.
    """
    documents, others = [], 0
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"--data {path}: expected a file or a folder, there is none")
        files = [path] if path.is_file() else _files_below(path)
        if leave_out is not None and not path.is_file():
            below = leave_out.resolve()
            files = [file for file in files if not file.parent.resolve().is_relative_to(below)]
        for file in files:
            text = _read_text(file)
            if text is None:
                others += 1
                continue
            name = file.name if path.is_file() else file.relative_to(path).as_posix()
            documents.append(Document(name, text))
    if not documents:
        shown = ", ".join(map(str, paths))
        raise UserError(f"--data {shown}: expected UTF-8 text, found none ({others} other files)")
    return documents, others


def read_standard_library(patterns: Sequence[str]) -> tuple[list[Document], int]:
    """The running Python's own library sources, without tests and without installed packages.

    Args:
      patterns: see `matches`.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    documents, others = [], 0
    for file in _files_below(root, leave_out=_NOT_LIBRARY):
        name = file.relative_to(root).as_posix()
        if file.suffix != ".py" or not matches(name, patterns):
            continue
        text = _read_text(file)
        if text is None:
            others += 1
        else:
            documents.append(Document(name, text))
    if not documents:
        raise UserError(f"stdlib_files {','.join(patterns)}: no source in {root} matches; name a path with --data")
    return documents, others


def _files_below(root: Path, leave_out: Iterable[str] = ()) -> list[Path]:
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - set(leave_out))
        found += [Path(folder, name) for name in files]
    return sorted(file for file in found if file.is_file())


def _read_text(file: Path) -> str | None:
    """The file's text; None if it is empty or not UTF-8 or holds a NUL."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"--data {file}: cannot be read: {error.strerror}") from error
    if not content or b"\0" in content:
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return None


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches one of the shell-style patterns and none of those after a `!`.

    `*` also crosses `/`: `json/*` is a package with all that is in it.
    """
    wanted = [pattern for pattern in patterns if not pattern.startswith("!")]
    unwanted = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    return any(fnmatch.fnmatchcase(name, p) for p in wanted) and not any(fnmatch.fnmatchcase(name, p) for p in unwanted)


def split_held_out(documents: Sequence[Document], patterns: Sequence[str]) -> tuple[list[Document], list[Document]]:
    """Documents to train on, and those whose name matches the patterns.

    Raises:
      UserError: if nothing is left to train on.
    """
    held_out = [document for document in documents if matches(document.name, patterns)]
    kept = [document for document in documents if not matches(document.name, patterns)]
    if not kept:
        raise UserError(f"held_out {','.join(patterns)}: matches every document, none is left to train on")
    return kept, held_out


def fingerprint(documents: Iterable[Document]) -> str:
    """SHA-256 over names and texts, in order: a run continues only on the data it began with."""
    digest = hashlib.sha256()
    for document in documents:
        for part in document:
            content = part.encode("utf-8", "surrogateescape")  # names of files may be any bytes
            digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def tokenize(
    tokenizer: Tokenizer, documents: Sequence[Document], progress: Callable[[int], None] = lambda _: None
) -> TokenStream:
    """Ids of documents, each followed by the end token.

    Args:
      progress: called with the number of documents done.

    Raises:
      UserError: if the tokenizer has no end token.
    """
    end = tokenizer.end_id
    if end is None:
        raise UserError("the tokenizer has no token that ends a document")
    pieces: list[np.ndarray] = []
    for first in range(0, len(documents), 64):
        texts = [document.text for document in documents[first : first + 64]]
        pieces += [np.asarray([*ids, end], np.int32) for ids in tokenizer.encode_batch(texts)]
        progress(len(pieces))
    lengths = [len(piece) for piece in pieces]
    return TokenStream(np.concatenate(pieces), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


class PackedRows:
    """Rows of an endlessly repeated, reshuffled token stream, addressed by position, so that resuming needs only that.

    Row r of the run belongs to epoch r // rows_per_epoch; an epoch's order follows from the seed and its number.
    """

    def __init__(self, stream: TokenStream, sequence_length: int, seed: int, *, shuffle: bool = True) -> None:
        self._stream = stream
        self._length = sequence_length
        self._seed = seed
        self._shuffle = shuffle
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def rows_per_epoch(self) -> int:
        """Rows that hold every token once."""
        return -(-len(self._stream.tokens) // self._length)

    def batch(self, position: int, batch_size: int) -> Batch:
        """Rows position .. position + batch_size - 1; they may straddle epochs."""
        rows = [divmod(position + b, self.rows_per_epoch) for b in range(batch_size)]
        for epoch in sorted(set(self._epochs) - {epoch for epoch, _ in rows}):
            del self._epochs[epoch]
        tokens, segments = zip(*(self._row(epoch, row) for epoch, row in rows), strict=True)
        segment_ids = np.stack(segments)
        return Batch(np.stack(tokens), segment_ids, segment_ids != PADDING)

    def _row(self, epoch: int, row: int) -> tuple[np.ndarray, np.ndarray]:
        if epoch not in self._epochs:
            self._epochs[epoch] = self._lay_out(epoch)
        tokens, segments = self._epochs[epoch]
        return tokens[row], segments[row]

    def _lay_out(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """An epoch's rows [rows_per_epoch, T]: tokens and segment ids."""
        tokens, starts = self._stream
        order = np.arange(len(starts) - 1)
        random = np.random.default_rng([self._seed, epoch])
        if self._shuffle:
            random.shuffle(order)
        laid = np.zeros(self.rows_per_epoch * self._length, np.int32)
        segments = np.full_like(laid, PADDING)
        laid[: len(tokens)] = np.concatenate([tokens[starts[d] : starts[d + 1]] for d in order])
        lengths = np.diff(starts)[order]
        segments[: len(tokens)] = np.repeat(np.arange(1, len(order) + 1, dtype=np.int32), lengths)
        rows = np.arange(self.rows_per_epoch)
        if self._shuffle:
            random.shuffle(rows)
        shape = (self.rows_per_epoch, self._length)
        return laid.reshape(shape)[rows], segments.reshape(shape)[rows]
