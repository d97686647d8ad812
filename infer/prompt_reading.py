"""Prompts into the model, a piece of a fixed size at a time: beside the cache, memory does not grow with the prompt."""

from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jaxtyping import Int

from infer.buckets import bucket
from infer.carry import Context
from infer.programs import Programs
from infer.speculative import read

PIECE = 512
SMALLEST_PIECE = 16


def slots_for(cache_length: int, max_drafts: int) -> int:
    """S for rows of at most `cache_length` tokens: a bucket, and room for what a round or a piece writes past them.

    Other cache lengths of the same bucket share its compiled programs.
    """
    rounded = bucket(cache_length, SMALLEST_PIECE) if cache_length <= PIECE else -(-cache_length // PIECE) * PIECE
    return rounded + max(max_drafts + 1, SMALLEST_PIECE)


def padded(tokens: Sequence[int], width: int) -> tuple[Int[np.ndarray, "1 {width}"], Int[np.ndarray, " 1"]]:
    """Tokens of one row, padded, and how many they are."""
    row = np.zeros((1, width), np.int32)
    row[0, : len(tokens)] = tokens
    return row, np.array([len(tokens)], np.int32)


def piece_widths(first: int, count: int, num_slots: int) -> Iterator[int]:
    """Widths of padded pieces for `count` tokens from index `first` on: buckets, none of which reaches past S.

    A padded piece writes its whole width, and a write past the end would land on good slots.
    """
    while count > 0:
        width = bucket(min(count, PIECE), SMALLEST_PIECE)
        while first + width > num_slots:
            width //= 2
        yield width
        first, count = first + width, count - width


def read_pieces(
    programs: Programs, context: Context, first: int, tokens: Sequence[int], num_slots: int, with_head: bool
) -> Iterator[tuple[Context, int]]:
    """Reads tokens after the `first` ones that a context of one row holds; the context is donated.

    Yields:
      After each piece the context, and how many of the tokens it has read; nothing if there are none.
    """
    done = 0
    for width in piece_widths(first, len(tokens), num_slots):
        piece = tokens[done : done + width]
        done += len(piece)
        context = programs.call(read, context, *padded(piece, width), with_head=with_head)
        # One piece at a time, so that progress is true and Ctrl-C is heard between them.
        jax.block_until_ready(context.hidden)
        yield context, done
