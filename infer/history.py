"""What one row has read, kept from turn to turn, with places in it to return to.

A key/value cache can be cut anywhere, a recurrent memory cannot: going back is possible only to where a copy of the
memory was kept, a mark.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from infer.carry import Context
from infer.programs import Programs
from infer.prompt_reading import read_pieces
from infer.speculative import unread
from mtp_jax.state import Bookmark, bookmark, forget_newest, grow, return_to

MARKS = 6
"""Kept at most, the newest: those of two turns. Each holds a copy of all DeltaNet memories."""


class _Mark(NamedTuple):
    """Where the first `num_tokens` tokens had been read."""

    num_tokens: int
    trunk: Bookmark
    head: Bookmark
    hidden: Float[Array, "1 D"]


class History:
    """Tokens that a row has read, and the model's state after them.

    Every state in here is a true `Context`: the head has read one pair fewer than the trunk has tokens. Whatever
    interrupts a method, the history afterwards is one that was, or an empty one if a donated state was lost.
    """

    def __init__(self, programs: Programs, with_head: bool) -> None:
        """Args: with_head: False leaves the head unread, for decoding with J = 0 only."""
        self._programs = programs
        self._with_head = with_head
        self._num_slots = 0
        self._now: tuple[list[int], Context] | None = None  # one attribute, so that both change at once
        self._marks: list[_Mark] = []  # ascending; each is of a prefix of the tokens

    @property
    def tokens(self) -> list[int]:
        """Those that have been read."""
        return [] if self._now is None else self._now[0]

    def return_to_prefix_of(self, tokens: Sequence[int], num_slots: int) -> int:
        """Goes back to the longest kept state whose tokens are a prefix of the given ones, and makes room.

        Args:
          num_slots: S that is needed; the buffers grow to it, and never shrink.

        Returns:
          How many tokens that state has read; all of the given ones, if it may be.
        """
        if self._now is not None and any(leaf.is_deleted() for leaf in jax.tree.leaves(self._now[1])):
            self.forget()  # an interrupted call had it
        common = common_prefix(self.tokens, tokens)
        # What is read next overwrites keys and values that later marks rely on.
        self._marks = [mark for mark in self._marks if mark.num_tokens <= common]
        if self._now is not None and common < len(self.tokens):
            read, context = self._now
            mark = self._marks[-1] if self._marks else None
            self._now = None if mark is None else (read[: mark.num_tokens], _back(context, mark))
        self._make_room(num_slots)
        return len(self.tokens)

    def _make_room(self, num_slots: int) -> None:
        if self._now is None:
            self._num_slots = max(self._num_slots, num_slots)
            self._now = [], self._programs.call(unread, batch=1, num_slots=self._num_slots)
        elif num_slots > self._num_slots:
            read, context = self._now
            trunk, head = (grow(state, num_slots) for state in (context.trunk, context.head))
            self._now = read, context._replace(trunk=trunk, head=head)
            self._num_slots = num_slots

    def read(self, tokens: Sequence[int]) -> Iterator[int]:
        """Reads more tokens, for which there is room; gives how many of them it has read, piece by piece."""
        assert self._now is not None
        before, context = self._now
        pieces = read_pieces(self._programs, context, len(before), tokens, self._num_slots, self._with_head)
        for later, done in pieces:
            self._now = [*before, *tokens[:done]], later
            yield done

    def mark(self) -> None:
        """Makes the present state one that can be returned to; the oldest mark may be dropped for it."""
        assert self._now is not None
        read, context = self._now
        if not read or (self._marks and self._marks[-1].num_tokens == len(read)):
            return
        marks = bookmark(context.trunk), bookmark(context.head)
        self._marks = [*self._marks, _Mark(len(read), *marks, jnp.copy(context.hidden))][-MARKS:]

    @property
    def context(self) -> Context:
        """To be decoded from. It is donated, so the history is lost unless `follow` is told of what became of it."""
        assert self._now is not None
        return self._now[1]

    @property
    def num_slots(self) -> int:
        """S of the buffers."""
        return self._num_slots

    def follow(self, tokens: Sequence[int], context: Context) -> None:
        """Takes over a state that was decoded to.

        Args:
          tokens: all that its trunk has read.
          context: between rounds, when the head has read the pair of the newest token too. As that token is not read
            yet, and may never be, the pair is forgotten; what reads on reads it again.
        """
        head = forget_newest(context.head) if self._with_head else context.head
        self._now = list(tokens), context._replace(head=head)

    def forget(self) -> None:
        """Empties the history."""
        self._marks, self._now = [], None


def _back(context: Context, mark: _Mark) -> Context:
    trunk, head = return_to(context.trunk, mark.trunk), return_to(context.head, mark.head)
    return Context(trunk, head, jnp.copy(mark.hidden))


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    length = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        length += 1
    return length
