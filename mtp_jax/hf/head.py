"""The head's tensors apart from the trunk's: a file of their own, and what names it in the rest of the folder.

Qwen's heads are named alike (`mtp.`) whatever the prefix of the trunk, so one file serves both layouts. GLM's are named
by the layer that they are, so one fits trunks of its own depth.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from mtp_jax.config import ModelConfig
from mtp_jax.errors import UserError
from mtp_jax.files import read_json_object, replacing, write_json
from mtp_jax.hf.families import Naming, slots
from mtp_jax.hf.manifest import CONFIG, INDEX, Manifest, index_bytes, list_some, safe_path
from mtp_jax.hf.rules import Slot
from mtp_jax.hf.tensor_file import Entry, TensorFile, make_header

COPIES = "copies"
"""Key of a head file's metadata: names, with commas, of the copies of other tensors that its checkpoint had."""
_ALONE = "model.safetensors"

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]  # stored type and published shape by name
WriteTensor = Callable[[BinaryIO, str, Entry], None]


def head_slots(config: ModelConfig, naming: Naming) -> dict[str, Slot]:
    """What each tensor of the head is to a model."""
    every = slots(config, naming)
    return {name: slot for name, slot in every.items() if naming.family.is_head(config, name)}


def traits(config: ModelConfig) -> dict[str, str]:
    """What changes the head's computation but no shape; goes along, as metadata, with a head on its own."""
    values: dict[str, Any] = {
        "rotary_dim": config.attention.rotary_dim,
        "rope_theta": float(config.attention.rope_theta),
        "rms_norm_eps": config.norm_eps,
        "head_reads": config.head_reads,
    }
    if moe := config.moe:
        values |= {
            "experts_per_token": moe.experts_per_token,
            "normalise": moe.normalise,
            "scaling": float(moe.scaling),
            "num_groups": moe.num_groups,
            "groups_per_token": moe.groups_per_token,
        }
    return {name: str(value) for name, value in values.items()}


def write_head_file(
    path: Path, tensors: Tensors, write: WriteTensor, metadata: Mapping[str, str] | None = None
) -> TensorFile:
    """Writes a safetensors file, whole or not at all; `write(file, name, entry)` writes one tensor's bytes."""
    header, entries = make_header(tensors, metadata)
    with replacing(path) as partial, open(partial, "wb") as target:
        target.write(len(header).to_bytes(8, "little"))
        target.write(header)
        for name, entry in entries.items():
            write(target, name, entry)
    return TensorFile(path.name, header, entries)


def add_head(folder: Path, trunk: Manifest, tensors: Tensors, write: WriteTensor) -> None:
    """Gives a head to a folder that holds a copy of a trunk's files: one tensor file more, named in the index (which
    is made if there was none), and declared in config.json.

    A file named model.safetensors gets another name: where there is one, `transformers` looks into no other and reads
    no index.
    """
    names = {file.name: file.name for file in trunk.files}
    if _ALONE in names:
        names[_ALONE] = _unused("model-00001-of-00002.safetensors", names)
        (folder / _ALONE).rename(folder / names[_ALONE])
    added = write_head_file(folder / _unused("mtp.safetensors", names), tensors, write)
    (folder / INDEX).write_bytes(_grown_index(trunk, names, added))
    if key := trunk.naming.family.head_key:
        values = read_json_object(safe_path(trunk.folder, CONFIG))
        text = values.get("text_config", values)
        num_layers = trunk.naming.family.num_head_layers(trunk.config, tensors)
        if text.get(key) != num_layers:
            text[key] = num_layers
            write_json(folder / CONFIG, values)


def _unused(name: str, taken: Mapping[str, str]) -> str:
    while name in taken:
        name = f"_{name}"
    return name


def _grown_index(trunk: Manifest, names: Mapping[str, str], added: TensorFile) -> bytes:
    """The trunk's index, in its order and with what else its metadata says, for files under these names."""
    weight_map = {name: names[file.name] for file in trunk.files for name in file.entries}
    weight_map |= {name: added.name for name in added.entries}
    total = sum(entry.end - entry.begin for file in (*trunk.files, added) for entry in file.entries.values())
    if trunk.index is None:
        return index_bytes(weight_map, total)
    values: dict[str, Any] = json.loads(trunk.index)
    values["weight_map"] = {name: weight_map[name] for name in values["weight_map"]} | weight_map
    metadata = values.get("metadata")
    values["metadata"] = {**(metadata if isinstance(metadata, dict) else {}), "total_size": total}
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def check_head(
    where: str, found: Tensors, source: Mapping[str, str], trunk: Manifest, trunk_types: set[str]
) -> list[str]:
    """Faults of a head for a trunk: tensors missing or too many, shapes, stored types, settings.

    Args:
      source: the head's `traits`, as far as they are known.
    """
    family = trunk.naming.family
    config = replace(trunk.config, num_mtp_layers=family.num_head_layers(trunk.config, found) or 1)
    expected = head_slots(config, family.naming(config, found))
    faults = []
    if missing := sorted(expected.keys() - found.keys()):
        faults.append(f"{where} lacks {list_some(missing)}")
    if unexpected := sorted(found.keys() - expected.keys()):
        faults.append(f"{where} has, unlike a head of this trunk: {list_some(unexpected)}")
    for name in sorted(expected.keys() & found.keys()):
        dtype, shape = found[name]
        if shape != expected[name].shape:
            faults.append(f"{name}: the trunk's {CONFIG} asks for {list(expected[name].shape)}, got {list(shape)}")
        if dtype not in trunk_types:
            faults.append(f"{name}: expected a type of the trunk ({', '.join(sorted(trunk_types))}), got {dtype}")
    for key, value in traits(trunk.config).items():
        if source.get(key, value) != value:
            faults.append(f"{key}: the trunk's is {value}, the head was trained with {source[key]}")
    return faults


def check_no_head(trunk: Manifest) -> None:
    """Raises:
    UserError: if the checkpoint has tensors of a head already.
    """
    if names := trunk.head_names:
        raise UserError(f"{trunk.folder}: expected a trunk without a head, found {list_some(sorted(names))}")
