"""The command line that trains a grid of runs, as a user runs it."""

import json
import os
import signal
import subprocess
import time

import pytest

SMALL = ["batch_size=2", "sequence_length=32", "vocab_size=320", "width=16", "mlp_width=24", "head_dim=8"]
SMALL += ["delta_head_k_dim=8", "delta_head_v_dim=8", "warmup_steps=0", "max_skipped_steps=2"]
SMALL += [
    "num_layers=1",
    "full_attention_interval=1",
    "acceptance_prompts=1",
    "acceptance_new_tokens=4",
    "held_out=b.txt",
]


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("def double(x):\n    return x + x\n\n" * 20)
    (folder / "b.txt").write_text("def triple(x):\n    return x + x + x\n" * 3)
    return folder


@pytest.fixture
def arguments(texts, tmp_path):
    return ["--config", "tiny", "--data", texts, "--workdir", tmp_path / "grid", "--set", *SMALL]


def _records(folder):
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def _rows(folder, name):
    metrics = folder / "runs" / name / "metrics.jsonl"
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


def test_a_grid_from_end_to_end_with_a_run_that_fails(start, arguments, tmp_path):
    """Two at a time. The rate of 1e30 ends its run; the other one is recorded and told."""
    grid = ["--weights", "0.3", "--vary", "learning_rate=1e30,0.003", "--processes", 2]
    process = start("ablate_loss_weight", *arguments, "steps=4", *grid, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    bad, good = "0.3_learning_rate=1e+30-seed0", "0.3_learning_rate=0.003-seed0"
    assert [line.split("  ")[0] for line in out.splitlines()] == ["run", good]
    assert f"{bad}: failed: step 3: 2 steps in a row without a finite loss and gradient; lower learning_rate" in err
    assert err.splitlines()[-1] == f"failed: {bad}; the same command tries again"

    folder = tmp_path / "grid"
    (record,) = _records(folder)
    assert record["name"] == good
    assert record["figures"] == _rows(folder, good)[-1]
    assert {"eval_main_loss", "eval_mtp_agreement", "acceptance", "tokens_per_round"} <= set(record["figures"])
    assert (record["mtp_weights"], record["varied"]) == ([0.3], {"learning_rate": 0.003})
    assert record["settings"] == json.loads((folder / "runs" / good / "config.json").read_text())
    assert record["parameters"] > 320 * 16
    assert record["unigram_loss"] > 0
    assert 0 < record["training_seconds"] < record["seconds"]
    assert [path.name for path in (folder / "runs" / good / "checkpoints").iterdir()] == ["4"]


@pytest.fixture
def until_rows(tmp_path):
    """Waits until a run has so many rows of metrics."""

    def wait(process, name, count):
        deadline = time.monotonic() + 240
        while len(_rows(tmp_path / "grid", name)) < count:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)

    return wait


def test_a_grid_that_is_interrupted_and_killed_goes_on(start, arguments, until_rows, tmp_path):
    """Ctrl-C in the first run, SIGKILL of the parent in the second: neither leaves a process, nothing is repeated."""
    folder = tmp_path / "grid"
    command = ["ablate_loss_weight", *arguments, "steps=200", "checkpoint_every=150", "--weights", "0.3,0"]

    process = start(*command, stderr=subprocess.PIPE, start_new_session=True)
    until_rows(process, "0.3-seed0", 20)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all that it started
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "stopping: 0.3-seed0; the same command continues" in err
    (saved,) = (int(path.name) for path in (folder / "runs" / "0.3-seed0" / "checkpoints").iterdir())
    assert 20 <= saved < 150
    assert not (folder / "records.jsonl").exists()

    process = start(*command, stderr=subprocess.DEVNULL)
    until_rows(process, "0-seed0", 20)
    process.kill()
    process.wait()
    (first,) = _records(folder)
    assert first["name"] == "0.3-seed0"
    log = (folder / "runs" / "0.3-seed0.log").read_bytes()
    assert f"continuing from step {saved}".encode() in log
    assert [row["step"] for row in _rows(folder, "0.3-seed0")] == list(range(1, 201))

    # At once: what the killed parent left is still saving its checkpoint.
    process = start(*command, "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "1 of 2 runs were done before" in err
    records = json.loads(out)["records"]
    assert records == _records(folder)
    assert records[0] == first
    assert [record["name"] for record in records] == ["0.3-seed0", "0-seed0"]
    assert (folder / "runs" / "0.3-seed0.log").read_bytes() == log
    assert "continuing from step" in (folder / "runs" / "0-seed0.log").read_text()
    # The same weights have read the same batch; what they learnt from it differs.
    first, second = (_rows(folder, name) for name in ("0.3-seed0", "0-seed0"))
    assert [row["tokens"] for row in first] == [row["tokens"] for row in second]
    assert first[0]["main_loss"] == second[0]["main_loss"]
    assert first[-1]["main_loss"] != second[-1]["main_loss"]


def test_a_dry_run_lists_the_runs_and_writes_nothing(call, arguments, tmp_path):
    cache = sorted(os.listdir(os.environ["MTP_JAX_CACHE"]))
    before = sorted(tmp_path.rglob("*"))
    grid = ["--weights", "0,0.3", "--schedules", "constant,0.3-then-0.1", "--seeds", 2, "--vary", "depths=1,2"]
    status, out, err = call("ablate_loss_weight", *arguments, *grid, "--dry-run")
    assert status == 0, err
    lines = out.splitlines()
    assert len(lines) == (2 + 1) * 2 * 2
    assert lines[-1].startswith(
        "0.3-then-0.1_depths=2-seed1  mtp_weights=0.3,0.1 mtp_switch_tokens=768 depths=2 seed=1  "
    )
    assert "1,536 tokens" in lines[-1]
    assert err.startswith("12 runs, 12 to do: about ")
    assert "estimated from a matrix product on this machine" in err
    status, out, _ = call("ablate_loss_weight", *arguments, *grid, "--dry-run", "--json")
    planned = json.loads(out)
    assert [run["name"] for run in planned["runs"]] == [line.split()[0] for line in lines]
    assert planned["seconds"] == pytest.approx(sum(run["seconds"] for run in planned["runs"]))
    assert sorted(tmp_path.rglob("*")) == before
    assert sorted(os.listdir(os.environ["MTP_JAX_CACHE"])) == cache


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--weights: expected one or more, or a schedule"),
        (["--weights", "-1"], "--weights: expected finite numbers, none negative, got '-1'"),
        (["--weights", "0", "--seeds", "0"], "--seeds: expected an integer that is at least 1"),
        (["--weights", "0", "--processes", "0"], "--processes: expected an integer that is at least 1"),
        (["--weights", "0", "--schedules", "warm"], "--schedules: expected constant or weights like 0.3-then-0.1"),
        (["--weights", "0", "--vary", "depht=1"], "close: depths"),
        (["--weights", "0", "--set", "seed=3"], "--set seed: the grid sets seed by itself; see --seeds"),
        (["--weights", "0", "--set", "mtp_weights=1,2"], "--set mtp_weights: the grid sets mtp_weights by itself; see"),
        (["--weights", "0", "--set", "held_out="], "setting held_out: expected patterns of some files"),
        (["--weights", "0", "--data", "absent"], "absent: expected a file or a folder"),
        (["--weights", "0", "--config", "finetune"], "starts from a checkpoint: name it with --init"),
        (["--weights", "0", "--workdir", "texts"], "got a.txt in it"),
        (["--weights", "0", "--workdir", "texts/grid"], "lies in --data"),
    ],
)
def test_mistakes_end_with_one_line_before_anything_starts(call, arguments, flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    status, out, err = call("ablate_loss_weight", *arguments, *flags)
    _assert_a_mistake(status, out, err, message)
    assert sorted(tmp_path.rglob("*")) == before


def _assert_a_mistake(status, out, err, message):
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_a_checkpoint_that_is_not_there_is_a_mistake(call, tmp_path):
    flags = ["--config", "realign", "--init", "absent", "--weights", "0", "--workdir", tmp_path / "grid"]
    _assert_a_mistake(*call("ablate_loss_weight", *flags), "absent: expected a checkpoint folder")
