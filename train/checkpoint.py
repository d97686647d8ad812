"""The work directory: settings, tokenizer, what the data was, Orbax checkpoints, and how a run finds its place again.

    config.json       the experiment's settings
    tokenizer/        the base's, or trained on the training documents before the first step
    data.json         what the run trains on: counts, held-out names, a fingerprint
    base.json         the checkpoint that the run started from, if any: its folder, a fingerprint
    checkpoints/N/    Orbax: what is trained of the parameters, optimiser, counters, after step N
    metrics.jsonl     one row a logged step

Every file is written beside its final name and renamed, so that a run killed at any moment leaves none half-written;
Orbax does the same with checkpoints.
"""

import dataclasses
import fcntl
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree
from orbax.checkpoint import checkpoint_managers as preservation

from mtp_jax.config import ModelConfig
from mtp_jax.errors import UserError
from mtp_jax.files import read_json_object, write_bytes, write_json
from mtp_jax.hf import Manifest
from mtp_jax.mtp import MTPModel
from mtp_jax.text import Tokenizer
from train.batch import Batch
from train.experiment import Experiment
from train.lora import merged
from train.processes import is_first
from train.start import Start, read_start
from train.step import TrainState, initial_state, trained


class Counters(NamedTuple):
    """The host's side of a checkpoint."""

    step: int
    tokens: int  # non-padding input tokens of all steps so far
    position: dict[str, Any]  # of the data, as `Batches.state` gives it


class Workdir:
    """Paths of a work directory, and its small files. Nothing is written before `create`."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.config = self.root / "config.json"
        self.data = self.root / "data.json"
        self.base = self.root / "base.json"
        self.tokenizer = self.root / "tokenizer"
        self.checkpoints = self.root / "checkpoints"
        self.metrics = self.root / "metrics.jsonl"
        self.tensorboard = self.root / "tensorboard"
        self._claim: int | None = None  # the open folder

    def stored_experiment(self) -> Experiment | None:
        """The settings the directory was made with; None if it is new or empty.

        Raises:
          UserError: if the path is a file, or holds something but no settings that can be read.
        """
        if self.root.exists() and not self.root.is_dir():
            raise UserError(f"--workdir {self.root}: expected a folder, got a file")
        if not self.config.is_file():
            strangers = sorted(p.name for p in self.root.iterdir()) if self.root.is_dir() else []
            # A first start killed while writing config.json leaves only its partial file.
            if strangers and strangers != ["config.json.partial"]:
                raise UserError(
                    f"--workdir {self.root}: expected a new folder or one with a config.json, got {strangers[0]} in it"
                )
            return None
        try:
            settings = json.loads(self.config.read_text(encoding="utf-8"))
            if not isinstance(settings, dict):
                raise ValueError("not an object")
            return Experiment.from_json(settings)
        except ValueError as error:
            raise UserError(f"{self.config}: expected a run's settings: {error}") from error

    def claim(self) -> None:
        """Keeps other runs out until `close`, or the end of the process; the folder's readers are not disturbed.

        Raises:
          UserError: if another run is training in the folder.
        """
        if not is_first() or self._claim is not None or not self.root.is_dir():
            return
        self._claim = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise UserError(f"--workdir {self.root}: another run is training in it") from None
        except OSError:  # some network file systems have no such locks; that is no reason not to train
            pass

    def close(self) -> None:
        """Lets other runs in again, if this one has claimed the folder."""
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def check_writable(self) -> None:
        """Raises:
        UserError: if it can be seen that the folder, or what lies in it, cannot be written.
        """
        existing = next(path for path in (self.root.absolute(), *self.root.absolute().parents) if path.exists())
        for path in (existing, self.checkpoints, self.metrics):
            if path.exists() and not os.access(path, os.W_OK | (os.X_OK if path.is_dir() else 0)):
                raise UserError(f"--workdir {self.root}: cannot be written: {path} may not be written to")

    def check_continues(self, experiment: Experiment) -> None:
        """Raises:
        UserError: if the directory belongs to a run that `experiment` does not continue; names the differences.
        """
        stored = self.stored_experiment()
        differences = stored.refused_changes(experiment) if stored else []
        if differences:
            raise UserError(f"--workdir {self.root} belongs to another run: {'; '.join(differences)}")

    def check_data(self, fingerprint: str) -> None:
        """Raises:
        UserError: if the run began with other data, or its data.json cannot be read.
        """
        if self.data.is_file() and read_json_object(self.data).get("fingerprint") != fingerprint:
            raise UserError(f"--workdir {self.root}: the data has changed since the run began (see {self.data})")

    def check_base(self, base: dict[str, Any] | None) -> None:
        """Raises:
        UserError: if the run started from another checkpoint, or base.json cannot be read.
        """
        if base and self.base.is_file():
            before = read_json_object(self.base)
            if before.get("fingerprint") != base["fingerprint"]:
                raise UserError(
                    f"--workdir {self.root}: {base['folder']} is not the checkpoint that the run started from, or has "
                    f"changed since (see {self.base})"
                )

    def create(
        self, experiment: Experiment, tokenizer: Tokenizer, data: dict[str, Any], base: dict[str, Any] | None = None
    ) -> None:
        """Makes and claims the folder; writes settings and base if they changed, and the rest if it is not there.

        Of several processes the first does so, and this, `keep_rows_up_to` and `append_row` do nothing in the others.

        Raises:
          UserError: if the folder cannot be written, or another run is training in it.
        """
        if not is_first():
            return
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.claim()
            if self.stored_experiment() != experiment:
                write_json(self.config, experiment.to_json())
            if not self.tokenizer.is_dir():
                save_folder(self.tokenizer, tokenizer.save)
            if not self.data.is_file():
                write_json(self.data, data)
            if base and not (self.base.is_file() and read_json_object(self.base) == base):
                write_json(self.base, base)
        except OSError as error:
            raise UserError(f"--workdir {self.root}: cannot be written: {error.strerror}") from error

    def keep_rows_up_to(self, step: int) -> None:
        """Drops the rows of metrics.jsonl past a step, and lines that are no whole row."""
        if not is_first() or not self.metrics.exists():
            return
        lines = self.metrics.read_bytes().splitlines(keepends=True)
        steps = [_step_of(line) if line.endswith(b"\n") else None for line in lines]
        kept = [line for line, number in zip(lines, steps, strict=True) if number is not None and number <= step]
        if len(kept) < len(lines):
            write_bytes(self.metrics, b"".join(kept))

    def last_row(self) -> dict[str, Any]:
        """The last row of metrics.jsonl; empty if there is none."""
        rows = self.rows()
        return rows[-1] if rows else {}

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl; lines that are none are passed over."""
        lines = self.metrics.read_bytes().splitlines() if self.metrics.exists() else []
        return [json.loads(line) for line in lines if _step_of(line) is not None]

    def append_row(self, row: dict[str, Any]) -> None:
        """Adds one line to metrics.jsonl, numbers unrounded, and flushes it.

        Raises:
          UserError: if it cannot be written; a part of it may be there.
        """
        if not is_first():
            return
        try:
            with open(self.metrics, "ab") as file:
                file.write((json.dumps(row, allow_nan=False) + "\n").encode("utf-8"))
        except OSError as error:
            raise UserError(f"{self.metrics}: cannot be written: {error.strerror}") from error

    def save_batch(self, step: int, batch: Batch) -> Path:
        """Writes the batch that a step read, in this process, for inspection: an array for each of its fields.

        Returns:
          the file.
        """
        process = f"_{jax.process_index()}" if jax.process_count() > 1 else ""
        path = self.root / f"batch_of_step_{step}{process}.npz"
        np.savez(path, **batch._asdict())
        return path


def _step_of(line: bytes) -> int | None:
    """The step of a row of metrics.jsonl; None if the line is no whole row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return step if type(step) is int else None


def save_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Calls `write(folder)` on a folder beside `path`, then renames it to `path`: whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial)
    os.replace(partial, path)


class Checkpoints:
    """Saves and restores the training state. Orbax writes in the background, and renames a checkpoint into place when
    it is complete; only then are older ones removed."""

    def __init__(self, workdir: Workdir, *, keep: int | None = None, keep_best: str = "") -> None:
        """With `keep`, the number of latest checkpoints to keep (0: all), this writes and first removes what a killed
        run left unfinished. Without, it only reads, and leaves a run that is going on alone.

        Args:
          keep_best: a figure of the rows; the checkpoint with the best one is kept too.
        """
        # Its notes on every save would drown the progress; errors it both logs, with a traceback, and raises here.
        # Of several arrays that fail to be written it raises one, and asyncio logs that nobody asked for the others.
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        best: dict[str, Any] = {}
        if keep_best:
            smaller = keep_best.endswith("loss")
            best = {"best_fn": lambda figures: figures[keep_best], "best_mode": "min" if smaller else "max"}
        if keep is None:
            options = ocp.CheckpointManagerOptions(read_only=True, **best)
        else:
            kept: list[preservation.PreservationPolicy] = [preservation.LatestN(n=keep or None)]
            if keep_best and keep:
                kept.append(
                    preservation.BestN(
                        get_metric_fn=best["best_fn"],
                        reverse=best["best_mode"] == "min",
                        n=1,
                        keep_checkpoints_without_metrics=False,
                    )
                )
            options = ocp.CheckpointManagerOptions(
                preservation_policy=preservation.AnyPreservationPolicy(kept),
                cleanup_tmp_directories=True,
                **best,
            )
        self._unraisable_hook = sys.unraisablehook
        sys.unraisablehook = self._tell_unless_echo
        self._keep_best = keep_best
        self._saving: int | None = None  # the step whose checkpoint may not be complete
        self._folder = workdir.checkpoints
        self._manager = ocp.CheckpointManager(workdir.checkpoints.absolute(), options=options)

    def latest(self) -> int | None:
        """The last complete checkpoint's step; None if there is none."""
        return self._manager.latest_step()

    def save(self, state: TrainState, counters: Counters, row: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Begins a checkpoint, once the one before is complete. The state may be given away at once.

        Args:
          row: the newest row of metrics; it counts for `keep_best` if it is of this step.

        Raises:
          UserError: if this or the one before cannot be written; those that are complete stay.
        """
        self.wait()
        # Copies: the next step writes into the state's buffers while they are being saved, and on a CPU an array that
        # is fetched is a view of them.
        if jax.sharding.get_mesh().empty:
            state = jax.tree.map(np.array, jax.device_get(state))
        elif jax.default_backend() == "cpu":  # elsewhere Orbax has fetched each device's part when it returns
            state = jax.tree.map(jnp.copy, state)
        rest = state._replace(params=None)._asdict()
        del rest["params"]
        best = row.get(self._keep_best) if row.get("step") == counters.step else None
        with self._written(counters.step):
            # Where no folder can be made, Orbax's threads would wait for theirs for minutes, and the process for them.
            if is_first():
                probe = self._folder / "probe"
                probe.mkdir(exist_ok=True)  # there if a run was killed just here
                probe.rmdir()
            self._saving = counters.step
            self._manager.save(
                counters.step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(state.params),
                    rest=ocp.args.StandardSave(rest),
                    counters=ocp.args.JsonSave(counters._asdict()),
                ),
                metrics=None if best is None else {self._keep_best: best},
                force=True,
            )

    def wait(self) -> None:
        """Returns when the last checkpoint begun is complete.

        Raises:
          UserError: if it cannot be written.
        """
        if self._saving is not None:
            with self._written(self._saving):
                self._saving = None  # also if it fails: it is told once
                self._manager.wait_until_finished()

    @contextmanager
    def _written(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a full disk is told in many ways, most of them by the layers below Orbax
            self._saving = None
            raise UserError(
                f"{self._folder}: the checkpoint after step {step} cannot be written, those before it stay: "
                f"{_reason(error)}"
            ) from error

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, Counters]:
        """The state after `step`.

        Args:
          like: a state of the same shapes, such as `jax.eval_shape` gives; where they say so, on several devices,
            whichever those are that it was saved from.

        Raises:
          UserError: if the checkpoint is damaged.
        """
        rest = like._asdict()
        params = rest.pop("params")
        restored = self._restore(
            step,
            ocp.args.Composite(
                params=ocp.args.StandardRestore(_on_device(params)),
                rest=ocp.args.StandardRestore(_on_device(rest)),
                counters=ocp.args.JsonRestore(),
            ),
        )
        return TrainState(params=restored["params"], **restored["rest"]), Counters(**restored["counters"])

    def restore_params(self, step: int, like: PyTree) -> PyTree:
        """The parameters after `step`, without the optimiser.

        Raises:
          UserError: if the checkpoint is damaged.
        """
        args = ocp.args.Composite(params=ocp.args.StandardRestore(_on_device(like)))
        return self._restore(step, args)["params"]

    def _restore(self, step: int, args: ocp.args.Composite) -> Any:
        try:
            return self._manager.restore(step, args=args)
        except Exception as error:  # Orbax says that files are damaged or missing in many ways, some over several lines
            raise UserError(
                f"{self._folder / str(step)}: the checkpoint is damaged, or of another shape than the run's settings "
                f"say; without it an earlier one is taken: {_reason(error)}"
            ) from error

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, rising."""
        return sorted(self._manager.all_steps())

    def best(self) -> int | None:
        """The step of the best checkpoint by `keep_best`; None if none has that figure."""
        return self._manager.best_step() if self._keep_best else None

    def close(self) -> None:
        """Ends Orbax's threads, after what they are writing.

        Raises:
          UserError: if the last checkpoint begun cannot be written.
        """
        try:
            self.wait()
        finally:
            self._manager.close()
            sys.unraisablehook = self._unraisable_hook

    def _tell_unless_echo(self, unraisable: Any) -> None:
        """Of several writes that fail together Orbax waits for the first; the others find its event loop closed."""
        if str(unraisable.exc_value) != "Event loop is closed":
            self._unraisable_hook(unraisable)


def _reason(error: Exception) -> str:
    """The first line of an error's text."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def latest_step(workdir: Workdir) -> int | None:
    """The last complete checkpoint's step; None if there is none. Makes no folder, which Orbax would."""
    if not workdir.checkpoints.is_dir():
        return None
    checkpoints = Checkpoints(workdir)
    try:
        return checkpoints.latest()
    finally:
        checkpoints.close()


def _on_device(tree: PyTree) -> PyTree:
    """Shapes, of which those that no mesh has a place for belong on the first device."""
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or first), tree)


class Trained(NamedTuple):
    """What a run has learnt, ready for `save_checkpoint`."""

    config: ModelConfig
    params: PyTree  # of an ordinary model: adapters are merged
    tokenizer: Path  # folder
    manifest: Manifest | None  # of the checkpoint that the run started from
    step: int  # of the run's checkpoint


def load_for_export(
    workdir: Path | str, step: int | None = None, base: Path | str | None = None, *, best: bool = False
) -> Trained:
    """What a run has learnt, float32. What it did not train comes from the checkpoint it started from.

    Args:
      step: of the checkpoint; the latest by default.
      best: take the best checkpoint by the run's setting keep_best instead.
      base: where the checkpoint is that the run started from, if it has moved.

    Raises:
      UserError: if the folder is not a run's, or it has no such checkpoint, or the run's base is gone or has changed.
    """
    folder = Workdir(workdir)
    experiment = folder.stored_experiment()
    if experiment is None:
        raise UserError(f"--workdir {folder.root}: expected a training run's folder, found no config.json in it")
    # Asked of the folder first: Orbax would create it.
    checkpoints = Checkpoints(folder, keep_best=experiment.keep_best) if folder.checkpoints.is_dir() else None
    have = checkpoints.steps() if checkpoints else []
    if checkpoints is None or not have:
        raise UserError(f"--workdir {folder.root}: expected a checkpoint, the run has none yet")
    try:
        if step is not None and step not in have:
            raise UserError(f"--step {step}: there is no such checkpoint (there are {', '.join(map(str, have))})")
        if best:
            step = checkpoints.best()
            if step is None:
                why = f"none has {experiment.keep_best}" if experiment.keep_best else "keep_best was not set"
                raise UserError(f"--best: expected a run that kept its best checkpoint, {why}; name one with --step N")
        start = _start_again(folder, experiment, base)
        # As a float32 run: what was not trained must come back to the bit.
        experiment = dataclasses.replace(experiment, dtype="float32")
        model = MTPModel(config=start.config, dtype=jnp.dtype(jnp.float32))
        like = jax.eval_shape(lambda: trained(initial_state(model, experiment).params, experiment))
        step = have[-1] if step is None else step
        learnt = checkpoints.restore_params(step, like)
        params = merged(start.completed(learnt, experiment), experiment)
        return Trained(start.config, params, folder.tokenizer, start.base, step)
    finally:
        checkpoints.close()


def _start_again(folder: Workdir, experiment: Experiment, base: Path | str | None) -> Start:
    if not experiment.init:
        if base is not None:
            raise UserError(f"--base: the run in {folder.root} started from nothing")
        return read_start(experiment)
    if base is not None:
        experiment = dataclasses.replace(experiment, init=str(Path(base).absolute()))
    if not Path(experiment.init).is_dir():
        raise UserError(
            f"{experiment.init}: expected the checkpoint that the run in {folder.root} started from, there is none; "
            "if it has moved, name it with --base DIR"
        )
    start = read_start(experiment)
    folder.check_base(start.record())
    return start
