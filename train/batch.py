"""What a training step reads."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

PADDING = 0  # segment id of padding; documents count from 1


class Batch(NamedTuple):
    """Packed rows. Every change of segment id within a row starts a document; positions restart there."""

    tokens: Int[np.ndarray, "B T"]
    segment_ids: Int[np.ndarray, "B T"]
    loss_mask: Bool[np.ndarray, "B T"]  # whether the token may be a target: not in a user's turn, not in padding

    @property
    def num_tokens(self) -> int:
        """Input tokens that are not padding."""
        return int(np.count_nonzero(self.segment_ids != PADDING))


def empty_batch(batch_size: int, sequence_length: int) -> Batch:
    """Padding only: a batch's shapes and types."""
    return Batch(*(np.zeros((batch_size, sequence_length), dtype) for dtype in (np.int32, np.int32, np.bool_)))
