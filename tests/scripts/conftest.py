"""Calling a command line as a user does, within this process or in one of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bent_model import write_checkpoint

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def call(script, capsys, monkeypatch):
    """`call("generate", *flags)` is (status, stdout, stderr)."""
    # The program compiled for one set of flags serves the other tests: jax keeps it.
    cli = script("_cli")
    monkeypatch.setitem(sys.modules, "_cli", cli)

    def run(name, *argv):
        with pytest.raises(SystemExit) as end:
            cli.run(script(name).main, list(map(str, argv)))
        out, err = capsys.readouterr()
        return end.value.code, out, err

    return run


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A small model with a tokenizer; treat it as read-only."""
    folder = tmp_path_factory.mktemp("checkpoints") / "bent"
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def without_tokenizer(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bare")
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((checkpoint / name).read_bytes())
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Programs that one process of the tests has compiled serve the next."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def start(cache):
    """`start("generate", *flags, **popen)` is a process, which ends with the test."""
    processes = []

    def start_process(name, *argv, environment=(), **popen):
        command = [sys.executable, str(ROOT / "scripts" / f"{name}.py"), *map(str, argv)]
        variables = {"JAX_ENABLE_COMPILATION_CACHE": "true", "XDG_CACHE_HOME": str(cache), **dict(environment)}
        processes.append(subprocess.Popen(command, env={**os.environ, **variables}, text=True, **popen))
        return processes[-1]

    yield start_process
    for process in processes:
        with process:
            process.kill()
