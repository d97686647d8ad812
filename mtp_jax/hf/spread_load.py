"""Published checkpoint -> parameters spread over a mesh, one device's part of one parameter at a time.

No parameter is ever whole in the host's memory: a part is read from where its tensors lie in their files, put on its
device and dropped. Tensors whose rows are grouped by heads (`RowsByHead`) are put in order whole first, one at a time.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from mtp_jax.hf.layouts import Layout, Shape, write
from mtp_jax.hf.manifest import Manifest, safe_path
from mtp_jax.hf.parameters import parameter_dtype, parameter_shapes, unflatten
from mtp_jax.hf.tensor_file import Reader
from mtp_jax.sharding import parameter_spec

Index = tuple[slice, ...]


@dataclass(frozen=True)
class _Source:
    """A parameter, or matrix `index` of a stack of them, is part `number` of what a tensor holds."""

    reader: Reader
    name: str
    layout: Layout
    number: int
    index: int | None

    def values(self) -> np.ndarray:
        """A view into the file, where the layout allows it."""
        return self.layout.split(self.reader.mapped(self.name))[self.number]


def read_spread_params(manifest: Manifest, dtype: np.dtype, mesh: Mesh) -> dict:
    """As `mtp_jax.hf.load.read_params`, each parameter spread as the table in `mtp_jax.sharding` says."""
    expected, shapes = manifest.slots, parameter_shapes(manifest.config)
    sources: dict[str, list[_Source]] = {path: [] for path in shapes}
    with ExitStack() as stack:
        for file in manifest.files:
            reader = stack.enter_context(Reader(safe_path(manifest.folder, file.name), file))
            reader.check_header()
            for name in file.entries.keys() & expected.keys():
                slot = expected[name]
                for number, piece in enumerate(slot.pieces):
                    sources[piece.path].append(_Source(reader, name, slot.layout, number, piece.index))
        return unflatten(
            {
                path: _placed(
                    shape,
                    NamedSharding(mesh, parameter_spec(path, shape, manifest.config, mesh.shape)),
                    _part_reader(sources[path], shape, parameter_dtype(path, dtype)),
                )
                for path, shape in shapes.items()
            }
        )


def _part_reader(sources: list[_Source], shape: Shape, dtype: np.dtype) -> Callable[[Index], np.ndarray]:
    def read(index: Index) -> np.ndarray:
        bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
        result = np.empty([end - begin for begin, end in bounds], dtype)
        for source in sources:
            if source.index is None:
                write(source.values()[index], result)
            elif bounds[0][0] <= source.index < bounds[0][1]:
                write(source.values()[index[1:]], result[source.index - bounds[0][0]])
        return result

    return read


def _placed(shape: Shape, sharding: NamedSharding, read: Callable[[Index], np.ndarray]) -> jax.Array:
    """The array whose parts on this process's devices are read; what several of them hold is read once."""
    by_part: dict[tuple, tuple[Index, list]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        by_part.setdefault(tuple(map(attrgetter("start", "stop"), index)), (index, []))[1].append(device)
    arrays = []
    for index, devices in by_part.values():
        values = read(index)
        arrays += [jax.device_put(values, device) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)
