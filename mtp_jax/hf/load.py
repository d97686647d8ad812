"""Published checkpoint -> parameters, by two threads, with nothing missing, left over or guessed."""

import math
import mmap
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from mtp_jax.config import ModelConfig
from mtp_jax.errors import UserError
from mtp_jax.files import read_json_object
from mtp_jax.hf.config_json import config_from_json, family_from_json
from mtp_jax.hf.families import Family, Naming, slots
from mtp_jax.hf.families.blocks import OUTPUT_MATRIX
from mtp_jax.hf.layouts import ROWS_AT_ONCE, Shape, write
from mtp_jax.hf.manifest import CONFIG, Manifest, list_some, owners, raise_faults, read_files, safe_path
from mtp_jax.hf.parameters import parameter_dtype, parameter_shapes, unflatten
from mtp_jax.hf.rules import Slot
from mtp_jax.hf.spread_load import read_spread_params
from mtp_jax.hf.tensor_file import NUMPY_DTYPES, Entry, Reader, TensorFile

_THREADS = 2  # each holds a run as it is in its file
_RUN_BYTES = 1 << 21  # so that a run stays in the cache from reading to writing
_AHEAD = 16  # runs converted at most before the one that is taken next, after which a parameter may have to be placed


class _Run(NamedTuple):
    """What is read and converted in one go: a tensor, or rows of it, and where in its parameters they go."""

    name: str
    slot: Slot
    rows: slice
    place: tuple


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model.

    Attributes:
      config: what it is; without a head if it was loaded with `trunk_only`.
      params: nested dict, as `init_params` gives it; to be donated, read them with `read_params`.
      manifest: what `save_checkpoint` needs to give the same files back.
      folder: where it came from.
    """

    config: ModelConfig
    params: dict
    manifest: Manifest
    folder: Path


def load_checkpoint(
    folder: Path | str, trunk_only: bool = False, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None
) -> Checkpoint:
    """Loads a checkpoint in the published layout of its family (`mtp_jax.hf.families`).

    Accepts both prefixes, tied and untied matrices, experts one by one or fused, one file or several with or without
    an index, and bfloat16, float32 and float16 in any mixture. A vision tower is carried along untouched.

    Args:
      trunk_only: load without the MTP head, on purpose; its tensors, if any, are carried along.
      dtype: of the matrices, float32 or bfloat16. Scales, A_log, dt_bias and routers are float32 in any case.
      mesh: to spread the parameters over; each device's parts are read by themselves, one after the other.

    Raises:
      UserError: if a file is missing, damaged or leads out of the folder, or if tensors are missing, unexpected,
        written twice or of another shape or type than config.json says; all of them are named together.
    """
    if np.dtype(dtype) not in (np.dtype(np.float32), np.dtype(jnp.bfloat16)):
        raise ValueError(f"dtype must be float32 or bfloat16, got {dtype}")
    manifest = read_manifest(folder, trunk_only)
    return Checkpoint(manifest.config, read_params(manifest, dtype, mesh), manifest, Path(folder))


def read_manifest(folder: Path | str, trunk_only: bool = False) -> Manifest:
    """All of a checkpoint but the weights: config and headers, checked against each other.

    Raises:
      UserError: as `load_checkpoint`.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: expected a checkpoint folder, got {'a file' if folder.exists() else 'nothing'}")
    family, config = _described(folder)
    files, index, faults = read_files(folder)
    found, twice = owners(files)
    config = _with_head(config, family, found, trunk_only)
    naming = family.naming(config, found)
    _check_size(folder, config, naming, found)
    expected = slots(config, naming)
    others = found.keys() - expected.keys()
    copies = naming.copies(config, others)
    carried = {name for name in others - copies.keys() if name.startswith(family.carried)}
    if trunk_only:
        carried |= {name for name in others - copies.keys() if family.is_head(config, name)}
    faults += twice + _compare(expected, found, carried | copies.keys(), config, family)
    raise_faults(folder, faults)
    raise_faults(folder, [fault for name in sorted(copies) if (fault := _different(folder, found, name, copies[name]))])
    return Manifest(folder.absolute(), config, naming, files, index, frozenset(carried), copies)


def read_params(
    manifest: Manifest, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None, donated: bool = False
) -> dict:
    """The weights of a checkpoint whose headers are read, as `load_checkpoint` gives them.

    Args:
      donated: whether a program will take over their memory (`donate_argnums`), as a training step does. On a CPU
        they otherwise stay where they were converted, which saves copying each now; JAX would then copy them all when
        they are donated, and hold both. Without effect with a mesh.

    Raises:
      UserError: if a file is gone, truncated or no longer the one whose header was read.
    """
    dtype = jnp.dtype(dtype)
    if mesh is not None:
        return read_spread_params(manifest, dtype, mesh)
    expected, shapes = manifest.slots, parameter_shapes(manifest.config)
    arrays = {path: _empty(shape, parameter_dtype(path, dtype)) for path, shape in shapes.items()}
    runs = {
        file.name: [
            run
            for name, entry in file.entries.items()
            if name in expected
            for run in _runs(name, expected[name], entry)
        ]
        for file in manifest.files
    }
    to_come = Counter(piece.path for run in chain.from_iterable(runs.values()) for piece in run.slot.pieces)
    leaves: dict[str, jax.Array] = {}

    def take(reader: Reader, run: _Run) -> Slot:
        parts = run.slot.layout.split(reader.array(run.name, run.rows))
        for part, piece in zip(parts, run.slot.pieces, strict=True):
            write(part, piece.of(arrays)[run.place])
        return run.slot

    with ThreadPoolExecutor(_THREADS) as pool:
        for file in manifest.files:
            with Reader(safe_path(manifest.folder, file.name), file) as reader:
                reader.check_header()
                for slot in _in_order(pool, partial(take, reader), runs[file.name]):
                    for path in (piece.path for piece in slot.pieces):
                        to_come[path] -= 1
                        if not to_come[path]:
                            array = arrays.pop(path)
                            leaves[path] = jnp.array(array) if donated else jax.device_put(array)
    return unflatten(leaves)


def _runs(name: str, slot: Slot, entry: Entry) -> Iterator[_Run]:
    """A large tensor a few rows at a time, where its layout allows it."""
    num_bytes = entry.end - entry.begin
    axis = slot.layout.row_axis(len(entry.shape))
    if axis is None or num_bytes <= _RUN_BYTES:
        yield _Run(name, slot, slice(None), (...,))
        return
    fewest = ROWS_AT_ONCE if len(entry.shape) == 2 else 1
    step = max(_RUN_BYTES * entry.shape[0] // num_bytes // fewest, 1) * fewest
    for start in range(0, entry.shape[0], step):
        rows = slice(start, start + step)
        yield _Run(name, slot, rows, (slice(None),) * axis + (rows,))


def _in_order(pool: Executor, function: Callable[[_Run], Slot], runs: Iterable[_Run]) -> Iterator[Slot]:
    """Results one by one, so many calls ahead."""
    runs = iter(runs)
    begun = deque(pool.submit(function, run) for run in islice(runs, 1 + _AHEAD))
    while begun:
        yield begun.popleft().result()
        begun.extend(pool.submit(function, run) for run in islice(runs, 1))


def _empty(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """An array to be written, which takes no memory before.

    It lies in pages of its own, since `jax.device_put` copies what does not begin at a multiple of 64 bytes; in large
    ones where there are, since the first touch of gigabytes in small ones takes longer than converting them.
    """
    size = math.prod(shape)
    memory = mmap.mmap(-1, max(size * dtype.itemsize, 1), access=mmap.ACCESS_COPY)
    with suppress(AttributeError, OSError):  # unknown to this system, or to its kernel
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype, size).reshape(shape)


def read_config(folder: Path, trunk_only: bool = False) -> ModelConfig:
    """The model that a folder's config.json describes, without its head if `trunk_only`.

    Where config.json does not say whether there is a head, the names of the tensors do.

    Raises:
      UserError: if there is no such file, or it describes something that is not built here.
    """
    family, config = _described(folder)
    names = [] if trunk_only or family.head_key else owners(read_files(folder)[0])[0]
    return _with_head(config, family, names, trunk_only)


def _described(folder: Path) -> tuple[Family, ModelConfig]:
    path = safe_path(folder, CONFIG)
    if not path.is_file():
        raise UserError(f"{path}: expected the model's config, got nothing")
    values = read_json_object(path)
    return family_from_json(values, str(path)), config_from_json(values, str(path))


def _with_head(config: ModelConfig, family: Family, names: Collection[str], trunk_only: bool) -> ModelConfig:
    if trunk_only:
        return replace(config, num_mtp_layers=0)
    if family.head_key is None:
        return replace(config, num_mtp_layers=family.num_head_layers(config, names))
    return config


def _check_size(folder: Path, config: ModelConfig, naming: Naming, found: Collection[str]) -> None:
    """Refuses a config.json that speaks of a far larger model than the files hold, whose every name takes minutes."""
    single = 0 if naming.fused_trunk or config.moe is None else config.moe.num_experts
    fewest = config.num_layers + (config.num_layers - config.num_dense_layers) * single
    if fewest > len(found):
        experts = f" with {single} experts each" if single else ""
        raise UserError(
            f"{folder}: {CONFIG} asks for {config.num_layers} layers{experts}, so for more than {fewest} tensors; the "
            f"files hold {len(found)}"
        )


def _compare(
    expected: Mapping[str, Slot],
    found: Mapping[str, tuple[TensorFile, Entry]],
    allowed: Collection[str],
    config: ModelConfig,
    family: Family,
) -> list[str]:
    """Faults: what the files lack, what they have too much, and what does not fit."""
    faults = []
    missing = [name for name in expected if name not in found]
    if missing:
        hint = ""
        if all(family.is_head(config, name) for name in missing):
            hint = (
                f" ({CONFIG} declares an MTP head; scripts/graft_head.py puts back a head that another tool has lost; "
                "to load the trunk alone on purpose, use --trunk-only)"
            )
        faults.append(f"missing: {list_some(missing)}{hint}")
    unexpected = sorted(found.keys() - expected.keys() - set(allowed))
    if unexpected:
        hint = ""
        if not config.num_mtp_layers and any(family.is_head(config, name) for name in unexpected):
            hint = f" ({CONFIG} declares no MTP head: {family.head_key} is 0 or absent)"
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


def _different(folder: Path, found: Mapping[str, tuple[TensorFile, Entry]], name: str, original: str) -> str | None:
    """The fault of a tensor that repeats another: that it is not the same to the bit."""
    (file_a, a), (file_b, b) = found[name], found[original]
    same = a.dtype == b.dtype and a.shape == b.shape
    if same:
        with Reader(folder / file_a.name, file_a) as left, Reader(folder / file_b.name, file_b) as right:
            same = all(x == y for x, y in zip(left.chunks(name), right.chunks(original), strict=True))
    if same:
        return None
    because = f"{CONFIG} says tie_word_embeddings, but " if name == OUTPUT_MATRIX else ""
    return (
        f"{because}{name} in {file_a.name} is not equal to {original} in {file_b.name}, whose copy it should be; "
        "without it the model loads"
    )
