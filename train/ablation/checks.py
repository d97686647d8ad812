"""What can be wrong with a grid beyond its settings, asked before the first run starts."""

from collections.abc import Sequence
from pathlib import Path

from mtp_jax.errors import UserError
from train.ablation.grid import Run
from train.corpus import read_corpus
from train.progress import Progress
from train.start import read_start

_OF_THE_START = ("init", "new_head", "lora_rank", "lora_targets", "gradient_mode")
_OF_THE_DATA = ("data", "stdlib_files", "data_weights", "held_out", "held_out_every", "skip_bad")


def check_inputs(runs: Sequence[Run], root: Path) -> None:
    """Looks at the checkpoints and the data of all runs; writes nothing.

    Args:
      root: the grid's folder.

    Raises:
      UserError: if a checkpoint or data cannot be used, nothing is held out to compare runs by, or the grid's folder
        lies within the data.
    """
    for run in _different(runs, _OF_THE_START):
        read_start(run.experiment)
    for run in _different(runs, _OF_THE_DATA):
        experiment = run.experiment
        for path in experiment.data:
            if root.resolve().is_relative_to(Path(path).resolve()):
                raise UserError(f"--workdir {root}: lies in --data {path}, so runs would read what others write")
        corpus = read_corpus(experiment, Progress(quiet=True))
        if not corpus.held_out_files and not experiment.held_out_every:
            patterns = ",".join(experiment.held_out) or "none"
            raise UserError(
                f"setting held_out: expected patterns of some files of the data (or held_out_every), got {patterns}: "
                "runs are compared on what they were not trained on"
            )


def _different(runs: Sequence[Run], settings: Sequence[str]) -> list[Run]:
    """A run for each combination of these settings."""
    return list({tuple(getattr(run.experiment, name) for name in settings): run for run in runs}.values())
