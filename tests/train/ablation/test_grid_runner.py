"""The processes of a grid, with a stand-in for the one that trains; with the real one in test_ablate_loss_weight.py."""

import json
import os
import signal
import sys
import threading
import time

import pytest

from configs import PRESETS
from mtp_jax.errors import UserError
from train.ablation import runner
from train.ablation.grid import grid, parse_vary
from train.ablation.records import GridFolder

# What it does is said by the run's number of steps: end well, fail with or without words, be killed, or wait for the
# end of its input; a wish to be killed at the end of it is not heard.
STAND_IN = """
import json, os, pathlib, signal, sys, time
task = json.loads(sys.stdin.readline())
steps, folder = task["settings"]["steps"], pathlib.Path(task["workdir"])
folder.mkdir(exist_ok=True)
if steps == 2:
    sys.exit("one line\\n\\nerror: the last word\\nException ignored in: a thread\\nRuntimeError: torn down\\n")
if steps == 3:
    sys.exit(3)
if steps == 4:
    os.kill(os.getpid(), signal.SIGKILL)
if steps >= 5:
    (folder / "begun").touch()
    sys.stdin.read()
    (folder / "saved").touch()
    if steps == 6:
        time.sleep(60)
    sys.exit(130)
figures = {"eval_main_loss": 2.0}
record = {"name": task["name"], "settings": task["settings"], "seconds": 1.0, "figures": figures}
record |= {"cores": task["cores"], "begin": time.time()}
time.sleep(0.3)
(folder / "record.json").write_text(json.dumps(record | {"end": time.time()}))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_CHILD", (sys.executable, "-c", STAND_IN))
    folder = GridFolder(tmp_path / "grid")
    folder.claim()
    yield folder
    folder.close()


def _runs(steps, seeds=1):
    return grid(PRESETS["tiny"](), (0.3,), (), parse_vary([f"steps={steps}"]), seeds)


def test_a_run_that_fails_leaves_the_others_alone(folder):
    said = []
    folder.log("0.3_steps=3-seed0").write_text("error: of an earlier try\n")
    failures = runner.run_grid(folder, _runs("2,3,4,1"), 1, said.append)
    assert failures == [
        ("0.3_steps=2-seed0", "the last word"),
        ("0.3_steps=3-seed0", "exit status 3"),
        ("0.3_steps=4-seed0", "killed by SIGKILL"),
    ]
    assert [record["name"] for record in folder.read()] == ["0.3_steps=1-seed0"]
    assert "[1/4] 0.3_steps=2-seed0: failed: the last word (log: " in said[1]
    assert said[-1].startswith("[4/4] 0.3_steps=1-seed0: done in 1 s, 1 MB; held-out main 2.000")


@pytest.mark.parametrize("processes", [1, 2])
def test_so_many_run_at_a_time_each_on_its_cores(folder, processes, monkeypatch):
    monkeypatch.setattr(runner, "split_cores", lambda count: [[10 + n] for n in range(count)])
    assert runner.run_grid(folder, _runs("1", seeds=4), processes, str) == []
    records = folder.read()
    assert len(records) == 4
    moments = [record["begin"] for record in records]
    at_once = [sum(other["begin"] <= moment < other["end"] for other in records) for moment in moments]
    assert max(at_once) == processes
    assert {tuple(record["cores"]) for record in records} == {(10 + n,) for n in range(processes)}
    assert runner.run_grid(folder, _runs("1", seeds=4), processes, str) == []
    assert folder.read() == records


def test_a_record_that_nobody_collected_is_not_trained_for_again(folder):
    (run,) = _runs("2")
    folder.workdir(run.name).mkdir()
    record = {"name": run.name, "settings": run.experiment.to_json(), "figures": {}}
    (folder.workdir(run.name) / "record.json").write_text(json.dumps(record))
    assert runner.run_grid(folder, [run], 1, str) == []
    assert folder.read() == [record]


@pytest.fixture
def interrupting(folder):
    """Sends this process a signal, and another one later, once so many runs have begun."""

    def start(begun, first, second=None):
        def send():
            while sum(1 for _ in folder.runs.glob("*/begun")) < begun:
                time.sleep(0.01)
            os.kill(os.getpid(), first)
            if second:
                while not any(folder.runs.glob("*/saved")):
                    time.sleep(0.01)
                os.kill(os.getpid(), second)

        thread = threading.Thread(target=send)
        thread.start()
        threads.append(thread)

    threads = []
    yield start
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_and_lets_them_save(folder, interrupting, number):
    handler = signal.getsignal(signal.SIGTERM)
    interrupting(2, number)
    said = []
    with pytest.raises(KeyboardInterrupt):
        runner.run_grid(folder, _runs("5", seeds=3), 2, said.append)
    assert said[-1] == "stopping: 0.3_steps=5-seed0, 0.3_steps=5-seed1; the same command continues"
    assert len(list(folder.runs.glob("*/saved"))) == 2
    assert folder.read() == []
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_second_signal_does_not_wait(folder, interrupting):
    interrupting(1, signal.SIGTERM, signal.SIGINT)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        runner.run_grid(folder, _runs("6"), 1, str)
    assert time.monotonic() - begin < 30


def test_a_mistake_is_told_before_any_process(folder):
    (run,) = _runs("1")
    folder.append({"name": run.name, "settings": {**run.experiment.to_json(), "width": 64}})
    with pytest.raises(UserError, match="width is 64 there and 32 here"):
        runner.run_grid(folder, [run], 1, str)
    assert list(folder.runs.iterdir()) == []
