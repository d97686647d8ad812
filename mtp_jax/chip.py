"""What a chip can do at most, and several of them together."""

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Chip:
    """What a chip can do at most.

    Attributes:
      memory: bytes.
      bandwidth: of that memory, in bytes/s.
      flops: operations/s in matrix products of `dtype`.
      dtype: of weights, keys and values, and of what is exchanged.
      link: bytes/s that it sends, receiving as many, to chips that it is joined to; 0: it is alone.
      island: how many are joined; None: as many as there are.
      network: bytes/s that it sends to other islands.
    """

    memory: float
    bandwidth: float
    flops: float
    dtype: str = "bfloat16"
    link: float = 0.0
    island: int | None = None
    network: float = 0.0


@dataclass(frozen=True)
class Machine:
    """So many chips of a kind.

    Raises:
      ValueError: if they are several and not joined.
    """

    chip: Chip
    devices: int

    def __post_init__(self) -> None:
        if self.devices > 1 and not self.chip.link:
            raise ValueError(f"a chip without link works alone, got {self.devices} devices")
        if self.islands > 1 and not self.chip.network:
            raise ValueError(f"at most {self.chip.island} chips without network, got {self.devices} devices")

    @property
    def islands(self) -> int:
        return ceil(self.devices / (self.chip.island or self.devices))

    def gather_seconds(self, nbytes: int) -> float:
        """Time until each device has all of what each held an equal part of. Adding up and scattering takes as long.

        A device receives nbytes (1 - 1/i) from the i of its island, and its own part of the others' by the network.
        """
        within = self.devices / self.islands
        by_link = nbytes * (1 - 1 / within)
        by_network = nbytes * (1 - 1 / self.islands) / within
        return max(
            by_link / self.chip.link if by_link else 0.0,
            by_network / self.chip.network if by_network else 0.0,
        )

    def share(self, units: int) -> float:
        """What part of so many equal units, none of which is divided, the busiest device has."""
        return ceil(units / self.devices) / units
