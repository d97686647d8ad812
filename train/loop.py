"""The training run, read from top to bottom: data, state, steps, metrics, checkpoints."""

import dataclasses
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from mtp_jax.errors import UserError
from mtp_jax.mtp import MTPModel
from mtp_jax.sharding import laid_out, made_spread, make_mesh, on_mesh, own_rows
from mtp_jax.text import end_ids
from train.acceptance import Acceptance, held_out_prompts
from train.batch import empty_batch
from train.board import Board
from train.checkpoint import Checkpoints, Counters, Workdir, latest_step
from train.corpus import packed_rows, read_corpus, run_tokenizer
from train.evaluation import evaluate
from train.experiment import Experiment
from train.lora import merged
from train.packing import PackedRows
from train.pipeline import Batches
from train.processes import is_first, meet
from train.progress import Progress
from train.recorder import Pending, Recorder
from train.schedules import mtp_weight
from train.start import read_start
from train.step import TrainState, build_model, compile_step, initial_state, stored, trained, with_dtype


def train(experiment: Experiment, root: Path | str, progress: Progress) -> dict[str, Any]:
    """Trains until `experiment.steps`, from the work directory's last checkpoint if it has one.

    A finished run is left as it is. SIGTERM and Ctrl-C save a checkpoint first (a second one does not wait).

    Returns:
      the last row of metrics.

    Raises:
      UserError: on bad data, a work directory of another run, or too many steps in a row without a finite loss.
      KeyboardInterrupt: after Ctrl-C.
    """
    experiment = with_dtype(experiment)
    if experiment.init:  # the run continues from any folder
        experiment = dataclasses.replace(experiment, init=str(Path(experiment.init).absolute()))
    shape = experiment.mesh_shape()
    mesh = shape and make_mesh(shape, "setting mesh")
    workdir = Workdir(root)
    with closing(workdir), on_mesh(mesh):
        return _train(experiment, workdir, progress)


def _train(experiment: Experiment, workdir: Workdir, progress: Progress) -> dict[str, Any]:
    workdir.claim()
    workdir.check_continues(experiment)
    if latest_step(workdir) == experiment.steps:
        progress.say(f"{workdir.root}: already trained to step {experiment.steps}")
        return workdir.last_row()
    workdir.check_writable()

    # All that can be wrong with the base and the data shows before anything is written.
    start = read_start(experiment)
    base = start.record()
    workdir.check_base(base)
    for line in start.lines():
        progress.say(line)
    corpus = read_corpus(experiment, progress, workdir.root)
    tokenizer = start.tokenizer or run_tokenizer(experiment, workdir, corpus, progress)
    rows = packed_rows(experiment, corpus, tokenizer, progress)
    if experiment.keep_best and not rows.held_out:
        raise UserError(
            f"setting keep_best: {experiment.keep_best} needs held-out documents, there are none: see held_out and "
            "held_out_every"
        )
    workdir.check_data(rows.record["fingerprint"])
    prompts = held_out_prompts(experiment, corpus, tokenizer) if experiment.acceptance_every else []
    meet("all processes have read the folder and the data")
    workdir.create(experiment, tokenizer, rows.record, base)
    meet("the first process has written the folder")

    model = build_model(start.config, experiment)
    acceptance = None
    if prompts:
        ends = end_ids(experiment.init or workdir.tokenizer, tokenizer)
        acceptance = Acceptance(experiment, model, tokenizer, ends, prompts)
    batches = Batches(
        rows.training,
        experiment.batch_size,
        experiment.seed,
        weights=experiment.data_weights,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    checkpoints = Checkpoints(workdir, keep=experiment.keep_checkpoints, keep_best=experiment.keep_best)
    try:
        latest = checkpoints.latest()
        if latest is None:
            state = made_spread(partial(initial_state, model, experiment), start.config, start.params(experiment))
            counters = Counters(0, 0, batches.state())
        else:
            like = stored(jax.eval_shape(lambda: initial_state(model, experiment)), experiment)
            state, counters = checkpoints.restore(latest, laid_out(like, start.config))
            params = start.completed(state.params, experiment)
            state = state._replace(params=laid_out(params, start.config))
            batches.restore(counters.position)
            progress.say(f"continuing from step {counters.step}")
        meet("all processes have found the checkpoint to go on from")
        workdir.keep_rows_up_to(counters.step)
        total, changing = (
            sum(leaf.size for leaf in jax.tree.leaves(tree))
            for tree in (state.params, trained(state.params, experiment))
        )
        part = f", {changing:,} of them trained" if changing < total else ""
        where = f", over {','.join(experiment.mesh)}" if experiment.mesh else ""
        where += f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
        progress.say(f"{total:,} parameters{part}, {experiment.dtype}{where}")
        _run(
            experiment,
            model,
            state,
            counters,
            batches,
            rows.held_out,
            acceptance,
            workdir,
            checkpoints,
            progress,
        )
    finally:
        batches.close()
        checkpoints.close()
    return workdir.last_row()


def _run(
    experiment: Experiment,
    model: MTPModel,
    state: TrainState,
    counters: Counters,
    batches: Batches,
    held_out: Sequence[PackedRows],
    acceptance: Acceptance | None,
    workdir: Workdir,
    checkpoints: Checkpoints,
    progress: Progress,
) -> None:
    """Steps from `counters` to the end. A step's metrics are fetched while the next step runs."""
    example = own_rows(empty_batch(experiment.batch_size // jax.process_count(), experiment.sequence_length))
    # Ahead of time, so that no step's time has the compiler's in it.
    with progress.task("compiling"):
        compiled_step = compile_step(model, experiment, state, example)

    with (
        _stop_requests() as stop_requested,
        closing(Board(workdir.tensorboard, workdir.rows())) if is_first() else nullcontext() as board,
        progress.training(experiment.steps, counters.step) as show,
    ):
        recorder = Recorder(experiment, workdir, board, progress, show)
        pending: Pending | None = None
        saved_step = counters.step
        stopped_by = 0
        while counters.step < experiment.steps and not (stopped_by := stop_requested(counters.step)):
            batch = next(batches)
            weight = mtp_weight(experiment, counters.tokens)
            state, metrics = compiled_step(state, own_rows(batch), np.float32(weight))
            if pending:
                recorder.settle(pending)
            step = counters.step + 1
            counters = Counters(step, counters.tokens + batches.num_tokens, batches.state())
            pending = Pending(counters, batch, batches.num_tokens, weight, metrics)

            evaluations = []
            if held_out and (step == experiment.steps or _is_due(step, experiment.eval_every)):
                evaluations.append(partial(evaluate, experiment, model, state, held_out))
            if acceptance and (step == experiment.steps or _is_due(step, experiment.acceptance_every)):
                evaluations.append(partial(acceptance.measure, merged(state.params, experiment)))
            if evaluations:
                recorder.settle(pending, evaluations)
                pending = None
            if _is_due(step, experiment.checkpoint_every):
                # After its row, so that a checkpoint never stands without the rows before it.
                if pending:
                    recorder.settle(pending)
                pending = None
                with recorder.paused():
                    checkpoints.save(stored(state, experiment), counters, recorder.row)
                saved_step = step
        if pending:
            recorder.settle(pending)
        if saved_step < counters.step:
            checkpoints.save(stored(state, experiment), counters, recorder.row)
        checkpoints.wait()
    if counters.step < experiment.steps:
        progress.say(f"stopped after step {counters.step}; the same command continues")
        if stopped_by == signal.SIGINT:
            raise KeyboardInterrupt


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@contextmanager
def _stop_requests() -> Iterator[Callable[[int], int]]:
    """Yields a function that tells, before each step, which of SIGTERM and SIGINT has come, 0 before.

    The signal only leaves a mark, so that the step under way and its checkpoint are finished; a second one acts as
    it would without us. Of several processes all stop before the same step when one has heard SIGTERM.
    """
    if jax.process_count() > 1:
        yield lambda step: signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else 0
        return
    received = 0
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def mark(number: int, _frame: Any) -> None:
        nonlocal received
        received = number
        restore()

    for number in previous:
        signal.signal(number, mark)
    try:
        yield lambda _step: received
    finally:
        restore()
