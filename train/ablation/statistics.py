"""Means over seeds and how sure they are."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from scipy.stats import t as student_t

CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """A mean over seeds, and half the width of its confidence interval: None of one seed, which tells nothing."""

    mean: float
    half_width: float | None
    seeds: tuple[int, ...]

    @property
    def n(self) -> int:
        return len(self.seeds)

    @property
    def excludes_zero(self) -> bool | None:
        """Whether 0 lies outside the interval; None where there is no interval."""
        return None if self.half_width is None else abs(self.mean) > self.half_width


def estimate(values: Mapping[int, float]) -> Estimate | None:
    """The mean of what each seed gave, with Student's interval at `CONFIDENCE`; None of nothing.

        mean ± t s / sqrt(n),    s^2 = sum (x - mean)^2 / (n - 1),    t: quantile (1 + CONFIDENCE) / 2 at n - 1 degrees

    It holds where seeds are independent and what they give is about normal, which three values cannot show.

    Args:
      values: by seed.
    """
    if not values:
        return None
    seeds = tuple(sorted(values))
    n = len(seeds)
    mean = math.fsum(values.values()) / n
    if n == 1:
        return Estimate(mean, None, seeds)
    variance = math.fsum((value - mean) ** 2 for value in values.values()) / (n - 1)
    quantile = float(student_t.ppf((1 + CONFIDENCE) / 2, n - 1))
    return Estimate(mean, quantile * math.sqrt(variance / n), seeds)


def paired_difference(values: Mapping[int, float], reference: Mapping[int, float]) -> Estimate | None:
    """The mean of value - reference over the seeds that both have; None if there are none.

    A seed settles the first weights and the order of the data, so much of what seeds do to both arms alike cancels,
    and the interval is that of the differences, not of either mean.
    """
    return estimate(paired(values, reference))


def paired(values: Mapping[int, float], reference: Mapping[int, float]) -> dict[int, float]:
    """value - reference of each seed that both have."""
    return {seed: values[seed] - reference[seed] for seed in sorted(values.keys() & reference.keys())}
