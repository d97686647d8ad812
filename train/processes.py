"""One run in several processes, each with its own devices: how they find each other, and who writes.

All processes read the same data and settings, take the same steps and fail alike. The first alone writes what is
written once: settings, tokenizer, rows, the log. Checkpoints Orbax writes from all, each its own devices' parts.
"""

import jax
from jax.experimental import multihost_utils

from mtp_jax.errors import UserError
from train.experiment import Experiment


def join(coordinator: str, num_processes: int, process_id: int, experiment: Experiment) -> None:
    """Waits until all processes are there; from then on `jax.devices()` are those of all.

    Args:
      coordinator: HOST:PORT where the first process listens.
      process_id: of this one, from 0.

    Raises:
      UserError: if the run cannot be divided among so many, or the others are not found.
    """
    if num_processes > 1:
        _check(experiment, num_processes)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"--coordinator {coordinator}: the {num_processes} processes did not meet there: {reason}"
        ) from error


def _check(experiment: Experiment, count: int) -> None:
    shape = experiment.mesh_shape()
    if shape is None or shape.rows % count:
        got = ",".join(experiment.mesh) or "no mesh"
        raise UserError(
            f"--num-processes {count}: expected a mesh whose data times fsdp is a multiple of that, such as --set "
            f"mesh=fsdp:{count} where each process has one device, since each computes rows of its own; got {got}"
        )
    if experiment.acceptance_every:
        raise UserError(
            f"setting acceptance_every: expected 0 in a run of {count} processes, whose decoding loop would see a part "
            f"of the rows only, got {experiment.acceptance_every}"
        )


def is_first() -> bool:
    """Whether this process writes what is written once."""
    return jax.process_index() == 0


def meet(where: str) -> None:
    """Waits until all processes have come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(where)
