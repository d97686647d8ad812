"""The frequency model's loss against counting by hand."""

import math
from collections import Counter

import numpy as np
import pytest
from stores import pieces_of, store_of

from train import unigram
from train.packing import PackedRows
from train.unigram import unigram_loss

VOCABULARY = 11


def _rows(seed, num_documents):
    """Documents of 1 to 19 ids, in rows of 8; every third counts in its second half only."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 20, num_documents).tolist()
    masks = [
        "0" * (length // 2) + "1" * (length - length // 2) if i % 3 == 0 else length for i, length in enumerate(lengths)
    ]
    store = store_of(*masks)
    store = store._replace(tokens=rng.integers(0, VOCABULARY, len(store.tokens)).astype(np.int32))
    return PackedRows(store, pieces_of(store, 8), 8, [seed])


def _targets(rows):
    """As the batches have them: a token that counts and is not the first of its segment."""
    found = []
    for i in range(len(rows)):
        tokens, segments, mask = rows[i]
        found += [int(tokens[t]) for t in range(1, len(tokens)) if mask[t] and segments[t] == segments[t - 1] > 0]
    return found


@pytest.mark.parametrize("at_a_time", [1, 7, 1 << 20])
def test_it_is_the_mean_over_held_out_targets_of_counts_plus_one(monkeypatch, at_a_time):
    monkeypatch.setattr(unigram, "_AT_A_TIME", at_a_time)
    training, held_out = [_rows(0, 30), _rows(1, 9)], [_rows(2, 12)]
    counts = Counter(target for rows in training for target in _targets(rows))
    asked = _targets(held_out[0])
    total = sum(counts.values()) + VOCABULARY
    expected = sum(-math.log((counts[target] + 1) / total) for target in asked) / len(asked)
    assert unigram_loss(training, held_out, VOCABULARY) == pytest.approx(expected, rel=1e-12)
    assert len(asked) == held_out[0].num_targets
