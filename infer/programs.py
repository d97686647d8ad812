"""Compiled programs, kept by the shapes that they were compiled for."""

import time
from collections import OrderedDict
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from mtp_jax.mtp import MTPModel

KEPT = 64
"""Programs; beyond it the one unused for longest is dropped, and would be compiled again."""


class Programs:
    """Calls jitted functions of (model, params, ...) ahead-of-time compiled, so that compiling is timed apart.

    Attributes:
      model: static description.
      params: on the device.
      compile_seconds: spent on compiling so far.
    """

    def __init__(self, model: MTPModel, params: PyTree) -> None:
        self.model = model
        self.params = jax.device_put(params)
        self.compile_seconds = 0.0
        self._compiled: OrderedDict[Hashable, Any] = OrderedDict()

    def call(self, function: Any, *args: PyTree, **static: Hashable) -> Any:
        """function(model, params, *args, **static), compiled at the first call with these shapes.

        Args:
          function: a jitted function whose static arguments are `model` and the names in `static`.
        """
        leaves, structure = jax.tree.flatten(args)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        key = (function, structure, shapes, tuple(static.items()))
        if key not in self._compiled:
            started = time.perf_counter()
            with self.precision():
                self._compiled[key] = function.lower(self.model, self.params, *args, **static).compile()
            self.compile_seconds += time.perf_counter() - started
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return self._compiled[key](self.params, *args)

    def precision(self) -> AbstractContextManager:
        """float32 means float32: an accelerator's default rounds such products, and then passes over one token and over
        several may choose differently."""
        return jax.default_matmul_precision("highest") if self.model.dtype == jnp.float32 else nullcontext()
