"""How long runs will take, from the products that a step consists of and the speed of those before.

    seconds of a run = overhead + flops / rate

`flops` counts matrix products (`mtp_jax.flops`) of all steps. Rate and overhead, what a run takes besides its steps
(starting, tokenising, compiling, evaluating, decoding, saving), are those of the records in the same folder; without
any, the rate is that of a matrix product on this machine times the share of it that training was measured to reach.
"""

import heapq
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

from mtp_jax.config import ModelConfig
from mtp_jax.errors import UserError
from train.ablation.cores import num_cores
from train.ablation.grid import Run
from train.ablation.records import Record
from train.experiment import Experiment

SHARE_OF_PRODUCT = 0.8
"""Of the `demo` config on 2 cores: 4,500 tokens a second at 36 MFLOP each, where a product ran at 200 GFLOP/s."""

OVERHEAD_SECONDS = 30.0
"""Processor time of a `demo` run besides its steps, its programs compiled by an earlier one; the first took 76."""

_PRODUCT_SIDE = 1024
_PRODUCTS = 8


class Speed(NamedTuple):
    """How fast this machine trains, if one run has all of it."""

    flops_per_second: float
    overhead: float  # seconds
    source: str  # in words


def flops(experiment: Experiment, tokens: int) -> int:
    """Of the matrix products of so many tokens' training steps.

    Raises:
      UserError: if the checkpoint that the experiment starts from cannot be read.
    """
    from mtp_jax.flops import token_flops

    each = token_flops(_config(experiment), experiment.sequence_length)
    # A frozen trunk runs forward only, which is a third of a step.
    trunk = each.train // 3 if experiment.gradient_mode == "head_only" else each.train
    return tokens * (trunk + experiment.depths * each.train_mtp)


def speed_of(records: Iterable[Record], cores: int) -> Speed | None:
    """As recorded; None without records that say it.

    Args:
      cores: of the machine. A run that had some of them would have been as much faster with all.
    """
    work, seconds, overheads = 0.0, 0.0, []
    for record in records:
        with suppress(UserError, KeyError):
            experiment = Experiment.from_json(record["settings"])
            work += flops(experiment, record["tokens"])
            seconds += record["training_seconds"] * record["cores"] / cores
            overheads.append(max(record["seconds"] - record["training_seconds"], 0.0))
    if not overheads or not seconds:
        return None
    count = len(overheads)
    return Speed(work / seconds, statistics.median(overheads), f"the {count} run{'s' * (count > 1)} recorded here")


def measured_speed() -> Speed:
    """From a short matrix product on this machine."""
    import jax
    import jax.numpy as jnp

    side = jnp.ones((_PRODUCT_SIDE, _PRODUCT_SIDE), jnp.float32)
    product = jax.jit(lambda x: x @ x)
    product(side).block_until_ready()
    seconds = []
    for _ in range(_PRODUCTS):
        begin = time.perf_counter()
        product(side).block_until_ready()
        seconds.append(time.perf_counter() - begin)
    rate = 2 * _PRODUCT_SIDE**3 / min(seconds)
    source = f"a matrix product on this machine ({rate / 1e9:,.0f} GFLOP/s): rough"
    return Speed(SHARE_OF_PRODUCT * rate, OVERHEAD_SECONDS, source)


def run_seconds(run: Run, speed: Speed, processes: int) -> float:
    """Wall time of a run that shares the machine with others. What it takes besides its steps keeps about one core."""
    overhead = speed.overhead * max(1.0, processes / num_cores())
    return overhead + processes * flops(run.experiment, run.tokens) / speed.flops_per_second


def side_by_side(num_runs: int, processes: int) -> int:
    """How many of so many runs are under way at a time."""
    return max(1, min(num_runs, processes))


def all_seconds(seconds: Iterable[float], processes: int) -> float:
    """Until runs of so many seconds each have ended, if each begins as soon as one of the processes is free."""
    free = [0.0] * processes
    for each in seconds:
        heapq.heapreplace(free, free[0] + each)
    return max(free)


def seconds_left(
    records: Sequence[Record], begun: Sequence[tuple[Run, float]], waiting: Sequence[Run], processes: int
) -> float | None:
    """Until all runs are done; None while no record says how fast they are.

    Args:
      begun: runs under way, each with the seconds since it began.
    """
    speed = speed_of(records, num_cores())
    if speed is None:
        return None
    processes = side_by_side(len(begun) + len(waiting), processes)
    seconds = [max(run_seconds(run, speed, processes) - elapsed, 0.0) for run, elapsed in begun]
    seconds += [run_seconds(run, speed, processes) for run in waiting]
    return all_seconds(seconds, processes)


def duration(seconds: float) -> str:
    """`12 s`, `3 min`, `2 h 5 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _config(experiment: Experiment) -> ModelConfig:
    return _base_config(experiment.init, experiment.new_head) if experiment.init else experiment.model_config()


@lru_cache
def _base_config(init: str, new_head: bool) -> ModelConfig:
    from train.start import read_start

    return read_start(Experiment(init=init, new_head=new_head)).config
