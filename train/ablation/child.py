"""The process of one run: `python -m train.ablation.child`, the run as a line of JSON on its standard input.

Standard input then stays open while the parent lives. When it ends, because the parent asks or is gone, the run saves
a checkpoint and ends too, so no run goes on without a parent to collect it. Its record goes to `record.json` in the
work directory, its words to stderr.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

STOPPED = 130
_SECONDS_TO_SAVE = 300.0
_SECONDS_TO_BE_FREE = 120.0


def main() -> int:
    """Trains the run and writes its record.

    Returns:
      the exit status: 0, 2 after a mistake (the log's last line says which), or `STOPPED`.
    """
    begin = time.monotonic()
    task: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    if task["cores"]:
        os.sched_setaffinity(0, task["cores"])  # before jax counts them for its threads
    threading.Thread(target=_stop_when_the_parent_does, daemon=True).start()

    from mtp_jax.errors import UserError
    from mtp_jax.files import read_json_object, write_json
    from train.ablation.cores import num_cores
    from train.ablation.grid import Run
    from train.ablation.records import commit, make_record, training_seconds
    from train.experiment import Experiment

    code = commit()
    experiment = Experiment.from_json(task["settings"])
    run = Run(task["name"], task["label"], task["schedule"], task["varied"], experiment)
    root = Path(task["workdir"])
    try:
        from mtp_jax.sizes import parameters
        from train.allocator import keep_freed_memory
        from train.checkpoint import Workdir
        from train.loop import train
        from train.progress import Progress
        from train.start import read_start

        _wait_until_free(root)
        keep_freed_memory()
        row = train(experiment, root, Progress())
        if row.get("step") != experiment.steps:
            return STOPPED
        workdir = Workdir(root)
        stored = workdir.stored_experiment()
        assert stored is not None
        rows = workdir.rows()
        record = make_record(
            run,
            rows,
            stored.to_json(),
            parameters=sum(parameter.size for parameter in parameters(read_start(experiment).config)),
            seconds=time.monotonic() - begin,
            training_seconds=training_seconds(rows),
            cores=num_cores(),
            commit=code,
            unigram_loss=read_json_object(workdir.data).get("unigram_loss"),
        )
        write_json(root / "record.json", record)
    except UserError as error:
        print(f"error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 2
    return 0


def _stop_when_the_parent_does() -> None:
    while os.read(0, 1):
        pass
    # While training this asks for a checkpoint; before and after it there is nothing to save, and the process ends.
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_SECONDS_TO_SAVE)
    os._exit(STOPPED)


def _wait_until_free(root: Path) -> None:
    """Until a process whose parent was killed has saved its checkpoint in the same folder."""
    from mtp_jax.errors import UserError
    from train.checkpoint import Workdir

    deadline = time.monotonic() + _SECONDS_TO_BE_FREE
    while time.monotonic() < deadline:
        workdir = Workdir(root)
        try:
            workdir.claim()
        except UserError:
            time.sleep(0.2)
        else:
            workdir.close()
            return


if __name__ == "__main__":
    sys.exit(main())
