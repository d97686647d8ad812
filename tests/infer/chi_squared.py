"""Whether draws have a law."""

import numpy as np


def deviation(tokens, law):
    """Pearson's statistic as a standard normal deviate (Wilson and Hilferty); cells that expect under 5 are one."""
    counts = np.zeros(law.shape)
    np.add.at(counts, tuple(np.asarray(tokens).T), 1)
    if counts[law == 0].any():
        return np.inf
    counts, expected = counts[law > 0], law[law > 0] * len(tokens)
    small = expected < 5
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(counts) - 1
    if not freedom:
        return 0.0
    statistic = ((counts - expected) ** 2 / expected).sum()
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
