"""Runs of one seed differ in nothing but what is asked."""

import itertools

import numpy as np

from train.ablation.grid import grid, parse_vary
from train.corpus import new_tokenizer, packed_rows, read_corpus
from train.pipeline import Batches
from train.progress import Progress

QUIET = Progress(quiet=True)


def _batches(experiment, count):
    corpus = read_corpus(experiment, QUIET)
    rows = packed_rows(experiment, corpus, new_tokenizer(experiment, corpus, QUIET), QUIET)
    batches = Batches(rows.training, experiment.batch_size, experiment.seed, weights=experiment.data_weights)
    try:
        return np.stack([batch.tokens for batch in itertools.islice(batches, count)])
    finally:
        batches.close()


def test_all_arms_of_a_seed_read_the_same_batches(small_experiment):
    """Over more than an epoch, with a tokenizer trained by each for itself."""
    vary = parse_vary(["depths=1,2", "head_loss=ce,tv", "gradient_mode=joint,detached"])
    runs = grid(small_experiment, (0.0, 1.0), ((0.3, 0.1),), vary, 2)
    first = {seed: _batches(small_experiment.override([f"seed={seed}"]), 40) for seed in (0, 1)}
    for run in (runs[0], runs[9], runs[23], runs[-1]):
        np.testing.assert_array_equal(_batches(run.experiment, 40), first[run.experiment.seed])
    assert not np.array_equal(first[0], first[1])
