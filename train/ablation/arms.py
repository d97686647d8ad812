"""The arms of an ablation: its runs by what differs between them apart from the seed, and which of them count."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtp_jax.errors import UserError

Record = Mapping[str, Any]

PER_RUN = ("seed", "mtp_weights", "mtp_switch_tokens")
"""Settings that differ between runs by design; with those that an arm varies."""

_LARGEST = 3.4e38  # float32's: what is beyond it is no figure of a run, and would overflow when squared


@dataclass(frozen=True)
class Arm:
    """Runs that differ in nothing but the seed. `varied`: the other settings that the ablation varies, as text."""

    label: str
    schedule: str
    weights: tuple[float, ...]
    switch_tokens: tuple[int, ...]
    varied: tuple[tuple[str, str], ...]
    runs: Mapping[int, Record]

    @property
    def is_constant(self) -> bool:
        return len(self.weights) == 1

    @property
    def combination(self) -> str:
        """The varied settings in words."""
        return " ".join(f"{key}={value}" for key, value in self.varied)

    def values(self, figure: str) -> dict[int, float]:
        """A figure of the finished runs by seed, without those that lack it."""
        found = {seed: figure_of(record, figure) for seed, record in sorted(self.runs.items())}
        return {seed: value for seed, value in found.items() if value is not None}


@dataclass(frozen=True)
class Ablation:
    """Arms with at least one run that counts: constant weights rising, then schedules; and what is left out, and why.

    Attributes:
      left_out: name of a run, and the reason, in words.
    """

    arms: tuple[Arm, ...]
    left_out: tuple[tuple[str, str], ...]

    @property
    def runs(self) -> list[Record]:
        return [record for arm in self.arms for record in arm.runs.values()]

    def depths(self, figure: str) -> list[int]:
        """Depths or positions 1, 2, .. up to the last at which any run has the figure (`name_d2`, say)."""
        last = 0
        while any(arm.values(at_depth(figure, last + 1)) for arm in self.arms):
            last += 1
        return list(range(1, last + 1))

    def arm(self, label: str) -> Arm:
        """Raises: UserError: if there is none of that label."""
        for arm in self.arms:
            if arm.label == label:
                return arm
        raise UserError(f"--reference {label}: expected one of the arms {', '.join(arm.label for arm in self.arms)}")


def at_depth(figure: str, depth: int) -> str:
    """The name in metrics.jsonl of a figure at a depth or position: that of the first one has no suffix."""
    return figure if depth == 1 else f"{figure}_d{depth}"


def figure_of(record: Record, name: str) -> float | None:
    """A figure of the run's end; None if it was not measured or is no finite number.

    `eval_mtp_loss` is here the loss of depth 1 (which has a suffix of its own where several depths were measured), not
    the mean over depths.
    """
    figures = record["figures"]
    value = figures.get("eval_mtp_loss_d1", figures.get(name)) if name == "eval_mtp_loss" else figures.get(name)
    return number(value)


def number(value: Any) -> float | None:
    """A value of JSON as a number; None if it is no finite one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST <= value <= _LARGEST:
        return None
    return float(value)


def as_text(value: Any) -> str:
    """A setting as the command line takes it."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return ",".join(map(as_text, value))
    return json.dumps(value)


def reason_not_to_count(record: Record) -> str | None:
    """Why a run does not count; None if it does: it must have learnt more than how frequent each token is."""
    loss, unigram = figure_of(record, "eval_main_loss"), number(record["unigram_loss"])
    if loss is None:
        return "it has no finite held-out main loss"
    if unigram is None:
        return "the unigram model's held-out loss, which it must be below, was not recorded"
    if loss >= unigram:
        return f"its held-out main loss {loss:.4f} is not below the unigram model's {unigram:.4f}"
    return None


def arms_of(records: Iterable[Record], unfinished: Iterable[str] = ()) -> Ablation:
    """Sorts runs into arms.

    Args:
      records: as in records.jsonl.
      unfinished: names of runs that were begun; those without a record are left out as such.

    Raises:
      UserError: if a record lacks something, two are of one run or contradict each other, or no run counts.
    """
    records, unfinished = list(records), set(unfinished)
    names: set[str] = set()
    for record in records:
        _check(record)
        if record["name"] in names:
            raise UserError(f"run {record['name']}: expected one record of it, there are two")
        names.add(record["name"])
    left_out = [(name, "it has no record: it failed, or is not finished") for name in sorted(unfinished - names)]
    order = _Order(records)
    of_label: dict[str, list[Record]] = {}
    for record in sorted(records, key=order):
        of_label.setdefault(record["label"], []).append(record)
    seeds = {record["seed"] for record in records}
    arms = []
    for runs in of_label.values():
        reasons = {record["name"]: reason_not_to_count(record) for record in runs}
        left_out += [(name, reason) for name, reason in reasons.items() if reason]
        stem = runs[0]["name"].removesuffix(f"-seed{runs[0]['seed']}")
        for seed in sorted(seeds - {record["seed"] for record in runs}):
            if f"{stem}-seed{seed}" not in unfinished:
                left_out.append((f"{stem}-seed{seed}", "it has no record, though other arms have this seed"))
        counting = [record for record in runs if not reasons[record["name"]]]
        if counting:
            arms.append(_arm(counting))
    if not arms:
        name, reason = next(((n, r) for n, r in left_out if n in names), ("", "there are no records"))
        raise UserError(f"none of {len(records)} runs counts; {name}: {reason}")
    return Ablation(tuple(arms), tuple(left_out))


def _arm(runs: Sequence[Record]) -> Arm:
    first = runs[0]
    by_seed: dict[int, Record] = {}
    for record in runs:
        for key in ("schedule", "mtp_weights", "mtp_switch_tokens", "varied"):
            if record[key] != first[key]:
                raise UserError(
                    f"run {record['name']}: expected the {key} of {first['name']}, which has the same label, "
                    f"{as_text(first[key])}, got {as_text(record[key])}"
                )
        if record["seed"] in by_seed:
            raise UserError(f"run {record['name']}: has label and seed of {by_seed[record['seed']]['name']}")
        by_seed[record["seed"]] = record
    return Arm(
        label=first["label"],
        schedule=first["schedule"],
        weights=tuple(map(float, first["mtp_weights"])),
        switch_tokens=tuple(first["mtp_switch_tokens"]),
        varied=tuple((key, as_text(value)) for key, value in first["varied"].items()),
        runs=by_seed,
    )


class _Order:
    """A key to sort records by: constant weights rising, schedules, and in each the varied settings.

    Varied values go by size where they are numbers, else in the order in which they were first recorded.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self._first: dict[str, int] = {}
        for record in records:
            for key, value in record["varied"].items():
                self._first.setdefault(f"{key}={as_text(value)}", len(self._first))

    def __call__(self, record: Record) -> tuple[Any, ...]:
        weights = record["mtp_weights"]
        varied = []
        for key, value in record["varied"].items():
            size = number(value)
            varied.append((key, 0.0 if size is None else size, self._first[f"{key}={as_text(value)}"]))
        return len(weights) > 1, tuple(weights), record["schedule"], tuple(varied), record["seed"]


def _is_number(value: Any) -> bool:
    return number(value) is not None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_list_of(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(test, value))


_EXPECTED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "name": (lambda value: isinstance(value, str) and value != "", "a name"),
    "label": (lambda value: isinstance(value, str) and value != "", "a name"),
    "schedule": (lambda value: isinstance(value, str) and value != "", "a name"),
    "mtp_weights": (lambda value: _is_list_of(_is_number)(value) and value != [], "one or more numbers"),
    "mtp_switch_tokens": (_is_list_of(_is_count), "counts of tokens"),
    "varied": (lambda value: isinstance(value, dict), "an object"),
    "seed": (_is_count, "a whole number"),
    "settings": (lambda value: isinstance(value, dict), "an object"),
    "tokens": (_is_count, "a count"),
    "figures": (lambda value: isinstance(value, dict), "an object"),
    "rows": (_is_list_of(lambda row: isinstance(row, dict) and _is_count(row.get("step"))), "rows of metrics"),
    "unigram_loss": (lambda value: value is None or isinstance(value, int | float), "a number or null"),
    "commit": (lambda value: value is None or isinstance(value, str), "a commit or null"),
    "versions": (lambda value: isinstance(value, dict), "an object"),
}


def _check(record: Record) -> None:
    for key, (test, what) in _EXPECTED.items():
        if key not in record or not test(record[key]):
            got = json.dumps(record[key])[:60] if key in record else "none"
            raise UserError(f"run {record.get('name')}: {key}: expected {what}, got {got}")
    if len(record["mtp_switch_tokens"]) != len(record["mtp_weights"]) - 1:
        raise UserError(f"run {record['name']}: mtp_switch_tokens: expected one fewer than mtp_weights")
