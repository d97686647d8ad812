"""What an ablation keeps of each finished run, one JSON object a line, and the folder they lie in.

DIR/records.jsonl            a line a finished run; a run is done when its record is there
DIR/runs/NAME/               the run's work directory, and `record.json`, the same record
DIR/runs/NAME.log            what the run said
"""

import dataclasses
import fcntl
import importlib.metadata
import json
import os
import platform
import subprocess
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtp_jax.errors import UserError
from mtp_jax.files import read_json_object
from train.ablation.grid import Run
from train.experiment import Experiment, shown

Record = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds the packages."""

_MOST_ROWS = 60
_CURVES = ("step", "tokens", "main_loss", "mtp_loss", "mtp_weight")
_EVALUATED = "eval_"
_NO_RECORD = "no name or no settings"
# Change no figure of a finished run.
_FREE = ("log_every", "checkpoint_every", "keep_checkpoints")


class GridFolder:
    """Paths of an ablation, and its records. Nothing is written before `claim`."""

    def __init__(self, root: Path) -> None:
        """Raises:
        UserError: if there is something else at the path.
        """
        self.root = root
        self.runs = root / "runs"
        self.records = root / "records.jsonl"
        self._claim: int | None = None  # the open folder
        if root.exists() and not root.is_dir():
            raise UserError(f"--workdir {root}: expected a folder, got a file")
        # A folder `runs` alone proves nothing: that is where people put work directories of all kinds.
        if root.is_dir() and not self.records.is_file() and not any(self.runs.glob("*.log")):
            empty = self.runs.is_dir() and not any(self.runs.iterdir())  # a grid that was stopped at once
            strangers = sorted(path.name for path in root.iterdir() if not (empty and path == self.runs))
            if strangers:
                raise UserError(
                    f"--workdir {root}: expected a new folder or one that an ablation was written to, got "
                    f"{strangers[0]} in it"
                )

    def workdir(self, name: str) -> Path:
        """The work directory of a run."""
        return self.runs / name

    def log(self, name: str) -> Path:
        """The file that a run's words go to."""
        return self.runs / f"{name}.log"

    def claim(self) -> None:
        """Makes the folder and keeps others from running in it until this process ends or calls `close`.

        Raises:
          UserError: if it cannot be written, or another grid is running in it.
        """
        try:
            self.runs.mkdir(parents=True, exist_ok=True)
            self._claim = os.open(self.root, os.O_RDONLY)
        except OSError as error:
            raise UserError(f"--workdir {self.root}: cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise UserError(f"--workdir {self.root}: another grid is running in it") from None
        except OSError:  # some network file systems have no such locks
            pass

    def close(self) -> None:
        """Lets others in again."""
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def read(self) -> list[Record]:
        """The records so far; none if there is no file."""
        return read_records(self.records) if self.records.exists() else []

    def append(self, record: Record) -> None:
        """Adds a record, after cutting off a line that is not whole.

        Raises:
          UserError: if it cannot be written.
        """
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        try:
            with open(self.records, "a+b") as file:
                file.seek(0)
                whole = file.read().rpartition(b"\n")
                file.truncate(len(whole[0]) + len(whole[1]))
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"{self.records}: cannot be written: {error.strerror}") from error

    def finished(self, runs: Sequence[Run]) -> dict[str, Record]:
        """Records of those runs that are done, by name. A run whose process wrote its record is, whoever was there to
        collect it.

        Raises:
          UserError: if a run of the same name, finished or not, has other settings; names the first difference.
        """
        records = {record["name"]: record for record in self.read()}
        done = {}
        for run in runs:
            where = self.workdir(run.name)
            record = records.get(run.name)
            if record is None and (where / "record.json").is_file():
                record = read_json_object(where / "record.json")
                if not _is_record(record):
                    raise UserError(f"{where / 'record.json'}: expected a record of a run: {_NO_RECORD}")
            if record is not None:
                _check_same(f"{self.root}: run {run.name} is recorded", record["settings"], run, free=_FREE)
                done[run.name] = record
            elif (where / "config.json").is_file():
                settings = read_json_object(where / "config.json")
                _check_same(f"{self.root}: run {run.name} has begun", settings, run, free=_FREE[:2])
        return done


def read_records(path: Path) -> list[Record]:
    """The records in a file; a last line that was cut short is passed over.

    Raises:
      UserError: if there is no such file, or a line is no record.
    """
    if not path.is_file():
        raise UserError(f"{path}: expected an ablation's records.jsonl, there is no such file")
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        try:
            record = json.loads(line)
            if not _is_record(record):
                raise ValueError(_NO_RECORD)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: expected a record of a run: {error}") from error
        records.append(record)
    return records


def make_record(run: Run, rows: Sequence[dict[str, Any]], settings: dict[str, Any], **measured: Any) -> Record:
    """The record of a finished run.

    Args:
      rows: of its metrics.jsonl.
      settings: as its work directory has them.
      measured: `parameters`, `seconds`, `training_seconds`, `cores`, `unigram_loss`, `commit`.
    """
    experiment = run.experiment
    return {
        "name": run.name,
        "label": run.label,
        "schedule": run.schedule,
        "mtp_weights": list(experiment.mtp_weights),
        "mtp_switch_tokens": list(experiment.mtp_switch_tokens),
        "varied": run.varied,
        "seed": experiment.seed,
        "settings": settings,
        "steps": rows[-1]["step"],
        "tokens": rows[-1]["tokens"],
        **measured,
        "versions": versions(),
        "figures": rows[-1],
        "rows": thinned(rows),
    }


def thinned(rows: Sequence[dict[str, Any]], most: int = _MOST_ROWS) -> list[dict[str, Any]]:
    """Some `most` rows with what a curve needs: all with an evaluation, the last, and others evenly spaced."""
    kept = {index for index, row in enumerate(rows) if any(key.startswith(_EVALUATED) for key in row)}
    kept.add(len(rows) - 1)
    room = max(most - len(kept), 1)
    kept.update(len(rows) * part // room for part in range(room))
    return [
        {key: value for key, value in rows[index].items() if key in _CURVES or key.startswith(_EVALUATED)}
        for index in sorted(kept)
    ]


def training_seconds(rows: Sequence[dict[str, Any]]) -> float:
    """Time of the steps alone, without compiling, evaluating and saving: tokens over tokens a second, row by row."""
    before = [0, *(row["tokens"] for row in rows[:-1])]
    return sum((row["tokens"] - seen) / row["tokens_per_second"] for seen, row in zip(before, rows, strict=True))


def versions() -> dict[str, str | None]:
    """Of what the figures depend on; None where a package does not say it."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("jax", "flax", "optax", "mtp_jax"):
        found[name] = None
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name.replace("_", "-"))
    if found["mtp_jax"] is None:  # run from its sources, not installed
        with suppress(OSError):
            found["mtp_jax"] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
                "version"
            ]
    return found


def commit(root: Path = ROOT) -> str | None:
    """The git commit of the code, with `-dirty` where files differ from it; None outside a clone."""

    def git(*command: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *command], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return None  # installed somewhere within another repository
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and isinstance(value.get("settings"), dict)


def _check_same(what: str, settings: Record, run: Run, free: Sequence[str]) -> None:
    try:
        before, now = Experiment.from_json(settings), run.experiment
    except UserError as error:
        raise UserError(f"{what} with settings that cannot be compared: {error}; name another --workdir") from error
    if now.dtype == "auto":
        now = dataclasses.replace(now, dtype=before.dtype)
    for field in dataclasses.fields(Experiment):
        there, here = getattr(before, field.name), getattr(now, field.name)
        if field.name not in free and there != here:
            raise UserError(
                f"{what} with other settings: {field.name} is {shown(there)} there and {shown(here)} here; "
                "name another --workdir"
            )
