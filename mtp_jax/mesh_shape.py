"""How many devices a mesh has along each of its axes, as people write it. Knows nothing of JAX."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from mtp_jax.errors import UserError


class MeshShape(NamedTuple):
    """Devices along each axis.

    Attributes:
      data: rows of a batch are spread over these; each holds all parameters.
      fsdp: rows are spread over these too, and parameters: a layer's are gathered when it is computed.
      tensor: heads, hidden channels, experts and the vocabulary are spread over these; each computes its own part.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        """All of them."""
        return prod(self)

    @property
    def rows(self) -> int:
        """Parts that the rows of a batch are spread in."""
        return self.data * self.fsdp


def parse_mesh(words: Sequence[str], name: str) -> MeshShape | None:
    """A shape from words such as `data:2`, `tensor:4`; None without any. Axes that are not named have 1 device.

    Args:
      name: of the setting or flag, for the message.

    Raises:
      UserError: if a word is no axis and a count, or an axis comes twice.
    """
    sizes: dict[str, int] = {}
    for word in words:
        axis, _, count = word.partition(":")
        if axis not in MeshShape._fields or not (count.isascii() and count.isdigit() and int(count) > 0):
            raise UserError(f"{name}: expected AXIS:DEVICES with an axis of data, fsdp, tensor, got {word!r}")
        if axis in sizes:
            raise UserError(f"{name}: axis {axis} comes twice")
        sizes[axis] = int(count)
    return MeshShape(**sizes) if sizes else None
