"""Small token stores for tests of packing and of the pipeline."""

import numpy as np

from train.packing import PackedRows, cut
from train.token_cache import TokenStore


def store_of(*masks):
    """Documents with these loss masks (0s and 1s, or a length: all 1), whose tokens are 1, 2, 3, ... in all."""
    bits = [[True] * mask if isinstance(mask, int) else [letter == "1" for letter in mask] for mask in masks]
    lengths = [len(mask) for mask in bits]
    return TokenStore(
        tokens=np.arange(1, sum(lengths) + 1, dtype=np.int32),
        loss_mask=np.concatenate(bits),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        files=np.zeros(len(masks), np.int32),
        rows=np.arange(1, len(masks) + 1),
        num_bad=0,
        checksum="",
    )


def pieces_of(store, sequence_length, *, split=True):
    return cut(store, np.arange(len(store.files)), sequence_length, split_conversations=split)


def rows_of(*masks, sequence_length, seed=None):
    store = store_of(*masks)
    return PackedRows(store, pieces_of(store, sequence_length), sequence_length, seed)
