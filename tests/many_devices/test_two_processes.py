"""A run in two processes of two devices each is the run of one process."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "train.py"
SETTINGS = """
    batch_size=8 sequence_length=32 log_every=1 warmup_steps=2 learning_rate_shape=constant held_out=b.txt eval_every=1
    acceptance_every=0 vocab_size=300 width=16 mlp_width=24 num_layers=2 full_attention_interval=2 num_heads=2
    num_kv_heads=2 head_dim=8 rotary_dim=4 delta_v_heads=2 delta_k_heads=2 delta_head_k_dim=8 delta_head_v_dim=8
    dtype=float32 mtp_weights=0.3,0.1 mtp_switch_tokens=400
"""


def start(workdir, data, *settings, flags=()):
    command = [sys.executable, SCRIPT, "--config", "tiny", "--data", data, "--workdir", workdir]
    environment = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    if flags:
        environment["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
    return subprocess.Popen(
        [*map(str, command), "--set", *SETTINGS.split(), *settings, *flags],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def in_one_process(workdir, data, *settings):
    process = start(workdir, data, *settings)
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors


def in_two_processes(workdir, data, *settings):
    """What the two wrote on stdout and stderr."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [
        start(
            workdir,
            data,
            "mesh=fsdp:2,tensor:2",
            *settings,
            flags=("--coordinator", address, "--num-processes", "2", "--process-id", str(index)),
        )
        for index in range(2)
    ]
    results = [process.communicate(timeout=500) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    return results


def rows(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_losses_counts_and_checkpoints(tmp_path):
    data = tmp_path / "texts"
    data.mkdir()
    (data / "a.txt").write_text("".join(f"value_{i} = {i * i}\n" for i in range(60)))
    for n in range(9):  # rows that are not full
        (data / f"c{n}.txt").write_text("def double(x):\n    return x + x\n" + "# more\n" * n)
    (data / "b.txt").write_text("def double(x):\n    return x + x\n" * 3)
    in_one_process(tmp_path / "one", data, "steps=5")
    first, second = in_two_processes(tmp_path / "two", data, "steps=3")
    assert "over fsdp:2,tensor:2 in 2 processes" in first[1]
    assert "step 3" in first[0]
    assert second[0] == ""
    first, _ = in_two_processes(tmp_path / "two", data, "steps=4")
    assert "continuing from step 3" in first[1]
    in_one_process(tmp_path / "two", data, "steps=5")
    expected, got = rows(tmp_path / "one"), rows(tmp_path / "two")
    assert [row["step"] for row in got] == [1, 2, 3, 4, 5]
    assert len({row["mtp_weight"] for row in expected}) == 2
    for row, other in zip(got, expected, strict=True):
        assert row["tokens"] == other["tokens"] < 8 * 32 * row["step"]
        shared = row.keys() - {"tokens_per_second"}
        assert {name: row[name] for name in shared} == pytest.approx({name: other[name] for name in shared}, rel=1e-3)
