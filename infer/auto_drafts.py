"""`--num-draft-tokens auto`: how many tokens to draft, from what rounds cost and how many drafts stand."""

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

RECENT_COSTS = 5  # chunks; the median of so many shrugs off two that something else held up
MEMORY = 0.85  # of acceptance from chunk to chunk: half is forgotten after four chunks
PRIOR_TRIALS = 1.0  # what a position is thought to do like the one before it, in drafts seen
MARGIN = 1.05  # a size must promise so much more than the one in use, lest noise make it flap
REVISIT = 40  # chunks after which the size not used for longest is measured again


class AutoDrafts:
    """Chooses J, the number of tokens drafted a round, among sizes whose programs exist.

    A round with J drafts yields on average, for a row,

        E_J = 1 + sum_{k=1..J} prod_{i<=k} a_i

    tokens, a_i being the share of the drafts at position i that stand if all before them do, and costs c_J
    seconds. The choice is the J with the largest E_J / c_J.

    - c_J is the median of recent chunks with J. A size's first chunk is left out: programs start cold.
    - a_i follows the text: counts decay. A position with few counts is thought to do like the one before it.
    - Sizes never measured come first, in order. Later, now and then, the one not used for longest gets a chunk, so
      that a size that has become worth while is found again.

    Host logic only: it is told after each chunk of rounds what happened, and says what to do next.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """Args: sizes: each J that may be chosen; 0, plain decoding, may be one."""
        if not sizes or min(sizes) < 0:
            raise ValueError(f"expected at least one number of drafts, none negative, got {list(sizes)}")
        self.sizes = sorted(set(sizes))
        self._costs = {size: deque[float](maxlen=RECENT_COSTS) for size in self.sizes}
        self._chunks = dict.fromkeys(self.sizes, 0)
        self._last_use = dict.fromkeys(self.sizes, 0)
        self._trials = [0.0] * self.sizes[-1]
        self._stood = [0.0] * self.sizes[-1]
        self._preferred = self.sizes[0]
        self._next = self.sizes[0]

    @property
    def num_draft_tokens(self) -> int:
        """J for the next chunk."""
        return self._next

    def observe(
        self, num_drafts: int, rounds: int, tokens: int, accepted_per_position: Sequence[int], seconds: float
    ) -> None:
        """Takes in what a chunk did.

        Args:
          num_drafts: J, one of the sizes.
          rounds: that the program ran, however many rows took part.
          tokens: emitted, of all rows.
          accepted_per_position: drafts emitted at positions 1 to J, of all rows.
          seconds: that the chunk took.
        """
        if not rounds:
            return
        self._chunks[num_drafts] += 1
        self._last_use[num_drafts] = sum(self._chunks.values())
        if self._chunks[num_drafts] > 1:
            self._costs[num_drafts].append(seconds / rounds)
        if num_drafts:
            # Each round of a row ends with one token that is no draft, but for a draft that ends the row.
            trials = max(tokens - sum(accepted_per_position[:num_drafts]), accepted_per_position[0])
            for position, stood in enumerate(accepted_per_position[:num_drafts]):
                self._trials[position] = MEMORY * self._trials[position] + trials
                self._stood[position] = MEMORY * self._stood[position] + stood
                trials = stood
        self._choose()

    def _choose(self) -> None:
        unmeasured = [size for size in self.sizes if not self._costs[size]]
        if unmeasured:
            self._next = unmeasured[0]
            return
        rates = {size: self._rate(size) for size in self.sizes}
        best = max(self.sizes, key=rates.__getitem__)
        if rates[best] > MARGIN * rates[self._preferred]:
            self._preferred = best
        now, oldest = sum(self._chunks.values()), min(self.sizes, key=self._last_use.__getitem__)
        self._next = oldest if now % REVISIT == 0 else self._preferred

    def _acceptance(self) -> list[float]:
        """a_1, a_2, ... up to the largest size."""
        shares, before = [], 0.5
        for stood, trials in zip(self._stood, self._trials, strict=True):
            before = (stood + PRIOR_TRIALS * before) / (trials + PRIOR_TRIALS)
            shares.append(before)
        return shares

    def _tokens_per_round(self, size: int) -> float:
        """E_J, of one row."""
        total = reach = 1.0
        for share in self._acceptance()[:size]:
            reach *= share
            total += reach
        return total

    def _rate(self, size: int) -> float:
        """E_J / c_J, tokens a second of one row."""
        return self._tokens_per_round(size) / statistics.median(self._costs[size])

    def report(self) -> dict[str, Any]:
        """The choice and what it rests on, for JSON.

        Null until all sizes were measured: the choice, and the figures of those that were not.
        """
        return {
            "num_draft_tokens": self._preferred if all(self._costs.values()) else None,
            "acceptance": self._acceptance(),
            "sizes": [
                {
                    "num_draft_tokens": size,
                    "chunks": self._chunks[size],
                    "seconds_per_round": statistics.median(self._costs[size]) if self._costs[size] else None,
                    "tokens_per_round": self._tokens_per_round(size),
                    "tokens_per_second": self._rate(size) if self._costs[size] else None,
                }
                for size in self.sizes
            ],
        }

    def summary(self) -> str:
        """The same in a line for people."""
        parts, report = [], self.report()
        for entry in report["sizes"]:
            size, seconds = entry["num_draft_tokens"], entry["seconds_per_round"]
            if seconds is None:
                parts.append(f"J={size} not measured")
            else:
                parts.append(f"J={size} {1e3 * seconds:.2f} ms a round, {entry['tokens_per_second']:.0f} tokens/s")
        chosen = "not chosen yet" if report["num_draft_tokens"] is None else f"J={self._preferred}"
        return f"drafts a round: {chosen} ({'; '.join(parts)})"
