"""Puts a head back on a trunk that lost it, on the files alone: no weight is loaded or changed."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mtp_jax.errors import UserError
from mtp_jax.files import new_folder
from mtp_jax.hf.head import Tensors, add_head, check_head, check_no_head, traits
from mtp_jax.hf.load import read_config, read_manifest
from mtp_jax.hf.manifest import CONFIG, owners, raise_faults, read_files, safe_path, side_files
from mtp_jax.hf.rules import slots
from mtp_jax.hf.tensor_file import Entry, Reader, TensorFile, read_header

_HEAD_ANYWHERE = re.compile(r"(?:model\.)?(?:language_model\.)?(mtp\..*)")
"""Published checkpoints say `mtp.`; tools that wrap the whole model put its own prefix before that too."""


@dataclass(frozen=True)
class _Head:
    """Where a head's tensors are: by published name, the file, and the tensor's name in it."""

    folder: Path
    places: Mapping[str, tuple[TensorFile, str]]
    traits: Mapping[str, str]

    @property
    def tensors(self) -> Tensors:
        entries = {name: file.entries[inside] for name, (file, inside) in self.places.items()}
        return {name: (entry.dtype, entry.shape) for name, entry in entries.items()}

    def write(self, target: BinaryIO, name: str, _entry: Entry) -> None:
        """Copies one tensor's bytes."""
        file, inside = self.places[name]
        with Reader(safe_path(self.folder, file.name), file) as reader:
            reader.check_header()
            target.writelines(reader.chunks(inside))


def graft_head(trunk: Path | str, head: Path | str, out: Path | str) -> list[str]:
    """Writes a checkpoint: the trunk's files as they are, and one file more that holds the head's tensors.

    The trunk's tensor files are hard links where the file system has them, else copies; its other files are copied.
    `model.safetensors.index.json` (made if there was none) and config.json name what was added.

    Args:
      trunk: a checkpoint without a head, whether or not its config.json declares one.
      head: a checkpoint that has one, or a safetensors file that holds one, alone or among other tensors.
      out: must not exist, or be an empty folder.

    Returns:
      names of the head's tensors.

    Raises:
      UserError: if the trunk has a head, or the head is not whole or not one for this trunk, or a file is missing,
        damaged or leads out of its folder, or `out` has files in it.
    """
    trunk, head, out = Path(trunk), Path(head), Path(out)
    manifest = read_manifest(trunk, trunk_only=True)
    check_no_head(manifest)
    source = _read_head(head)
    own = slots(manifest.config, manifest.prefix)
    types = {entry.dtype for file in manifest.files for name, entry in file.entries.items() if name in own}
    raise_faults(trunk, check_head(str(head), source.tensors, source.traits, manifest, types))
    with new_folder(out.resolve()) as folder:
        for file in manifest.files:
            _link_or_copy(safe_path(trunk, file.name), folder / file.name)
        for name in side_files(trunk):
            _copy(safe_path(trunk, name), folder / name)
        add_head(folder, manifest, source.tensors, source.write)
        read_manifest(folder)  # the result is what is meant: names, shapes, index, config
    return list(source.places)


def _read_head(path: Path) -> _Head:
    if path.is_dir():
        folder = path
        files, _, faults = read_files(folder)
        known = traits(read_config(folder)) if (folder / CONFIG).is_file() else {}
    elif path.suffix == ".safetensors":
        folder, faults = path.parent, []
        files = (read_header(path, path.name),)
        known = json.loads(files[0].header).get("__metadata__", {})
    else:
        raise UserError(f"{path}: expected a checkpoint folder or a .safetensors file, for the head")
    places: dict[str, tuple[TensorFile, str]] = {}
    found, twice = owners(files)
    for inside, (file, _) in found.items():
        if match := _HEAD_ANYWHERE.fullmatch(inside):
            if match[1] in places:
                twice.append(f"written twice: {match[1]}, as {places[match[1]][1]} and {inside}")
            places[match[1]] = (file, inside)
    raise_faults(path, faults + twice)
    if not places:
        raise UserError(f"{path}: expected the tensors of a head (mtp.*), found none among {len(found)}")
    return _Head(folder, places, known)


def _link_or_copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
