"""Several documents packed in one row, told apart by segment ids."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Documents(NamedTuple):
    """Where each token of a packed row belongs.

    Ids may repeat within a row (`[7, 7, 3, 7]` is three documents), so layers compare `number`, never ids.
    """

    number: Int[Array, "B T"]  # counts the changes of segment id so far; never falls along T
    position: Int[Array, "B T"]  # tokens since the document's start
    counted: Bool[Array, "B T"]  # in what is said of all tokens together; padding is not

    def reaching(self, depth: int) -> "Documents":
        """Of the counted tokens, counts only those that have one in their document so many places further on."""
        num_tokens = self.number.shape[1]
        ahead = jnp.pad(self.number[:, depth:], ((0, 0), (0, min(depth, num_tokens))), constant_values=-1)
        return self._replace(counted=self.counted & (ahead == self.number))


def documents(segment_ids: Int[Array, "B T"], counted: Bool[Array, "B T"] | None = None) -> Documents:
    """Numbers the documents of each row and the tokens within them; every change of id starts a document.

    Args:
      counted: None counts all.
    """
    if counted is None:
        counted = jnp.ones(segment_ids.shape, bool)
    changed = segment_ids[:, 1:] != segment_ids[:, :-1]
    starts = jnp.pad(changed, ((0, 0), (1, 0)))
    time = jnp.arange(segment_ids.shape[1])[None, :]
    start_time = jax.lax.cummax(jnp.where(starts, time, 0), axis=1)
    return Documents(jnp.cumsum(starts.astype(jnp.int32), axis=1), time - start_time, counted)
