"""Published tensors and our parameters: one table, read in both directions.

Each rule says which published tensor holds which parameter and how its axes lie. Expanded over a model's layers the
table is total and one-to-one: every parameter is written by exactly one tensor, and that tensor is written from it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax.config import LayerType, ModelConfig
from mtp_jax.mtp import MTPModel, init_params


class Layout(Enum):
    """How a published tensor lies, seen from our parameter."""

    SAME = "same"
    TRANSPOSED = "transposed"  # published [out, in], ours [in, out]
    CONV = "conv"  # published [P, 1, w+1], ours [w+1, P]

    def to_ours(self, tensor: np.ndarray) -> np.ndarray:
        """Our parameter, as a view of the published tensor."""
        if self is Layout.SAME:
            return tensor
        return (tensor if self is Layout.TRANSPOSED else tensor[:, 0]).T

    def to_published(self, parameter: np.ndarray) -> np.ndarray:
        """The published tensor, as a view of our parameter."""
        if self is Layout.SAME:
            return parameter
        return parameter.T if self is Layout.TRANSPOSED else parameter.T[:, None]

    def published_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the published tensor for a parameter's shape."""
        if self is Layout.SAME:
            return shape
        return shape[::-1] if self is Layout.TRANSPOSED else (shape[1], 1, shape[0])

    def shape_of_ours(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the parameter for a published tensor's shape."""
        if self is Layout.SAME:
            return shape
        return shape[::-1] if self is Layout.TRANSPOSED else (shape[2], shape[0])


@dataclass(frozen=True)
class Rule:
    """One line of the table: published name and parameter path, with `{n}` for the layer."""

    published: str
    path: str
    layout: Layout = Layout.SAME


@dataclass(frozen=True)
class Slot:
    """What one published tensor is to a model: the parameter it holds, its layout and its published shape."""

    path: str
    layout: Layout
    shape: tuple[int, ...]


def _kernel(published: str, path: str) -> Rule:
    return Rule(f"{published}.weight", f"{path}/kernel", Layout.TRANSPOSED)


def _scale(published: str, path: str) -> Rule:
    return Rule(f"{published}.weight", f"{path}/scale")


# A published module and ours have the same name within a block, so each is given once.
_MLP = tuple(_kernel(f"mlp.{name}", f"mlp/{name}") for name in ("gate_proj", "up_proj", "down_proj"))
_NORMS = tuple(_scale(name, name) for name in ("input_layernorm", "post_attention_layernorm"))
_BLOCK = {
    LayerType.LINEAR: (
        *_NORMS,
        *_MLP,
        *(
            _kernel(f"linear_attn.{name}", f"linear_attn/{name}")
            for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
        ),
        Rule("linear_attn.conv1d.weight", "linear_attn/conv1d/kernel", Layout.CONV),
        Rule("linear_attn.A_log", "linear_attn/A_log"),
        Rule("linear_attn.dt_bias", "linear_attn/dt_bias"),
        _scale("linear_attn.norm", "linear_attn/norm"),
    ),
    LayerType.FULL: (
        *_NORMS,
        *_MLP,
        *(_kernel(f"self_attn.{name}", f"self_attn/{name}") for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
        *(_scale(f"self_attn.{name}", f"self_attn/{name}") for name in ("q_norm", "k_norm")),
    ),
}
_HEAD = (
    _kernel("mtp.fc", "mtp/fc"),
    *(_scale(f"mtp.{name}", f"mtp/{name}") for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")),
)
_TIED = (Rule("embed_tokens.weight", "lm_head/kernel", Layout.TRANSPOSED),)
_UNTIED = (Rule("embed_tokens.weight", "embed_tokens/embedding"),)

MULTIMODAL_PREFIX = "model.language_model."
TEXT_PREFIX = "model."
OUTPUT_MATRIX = "lm_head.weight"
CARRIED = re.compile(r"model\.visual\.")
"""Tensors of parts that are not built here: carried along and written back as they came."""
HEAD = re.compile(r"mtp\.")

_ROWS_AT_ONCE = 256


def qwen3_5_rules(config: ModelConfig, prefix: str) -> tuple[Rule, ...]:
    """The table of Qwen3.5 dense for a model's layers.

    Args:
      prefix: `model.language_model.` in multimodal checkpoints, `model.` in those for text only.
    """

    def inside(rules: tuple[Rule, ...], published: str, path: str) -> list[Rule]:
        return [Rule(published + rule.published, path + rule.path, rule.layout) for rule in rules]

    rules = inside(_TIED if config.tie_embeddings else _UNTIED, prefix, "")
    for n, layer_type in enumerate(config.layer_types):
        rules += inside(_BLOCK[layer_type], f"{prefix}layers.{n}.", f"trunk/layers_{n}/")
    rules.append(_scale(f"{prefix}norm", "trunk/norm"))
    if not config.tie_embeddings:
        rules.append(Rule(OUTPUT_MATRIX, "lm_head/kernel", Layout.TRANSPOSED))
    if config.num_mtp_layers:
        rules += _HEAD
        rules += inside(_BLOCK[LayerType.FULL], "mtp.layers.0.", "mtp/layers_0/")
    return tuple(rules)


@lru_cache
def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter of a model by its path, such as `trunk/norm/scale`; nothing is computed."""
    tree = jax.eval_shape(lambda key: init_params(MTPModel(config), key), jax.random.key(0))
    return {path: leaf.shape for path, leaf in flatten(tree).items()}


def slots(config: ModelConfig, prefix: str) -> dict[str, Slot]:
    """What each published tensor of a model is to it, by published name."""
    shapes = parameter_shapes(config)
    rules = qwen3_5_rules(config, prefix)
    assert sorted(rule.path for rule in rules) == sorted(shapes), "the table must write each parameter once"
    return {
        rule.published: Slot(rule.path, rule.layout, rule.layout.published_shape(shapes[rule.path])) for rule in rules
    }


def converted(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A C-ordered copy in another type.

    A transposed matrix goes a few rows of its source at a time, which stay in the cache: three times as fast.
    """
    if values.ndim != 2 or values.flags.c_contiguous:
        return values.astype(dtype, order="C")
    result = np.empty(values.shape, dtype)
    for start in range(0, values.shape[1], _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        result[:, rows] = values.T[rows].astype(dtype).T
    return result


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
    """Whether a parameter is float32 in every precision mode: norms' scales, A_log and dt_bias."""
    return path.rpartition("/")[2] in ("scale", "A_log", "dt_bias")


def parameter_dtype(path: str, dtype: jnp.dtype) -> np.dtype:
    """The type a parameter has in a model whose matrices have type `dtype`."""
    return np.dtype(np.float32) if keeps_float32(path) else np.dtype(dtype)
