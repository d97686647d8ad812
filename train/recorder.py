"""Waits for steps, watches over them, and writes what they gave."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax

from mtp_jax.errors import UserError
from train.batch import Batch
from train.board import Board
from train.checkpoint import Counters, Workdir
from train.experiment import Experiment
from train.objective import expert_figures, mtp_figures
from train.progress import Progress
from train.step import StepMetrics


class Pending(NamedTuple):
    """A step that is under way on the device."""

    counters: Counters  # after it
    batch: Batch  # the rows of this process
    num_tokens: int  # of all processes
    mtp_weight: float
    metrics: StepMetrics


class Recorder:
    """Waits for steps, watches over them and writes their rows. The clock counts training only."""

    def __init__(
        self,
        experiment: Experiment,
        workdir: Workdir,
        board: Board | None,
        progress: Progress,
        show: Callable[..., None],
    ) -> None:
        self._experiment = experiment
        self._workdir = workdir
        self._board = board
        self._progress = progress
        self._show = show
        self._window_tokens = 0
        self._window_start = time.perf_counter()
        self.row: dict[str, Any] = {}  # the last one written

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keeps what happens inside out of tokens_per_second."""
        begin = time.perf_counter()
        yield
        self._window_start += time.perf_counter() - begin

    def settle(self, pending: Pending, evaluations: Sequence[Callable[[], dict[str, Any]]] = ()) -> None:
        """Waits for a step's metrics and writes its row if one is due.

        Args:
          evaluations: give further figures for the row.

        Raises:
          UserError: if too many steps in a row had no finite loss and gradient; the last one's batch is saved.
        """
        metrics: StepMetrics = jax.device_get(pending.metrics)
        now = time.perf_counter()
        step = pending.counters.step
        self._window_tokens += pending.num_tokens
        if metrics.skipped_in_a_row:
            self._progress.say(f"step {step}: loss or gradient is not finite; skipped ({metrics.skipped} so far)")
        if metrics.skipped_in_a_row >= self._experiment.max_skipped_steps:
            where = self._workdir.save_batch(step, pending.batch)
            raise UserError(
                f"step {step}: {metrics.skipped_in_a_row} steps in a row without a finite loss and gradient; "
                f"lower learning_rate, or look at the data: the last batch is in {where}"
            )
        row = None
        if evaluations or step == self._experiment.steps or step % self._experiment.log_every == 0:
            row = self._row(pending, metrics, self._window_tokens / (now - self._window_start))
            self._window_tokens, self._window_start = 0, now
            with self.paused():
                for evaluation in evaluations:
                    row |= evaluation()
            row = {key: _finite_or_none(value) for key, value in row.items()}
            self._workdir.append_row(row)
            if self._board:
                self._board.add(row)
            self.row = row
        self._show(step, row)

    def _row(self, pending: Pending, metrics: StepMetrics, tokens_per_second: float) -> dict[str, Any]:
        return {
            "step": pending.counters.step,
            "tokens": pending.counters.tokens,
            "loss": float(metrics.losses.loss),
            "main_loss": float(metrics.losses.main_loss),
            "mtp_loss": float(metrics.losses.mtp_loss),
            "mtp_weight": pending.mtp_weight,
            **mtp_figures(metrics.losses),
            **expert_figures(metrics.losses),
            "learning_rate": float(metrics.learning_rate),
            "grad_norm": float(metrics.grad_norm),
            "tokens_per_second": tokens_per_second,
        }


def _finite_or_none(value: Any) -> Any:
    """JSON has no NaN: a skipped step's figures are null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
