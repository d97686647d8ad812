"""Compiled programs, kept by the shapes that they were compiled for."""

import time
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PyTree

from mtp_jax.compiler_options import DECODING, compiler_options
from mtp_jax.mtp import MTPModel
from mtp_jax.sharding import on_mesh, parameter_shardings

MAPPINGS_ALLOWED = Path("/proc/sys/vm/max_map_count")


class Programs:
    """Calls jitted functions of (model, params, ...) ahead-of-time compiled, so that compiling is timed apart.

    Attributes:
      model: static description.
      params: on the device.
      compile_seconds: spent on compiling so far.
    """

    def __init__(self, model: MTPModel, params: PyTree, mesh: Mesh | None = None) -> None:
        """Args: mesh: to spread parameters and work over."""
        self.model = model
        self.params = jax.device_put(params, mesh and parameter_shardings(params, model.config, mesh))
        self._mesh = mesh
        self.compile_seconds = 0.0
        self._compiled: dict[Hashable, Any] = {}

    def call(self, function: Any, *args: PyTree, **static: Hashable) -> Any:
        """function(model, params, *args, **static), compiled at the first call with these shapes.

        Args:
          function: a jitted function whose static arguments are `model` and the names in `static`.
        """
        leaves, structure = jax.tree.flatten(args)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        key = (function, structure, shapes, tuple(static.items()))
        if key not in self._compiled:
            if _mappings_run_short():
                self._compiled.clear()
                jax.clear_caches()  # it keeps what it compiled too
            started = time.perf_counter()
            with self.precision(), on_mesh(self._mesh):
                lowered = function.lower(self.model, self.params, *args, **static)
                self._compiled[key] = lowered.compile(compiler_options(DECODING))
            self.compile_seconds += time.perf_counter() - started
        return self._compiled[key](self.params, *args)

    def precision(self) -> AbstractContextManager:
        """float32 means float32: an accelerator's default rounds such products, and then passes over one token and over
        several may choose differently."""
        return jax.default_matmul_precision("highest") if self.model.dtype == jnp.float32 else nullcontext()


def _mappings_run_short() -> bool:
    """Whether this process holds more than half of the memory mappings that Linux allows it.

    Each program for a CPU takes hundreds, and one that finds no more ends the process without a word.
    """
    try:
        limit = int(MAPPINGS_ALLOWED.read_text())
        with open("/proc/self/maps", "rb") as lines:
            return sum(1 for _ in lines) > limit // 2
    except OSError:  # another system, with other limits
        return False
