"""How long a step of plain decoding takes, the prompt's reading taken out."""

from collections.abc import Callable, Sequence
from statistics import median


def seconds_per_step(decode: Callable[[int], float], steps: int) -> float:
    """(seconds for 1 + steps tokens - seconds for 1 token) / steps, for anything that decodes one token a step.

    Args:
      decode: takes a number of new tokens, decodes that many, and gives the seconds it took.
      steps: tokens in the difference.
    """
    return (decode(1 + steps) - decode(1)) / steps


def alternate(measurements: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Takes each measurement in turn, `repeats` times over, so that what else the machine does falls on all alike.

    One turn before is not counted: it compiles and warms up.
    """
    taken: dict[str, list[float]] = {name: [] for name in measurements}
    for turn in range(repeats + 1):
        for name, measure in measurements.items():
            value = measure()
            if turn:
                taken[name].append(value)
    return taken


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": median(values), "min": min(values), "max": max(values)}
