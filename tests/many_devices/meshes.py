"""Meshes by name, and how what they give is compared with what one device gives."""

from dataclasses import replace

import jax
import numpy as np
from bent_model import CONFIG, EXPERTS

from mtp_jax.config import LayerType
from mtp_jax.mesh_shape import parse_mesh
from mtp_jax.sharding import make_mesh

SMALLEST = replace(CONFIG, layer_types=(LayerType.LINEAR,), moe=EXPERTS, num_dense_layers=1)
"""DeltaNet and an MLP in the trunk, attention and experts in the head: each part once, to be compiled quickly."""


def mesh(words: str) -> jax.sharding.Mesh:
    """Over all eight devices: `data:2,tensor:4`."""
    shape = parse_mesh(words.split(","), "mesh")
    assert shape is not None
    return make_mesh(shape, "mesh")


def assert_close(tree, expected):
    """Every array within rounding of the other, which for gradients is relative to the largest of an array."""

    def check(path, a, b):
        scale = max(float(np.abs(b).max(initial=0)), 1e-6)
        np.testing.assert_allclose(a / scale, b / scale, rtol=0, atol=2e-5, err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(check, jax.device_get(tree), jax.device_get(expected))
