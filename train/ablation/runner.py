"""Runs of a grid, each in a process of its own, some of them at a time."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import NamedTuple

from mtp_jax.files import read_json_object
from train.ablation.cores import split_cores
from train.ablation.estimate import duration, seconds_left
from train.ablation.grid import Run
from train.ablation.records import ROOT, GridFolder, Record

_SECONDS_BETWEEN_LOOKS = 0.1
_CHILD = (sys.executable, "-P", "-m", "train.ablation.child")
"""-P: the folder that this was started in may hold a train.py."""


class Failure(NamedTuple):
    """A run that did not end well."""

    name: str
    message: str


class _Child(NamedTuple):
    run: Run
    process: subprocess.Popen[bytes]
    slot: int
    log_start: int  # bytes of the log that earlier processes wrote
    begin: float


def run_grid(
    folder: GridFolder,
    runs: Sequence[Run],
    processes: int,
    say: Callable[[str], None],
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[Failure]:
    """Runs what is not done yet, so many processes at a time, and records each run that ends well.

    A run that fails leaves the others alone. Ctrl-C and SIGTERM end all, each with a checkpoint; a second one does not
    wait. A run that was begun continues.

    Args:
      say: takes lines for the log.
      environment: variables of the runs beside this process's own.

    Returns:
      the runs that failed.

    Raises:
      UserError: if a run in the folder has other settings, or the folder cannot be written.
      KeyboardInterrupt: after Ctrl-C or SIGTERM.
    """
    recorded = {record["name"] for record in folder.read()}
    done = folder.finished(runs)
    for name in [name for name in done if name not in recorded]:
        folder.append(done[name])
    if done:
        say(f"{len(done)} of {len(runs)} runs were done before")
    waiting = [run for run in runs if run.name not in done]
    number = {run.name: f"[{place}/{len(runs)}]" for place, run in enumerate(runs, 1)}
    cores = split_cores(processes)
    slots = list(range(processes))
    children: list[_Child] = []
    failures: list[Failure] = []

    def left() -> str:
        elapsed = time.monotonic()
        begun = [(child.run, elapsed - child.begin) for child in children]
        seconds = seconds_left(folder.read(), begun, waiting, processes)
        return "" if seconds is None else f"; about {duration(seconds)} left"

    with _sigterm_interrupts(), _stopped_at_the_end(children, say):
        while waiting or children:
            while waiting and slots:
                run, slot = waiting.pop(0), slots.pop(0)
                children.append(_start(folder, run, slot, cores[slot], environment))
                say(f"{number[run.name]} {run.name}: begins")
            for child in [child for child in children if child.process.poll() is not None]:
                children.remove(child)
                slots.append(child.slot)
                name = child.run.name
                failure = _failure(folder, child)
                if failure is None:
                    record = read_json_object(folder.workdir(name) / "record.json")
                    folder.append(record)
                    took = f"done in {duration(record['seconds'])}, {megabytes(folder.workdir(name))} MB"
                    say(f"{number[name]} {name}: {took}; {brief(record)}{left()}")
                else:
                    failures.append(failure)
                    say(f"{number[name]} {name}: failed: {failure.message} (log: {folder.log(name)}){left()}")
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    return failures


def megabytes(path: Path) -> int:
    """What the files in a folder take, rounded up."""
    total = 0
    for file in path.rglob("*"):
        with suppress(OSError):  # it may just have been removed
            total += file.stat().st_size if file.is_file() else 0
    return -(-total // 10**6)


def brief(record: Record) -> str:
    """A record's figures in a few words."""
    named = {"eval_main_loss": "held-out main", "eval_mtp_agreement": "agreement", "acceptance": "acceptance"}
    figures = record["figures"]
    parts = [f"{word} {figures[key]:.3f}" for key, word in named.items() if figures.get(key) is not None]
    return ", ".join(parts) or "nothing held out was measured"


def _start(folder: GridFolder, run: Run, slot: int, cores: Sequence[int], environment: Mapping[str, str]) -> _Child:
    log = folder.log(run.name)
    log_start = log.stat().st_size if log.exists() else 0
    variables = {**os.environ, **environment}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), variables.get("PYTHONPATH"))))
    with open(log, "ab") as file:
        process = subprocess.Popen(
            _CHILD,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            env=variables,
            start_new_session=True,  # Ctrl-C at the terminal is for this process, which passes it on
        )
    task = {
        "name": run.name,
        "label": run.label,
        "schedule": run.schedule,
        "varied": run.varied,
        "settings": run.experiment.to_json(),
        "workdir": str(folder.workdir(run.name)),
        "cores": list(cores),
    }
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it is gone already, which its status tells
        process.stdin.write((json.dumps(task) + "\n").encode())
        process.stdin.flush()
    return _Child(run, process, slot, log_start, time.monotonic())


def _failure(folder: GridFolder, child: _Child) -> Failure | None:
    """Why a process that has ended did not end well; None if it did."""
    _close(child)
    status = child.process.returncode
    if status == 0 and (folder.workdir(child.run.name) / "record.json").is_file():
        return None
    if status < 0:
        with suppress(ValueError):
            return Failure(child.run.name, f"killed by {signal.Signals(-status).name}")
    with open(folder.log(child.run.name), "rb") as file:
        file.seek(child.log_start)
        lines = file.read().decode("utf-8", "replace").split("\n")
    words = [line.strip() for line in lines if line.strip()]
    if not words:
        return Failure(child.run.name, f"exit status {status}")
    # Threads that are torn down at the end may complain after it.
    told = [line for line in words if line.startswith("error: ")]
    return Failure(child.run.name, (told or words)[-1].removeprefix("error: "))


def _close(child: _Child) -> None:
    assert child.process.stdin is not None
    with suppress(OSError):
        child.process.stdin.close()


@contextmanager
def _stopped_at_the_end(children: list[_Child], say: Callable[[str], None]) -> Iterator[None]:
    """Whatever happens inside, no child outlives it."""
    try:
        yield
    finally:
        for child in children:
            _close(child)
        try:
            if children:
                say(f"stopping: {', '.join(child.run.name for child in children)}; the same command continues")
            for child in children:
                child.process.wait()
        finally:
            for child in children:
                child.process.kill()
                child.process.wait()


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
