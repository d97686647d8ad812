"""An endless stream of batches whose position can be saved and returned to."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mtp_jax.errors import UserError
from train.batch import Batch
from train.packing import PackedRows, stack

try:
    import grain
except ImportError as missing:
    raise UserError("training needs grain: pip install 'mtp-jax[train]'") from missing

_PREFETCHED_BATCHES = 4


class Batches:
    """Batches of rows, each source repeated for ever and reshuffled each epoch.

    Which rows a batch holds follows from the seed and the batch's number, so a saved position is that number, and
    going on from it gives the very batches that would have come. A thread reads a few batches ahead.

    Attributes:
      num_tokens: of the last batch, in the rows of all processes. Each reads all of them: to add counts up the
        processes would have to wait for one another at every step.
    """

    def __init__(
        self,
        sources: Sequence[PackedRows],
        batch_size: int,
        seed: int,
        *,
        weights: Sequence[float] = (),
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        """Starts at the beginning.

        Args:
          batch_size: rows a step, of all processes together.
          weights: how many rows come from each source, relative to the others; equally many by default.
          process_index: this process takes rows process_index, process_index + process_count, ... of all.

        Raises:
          UserError: if the processes cannot share a batch evenly.
        """
        if batch_size % process_count:
            raise UserError(f"batch_size: expected a multiple of the {process_count} processes, got {batch_size}")
        seeds = np.random.SeedSequence(seed).generate_state(len(sources)).tolist()
        endless = [
            grain.MapDataset.source(rows).shuffle(seed=source_seed).repeat()  # repeat gives each epoch another order
            for rows, source_seed in zip(sources, seeds, strict=True)
        ]
        mixed = grain.MapDataset.mix(endless, weights=list(weights) or [1.0] * len(endless))
        batches = mixed.batch(batch_size, drop_remainder=True, batch_fn=stack)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_PREFETCHED_BATCHES)
        self._iterator = iter(batches.to_iter_dataset(options))
        self._own = slice(process_index, None, process_count)
        self.num_tokens = 0

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Batch:
        whole = next(self._iterator)
        self.num_tokens = whole.num_tokens
        return Batch(*(field[self._own] for field in whole))

    def state(self) -> dict[str, Any]:
        """The position, as JSON holds it: after the batches taken so far, whatever was read ahead."""
        return dict(self._iterator.get_state())

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to a position, forwards or backwards.

        Raises:
          UserError: if this is no position.
        """
        try:
            self._iterator.set_state(state)
        except (KeyError, TypeError, IndexError) as error:
            raise UserError(f"expected a saved position of the data, got {state}") from error

    def close(self) -> None:
        """Ends the thread that reads ahead."""
        self._iterator.close()
