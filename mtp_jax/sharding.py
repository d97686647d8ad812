"""Which part of every array lies on which device of a mesh: one table for parameters, and `spread` for all the rest.

A mesh has the axes `data`, `fsdp` and `tensor` (`mtp_jax.mesh_shape`). XLA's partitioner divides the work of a jitted
function by what is said here of its arguments, its results and a few arrays in between. Two parts of the model are
divided by hand, since their loops take one slice after another of what is spread: experts
(`mtp_jax.layers.experts`), and the losses over the vocabulary (`train.vocabulary_losses`). Outside `on_mesh` nothing
here does anything.

What an axis does not divide is not spread over it: every device along the axis holds all of it. So few key/value
heads are replicated over `tensor` while the query heads are spread, and a batch of one row is read by all.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from math import gcd, prod
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from mtp_jax.config import ModelConfig
from mtp_jax.errors import UserError
from mtp_jax.mesh_shape import MeshShape

DATA, FSDP, TENSOR = MeshShape._fields
ROWS = (DATA, FSDP)
"""What the rows of a batch are spread over."""

Axes = str | tuple[str, ...] | None


class Dim(Enum):
    """What a dimension of a parameter counts."""

    ONE = "not spread"
    WIDTH = "the residual stream, or another input of a product"
    VOCAB = "tokens"
    HIDDEN = "hidden channels of an MLP"
    EXPERTS = "experts"
    HEADS = "query heads, each with all of its channels"
    KV_HEADS = "key/value heads"
    DELTA_KEY_HEADS = "queries, keys and values of DeltaNet, each spread by itself when it is used"
    DELTA_HEADS = "DeltaNet's value heads"


_AXIS: dict[Dim, str | None] = {dim: TENSOR for dim in Dim} | {Dim.ONE: None, Dim.WIDTH: FSDP}

# By path; of an adapter, by that of its projection.
_TABLE = tuple(
    (re.compile(pattern), dims)
    for pattern, dims in (
        (r"^lm_head/kernel$", (Dim.WIDTH, Dim.VOCAB)),
        (r"^embed_tokens/embedding$", (Dim.VOCAB, Dim.WIDTH)),
        (r"/self_attn/q_proj/kernel$", (Dim.WIDTH, Dim.HEADS)),
        (r"/self_attn/q_proj/bias$", (Dim.HEADS,)),
        (r"/self_attn/[kv]_proj/kernel$", (Dim.WIDTH, Dim.KV_HEADS)),
        (r"/self_attn/[kv]_proj/bias$", (Dim.KV_HEADS,)),
        (r"/self_attn/o_proj/kernel$", (Dim.HEADS, Dim.WIDTH)),
        (r"/linear_attn/in_proj_qkv/kernel$", (Dim.WIDTH, Dim.DELTA_KEY_HEADS)),
        (r"/linear_attn/conv1d/kernel$", (Dim.ONE, Dim.DELTA_KEY_HEADS)),
        (r"/linear_attn/in_proj_[zba]/kernel$", (Dim.WIDTH, Dim.DELTA_HEADS)),
        (r"/linear_attn/(A_log|dt_bias)$", (Dim.DELTA_HEADS,)),
        (r"/linear_attn/out_proj/kernel$", (Dim.DELTA_HEADS, Dim.WIDTH)),
        (r"/mlp/gate/kernel$", (Dim.WIDTH, Dim.ONE)),
        (r"/mlp/gate/bias$", (Dim.ONE,)),
        (r"/mlp/experts/(gate|up)_proj$", (Dim.EXPERTS, Dim.WIDTH, Dim.ONE)),
        (r"/mlp/experts/down_proj$", (Dim.EXPERTS, Dim.ONE, Dim.WIDTH)),
        (r"/mlp/shared_expert_gate/kernel$", (Dim.WIDTH, Dim.ONE)),
        (r"/mlp/(shared_expert/)?(gate|up)_proj/kernel$", (Dim.WIDTH, Dim.HIDDEN)),
        (r"/mlp/(shared_expert/)?down_proj/kernel$", (Dim.HIDDEN, Dim.WIDTH)),
        (r"^mtp/fc(_\d+)?/kernel$", (Dim.WIDTH, Dim.HIDDEN)),
        (r"/scale$", (Dim.ONE,)),
    )
)


def make_mesh(shape: MeshShape, name: str) -> Mesh:
    """A mesh over all devices that there are.

    Args:
      name: of the setting or flag, for the message.

    Raises:
      UserError: if there is another number of devices.
    """
    found = jax.device_count()
    if found != shape.devices:
        axes = ",".join(f"{axis}:{size}" for axis, size in shape._asdict().items())
        raise UserError(f"{name}: {axes} takes {shape.devices} devices, there are {found} ({jax.default_backend()})")
    return jax.make_mesh(shape, shape._fields, axis_types=(AxisType.Auto,) * len(shape))


@contextmanager
def on_mesh(mesh: Mesh | None) -> Iterator[None]:
    """Within it, what is compiled is spread over the mesh; with None nothing changes."""
    if mesh is None:
        yield
    else:
        with jax.set_mesh(mesh):
            yield


def own_rows(batch: PyTree) -> PyTree:
    """Rows of a batch on the devices of the mesh in use, from those that this process has read; without a mesh as they
    are."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return batch
    sharding = NamedSharding(mesh, PartitionSpec(ROWS))
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)


def all_rows(batch: PyTree) -> PyTree:
    """As `own_rows`, of a batch that every process has read whole."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return batch
    sharding = NamedSharding(mesh, PartitionSpec(ROWS))
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, lambda part: x[part]), batch)


def axis_size(axes: Axes) -> int:
    """Devices along an axis, or several, of the mesh in use; 1 without one."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return prod(sizes.get(axis, 1) for axis in _tuple(axes))


def spread(x: Array, *dims: Axes) -> Array:
    """The same array, which under a mesh is spread like this: its first dimensions over these axes, the others not.

    A dimension that its axes do not divide goes over fewer of them, the last left out first.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, _spec(zip(dims, x.shape, strict=False), mesh.shape))


def spread_parameters(tree: PyTree, config: ModelConfig) -> PyTree:
    """The same tree, parameters or what is laid out like them, which under a mesh is spread as the table says."""
    mesh = jax.sharding.get_abstract_mesh()
    return tree if mesh.empty else jax.lax.with_sharding_constraint(tree, parameter_specs(tree, config, mesh.shape))


def spread_gradients(tree: PyTree, config: ModelConfig) -> PyTree:
    """As `spread_parameters`, of gradients: under a mesh each is cut to its device's part as soon as it is there, and
    not where it is used, until when it would be kept whole."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jax.tree.map(jax.lax.optimization_barrier, spread_parameters(tree, config))


def gathered_after(event: Array, params: PyTree) -> tuple[Array, PyTree]:
    """Both as they are. Under `fsdp` nothing of the parameters is gathered for who uses the results before `event` is
    there: in a loop, a layer at a time each time round, where XLA would gather all before the loop and keep them."""
    return jax.lax.optimization_barrier((event, params)) if axis_size(FSDP) > 1 else (event, params)


def made_spread(make: Callable[..., PyTree], config: ModelConfig, *given: PyTree) -> PyTree:
    """What a function makes, under a mesh each device its part only, as the table says.

    Args:
      given: its arguments, donated under a mesh.
    """
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return make(*given)
    shardings = parameter_shardings(jax.eval_shape(make, *given), config, mesh)
    return jax.jit(make, out_shardings=shardings, donate_argnums=range(len(given)))(*given)


def laid_out(tree: PyTree, config: ModelConfig) -> PyTree:
    """The same tree on the devices of the mesh in use, spread as the table says; without a mesh as it is.

    Shapes instead of arrays are only told where they belong, for Orbax to read them there.
    """
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return tree

    def place(leaf: Any, sharding: NamedSharding) -> Array | jax.ShapeDtypeStruct:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.device_put(leaf, sharding)

    return jax.tree.map(place, tree, parameter_shardings(tree, config, mesh))


def parameter_shardings(tree: PyTree, config: ModelConfig, mesh: Mesh) -> PyTree:
    """Shardings for parameters, a training state, or whatever has parameters in it; see `parameter_specs`."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        parameter_specs(tree, config, mesh.shape),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def parameter_specs(tree: PyTree, config: ModelConfig, sizes: Mapping[str, int]) -> PyTree:
    """How each leaf of a tree is spread over a mesh with axes of these sizes.

    A leaf is known by the names of the dicts it lies in, so an optimiser's moments follow their parameters. One that
    lies in none, such as a counter, is replicated.
    """

    def of_leaf(path: tuple, leaf: Any) -> PartitionSpec:
        names = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        return parameter_spec("/".join(names), leaf.shape, config, sizes) if names else PartitionSpec()

    return jax.tree_util.tree_map_with_path(of_leaf, tree)


def parameter_spec(path: str, shape: tuple[int, ...], config: ModelConfig, sizes: Mapping[str, int]) -> PartitionSpec:
    """How one parameter is spread; see the table. Of an adapter's A and B, the sides that are the projection's."""
    dims = parameter_dims(path)
    return _spec([(_AXIS[dim], _count(dim, size, config)) for dim, size in zip(dims, shape, strict=True)], sizes)


def parameter_dims(path: str) -> tuple[Dim, ...]:
    """What the dimensions of a parameter are, by its path."""
    if path.startswith("adapters/"):
        projection, _, side = path.removeprefix("adapters/").rpartition("/")
        num_in, num_out = parameter_dims(f"{projection}/kernel")
        return (num_in, Dim.ONE) if side == "A" else (Dim.ONE, num_out)
    found = [dims for pattern, dims in _TABLE if pattern.search(path)]
    assert len(found) == 1, f"the table must name each parameter once, {path} it names {len(found)} times"
    return found[0]


def _count(dim: Dim, size: int, config: ModelConfig) -> int:
    """What an axis must divide: channels and the heads that they belong to, which stay whole."""
    heads = {Dim.HEADS: config.attention.num_heads, Dim.KV_HEADS: config.attention.num_kv_heads}
    if config.delta is not None:
        heads |= {Dim.DELTA_HEADS: config.delta.num_v_heads, Dim.DELTA_KEY_HEADS: config.delta.num_k_heads}
    return gcd(size, heads.get(dim, size))


def _spec(dims: Iterable[tuple[Axes, int]], sizes: Mapping[str, int]) -> PartitionSpec:
    """Args: dims: of each dimension, its axes and what they must divide."""
    entries = []
    for axes, count in dims:
        kept = _tuple(axes)
        while kept and count % prod(sizes[axis] for axis in kept):
            kept = kept[:-1]
        entries.append(kept or None)
    return PartitionSpec(*entries)


def _tuple(axes: Axes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else axes or ()
