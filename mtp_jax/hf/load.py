"""Published checkpoint -> parameters, one tensor at a time, with nothing missing, left over or guessed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from mtp_jax.config import ModelConfig
from mtp_jax.errors import UserError
from mtp_jax.files import read_json_object
from mtp_jax.hf.config_json import config_from_json
from mtp_jax.hf.manifest import CONFIG, Manifest, list_some, owners, raise_faults, read_files, safe_path
from mtp_jax.hf.rules import (
    CARRIED,
    HEAD,
    MULTIMODAL_PREFIX,
    OUTPUT_MATRIX,
    TEXT_PREFIX,
    Slot,
    converted,
    parameter_dtype,
    slots,
    unflatten,
)
from mtp_jax.hf.tensor_file import NUMPY_DTYPES, Entry, Reader, TensorFile


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model.

    Attributes:
      config: what it is; without a head if it was loaded with `trunk_only`.
      params: nested dict, as `init_params` gives it.
      manifest: what `save_checkpoint` needs to give the same files back.
      folder: where it came from.
    """

    config: ModelConfig
    params: dict
    manifest: Manifest
    folder: Path


def load_checkpoint(folder: Path | str, trunk_only: bool = False, dtype: DTypeLike = jnp.float32) -> Checkpoint:
    """Loads a Qwen3.5 dense checkpoint in the published layout.

    Accepts both prefixes, tied and untied matrices, one file or several with or without an index, and bfloat16,
    float32 and float16 in any mixture. A vision tower (`model.visual.*`) is carried along untouched.

    Args:
      trunk_only: load without the MTP head, on purpose; its tensors, if any, are carried along.
      dtype: of the matrices, float32 or bfloat16. Scales, A_log and dt_bias are float32 in any case.

    Raises:
      UserError: if a file is missing, damaged or leads out of the folder, or if tensors are missing, unexpected,
        written twice or of another shape or type than config.json says; all of them are named together.
    """
    if np.dtype(dtype) not in (np.dtype(np.float32), np.dtype(jnp.bfloat16)):
        raise ValueError(f"dtype must be float32 or bfloat16, got {dtype}")
    manifest = read_manifest(folder, trunk_only)
    return Checkpoint(manifest.config, read_params(manifest, dtype), manifest, Path(folder))


def read_manifest(folder: Path | str, trunk_only: bool = False) -> Manifest:
    """All of a checkpoint but the weights: config and headers, checked against each other.

    Raises:
      UserError: as `load_checkpoint`.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: expected a checkpoint folder, got {'a file' if folder.exists() else 'nothing'}")
    config = read_config(folder, trunk_only)
    files, index, faults = read_files(folder)
    found, twice = owners(files)
    prefix = MULTIMODAL_PREFIX if any(name.startswith(MULTIMODAL_PREFIX) for name in found) else TEXT_PREFIX
    expected = slots(config, prefix)
    carried = {
        name for name in found.keys() - expected.keys() if CARRIED.match(name) or (trunk_only and HEAD.match(name))
    }
    alias = {OUTPUT_MATRIX} & found.keys() if config.tie_embeddings else set()
    faults += twice + _compare(expected, found, carried | alias, config)
    raise_faults(folder, faults)
    if alias:
        _check_alias(folder, found, f"{prefix}embed_tokens.weight")
    return Manifest(folder.absolute(), config, prefix, files, index, frozenset(carried))


def read_params(manifest: Manifest, dtype: DTypeLike = jnp.float32) -> dict:
    """The weights of a checkpoint whose headers are read, as `load_checkpoint` gives them.

    Raises:
      UserError: if a file is gone, truncated or no longer the one whose header was read.
    """
    expected = slots(manifest.config, manifest.prefix)
    leaves: dict[str, jax.Array] = {}
    for file in manifest.files:
        with Reader(safe_path(manifest.folder, file.name), file) as reader:
            reader.check_header()
            for name in file.entries:
                if slot := expected.get(name):
                    array = from_stored(reader.array(name), slot, parameter_dtype(slot.path, jnp.dtype(dtype)))
                    leaves[slot.path] = jnp.asarray(array)
    return unflatten(leaves)


def read_config(folder: Path, trunk_only: bool = False) -> ModelConfig:
    """The model that a folder's config.json describes, without its head if `trunk_only`.

    Raises:
      UserError: if there is no such file, or it describes something that is not built here.
    """
    path = safe_path(folder, CONFIG)
    if not path.is_file():
        raise UserError(f"{path}: expected the model's config, got nothing")
    config = config_from_json(read_json_object(path), str(path))
    return replace(config, num_mtp_layers=0) if trunk_only else config


def _compare(
    expected: Mapping[str, Slot],
    found: Mapping[str, tuple[TensorFile, Entry]],
    allowed: set[str],
    config: ModelConfig,
) -> list[str]:
    """Faults: what the files lack, what they have too much, and what does not fit."""
    faults = []
    missing = [name for name in expected if name not in found]
    if missing:
        hint = ""
        if all(map(HEAD.match, missing)):
            hint = (
                f" ({CONFIG} declares an MTP head; scripts/graft_head.py puts back a head that another tool has lost; "
                "to load the trunk alone on purpose, use --trunk-only)"
            )
        faults.append(f"missing: {list_some(missing)}{hint}")
    unexpected = sorted(found.keys() - expected.keys() - allowed)
    if unexpected:
        hint = ""
        if not config.num_mtp_layers and any(map(HEAD.match, unexpected)):
            hint = f" ({CONFIG} declares no MTP head: mtp_num_hidden_layers is 0 or absent)"
        places = [f"{name} in {found[name][0].name}" for name in unexpected]
        faults.append(f"unexpected: {list_some(places)}{hint}")
    wrong_shape, wrong_type = [], []
    for name in expected.keys() & found.keys():
        file, entry = found[name]
        if entry.shape != expected[name].shape:
            wrong_shape.append(
                f"{name} in {file.name} (expected {list(expected[name].shape)}, got {list(entry.shape)})"
            )
        if entry.dtype not in NUMPY_DTYPES:
            wrong_type.append(f"{name} in {file.name} (expected one of {', '.join(NUMPY_DTYPES)}, got {entry.dtype})")
    if wrong_shape:
        faults.append(f"of another shape than {CONFIG} says: {list_some(sorted(wrong_shape))}")
    if wrong_type:
        faults.append(f"of a type that is not read: {list_some(sorted(wrong_type))}")
    return faults


def _check_alias(folder: Path, found: Mapping[str, tuple[TensorFile, Entry]], embedding: str) -> None:
    """A tied checkpoint may repeat the embedding as its output matrix, if it is the same one."""
    (file_a, a), (file_b, b) = found[OUTPUT_MATRIX], found[embedding]
    same = a.dtype == b.dtype and a.shape == b.shape
    if same:
        with Reader(folder / file_a.name, file_a) as left, Reader(folder / file_b.name, file_b) as right:
            chunks = zip(left.chunks(OUTPUT_MATRIX), right.chunks(embedding), strict=True)
            same = all(x == y for x, y in chunks)
    if not same:
        raise UserError(
            f"{folder}: {CONFIG} says tie_word_embeddings, but {OUTPUT_MATRIX} in {file_a.name} is not equal to "
            f"{embedding} in {file_b.name}"
        )


def from_stored(tensor: np.ndarray, slot: Slot, dtype: np.dtype) -> np.ndarray:
    """A parameter from the tensor that holds it; a copy of its own, since the tensor's memory may be let go."""
    return converted(slot.layout.to_ours(tensor), dtype)
