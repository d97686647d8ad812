"""One continuation that is asked for, and the room it takes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import UInt32

from infer.buckets import bucket
from infer.noise import row_key
from mtp_jax.config import ModelConfig
from mtp_jax.errors import UserError

MIN_CACHE_LENGTH = 64


@dataclass(frozen=True)
class Job:
    """One row to decode.

    Attributes:
      prompt: ids.
      max_new_tokens: never exceeded.
      key: of its noise, see `infer.noise.row_key`; greedy decoding has none.
      stop: texts that end it; see `infer.text_stream.TextStream`.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    key: UInt32[np.ndarray, "2"] = field(default_factory=lambda: row_key(0, 0, 0))
    stop: tuple[str, ...] = ()

    def cache_length(self, config: ModelConfig, given: int | None) -> int:
        """The given cache length, or else the smallest bucket that holds the row, at most what the model can."""
        if given is not None:
            return given
        return min(bucket(len(self.prompt) + self.max_new_tokens, MIN_CACHE_LENGTH), config.max_position_embeddings)


def check_jobs(config: ModelConfig, jobs: Sequence[Job], cache_length: int | None = None) -> None:
    """Refuses what cannot be continued, before weights are read.

    Raises:
      UserError: a prompt is empty, too long for the cache or holds ids outside the vocabulary, or a limit is negative.
    """
    last = config.vocab_size - 1
    for number, job in enumerate(jobs):
        where = "the prompt" if len(jobs) == 1 else f"prompt {number}"
        if job.max_new_tokens < 0:
            raise UserError(f"the number of new tokens must be at least 0, got {job.max_new_tokens}")
        if not len(job.prompt):
            raise UserError(f"{where} is empty: expected at least one token")
        outside = next((i for i in job.prompt if not 0 <= i <= last), None)
        if outside is not None:
            raise UserError(f"{where} holds id {outside}; expected ids from 0 to {last}, the vocabulary")
        room = job.cache_length(config, cache_length)
        if len(job.prompt) > room:
            raise UserError(f"a prompt of {len(job.prompt)} tokens does not fit into the cache of {room} tokens")
