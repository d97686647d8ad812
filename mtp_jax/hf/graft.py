"""Puts a head back on a trunk that lost it, on the files alone: no weight is loaded or changed."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from mtp_jax.errors import UserError
from mtp_jax.files import new_folder
from mtp_jax.hf.head import COPIES, Tensors, add_head, check_head, check_no_head, head_slots, traits
from mtp_jax.hf.load import read_config, read_manifest
from mtp_jax.hf.manifest import CONFIG, Manifest, owners, raise_faults, read_files, safe_path, side_files
from mtp_jax.hf.tensor_file import Entry, Reader, TensorFile, read_header

_WRAPPERS = ("", "model.", "language_model.", "model.language_model.")
"""What tools that wrap the whole model put before the published names."""


@dataclass(frozen=True)
class _Place:
    """Where a tensor is: in which file, and by what name."""

    folder: Path
    file: TensorFile
    name: str

    @property
    def entry(self) -> Entry:
        return self.file.entries[self.name]


@dataclass(frozen=True)
class _Head:
    """Where a head's tensors are, by published name, and what is known of it beside them."""

    places: Mapping[str, _Place]
    traits: Mapping[str, str]

    @property
    def tensors(self) -> Tensors:
        return {name: (place.entry.dtype, place.entry.shape) for name, place in self.places.items()}

    def write(self, target: BinaryIO, name: str, _entry: Entry) -> None:
        """Copies one tensor's bytes."""
        place = self.places[name]
        with Reader(safe_path(place.folder, place.file.name), place.file) as reader:
            reader.check_header()
            target.writelines(reader.chunks(place.name))


def graft_head(trunk: Path | str, head: Path | str, out: Path | str) -> list[str]:
    """Writes a checkpoint: the trunk's files as they are, and one file more that holds the head's tensors.

    The trunk's tensor files are hard links where the file system has them, else copies; its other files are copied.
    `model.safetensors.index.json` (made if there was none) and config.json name what was added. Where the head comes
    with copies of the vocabulary matrices, or its file says that it had some, it gets copies of this trunk's.

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
    source, copies = _read_head(head, manifest)
    found = {name: _Place(trunk, file, name) for file in manifest.files for name in file.entries}
    types = {found[name].entry.dtype for name in manifest.slots}
    raise_faults(trunk, check_head(str(head), source.tensors, source.traits, manifest, types))
    copied = {name: found[original] for name, original in copies.items()}
    source = replace(source, places={**source.places, **copied})
    with new_folder(out.resolve()) as folder:
        for file in manifest.files:
            _link_or_copy(safe_path(trunk, file.name), folder / file.name)
        for name in side_files(trunk):
            _copy(safe_path(trunk, name), folder / name)
        add_head(folder, manifest, source.tensors, source.write)
        read_manifest(folder)  # the result is what is meant: names, shapes, index, config
    return list(source.places)


def _read_head(path: Path, trunk: Manifest) -> tuple[_Head, dict[str, str]]:
    """A head without its copies of other tensors, and by name what those would be copies of."""
    family, config, known = trunk.naming.family, trunk.config, {}
    if path.is_dir():
        folder = path
        files, _, faults = read_files(folder)
        if (folder / CONFIG).is_file():
            config = read_config(folder)
            known = traits(config)
    elif path.suffix == ".safetensors":
        folder, faults = path.parent, []
        files = (read_header(path, path.name),)
        known = json.loads(files[0].header).get("__metadata__", {})
    else:
        raise UserError(f"{path}: expected a checkpoint folder or a .safetensors file, for the head")
    places: dict[str, _Place] = {}
    found, twice = owners(files)
    for inside, (file, _) in found.items():
        unwrapped = (inside.removeprefix(wrapper) for wrapper in _WRAPPERS)
        name = next((name for name in unwrapped if family.is_head(config, name)), None)
        if name is None:
            continue
        if name in places:
            twice.append(f"written twice: {name}, as {places[name].name} and {inside}")
        places[name] = _Place(folder, file, inside)
    raise_faults(path, faults + twice)
    if not places:
        example = next(iter(head_slots(replace(trunk.config, num_mtp_layers=1), trunk.naming)))
        raise UserError(f"{path}: expected the tensors of a head ({example} and others), found none among {len(found)}")
    had = [name for name in known.get(COPIES, "").split(",") if family.is_head(trunk.config, name)]
    copies = trunk.naming.copies(trunk.config, [*places, *had])
    return _Head({name: place for name, place in places.items() if name not in copies}, known), copies


def _link_or_copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
