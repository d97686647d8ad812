"""The time that runs will take."""

import json
import os

import pytest

from configs import PRESETS
from train.ablation.cores import split_cores
from train.ablation.estimate import Speed, all_seconds, duration, flops, run_seconds, seconds_left, speed_of
from train.ablation.grid import grid, parse_vary
from train.ablation.report import plan

TINY = PRESETS["tiny"]()


def _record(experiment, training_seconds, seconds, tokens=1000, cores=2):
    settings = json.loads(json.dumps(experiment.to_json()))
    times = {"training_seconds": training_seconds, "seconds": seconds}
    return {"settings": settings, "tokens": tokens, "cores": cores, **times}


def test_recorded_time_scales_with_the_products():
    """Twice the tokens, twice the time; half the machine for each of two runs, twice the time of each."""
    once, twice = grid(TINY, (0.3,), (), parse_vary(["steps=24,48"]), 1)
    speed = speed_of([_record(once.experiment, 3.0, 10.0, once.tokens)], cores=2)
    assert speed is not None
    assert run_seconds(once, speed, 1) == pytest.approx(7 + 3)
    assert run_seconds(twice, speed, 1) == pytest.approx(7 + 6)
    assert run_seconds(twice, speed, 2) == pytest.approx(7 + 12)
    halved = speed_of([_record(once.experiment, 3.0, 10.0, once.tokens, cores=1)], cores=2)
    assert halved is not None
    assert halved.flops_per_second == pytest.approx(2 * speed.flops_per_second)


def test_depths_and_a_frozen_trunk_count():
    one = flops(TINY, 1000)
    deeper = [flops(TINY.override([f"depths={depths}"]), 1000) for depths in (2, 3)]
    assert deeper[1] - deeper[0] == deeper[0] - one > 0
    assert flops(TINY.override(["gradient_mode=head_only"]), 1000) < one


def test_records_without_times_or_of_another_version_say_nothing():
    strange = {**_record(TINY, 1.0, 2.0), "settings": {"lambda": 1}}
    assert speed_of([], 2) is None
    assert speed_of([strange, {"name": "x", "settings": {}}], 2) is None
    assert seconds_left([], [], [], 1) is None


def test_runs_under_way_count_for_what_they_still_take():
    (run,) = grid(TINY, (0.3,), (), (), 1)
    cores = len(os.sched_getaffinity(0))
    records = [_record(TINY, 4.0, 10.0, run.tokens, cores)]
    assert seconds_left(records, [(run, 3.0)], [run, run], 1) == pytest.approx(7 + 20)
    assert seconds_left(records, [(run, 99.0)], [], 1) == 0
    assert seconds_left(records, [(run, 3.0)], [], 99) == pytest.approx(7)


def test_more_processes_than_runs_make_nothing_faster():
    (run,) = grid(TINY, (0.3,), (), (), 1)
    records = [_record(TINY, 4.0, 10.0, run.tokens, len(os.sched_getaffinity(0)))]
    one, many = (plan([run], records, (), processes) for processes in (1, 99))
    assert one["seconds"] == many["seconds"] == many["runs"][0]["seconds"] == pytest.approx(10)
    assert many["summary"].startswith("1 run, 1 to do: about 10 s in all")
    done = plan([run], records, {run.name}, 99)
    assert (done["seconds"], done["summary"][:15]) == (0, "1 run, 0 to do:")


def test_a_run_begins_where_another_ends():
    assert all_seconds([3.0, 1.0, 1.0, 4.0], 2) == 6.0  # 3 beside 1, 1 and then 4: not half of 9
    assert all_seconds([], 2) == 0.0


def test_processes_beyond_the_cores_wait_for_each_other(monkeypatch):
    monkeypatch.setattr("train.ablation.estimate.num_cores", lambda: 2)
    (run,) = grid(TINY, (0.3,), (), (), 1)
    assert [run_seconds(run, Speed(1e30, 5.0, "nothing"), n) for n in (1, 2, 8)] == pytest.approx([5, 5, 20])


def test_cores_are_split_without_overlap(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {8, 1, 2, 3, 5})
    assert split_cores(1) == [[]]
    assert split_cores(2) == [[1, 2], [3, 5, 8]]
    assert split_cores(6) == [[]] * 6
    monkeypatch.delattr(os, "sched_getaffinity")
    assert split_cores(2) == [[], []]


def test_durations():
    expected = {0.4: "0 s", 89.0: "89 s", 91.0: "2 min", 3599.0: "1 h 0 min", 7500.0: "2 h 5 min"}
    assert {seconds: duration(seconds) for seconds in expected} == expected


def test_an_overhead_is_part_of_every_run():
    (run,) = grid(TINY, (0.3,), (), (), 1)
    assert run_seconds(run, Speed(1e30, 5.0, "nothing"), 1) == pytest.approx(5.0)
