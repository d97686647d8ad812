"""How large a model is: its parameters by part, and the bytes of its weights and of a row's state.

All of it is read off the model's own parameters and states as shapes; nothing is allocated.
"""

import re
from enum import StrEnum
from functools import lru_cache
from math import prod
from typing import NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike

from mtp_jax.config import ModelConfig
from mtp_jax.hf.parameters import parameter_dtype, parameter_shapes
from mtp_jax.state import AttentionState, State, empty_head_state, empty_trunk_state


class Part(StrEnum):
    """What a parameter belongs to."""

    EMBEDDING = "embedding"  # none if tied: then the output matrix serves as both
    OUTPUT_MATRIX = "output_matrix"
    DELTA_NET = "delta_net"
    ATTENTION = "attention"
    MLP = "mlp"  # of dense layers
    ROUTER = "router"
    EXPERTS = "experts"
    SHARED_EXPERT = "shared_expert"
    PROJECTION = "projection"  # the head's, of an embedding and a hidden state to one of them
    NORMS = "norms"


class Stage(StrEnum):
    """What a token passes through."""

    TRUNK = "trunk"
    HEAD = "head"  # its first layer, with the projection
    OUTPUT = "output"  # the product with the output matrix


# By path; the first that fits counts.
_PARTS = tuple(
    (re.compile(pattern), part)
    for pattern, part in (
        (r"/scale$", Part.NORMS),
        (r"^embed_tokens/", Part.EMBEDDING),
        (r"^lm_head/", Part.OUTPUT_MATRIX),
        (r"/linear_attn/", Part.DELTA_NET),
        (r"/self_attn/", Part.ATTENTION),
        (r"/mlp/gate/", Part.ROUTER),
        (r"/mlp/experts/", Part.EXPERTS),
        (r"/mlp/shared_expert", Part.SHARED_EXPERT),
        (r"/mlp/", Part.MLP),
        (r"^mtp/", Part.PROJECTION),
    )
)


class Parameter(NamedTuple):
    """One array of a model's parameters."""

    path: str
    part: Part
    size: int
    active: int  # of those, how many one token uses: its own row of the embedding, k of N experts, else all

    @property
    def in_head(self) -> bool:
        """It is the MTP head's; vocabulary matrices count as the trunk's."""
        return self.path.startswith("mtp/")

    @property
    def stage(self) -> Stage | None:
        """The stage whose tokens use it; None for the embedding (looked up) and for further layers of the head."""
        if self.part is Part.OUTPUT_MATRIX:
            return Stage.OUTPUT
        if self.in_head:
            return Stage.HEAD if self.path.startswith(("mtp/layers_0/", "mtp/fc/")) else None
        return None if self.part is Part.EMBEDDING else Stage.TRUNK

    @property
    def is_matrix(self) -> bool:
        """Tokens are multiplied by it: not a norm, a bias, a convolution, nor what is looked up."""
        return self.part is Part.EXPERTS or (self.path.endswith("/kernel") and "/conv1d/" not in self.path)


class Count(NamedTuple):
    """Parameters of one part."""

    total: int
    active: int


class RowBytes(NamedTuple):
    """What one row of a batch keeps between calls."""

    fixed: int  # DeltaNet's memories and convolution inputs, and the row's length
    per_slot: int  # keys and values, of each token that there is room for

    def at(self, num_slots: int) -> int:
        """Bytes with room for so many tokens."""
        return self.fixed + num_slots * self.per_slot


@lru_cache
def parameters(config: ModelConfig) -> tuple[Parameter, ...]:
    """All parameters of a model."""

    def active(part: Part, shape: tuple[int, ...]) -> int:
        if part is Part.EXPERTS:
            assert config.moe is not None
            return prod(shape) // config.moe.num_experts * config.moe.experts_per_token
        return shape[-1] if part is Part.EMBEDDING else prod(shape)

    found = []
    for path, shape in parameter_shapes(config).items():
        part = next(part for pattern, part in _PARTS if pattern.search(path))
        found.append(Parameter(path, part, prod(shape), active(part, shape)))
    return tuple(found)


def count_parts(config: ModelConfig, *, head: bool) -> dict[Part, Count]:
    """Parameters of the trunk with the vocabulary matrices, or of the MTP head, by part. Parts without any are left
    out."""
    chosen = [parameter for parameter in parameters(config) if parameter.in_head is head]
    counts = {}
    for part in Part:
        of_part = [parameter for parameter in chosen if parameter.part is part]
        if of_part:
            counts[part] = Count(sum(p.size for p in of_part), sum(p.active for p in of_part))
    return counts


@lru_cache
def weight_bytes(config: ModelConfig, dtype: DTypeLike) -> int:
    """Bytes of all parameters as a checkpoint is loaded for a compute dtype; some stay float32."""
    return sum(p.size * parameter_dtype(p.path, np.dtype(dtype)).itemsize for p in parameters(config))


@lru_cache
def row_bytes(config: ModelConfig, dtype: DTypeLike, *, head: bool) -> RowBytes:
    """What a row of a batch keeps in the trunk's state, or in the MTP head's."""
    empty = empty_head_state if head else empty_trunk_state
    state: State = jax.eval_shape(lambda: empty(config, 1, 1, dtype))
    per_slot = sum(tree_bytes(layer) for layer in state.layers if isinstance(layer, AttentionState))
    return RowBytes(tree_bytes(state) - per_slot, per_slot)


def tree_bytes(tree) -> int:
    """Bytes of all leaves, which may be shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
