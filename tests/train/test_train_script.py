"""`scripts/train.py` as a user runs it."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from small_run import SETTINGS, read_rows

from train.checkpoint import load_for_export
from train.experiment import Experiment

SCRIPT = Path(__file__).parents[2] / "scripts" / "train.py"


def _start(*arguments, environment=None, wrapper=()):
    return subprocess.Popen(
        [*wrapper, sys.executable, str(SCRIPT), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | (environment or {}),
    )


def _run(*arguments, environment=None, wrapper=()):
    process = _start(*arguments, environment=environment, wrapper=wrapper)
    out, err = process.communicate(timeout=900)
    return process.returncode, out, err


def test_help_lists_every_setting():
    status, out, _ = _run("--help")
    assert status == 0
    for field in dataclasses.fields(Experiment):
        assert f"  {field.name} (" in out
        assert field.metadata["meaning"] in out
    for flag in ("--config", "--data", "--workdir", "--set", "--json"):
        assert flag in out
    assert "(default: [])" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "tiny"], "--workdir"),
        (["--config", "huge", "--workdir", "w"], "huge"),
        (["--config", "tiny", "--workdir", "w", "--set", "stepps=3"], "close: steps"),
        (["--config", "tiny", "--workdir", "w", "--set", "steps=3", "seed=x"], "seed: expected int, got 'x'"),
        (["--config", "tiny", "--workdir", "w", "--data", "absent"], "absent: expected a file or a folder"),
        (["--config", "tiny", "--workdir", "file/w"], "file/w: cannot be written"),
        (["--config", "finetune", "--workdir", "w"], "--config finetune starts from a checkpoint: name it with --init"),
        (["--config", "finetune", "--workdir", "w", "--new-head"], "--new-head goes with --init DIR"),
        (["--config", "realign", "--workdir", "w", "--init", "absent"], "absent: expected a checkpoint folder"),
        (["--config", "tiny", "--workdir", "w", "--init", "x"], "expected no value beside init, whose config.json"),
    ],
)
def test_mistakes_end_with_status_2_and_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    status, out, err = _run(*arguments)
    assert (status, out) == (2, "")
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert err.endswith(errors[0] + "\n")
    assert "Traceback" not in err
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_data_and_set_may_be_repeated(text_folder, tmp_path, compilation_cache):
    half = len(SETTINGS) // 2
    arguments = ["--config", "tiny", "--workdir", tmp_path / "run", "--json", tmp_path / "out.json"]
    arguments += ["--data", text_folder / "a.txt", "--data", text_folder / "b.txt", text_folder / "c.txt"]
    arguments += ["--set", *SETTINGS[:half], "--set", *SETTINGS[half:], "--set", "steps=2"]
    status, out, err = _run(*arguments, environment=compilation_cache)
    assert (status, out) == (0, ""), err
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    assert settings["steps"] == 2
    assert settings["data"] == [str(text_folder / name) for name in ("a.txt", "b.txt", "c.txt")]
    row = json.loads((tmp_path / "out.json").read_text())
    assert row == json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])


# Each wait ends at another point of a step: some within a save, which is most of a step's time here.
KILLS = [("config", 0.0), ("rows", 0.0), ("rows", 0.013), ("rows", 0.031), ("rows", 0.057)]


@pytest.mark.parametrize(
    ("kills", "steps"),
    [
        pytest.param(KILLS[2:3], 14, id="once"),
        pytest.param([("save", 0.0)], 14, id="in a save"),
        pytest.param([*KILLS, *[("save", delay) for delay in (0.0, 0.01, 0.02)]], 60, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_equals_one_that_was_not(text_folder, tmp_path, compilation_cache, kills, steps):
    """SIGKILL at start, after some rows, and while checkpoints (one each step) are being written."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    settings = ["--set", *SETTINGS, f"steps={steps}", "checkpoint_every=1", "keep_checkpoints=3"]

    def arguments(workdir):
        return ["--config", "tiny", "--data", text_folder, "--workdir", workdir, *settings]

    status, _, err = _run(*arguments(straight), environment=compilation_cache)
    assert status == 0, err

    def num_rows():
        metrics = killed / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def has_come(event, before):
        if event == "save":  # a checkpoint that is being written has another name until it is complete
            return num_rows() > before + 2 and any((killed / "checkpoints").glob("*tmp*"))
        return (killed / "config.json").exists() if event == "config" else num_rows() > before + 2

    for round_number, (event, delay) in enumerate(kills):
        before = num_rows()
        process = _start(*arguments(killed), environment=compilation_cache)
        deadline = time.monotonic() + 600
        while process.poll() is None and time.monotonic() < deadline:
            if has_come(event, before):
                break
            time.sleep(0.0005 if event == "save" else 0.002)
        time.sleep(delay)
        assert process.poll() is None, f"round {round_number} ended before it was killed: {process.communicate()[1]}"
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if (event, delay) == ("save", 0.0):
            assert list((killed / "checkpoints").glob("*tmp*")), "it was not killed within a save"
    status, _, err = _run(*arguments(killed), environment=compilation_cache)
    assert status == 0, err
    assert "continuing from step" in err
    assert read_rows(killed) == read_rows(straight)
    jax.tree.map(np.testing.assert_array_equal, load_for_export(killed)[1], load_for_export(straight)[1])
    names = {p.name for p in killed.rglob("*")}
    assert not [name for name in names if "partial" in name or "tmp" in name]


def test_a_full_disk_is_an_error_and_the_last_checkpoint_stays(text_folder, tmp_path, compilation_cache):
    """By a limit on the size of files, which small ones do not reach and arrays do."""

    def arguments(steps):
        settings = ["--set", *SETTINGS, f"steps={steps}", "width=32", "checkpoint_every=2", "keep_checkpoints=1"]
        return ["--config", "tiny", "--data", text_folder, "--workdir", tmp_path / "run", *settings]

    status, _, err = _run(*arguments(2), environment=compilation_cache)
    assert status == 0, err
    # sh counts in blocks of 512 bytes.
    limited = ("sh", "-c", 'ulimit -f 40 && exec "$@"', "sh")
    status, out, err = _run(*arguments(6), environment={"JAX_ENABLE_COMPILATION_CACHE": "false"}, wrapper=limited)
    assert (status, out) == (2, ""), err
    assert err.count("error: ") == 1, err
    assert "checkpoints: the checkpoint after step 4 cannot be written, those before it stay: " in err
    assert "Traceback" not in err
    assert load_for_export(tmp_path / "run", 2)
    status, out, err = _run(*arguments(6), environment=compilation_cache)
    assert status == 0, err
    assert "continuing from step 2" in err
    assert [row["step"] for row in read_rows(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_the_tiny_config_learns_and_resumes_after_sigterm(tmp_path):
    arguments = ["--config", "tiny", "--workdir", tmp_path / "run"]
    process = _start(*arguments)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists() and process.poll() is None:
        time.sleep(0.002)
    process.terminate()
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    status, out, err = _run(*arguments)
    assert status == 0, err
    assert "step 24" in out
    rows = read_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 25))
    assert 200 <= rows[0]["tokens"] <= 1000
    assert rows[-1]["main_loss"] < rows[0]["main_loss"] - 0.5
