"""Documents to rows: first-fit against its definition, cuts, segments, masks, padding."""

import itertools
import time

import jax.numpy as jnp
import numpy as np
import pytest
from stores import pieces_of, rows_of, store_of

from mtp_jax.documents import documents
from train.packing import first_fit


def _naive_first_fit(lengths, capacity):
    room, rows = [], []
    for length in lengths:
        row = next((i for i, left in enumerate(room) if left >= length), len(room))
        if row == len(room):
            room.append(capacity)
        room[row] -= length
        rows.append(row)
    return rows


@pytest.mark.parametrize("capacity", [1, 2, 7, 64])
@pytest.mark.parametrize("num_pieces", [1, 2, 3, 50, 257])
def test_first_fit_is_the_first_row_with_room(capacity, num_pieces):
    lengths = np.random.default_rng(num_pieces).integers(1, capacity + 1, num_pieces).tolist()
    assert first_fit(lengths, capacity).tolist() == _naive_first_fit(lengths, capacity)


def test_first_fit_of_nothing():
    assert first_fit([], 5).tolist() == []


def test_a_million_documents_are_packed_in_seconds():
    lengths = np.minimum(np.random.default_rng(0).lognormal(6, 1, 1_000_000).astype(int) + 1, 4096)
    begin = time.process_time()
    rows = first_fit(lengths.tolist(), 4096)
    assert time.process_time() - begin < 60
    filled = np.bincount(rows, lengths)
    assert filled.max() <= 4096
    assert lengths.sum() / (4096 * len(filled)) > 0.99


def test_every_token_comes_once_and_segments_are_documents():
    lengths = (3, 8, 4, 6, 2, 5)
    rows = rows_of(*lengths, sequence_length=8)
    owner = np.repeat(np.arange(6), lengths)
    kept = []
    for i in range(len(rows)):
        tokens, segments, mask = rows[i]
        np.testing.assert_array_equal(mask, segments > 0)
        for number in set(segments.tolist()) - {0}:
            piece = tokens[segments == number]
            np.testing.assert_array_equal(np.diff(piece), 1)
            assert len(set(owner[piece - 1].tolist())) == 1
        kept += tokens[segments > 0].tolist()
    assert sorted(kept) == list(range(1, 29))
    assert rows.num_tokens == 28
    assert rows.padding == pytest.approx(1 - 28 / (8 * len(rows)))


def test_positions_restart_in_every_segment():
    row = rows_of(3, 2, sequence_length=7)[0]
    np.testing.assert_array_equal(row.segment_ids, [1, 1, 1, 2, 2, 0, 0])
    np.testing.assert_array_equal(documents(jnp.asarray(row.segment_ids[None])).position[0], [0, 1, 2, 0, 1, 0, 1])


def test_a_long_text_goes_on_as_a_segment_of_its_own():
    rows = rows_of(10, 2, sequence_length=4)
    assert [rows[i].tokens.tolist() for i in range(3)] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert rows[2].segment_ids.tolist() == [1, 1, 2, 2]


def test_a_last_piece_of_one_token_has_no_target_and_is_left_out():
    assert pieces_of(store_of(9), 4).lengths.tolist() == [4, 4]


def test_a_long_conversation_is_cut_after_the_last_turn_that_fits():
    store = store_of("0011" + "0001" + "01" + "0")
    pieces = pieces_of(store, 9)
    assert pieces.starts.tolist() == [0, 8]
    assert pieces.lengths.tolist() == [8, 3]
    assert (pieces.num_split, pieces.num_dropped) == (1, 0)


def test_a_turn_longer_than_a_row_is_cut_within():
    pieces = pieces_of(store_of("001111110"), 4)
    assert list(zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True)) == [(0, 4), (4, 4)]


def test_pieces_of_a_conversation_without_targets_are_left_out():
    pieces = pieces_of(store_of("0" * 9 + "11"), 4)
    assert list(zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True)) == [(8, 3)]


def test_long_conversations_are_dropped_where_that_is_the_rule():
    pieces = pieces_of(store_of("0011", 9, "00110011"), 4, split=False)
    assert pieces.starts.tolist() == [0, 4, 8]
    assert (pieces.num_split, pieces.num_dropped) == (0, 1)


def test_the_mask_moves_with_its_tokens():
    rows = rows_of("0110", "001", 3, sequence_length=8, seed=[1])
    owner = dict(zip(range(1, 11), map(int, "0110" + "001" + "111"), strict=True))
    for tokens, segments, mask in (rows[i] for i in range(len(rows))):
        for token, segment, trained in zip(tokens.tolist(), segments.tolist(), mask.tolist(), strict=True):
            assert trained == (segment > 0 and owner[token] == 1)


@pytest.mark.parametrize("seed", [None, [3]])
def test_targets_are_counted_as_rows_hold_them(seed):
    masks = ["0110", "001", 3, "1", "100", 9, "0" * 9 + "1"]
    rows = rows_of(*masks, sequence_length=5, seed=seed)
    count = 0
    for _, segments, mask in (rows[i] for i in range(len(rows))):
        pairs = itertools.pairwise(zip(segments.tolist(), mask.tolist(), strict=True))
        count += sum(before == now and trained for (before, _), (now, trained) in pairs)
    assert rows.num_targets == count


def test_seeds_give_other_rows():
    one, same, other = (rows_of(*range(1, 30), sequence_length=30, seed=[seed]) for seed in (0, 0, 1))
    assert one[0].tokens.tolist() == same[0].tokens.tolist()
    assert one[0].tokens.tolist() != other[0].tokens.tolist()


def test_batches_hold_all_rows_once_and_the_last_is_filled_up():
    rows = rows_of(4, 4, 4, sequence_length=4)
    batches = list(rows.batches(2))
    assert [batch.num_tokens for batch in batches] == [8, 4]
    np.testing.assert_array_equal(np.concatenate([b.tokens for b in batches])[:3].ravel(), np.arange(1, 13))
    for array in batches[1]:
        assert array.shape == (2, 4)
        assert not array[1].any()
