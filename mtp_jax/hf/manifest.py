"""What a checkpoint folder holds: its tensor files, their index, and the files beside them.

The folder may come from anyone, so nothing outside it is read: not through the index, not through links.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mtp_jax.config import ModelConfig
from mtp_jax.errors import UserError
from mtp_jax.files import read_json_object
from mtp_jax.hf.families import Naming, slots
from mtp_jax.hf.rules import Slot
from mtp_jax.hf.tensor_file import MAX_HEADER, Entry, TensorFile, read_header

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"

WEIGHT_SUFFIXES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".npz", ".npy", ".tar"),
    *(".pkl", ".pickle", ".joblib"),
)
"""Files that hold weights, or run code when read; neither is a side file."""

MAX_NAMED = 60
"""Names listed for one kind of fault; the rest are counted."""


@dataclass(frozen=True)
class Manifest:
    """Where a loaded model's tensors came from: all that `save_checkpoint` needs to write the same files again.

    Attributes:
      folder: the source; what was not trained is copied from there when saving.
      config: of the loaded model.
      naming: how its tensors are named.
      files: headers, one a file.
      index: the index file as it stands, or None if there is none.
      carried: tensors that are no part of the model, copied as they are.
      copies: tensors that repeat another, by name, and which one; written from that when saving.
    """

    folder: Path
    config: ModelConfig
    naming: Naming
    files: tuple[TensorFile, ...]
    index: bytes | None
    carried: frozenset[str]
    copies: Mapping[str, str]

    @property
    def slots(self) -> dict[str, Slot]:
        """What each tensor is to the loaded model, by published name."""
        return slots(self.config, self.naming)

    @property
    def head_names(self) -> list[str]:
        """Names of the head's tensors that the files hold, whether loaded or carried along."""
        is_head = self.naming.family.is_head
        return [name for file in self.files for name in file.entries if is_head(self.config, name)]


def list_some(names: list[str]) -> str:
    """Names for an error message: all of them, up to a bound."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def raise_faults(folder: Path, faults: list[str]) -> None:
    """Raises:
    UserError: with all faults in one line, up to a bound, if there are any.
    """
    if faults:
        more = f"; and {len(faults) - MAX_NAMED} more faults" if len(faults) > MAX_NAMED else ""
        raise UserError(f"{folder}: " + "; ".join(faults[:MAX_NAMED]) + more)


def read_files(folder: Path) -> tuple[tuple[TensorFile, ...], bytes | None, list[str]]:
    """Headers of all tensor files, the index as bytes (or None), and faults found so far.

    Every `*.safetensors` in the folder counts, also one that the index leaves out: some tools add the head in a file
    of its own and forget the index. Tensors that such a file repeats are then found twice, which is a fault.

    Raises:
      UserError: if there are no tensor files, or one of them, or the index, cannot be read.
    """
    present = sorted(path.name for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    index_path = folder / INDEX
    if index_path.is_file():
        weight_map, raw = _read_index(folder)
        listed = sorted(set(weight_map.values()))
        faults = []
        files, unreadable = _read_headers(folder, sorted({*listed, *present}))
        for file in files:
            if file.name not in listed:
                continue
            inside = {name for name, where in weight_map.items() if where == file.name}
            if lacking := sorted(inside - file.entries.keys()):
                faults.append(f"{INDEX} puts into {file.name}, which lacks them: {list_some(lacking)}")
            if unlisted := sorted(file.entries.keys() - inside):
                faults.append(f"{file.name} holds, unlike {INDEX} says: {list_some(unlisted)}")
        if unreadable:
            raise UserError("; ".join(unreadable + faults))
        return files, raw, faults
    if not present:
        others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
        hint = f"; {', '.join(others)}: this form can run code and is not read, convert it" if others else ""
        raise UserError(f"{folder}: expected *.safetensors files, got none{hint}")
    files, unreadable = _read_headers(folder, present)
    if unreadable:
        raise UserError("; ".join(unreadable))
    return files, None, []


def _read_index(folder: Path) -> tuple[dict[str, str], bytes]:
    path = safe_path(folder, INDEX)
    if path.stat().st_size > MAX_HEADER:
        raise UserError(f"{path}: expected at most {MAX_HEADER} bytes, got {path.stat().st_size}")
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{path}: expected a weight_map from tensors to files, got {type(weight_map).__name__}")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            raise UserError(f"{path}: {tensor}: expected the name of a safetensors file, got {name!r}")
    return weight_map, path.read_bytes()


def _read_headers(folder: Path, names: list[str]) -> tuple[tuple[TensorFile, ...], list[str]]:
    files, unreadable = [], []
    for name in names:
        try:
            files.append(read_header(safe_path(folder, name), name))
        except UserError as error:
            unreadable.append(str(error))
    return tuple(files), unreadable


def safe_path(folder: Path, name: str) -> Path:
    """The file of that name inside the folder.

    A link may lead to another file of the folder or, in a model hub's cache (`snapshots/REVISION/`), to the `blobs`
    beside it.

    Raises:
      UserError: if the name is absolute, climbs with `..`, or leads out of the folder through a link.
    """
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts or "\\" in name or "\0" in name or not relative.parts:
        raise UserError(f"{folder}: expected the name of a file inside the folder, got {name!r}")
    root = folder.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    path = folder / relative
    try:
        target = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a name that no file can have
        raise UserError(f"{path}: cannot be read: {error}") from error
    if not any(target.is_relative_to(place) for place in allowed):
        raise UserError(f"{path}: leads out of the folder, to {target}; put a copy in its place")
    return path


def owners(files: tuple[TensorFile, ...]) -> tuple[dict[str, tuple[TensorFile, Entry]], list[str]]:
    """Which file holds each tensor, and a fault for each one that is in two files."""
    found: dict[str, tuple[TensorFile, Entry]] = {}
    faults = []
    for file in files:
        for name, entry in file.entries.items():
            if name in found:
                faults.append(f"written twice: {name}, in {found[name][0].name} and {file.name}")
            else:
                found[name] = (file, entry)
    return found, faults


def side_files(folder: Path) -> Iterator[str]:
    """Names, relative to the folder, of the files that go with the weights: tokenizer, configs, templates."""
    for directory, directories, names in os.walk(folder):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        for name in sorted(names):
            path = Path(directory) / name
            relative = path.relative_to(folder).as_posix()
            weights = path.suffix.lower() in WEIGHT_SUFFIXES or name.endswith(".index.json")
            if path.is_file() and not weights and not name.startswith("."):
                yield relative


def index_bytes(weight_map: dict[str, str], total_size: int) -> bytes:
    """The index of a checkpoint in several files, in the published form."""
    values = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
