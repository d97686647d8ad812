"""Which runs an ablation consists of: weights and schedules of the MTP loss, values of other settings, seeds."""

import dataclasses
import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mtp_jax.errors import UserError
from train.experiment import Experiment, parse_setting, shown

CONSTANT = "constant"
_THEN = "-then-"
_LONGEST_NAME = 100
_LENGTH = ("steps", "batch_size", "sequence_length")  # their product is a run's tokens

# The grid itself sets these, from the flag beside each.
_OWN_FLAGS = {"seed": "--seeds", "mtp_weights": "--weights or --schedules", "mtp_switch_tokens": "--set"}


class Vary(NamedTuple):
    """A setting and the values that it takes in turn."""

    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Run:
    """One training run of the grid.

    Attributes:
      name: of its folder: the label made safe, and the seed.
      label: names the arm, all that differs but the seed: `0.3`, `0.3-then-0.1`, `0.3 depths=2`.
      schedule: of the MTP loss's weight: `0.3` held constant, or `0.3-then-0.1`.
      varied: settings of the arm beside it, by name.
    """

    name: str
    label: str
    schedule: str
    varied: dict[str, Any]
    experiment: Experiment

    @property
    def tokens(self) -> int:
        """What its rows have room for; it sees fewer where rows are padded."""
        return math.prod(getattr(self.experiment, key) for key in _LENGTH)


def parse_weights(text: str) -> tuple[float, ...]:
    """Weights from `0,0.1,0.3`.

    Raises:
      UserError: if one is no finite number from 0, or is there twice.
    """
    weights = tuple(_weight("--weights", part) for part in text.split(",") if text.strip())
    _require_different("--weights", [_number(weight) for weight in weights])
    return weights


def parse_schedules(text: str) -> tuple[tuple[float, ...], ...]:
    """The named schedules of `constant,0.3-then-0.1`, each as its weights. `constant` adds none.

    Raises:
      UserError: if one is spelled in another way, or is there twice.
    """
    schedules = []
    for name in map(str.strip, text.split(",")):
        if name == CONSTANT:
            continue
        parts = name.split(_THEN)
        if len(parts) < 2:
            raise UserError(f"--schedules: expected {CONSTANT} or weights like 0.3{_THEN}0.1, got {name!r}")
        weights = tuple(_weight(f"--schedules {name}", part) for part in parts)
        if any(a == b for a, b in itertools.pairwise(weights)):
            raise UserError(f"--schedules {name}: expected another weight after each {_THEN}, got the same")
        schedules.append(weights)
    _require_different("--schedules", list(map(schedule_name, schedules)))
    return tuple(schedules)


def parse_vary(texts: Iterable[str]) -> tuple[Vary, ...]:
    """Settings to vary from `KEY=V1,V2` each; values that hold commas are separated by semicolons.

    Raises:
      UserError: if a setting does not exist, is the grid's own, is there twice, or has a value that is not of its type
        or there twice.
    """
    varies: list[Vary] = []
    for text in texts:
        key, equals, values = text.partition("=")
        key = key.strip()
        if not equals or not values.strip():
            raise UserError(f"--vary {text}: expected KEY=V1,V2, a setting and its values")
        if key in _OWN_FLAGS:
            raise UserError(f"--vary {key}: the grid sets {key} by itself; see {_OWN_FLAGS[key]}")
        if any(key == vary.key for vary in varies):
            raise UserError(f"--vary {key}: given twice; expected each setting once, with all its values")
        parts = [part.strip() for part in values.split(";" if ";" in values else ",")]
        if not all(parts):
            raise UserError(f"--vary {text}: expected a value between any two separators, one is missing")
        try:
            parsed = tuple(parse_setting(key, part) for part in parts)
        except UserError as error:
            raise UserError(f"--vary {key}: {error}") from error
        _require_different(f"--vary {key}", list(map(shown, parsed)))
        varies.append(Vary(key, parsed))
    return tuple(varies)


def grid(
    base: Experiment,
    weights: Sequence[float],
    schedules: Sequence[Sequence[float]],
    varies: Sequence[Vary],
    num_seeds: int,
) -> list[Run]:
    """Every weight held constant and every schedule, times the values of every varied setting, times seeds from 0.

    All arms of a seed come before the next seed, so that a grid which is stopped early has compared all of them. Runs
    of one seed read the same batches, unless what is varied concerns the data or the rows.

    So that runs compare, two settings that would measure less do not: a run that decodes no held-out prompts
    (`acceptance_every=0`) does at its end, and where `depths` is varied all runs are measured at the largest
    (`measured_depths`, if it is 0).

    Raises:
      UserError: if there is nothing to run, or a combination contradicts itself; names the run.
    """
    if not weights and not schedules:
        raise UserError("--weights: expected one or more, or a schedule such as --schedules 0.3-then-0.1, got neither")
    if not base.measured_depths:
        deepest = max((depths for vary in varies if vary.key == "depths" for depths in vary.values), default=0)
        base = dataclasses.replace(base, measured_depths=deepest)
    all_schedules = [*((weight,) for weight in weights), *map(tuple, schedules)]
    combinations = list(itertools.product(*(vary.values for vary in varies)))
    runs = [
        _run(base, schedule, dict(zip((vary.key for vary in varies), values, strict=True)), seed)
        for seed in range(num_seeds)
        for schedule in all_schedules
        for values in combinations
    ]
    names = [run.name for run in runs]
    assert len(set(names)) == len(names)
    return runs


def preset_for(preset: Experiment, assignments: Iterable[str]) -> Experiment:
    """The preset that the settings of `--set KEY=VALUE` are put upon. No run has its weights: there are as many as go
    with the switch points that are set, which so need not fit the preset's own schedule.

    Raises:
      UserError: if one sets what the grid sets by itself, or the points are none.
    """
    for assignment in assignments:
        key, _, value = (part.strip() for part in assignment.partition("="))
        if key == "mtp_switch_tokens":
            points = parse_setting(key, value)
            weights = (0.0,) * (len(points) + 1)
            preset = dataclasses.replace(preset, mtp_weights=weights, mtp_switch_tokens=points)
        elif key in _OWN_FLAGS:
            raise UserError(f"--set {key}: the grid sets {key} by itself; see {_OWN_FLAGS[key]}")
    return preset


def schedule_name(weights: Sequence[float]) -> str:
    """`0.3`, or `0.3-then-0.1`."""
    return _THEN.join(map(_number, weights))


def switch_tokens(own: Sequence[int], tokens: int, num_weights: int) -> tuple[int, ...]:
    """Where a schedule's weights after the first take over: at the experiment's own points, if it has as many and all
    lie within the run, else evenly spaced over it.

    Args:
      own: the experiment's `mtp_switch_tokens`.
      tokens: of the run.
    """
    if len(own) == num_weights - 1 and all(0 < point < tokens for point in own):
        return tuple(own)
    return tuple(tokens * part // num_weights for part in range(1, num_weights))


def _run(base: Experiment, weights: tuple[float, ...], varied: dict[str, Any], seed: int) -> Run:
    schedule = schedule_name(weights)
    label = " ".join([schedule, *(f"{key}={shown(value)}" for key, value in varied.items())])
    name = f"{_safe(label)}-seed{seed}"
    tokens = math.prod(varied.get(key, getattr(base, key)) for key in _LENGTH)
    settings: dict[str, Any] = {
        **varied,
        "seed": seed,
        "mtp_weights": weights,
        "mtp_switch_tokens": switch_tokens(base.mtp_switch_tokens, tokens, len(weights)),
    }
    try:
        experiment = dataclasses.replace(base, **settings)
        if not experiment.acceptance_every:
            experiment = dataclasses.replace(experiment, acceptance_every=experiment.steps)
    except UserError as error:
        raise UserError(f"run {name}: {error}") from error
    data = {key: list(value) if isinstance(value, tuple) else value for key, value in varied.items()}
    return Run(name, label, schedule, data, experiment)


def _safe(label: str) -> str:
    """A label as a file's name. One that had to change otherwise than in its spaces gets a hash, to stay different."""
    plain = label.replace(" ", "_")
    safe = re.sub(r"[^A-Za-z0-9._=,+-]", "_", plain)[:_LONGEST_NAME]
    return safe if safe == plain else f"{safe}-{hashlib.sha256(label.encode()).hexdigest()[:8]}"


def _weight(where: str, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise UserError(f"{where}: expected finite numbers, none negative, got {text.strip()!r}")
    return abs(weight)  # -0.0 is 0


def _number(value: float) -> str:
    """As short as it can be and still be that number: 1.0 is 1."""
    return repr(value).removesuffix(".0")


def _require_different(where: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{where}: {name} is given twice; expected each once")
