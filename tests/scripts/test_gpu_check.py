"""scripts/gpu_check.sh, as far as a machine without a GPU can tell."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "gpu_check.sh"


def check(*arguments, **variables):
    environment = os.environ | {"PYTHON": sys.executable} | variables
    return subprocess.run([SCRIPT, *map(str, arguments)], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fly"], "expected parts out of parity decode prefill train delta-rule load startup run, got fly"),
        (["--out"], "--out needs a value"),
        (["--out", "/nowhere/x.json"], "--out: there is no folder /nowhere"),
        (["--checkpoint", "/nowhere/at/all"], "there is no /nowhere/at/all"),
    ],
)
def test_a_mistake_in_checking_is_status_2(arguments, message):
    ended = check(*arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert message in ended.stderr


@pytest.mark.slow
def test_what_passed_and_what_failed_is_in_one_file(checkpoint, tmp_path):
    # The model has too few positions for the prompts that are measured.
    ended = check("--checkpoint", checkpoint, "--out", tmp_path / "out.json", "load", "prefill")
    assert ended.returncode == 1, ended.stderr
    record = json.loads((tmp_path / "out.json").read_text())
    assert not record["passed"]
    assert record["backend"] == "cpu"
    assert {name: part["ended"] for name, part in record["parts"].items()} == {"load": "passed", "prefill": "failed"}
    assert record["parts"]["load"]["result"]["load_over_numpy"] > 0
    assert "--lengths 2048: the model has 256 positions" in record["parts"]["prefill"]["last_lines"][-1]


@pytest.mark.slow
def test_nothing_starts_without_time_for_it(checkpoint, tmp_path):
    ended = check("--checkpoint", checkpoint, "--out", tmp_path / "out.json", "load", "startup", LIMIT="5")
    assert ended.returncode == 1, ended.stderr
    parts = json.loads((tmp_path / "out.json").read_text())["parts"]
    assert parts["startup"]["ended"] == "skipped: no time left"
