"""Where arms stand in a figure, and what they are called there."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from train.ablation.arms import Arm, number

_LONGEST = 48  # characters of a label
_LONGEST_TICK = 22
_ROOM = 42  # characters below a panel


class Categories(NamedTuple):
    """The axis: weights and schedules, evenly spaced since 0 has no logarithm. Or, of one schedule, the varied values.

    Attributes:
      ticks: what stands at 0, 1, ..
      places: by the arm's label.
      series: the varied settings of each series; the empty string is that of an ablation which varies none.
      joined: runs of places that a line may join, since they have an order.
    """

    title: str
    ticks: tuple[str, ...]
    places: Mapping[str, int]
    series: tuple[str, ...]
    joined: tuple[range, ...]
    divided: float | None

    def in_series(self, arms: Sequence[Arm], series: str) -> list[Arm]:
        return [arm for arm in arms if len(self.series) == 1 or arm.combination == series]


def categories_of(arms: Sequence[Arm]) -> Categories:
    """Args: arms: in order (`arms_of`)."""
    schedules = list(dict.fromkeys(arm.schedule for arm in arms))
    combinations = list(dict.fromkeys(arm.combination for arm in arms))
    if len(schedules) == 1 and len(combinations) > 1:
        keys = sorted({key for arm in arms for key, _ in arm.varied})
        values = {arm.combination: _values(arm, keys) for arm in arms}
        is_scale = len(keys) == 1 and all(_is_a_number(values[combination][0]) for combination in combinations)
        return Categories(
            title=f"{printable(', '.join(keys))} (λ = {printable(schedules[0])})",
            ticks=tuple(printable(", ".join(values[combination]), _LONGEST_TICK) for combination in combinations),
            places={arm.label: combinations.index(arm.combination) for arm in arms},
            series=("",),
            joined=(range(len(combinations)),) if is_scale else (),
            divided=None,
        )
    constants = sum(any(arm.schedule == schedule and arm.is_constant for arm in arms) for schedule in schedules)
    return Categories(
        title="λ, weight of the MTP loss",
        ticks=tuple(printable(schedule.replace("-then-", " then "), _LONGEST_TICK) for schedule in schedules),
        places={arm.label: schedules.index(arm.schedule) for arm in arms},
        series=tuple(combinations),
        joined=(range(constants),),
        divided=constants - 0.5 if 0 < constants < len(schedules) else None,
    )


def _values(arm: Arm, keys: Sequence[str]) -> list[str]:
    return [dict(arm.varied).get(key, "as configured") for key in keys]


def _is_a_number(text: str) -> bool:
    try:
        return number(float(text)) is not None
    except ValueError:
        return False


def series_name(series: str) -> str:
    """In a legend beside other series."""
    return printable(series) if series else "as configured"


def printable(text: str, longest: int = _LONGEST) -> str:
    """A label as it can be drawn: on one line, of no more characters, and shown in a legend."""
    line = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    line = f" {line}" if line.startswith("_") else line  # matplotlib leaves such out
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def is_crowded(categories: Categories) -> bool:
    """Whether what stands at the axis of arms has to lean."""
    return sum(max(map(len, tick.split(" then "))) + 2 for tick in categories.ticks) > _ROOM
