"""Documents to rows of one length.

Documents are put, in an order that the seed decides, each into the first row that still has room for it. A row's
documents are segments of their own: memory, convolution, attention, positions and targets stop between them. Longer
documents than a row are cut: a text every T tokens; a conversation after the last turn of the assistant that still
fits, so that pieces begin with a question, or not used at all.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from train.batch import PADDING, Batch, empty_batch
from train.token_cache import TokenStore


class Pieces(NamedTuple):
    """Stretches of a store's tokens, each no longer than a row and of one document."""

    starts: Int[np.ndarray, " num_pieces"]
    lengths: Int[np.ndarray, " num_pieces"]
    num_split: int  # conversations that were cut
    num_dropped: int  # conversations that were not used


class Row(NamedTuple):
    """One row of a batch."""

    tokens: Int[np.ndarray, " T"]
    segment_ids: Int[np.ndarray, " T"]
    loss_mask: Bool[np.ndarray, " T"]


def cut(
    store: TokenStore, documents: Int[np.ndarray, " num_chosen"], sequence_length: int, *, split_conversations: bool
) -> Pieces:
    """The chosen documents, long ones in pieces.

    A document of which not every token is a target counts as a conversation. A piece without a target is left out (the
    first token of a segment is none).
    """
    starts, lengths = store.starts[:-1][documents], np.diff(store.starts)[documents]
    fits = lengths <= sequence_length
    piece_starts, piece_lengths = [starts[fits]], [lengths[fits]]
    num_split = num_dropped = 0
    for start, length in zip(starts[~fits].tolist(), lengths[~fits].tolist(), strict=True):
        mask = store.loss_mask[start : start + length]
        if mask.all():
            borders = np.append(np.arange(0, length, sequence_length), length)
        elif split_conversations:
            borders = _conversation_borders(mask, sequence_length)
            num_split += 1
        else:
            num_dropped += 1
            continue
        piece_starts.append(start + borders[:-1])
        piece_lengths.append(np.diff(borders))
    starts, lengths = np.concatenate(piece_starts), np.concatenate(piece_lengths)
    order = np.argsort(starts)
    starts, lengths = starts[order], lengths[order]
    kept = num_targets(store.loss_mask, starts, lengths) > 0
    return Pieces(starts[kept], lengths[kept], num_split, num_dropped)


def num_targets(
    loss_mask: Bool[np.ndarray, " num_tokens"],
    starts: Int[np.ndarray, " num_pieces"],
    lengths: Int[np.ndarray, " num_pieces"],
) -> Int[np.ndarray, " num_pieces"]:
    """Targets of the next-token loss in each piece. Its first token is none: nothing comes before it.

    Args:
      starts: rising; pieces do not overlap.
    """
    if not len(starts):
        return np.zeros(0, np.int64)
    ends = starts + lengths
    # Sums from each border to the next: over pieces, and over what lies between them.
    borders = np.column_stack([np.minimum(starts + 1, ends[-1] - 1), ends]).ravel()[:-1]
    sums = np.add.reduceat(loss_mask[: ends[-1]], borders, dtype=np.int64)[::2]
    return np.where(lengths > 1, sums, 0)


def _conversation_borders(mask: Bool[np.ndarray, " num_tokens"], sequence_length: int) -> np.ndarray:
    """Where to cut: after the last end of a turn that fits, or within a turn that is longer than a row."""
    turn_ends = np.flatnonzero(mask[:-1] & ~mask[1:]) + 1
    borders = [0]
    while len(mask) - borders[-1] > sequence_length:
        last = np.searchsorted(turn_ends, borders[-1] + sequence_length, side="right") - 1
        border = turn_ends[last] if last >= 0 else 0
        borders.append(int(border) if border > borders[-1] else borders[-1] + sequence_length)
    return np.array([*borders, len(mask)], np.int64)


def first_fit(lengths: Sequence[int], capacity: int) -> Int[np.ndarray, " num_pieces"]:
    """The row of each piece: the first one with room for it, in the order given. O(n log n).

    A tree over rows holds the largest room below each node, so the first row with enough of it is found by going down.

    Args:
      lengths: 1 to `capacity` each.
    """
    num_leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    room = [capacity] * (2 * num_leaves)
    rows = np.empty(len(lengths), np.int64)
    for i, length in enumerate(lengths):
        node = 1
        while node < num_leaves:
            node *= 2
            if room[node] < length:
                node += 1
        rows[i] = node - num_leaves
        room[node] -= length
        node >>= 1
        while node:
            left, right = room[2 * node], room[2 * node + 1]
            largest = left if left >= right else right
            if room[node] == largest:
                break
            room[node] = largest
            node >>= 1
    return rows


class PackedRows:
    """Rows that hold every piece once, addressed by number and made when they are asked for."""

    def __init__(
        self, store: TokenStore, pieces: Pieces, sequence_length: int, seed: Sequence[int] | None = None
    ) -> None:
        """Without a seed the documents keep their order."""
        order = np.arange(len(pieces.starts))
        if seed is not None:
            np.random.default_rng(seed).shuffle(order)
        rows = first_fit(pieces.lengths[order].tolist(), sequence_length)
        by_row = order[np.argsort(rows, kind="stable")]
        self._store = store
        self._starts, self._lengths = pieces.starts[by_row], pieces.lengths[by_row]
        self._borders = np.concatenate([[0], np.cumsum(np.bincount(rows))]).astype(np.int64)
        self.sequence_length = sequence_length
        self.num_tokens = int(pieces.lengths.sum())
        self.num_targets = int(num_targets(store.loss_mask, pieces.starts, pieces.lengths).sum())

    def __len__(self) -> int:
        return len(self._borders) - 1

    def __getitem__(self, index: int) -> Row:
        tokens = np.zeros(self.sequence_length, np.int32)
        segment_ids = np.full(self.sequence_length, PADDING, np.int32)
        loss_mask = np.zeros(self.sequence_length, bool)
        at = 0
        for segment, piece in enumerate(range(self._borders[index], self._borders[index + 1]), 1):
            source = slice(self._starts[piece], self._starts[piece] + self._lengths[piece])
            target = slice(at, at + self._lengths[piece])
            tokens[target] = self._store.tokens[source]
            loss_mask[target] = self._store.loss_mask[source]
            segment_ids[target] = segment
            at = target.stop
        return Row(tokens, segment_ids, loss_mask)

    @property
    def num_pieces(self) -> int:
        """Segments of all rows."""
        return len(self._starts)

    @property
    def padding(self) -> float:
        """Share of all places in rows that hold no token."""
        return 1 - self.num_tokens / (len(self) * self.sequence_length)

    def targets(self, at_a_time: int) -> Iterator[Int[np.ndarray, " num_some"]]:
        """Ids of all targets of the next-token loss, about so many tokens' at a time."""
        before = np.cumsum(self._lengths) - self._lengths
        parts = np.flatnonzero(np.diff(before // at_a_time, prepend=0)) if len(before) else []
        for starts, lengths in zip(np.split(self._starts, parts), np.split(self._lengths, parts), strict=True):
            places = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
            is_target = self._store.loss_mask[places]
            is_target[np.cumsum(lengths) - lengths] = False
            yield self._store.tokens[places[is_target]]

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """All rows once, in order. The last batch is filled up with rows of padding, to keep one compiled shape."""
        empty = Row(*(array[0] for array in empty_batch(1, self.sequence_length)))
        for first in range(0, len(self), batch_size):
            rows = [self[row] for row in range(first, min(first + batch_size, len(self)))]
            yield stack(rows + [empty] * (batch_size - len(rows)))


def stack(rows: Sequence[Row]) -> Batch:
    """Rows to a batch."""
    tokens, segment_ids, loss_mask = zip(*rows, strict=True)
    return Batch(np.stack(tokens), np.stack(segment_ids), np.stack(loss_mask))
