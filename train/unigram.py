"""The loss of a model that knows only how often each token comes: what a trained model must be below to count."""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Int

from train.packing import PackedRows

_AT_A_TIME = 1 << 20
"""Tokens looked at, at one time: a corpus may be larger than memory."""


def unigram_loss(training: Iterable[PackedRows], held_out: Iterable[PackedRows], vocab_size: int) -> float:
    """Mean over held-out targets v of -log p(v), nats a token, with p from counts in training, each plus one.

        p(v) = (n_v + 1) / (sum_u n_u + V)

    Several sources are one heap, whatever `data_weights` says.
    """
    seen = sum((_target_counts(rows, vocab_size) for rows in training), start=np.ones(vocab_size, np.int64))
    asked = sum((_target_counts(rows, vocab_size) for rows in held_out), start=np.zeros(vocab_size, np.int64))
    return float(asked @ (np.log(seen.sum()) - np.log(seen)) / asked.sum())


def _target_counts(rows: PackedRows, vocab_size: int) -> Int[np.ndarray, " V"]:
    """How often each id is a target of the next-token loss."""
    counts = np.zeros(vocab_size, np.int64)
    for targets in rows.targets(_AT_A_TIME):
        counts += np.bincount(targets, minlength=vocab_size)
    return counts
