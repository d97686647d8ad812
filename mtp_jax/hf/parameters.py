"""Our parameters: nested dicts whose leaves are known by their paths, such as `trunk/norm/scale`."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax.config import ModelConfig
from mtp_jax.mtp import MTPModel, init_params


@lru_cache
def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter of a model by its path; nothing is computed."""
    tree = jax.eval_shape(lambda key: init_params(MTPModel(config), key), jax.random.key(0))
    return {path: leaf.shape for path, leaf in flatten(tree).items()}


def flatten(tree: Mapping, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested dicts by their paths, joined with `/`."""
    leaves = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            leaves.update(flatten(value, f"{prefix}{name}/"))
        else:
            leaves[prefix + name] = value
    return leaves


def unflatten(leaves: Mapping[str, Any]) -> dict:
    """Nested dicts from leaves by path."""
    tree: dict = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def keeps_float32(path: str) -> bool:
    """Whether a parameter is float32 in every precision mode: norms' scales, A_log, dt_bias and what routes tokens."""
    *_, owner, name = path.split("/")
    return name in ("scale", "A_log", "dt_bias") or owner == "gate"


def parameter_dtype(path: str, dtype: jnp.dtype) -> np.dtype:
    """The type a parameter has in a model whose matrices have type `dtype`."""
    return np.dtype(np.float32) if keeps_float32(path) else np.dtype(dtype)
