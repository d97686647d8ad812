"""Parameters -> published checkpoint.

A loaded model is written into the files it came from: same names, types, order, shard boundaries, metadata, index
and side files, and the same bytes wherever nothing was trained. A model trained from nothing gets the layout that
text-only checkpoints are published in.
"""

import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mtp_jax.config import ModelConfig
from mtp_jax.errors import UserError
from mtp_jax.files import write_json
from mtp_jax.hf.config_json import config_to_json
from mtp_jax.hf.load import from_stored
from mtp_jax.hf.manifest import CONFIG, INDEX, Manifest, index_bytes, safe_path, side_files
from mtp_jax.hf.rules import OUTPUT_MATRIX, TEXT_PREFIX, Slot, converted, flatten, slots
from mtp_jax.hf.tensor_file import NUMPY_DTYPES, Entry, Reader, TensorFile, make_header
from mtp_jax.text.stop import end_ids
from mtp_jax.text.tokenizer import Tokenizer

MAX_SHARD_BYTES = 5_000_000_000
"""Where a model trained from nothing is cut into files, as published checkpoints are."""


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
      manifest: of the checkpoint that the model was loaded from. None: a model trained from nothing, written as
        `qwen3_5_text` with prefix `model.`, in bfloat16 with A_log and linear_attn.norm in float32.
      tokenizer_folder: where a model trained from nothing has its tokenizer, if any; its end ids go into
        config.json and generation_config.json. A loaded model keeps the side files it came with.
      max_shard_bytes: cut of a model trained from nothing; a single tensor may be larger.

    Raises:
      UserError: if `out` is not empty or cannot be written, `config` is not the manifest's, the source has changed
        or is gone, or a value is too large for the stored type.
      ValueError: if `params` are not the parameters of `config`.
    """
    if manifest is not None:
        _check_same_model(config, manifest.config)
    leaves = flatten(params)
    expected = slots(config, TEXT_PREFIX if manifest is None else manifest.prefix)
    _check_params(leaves, expected)
    with _fresh_folder(Path(out).resolve()) as folder:
        if manifest is None:
            _write_new(folder, config, leaves, expected, tokenizer_folder, max_shard_bytes)
        else:
            _write_again(folder, manifest, leaves, expected)


@contextmanager
def _fresh_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its name at the end, or goes away if anything fails."""
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


def _check_same_model(config: ModelConfig, loaded: ModelConfig) -> None:
    changed = [
        f"{field.name} (was {getattr(loaded, field.name)}, got {getattr(config, field.name)})"
        for field in fields(ModelConfig)
        if getattr(config, field.name) != getattr(loaded, field.name)
    ]
    if changed:
        raise UserError(f"the model is not the one that was loaded: {', '.join(changed)}")


def _check_params(leaves: Mapping[str, Any], expected: Mapping[str, Slot]) -> None:
    shapes = {slot.path: slot.layout.shape_of_ours(slot.shape) for slot in expected.values()}
    faults = [f"{path} is missing" for path in shapes.keys() - leaves.keys()]
    faults += [f"{path} is unexpected" for path in leaves.keys() - shapes.keys()]
    faults += [
        f"{path} should be {shapes[path]}, got {tuple(leaves[path].shape)}"
        for path in shapes.keys() & leaves.keys()
        if tuple(leaves[path].shape) != shapes[path]
    ]
    if faults:
        raise ValueError("params are not those of config: " + "; ".join(sorted(faults)))


def _write_again(folder: Path, manifest: Manifest, leaves: Mapping[str, Any], expected: Mapping[str, Slot]) -> None:
    # A tied checkpoint may repeat the embedding; the repetition follows it.
    alias = expected.get(f"{manifest.prefix}embed_tokens.weight")
    for file in manifest.files:
        with ExitStack() as stack:
            reader = stack.enter_context(Reader(safe_path(manifest.folder, file.name), file))
            reader.check_header()
            target = stack.enter_context(_create(folder / file.name))
            _write_header(target, file)
            for name in file.entries:
                slot = expected.get(name, alias if name == OUTPUT_MATRIX else None)
                if name in manifest.carried or slot is None:
                    target.writelines(reader.chunks(name))
                    continue
                stored = reader.array(name)
                parameter = np.asarray(leaves[slot.path])
                same = from_stored(stored, slot, parameter.dtype)
                # What was not trained keeps its bytes, even if loading rounded it.
                if _same_bits(same, parameter):
                    stored.tofile(target)
                else:
                    _rounded(name, parameter, slot, file.entries[name]).tofile(target)
    if manifest.index is not None:
        with _create(folder / INDEX) as target:
            target.write(manifest.index)
    _copy_side_files(manifest.folder, folder, list(side_files(manifest.folder)))


def _write_new(
    folder: Path,
    config: ModelConfig,
    leaves: Mapping[str, Any],
    expected: Mapping[str, Slot],
    tokenizer_folder: Path | str | None,
    max_shard_bytes: int,
) -> None:
    shards = _shards(expected, max_shard_bytes)
    weight_map, total = {}, 0
    for number, tensors in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        header, entries = make_header(tensors)
        with _create(folder / name) as target:
            _write_header(target, TensorFile(name, header, entries))
            for tensor, entry in entries.items():
                slot = expected[tensor]
                _rounded(tensor, np.asarray(leaves[slot.path]), slot, entry).tofile(target)
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
        dtype = "F32" if name.endswith((".A_log", ".linear_attn.norm.weight")) else "BF16"
        num_bytes = math.prod(slot.shape) * NUMPY_DTYPES[dtype].itemsize
        if shards[-1] and size + num_bytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = (dtype, slot.shape)
        size += num_bytes
    return shards


def _rounded(name: str, parameter: np.ndarray, slot: Slot, entry: Entry) -> np.ndarray:
    with np.errstate(over="ignore"):  # reported below, by name
        stored = converted(slot.layout.to_published(parameter), NUMPY_DTYPES[entry.dtype])
    if entry.dtype == "F16" and np.isinf(stored).sum() > np.isinf(parameter).sum():
        raise UserError(f"{name}: a value is too large for its stored type F16: {np.abs(parameter).max()}")
    return stored


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equality that tells 0 from -0 and takes a NaN for itself."""
    bits = np.dtype(f"u{a.dtype.itemsize}")
    return np.array_equal(a.view(bits), b.view(bits))


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
