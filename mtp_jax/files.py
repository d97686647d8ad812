"""Reading and writing small files: errors name the file, writes are whole."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mtp_jax.errors import UserError


def read_text(path: Path) -> str:
    """The file's text, line ends as they are.

    Raises:
      UserError: if it cannot be read or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        line = 1 + error.object.count(b"\n", 0, error.start)
        raise UserError(f"{path}:{line}: expected UTF-8 text, got other bytes at offset {error.start}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      UserError: if it cannot be read, is not JSON, or holds something other than an object.
    """
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSONDecodeError alone: integers may be too long
        raise UserError(f"{path}: expected JSON, got something else: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


@contextmanager
def replacing(path: Path, suffix: str = ".partial") -> Iterator[Path]:
    """Yields a name beside the final one to write to, and renames it at the end: no half-written file is ever seen.

    If writing fails, what was written is removed and the final name stays as it was. A link stays one: what it names is
    replaced. A device or a pipe (/dev/null, say) is written to, since another file in its place would not be it.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        yield path
        return
    path = path.resolve()
    partial = path.with_name(path.name + suffix)
    try:
        yield partial
        os.replace(partial, path)
    finally:
        with suppress(OSError):  # there is none if all went well
            partial.unlink()


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file, whole or not at all."""
    with replacing(path) as partial:
        partial.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8, whole or not at all, line ends as they are."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON object in the published style: two spaces of indent, non-ASCII kept, a last newline.

    Names of files may have no UTF-8 form; an object that holds one is written in ASCII, which can say them.
    """
    try:
        write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    except UnicodeEncodeError:
        write_text(path, json.dumps(value, indent=2) + "\n")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yields a folder beside `out` that takes its name at the end, or goes away if anything fails.

    Raises:
      UserError: if there is something at `out` other than an empty folder, or it cannot be written.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out}: expected a new or an empty folder, got one with files in it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror}") from error
    try:
        yield folder
        umask = os.umask(0)
        os.umask(umask)
        folder.chmod(0o777 & ~umask)  # mkdtemp makes it private
        os.replace(folder, out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
