"""Parameters -> published checkpoint.

A loaded model is written into the files it came from: same names, types, order, shard boundaries, metadata, index
and side files, and the same bytes wherever nothing was trained. A model trained from nothing gets the layout that
text-only checkpoints are published in.
"""

import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mtp_jax.config import ModelConfig
from mtp_jax.errors import UserError
from mtp_jax.files import new_folder, write_json
from mtp_jax.hf.config_json import config_to_json, family_of_new
from mtp_jax.hf.families import TEXT_PREFIX, Naming, slots
from mtp_jax.hf.head import COPIES, add_head, check_no_head, head_slots, traits, write_head_file
from mtp_jax.hf.layouts import Shape, converted
from mtp_jax.hf.manifest import CONFIG, INDEX, Manifest, index_bytes, safe_path, side_files
from mtp_jax.hf.parameters import flatten, parameter_shapes
from mtp_jax.hf.rules import Slot
from mtp_jax.hf.tensor_file import NUMPY_DTYPES, Entry, Reader, TensorFile, make_header
from mtp_jax.text.stop import end_ids
from mtp_jax.text.tokenizer import Tokenizer

MAX_SHARD_BYTES = 5_000_000_000
"""Where a model trained from nothing is cut into files, as published checkpoints are."""

_ALWAYS_FLOAT32 = (".A_log", ".linear_attn.norm.weight", ".e_score_correction_bias")


def save_checkpoint(
    out: Path | str,
    config: ModelConfig,
    params: Mapping[str, Any],
    manifest: Manifest | None = None,
    tokenizer_folder: Path | str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a checkpoint folder: complete, or not at all.

    Changed parameters are rounded to the type their tensor is stored in (to nearest, ties to even).

    Args:
      out: must not exist, or be an empty folder.
      manifest: of the checkpoint that the model was loaded from. If that had no head and the model has, the head goes
        into a file of its own, stored like the embedding. None: a model trained from nothing, written as
        `qwen3_5_text` (with experts `qwen3_5_moe_text`) with prefix `model.`, in bfloat16 with A_log and
        linear_attn.norm in float32.
      tokenizer_folder: where a model trained from nothing has its tokenizer, if any; its end ids go into
        config.json and generation_config.json. A loaded model keeps the side files it came with.
      max_shard_bytes: cut of a model trained from nothing; a single tensor may be larger.

    Raises:
      UserError: if `out` is not empty or cannot be written, `config` is not the manifest's or, without one, not
        Qwen3.5's, the source has changed or is gone, or a value is too large for the stored type.
      ValueError: if `params` are not the parameters of `config`.
    """
    if manifest is not None:
        _check_same_model(config, manifest)
    leaves = flatten(params)
    _check_params(leaves, parameter_shapes(config))
    with new_folder(Path(out).resolve()) as folder:
        if manifest is None:
            _write_new(folder, config, leaves, tokenizer_folder, max_shard_bytes)
        else:
            _write_again(folder, config, manifest, leaves)


def _naming(config: ModelConfig, manifest: Manifest | None) -> Naming:
    if manifest is not None:
        return manifest.naming
    family = family_of_new(config)
    return Naming(family, TEXT_PREFIX, family.fused_trunk, family.fused_head)


def _check_same_model(config: ModelConfig, manifest: Manifest) -> None:
    loaded = manifest.config
    if config.num_mtp_layers and not loaded.num_mtp_layers:
        check_no_head(manifest)
        loaded = replace(loaded, num_mtp_layers=config.num_mtp_layers)
    changed = [
        f"{field.name} (was {getattr(loaded, field.name)}, got {getattr(config, field.name)})"
        for field in fields(ModelConfig)
        if getattr(config, field.name) != getattr(loaded, field.name)
    ]
    if changed:
        raise UserError(f"the model is not the one that was loaded: {', '.join(changed)}")


def _check_params(leaves: Mapping[str, Any], shapes: Mapping[str, Shape]) -> None:
    faults = [f"{path} is missing" for path in shapes.keys() - leaves.keys()]
    faults += [f"{path} is unexpected" for path in leaves.keys() - shapes.keys()]
    faults += [
        f"{path} should be {shapes[path]}, got {tuple(leaves[path].shape)}"
        for path in shapes.keys() & leaves.keys()
        if tuple(leaves[path].shape) != shapes[path]
    ]
    if faults:
        raise ValueError("params are not those of config: " + "; ".join(sorted(faults)))


def _write_again(folder: Path, config: ModelConfig, manifest: Manifest, leaves: Mapping[str, Any]) -> None:
    expected = slots(config, manifest.naming)
    for file in manifest.files:
        with ExitStack() as stack:
            reader = stack.enter_context(Reader(safe_path(manifest.folder, file.name), file))
            reader.check_header()
            target = stack.enter_context(_create(folder / file.name))
            _write_header(target, file)
            for name in file.entries:
                if name in manifest.carried:
                    target.writelines(reader.chunks(name))
                else:  # a copy holds the same as its original when it is read, and so it does when it is written
                    _again(reader, name, expected[manifest.copies.get(name, name)], leaves).tofile(target)
    if manifest.index is not None:
        with _create(folder / INDEX) as target:
            target.write(manifest.index)
    _copy_side_files(manifest.folder, folder, list(side_files(manifest.folder)))
    if config.num_mtp_layers and not manifest.head_names:
        head = head_slots(config, manifest.naming)
        tensors = {name: (_new_type(name, manifest), slot.shape) for name, slot in head.items()}
        add_head(folder, manifest, tensors, partial(_write_rounded, leaves, head))


def save_head(path: Path | str, config: ModelConfig, params: Mapping[str, Any], manifest: Manifest | None) -> None:
    """Writes the head alone as a safetensors file: published names, stored types as `save_checkpoint` chooses them.

    Its metadata says what shapes do not (`traits`), which `graft_head` compares. Copies of the vocabulary matrices,
    which are the trunk's, stay out; the metadata names them, and `graft_head` makes them again.

    Args:
      path: written beside and renamed; a file that is there is replaced.
      manifest: as for `save_checkpoint`.

    Raises:
      UserError: if the model has no head, or the source has changed or is gone.
    """
    if not config.num_mtp_layers:
        raise UserError("expected a model with an MTP head, got one without (mtp_num_hidden_layers is 0)")
    if manifest is not None:
        _check_same_model(config, manifest)
    leaves = flatten(params)
    expected = head_slots(config, _naming(config, manifest))
    stored = {name: file for file in manifest.files for name in file.entries} if manifest else {}

    def stored_type(name: str) -> str:
        return stored[name].entries[name].dtype if name in stored else _new_type(name, manifest)

    def write(target: BinaryIO, name: str, entry: Entry) -> None:
        if manifest is None or name not in stored:
            return _write_rounded(leaves, expected, target, name, entry)
        with Reader(safe_path(manifest.folder, stored[name].name), stored[name]) as reader:
            reader.check_header()
            _again(reader, name, expected[name], leaves).tofile(target)

    tensors = {name: (stored_type(name), slot.shape) for name, slot in expected.items()}
    metadata = traits(config)
    if copies := [name for name in manifest.copies if manifest.naming.family.is_head(config, name)] if manifest else []:
        metadata[COPIES] = ",".join(sorted(copies))
    write_head_file(Path(path), tensors, write, metadata)


def _new_type(name: str, manifest: Manifest | None) -> str:
    """What a tensor that no file holds yet is stored as: like the embedding, but for a few that are always float32."""
    if name.endswith(_ALWAYS_FLOAT32):
        return "F32"
    if manifest is None:
        return "BF16"
    embedding = f"{manifest.naming.prefix}embed_tokens.weight"
    return next(file.entries[embedding].dtype for file in manifest.files if embedding in file.entries)


def _again(reader: Reader, name: str, slot: Slot, leaves: Mapping[str, Any]) -> np.ndarray:
    """The tensor to write for parameters that came from a file: where they were not trained, what is stored, even if
    loading rounded it."""
    stored = reader.array(name)
    parts, trained = [], False
    for part, piece in zip(slot.layout.split(stored), slot.pieces, strict=True):
        parameter = np.asarray(piece.of(leaves))
        same = _same_bits(converted(part, parameter.dtype), parameter)
        if not same.all():
            part, trained = np.where(same, part, _rounded(name, parameter, reader.entry(name))), True
        parts.append(part)
    return converted(slot.layout.join(parts), stored.dtype) if trained else stored


def _write_rounded(
    leaves: Mapping[str, Any], expected: Mapping[str, Slot], target: BinaryIO, name: str, entry: Entry
) -> None:
    slot = expected[name]
    parts = [_rounded(name, np.asarray(piece.of(leaves)), entry) for piece in slot.pieces]
    converted(slot.layout.join(parts), NUMPY_DTYPES[entry.dtype]).tofile(target)


def _write_new(
    folder: Path,
    config: ModelConfig,
    leaves: Mapping[str, Any],
    tokenizer_folder: Path | str | None,
    max_shard_bytes: int,
) -> None:
    expected = slots(config, _naming(config, None))
    shards = _shards(expected, max_shard_bytes)
    weight_map, total = {}, 0
    for number, tensors in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        header, entries = make_header(tensors)
        with _create(folder / name) as target:
            _write_header(target, TensorFile(name, header, entries))
            for tensor, entry in entries.items():
                _write_rounded(leaves, expected, target, tensor, entry)
                weight_map[tensor] = name
                total += entry.end - entry.begin
    if len(shards) > 1:
        with _create(folder / INDEX) as target:
            target.write(index_bytes(weight_map, total))
    tokenizer = None
    if tokenizer_folder is not None:
        source = Path(tokenizer_folder)
        tokenizer = Tokenizer.from_folder(source)
        names = [name for name in side_files(source) if name not in (CONFIG, "generation_config.json")]
        _copy_side_files(source, folder, names)
    write_json(folder / CONFIG, config_to_json(config, tokenizer.end_id if tokenizer else None))
    generation: dict[str, Any] = {"do_sample": False}
    if stop := sorted(end_ids(folder, tokenizer)):
        generation["eos_token_id"] = stop
    write_json(folder / "generation_config.json", generation)


def _shards(expected: Mapping[str, Slot], max_shard_bytes: int) -> list[dict[str, tuple[str, tuple[int, ...]]]]:
    """Tensors in the order of the layers, cut where the next one would not fit."""
    shards: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    size = 0
    for name, slot in expected.items():
        dtype = _new_type(name, None)
        num_bytes = math.prod(slot.shape) * NUMPY_DTYPES[dtype].itemsize
        if shards[-1] and size + num_bytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = (dtype, slot.shape)
        size += num_bytes
    return shards


def _rounded(name: str, parameter: np.ndarray, entry: Entry) -> np.ndarray:
    with np.errstate(over="ignore"):  # reported below, by name
        stored = parameter.astype(NUMPY_DTYPES[entry.dtype])
    if entry.dtype == "F16" and np.isinf(stored).sum() > np.isinf(parameter).sum():
        raise UserError(f"{name}: a value is too large for its stored type F16: {np.abs(parameter).max()}")
    return stored


def _same_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Equality of elements that tells 0 from -0 and takes a NaN for itself."""
    bits = np.dtype(f"u{a.dtype.itemsize}")
    return a.view(bits) == b.view(bits)


def _write_header(target: BinaryIO, file: TensorFile) -> None:
    target.write(len(file.header).to_bytes(8, "little"))
    target.write(file.header)


@contextmanager
def _create(path: Path) -> Iterator[BinaryIO]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "xb") as file:
        yield file


def _copy_side_files(source: Path, folder: Path, names: list[str]) -> None:
    for name in names:
        path = safe_path(source, name)
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
