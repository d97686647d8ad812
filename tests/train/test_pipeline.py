"""The stream of batches: epochs, mixtures, processes, and positions that are returned to."""

import json
from collections import Counter

import numpy as np
import pytest
from stores import rows_of

from mtp_jax.errors import UserError
from train.pipeline import Batches

MIXTURE = {"weights": (3.0, 1.0)}


@pytest.fixture(scope="module")
def sources():
    """Eleven rows of one document of 4 tokens, five of one of 3; the first token of a row is its name."""
    return [rows_of(*[4] * 11, sequence_length=4), rows_of(*[3] * 5, sequence_length=4)]


def _taken(batches, count):
    return [next(batches) for _ in range(count)]


def _same(one, other):
    for a, b in zip(one, other, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


def _rows(batches):
    return [row.tobytes() for batch in batches for row in batch.tokens]


def test_an_epoch_holds_every_row_once_in_another_order(sources):
    stream = _rows(_taken(Batches(sources[:1], 1, seed=0), 33))
    epochs = [stream[:11], stream[11:22], stream[22:]]
    assert [len(set(epoch)) for epoch in epochs] == [11, 11, 11]
    assert epochs[0] != epochs[1] != epochs[2]


def test_batches_straddle_epochs(sources):
    assert _rows(_taken(Batches(sources[:1], 4, seed=0), 8)) == _rows(_taken(Batches(sources[:1], 1, seed=0), 32))


@pytest.mark.parametrize("num_rows", [1, 2])
def test_few_rows_repeat(num_rows):
    batches = Batches([rows_of(*[3] * num_rows, sequence_length=3)], 3, seed=0)
    for batch in _taken(batches, 3):
        assert batch.tokens.shape == batch.segment_ids.shape == batch.loss_mask.shape == (3, 3)
        assert batch.num_tokens == 9


def test_seeds_give_other_orders(sources):
    streams = [tuple(_rows(_taken(Batches(sources[:1], 1, seed=seed), 11))) for seed in range(4)]
    assert len(set(streams)) == 4


@pytest.mark.parametrize("options", [{}, MIXTURE, {"process_index": 1, "process_count": 2}])
@pytest.mark.parametrize("position", [0, 1, 5, 13])
def test_a_saved_position_is_returned_to_exactly(sources, options, position):
    """Also past the end of an epoch, in another object, through JSON, and backwards."""
    batches = Batches(sources, 2, seed=7, **options)
    _taken(batches, position)
    state = json.loads(json.dumps(batches.state()))
    rest = _taken(batches, 12)
    fresh = Batches(sources, 2, seed=7, **options)
    fresh.restore(state)
    assert fresh.state() == state
    _same(_taken(fresh, 12), rest)
    batches.restore(state)
    _same(_taken(batches, 12), rest)


def test_reading_ahead_does_not_move_the_position(sources):
    batches = Batches(sources[:1], 2, seed=0)
    before = batches.state()
    next(batches)
    assert batches.state() != before
    assert batches.state() == {"next_index": 1}


def test_weights_are_shares_of_rows(sources):
    lengths = Counter()
    for batch in _taken(Batches(sources, 4, seed=0, **MIXTURE), 25):
        lengths.update(np.count_nonzero(batch.segment_ids, axis=1).tolist())
    assert lengths == {4: 75, 3: 25}


def test_a_source_in_a_mixture_still_comes_whole_each_epoch(sources):
    stream = [row for batch in _taken(Batches(sources, 1, seed=0, **MIXTURE), 44) for row in batch.tokens.tolist()]
    firsts = [row[0] for row in stream if row[3]]
    assert len(firsts) == 33
    assert [len(set(firsts[i : i + 11])) for i in (0, 11, 22)] == [11, 11, 11]


def test_processes_share_each_batch(sources):
    whole = _taken(Batches(sources, 6, seed=3, **MIXTURE), 5)
    parts = [_taken(Batches(sources, 6, seed=3, **MIXTURE, process_index=i, process_count=3), 5) for i in range(3)]
    for together, *shares in zip(whole, *parts, strict=True):
        assert [len(share.tokens) for share in shares] == [2, 2, 2]
        assert sorted(_rows([together])) == sorted(_rows(shares))


def test_processes_that_cannot_share_a_batch_are_refused(sources):
    with pytest.raises(UserError, match="multiple of the 3 processes, got 4"):
        Batches(sources, 4, seed=0, process_count=3)


@pytest.mark.parametrize("state", [{}, {"next_index": "x"}, {"next_index": -1}])
def test_what_is_no_position_is_refused(sources, state):
    with pytest.raises(UserError, match="saved position"):
        Batches(sources, 1, seed=0).restore(state)
