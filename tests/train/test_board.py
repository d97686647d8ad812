"""Event files, read with TensorBoard's own reader."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from train.board import Board

ROWS = [{"step": 2, "loss": 3.5, "acceptance": None}, {"step": 4, "loss": 2.25}, {"step": 6, "loss": 1.0}]


def _read(folder):
    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, float(make_ndarray(event.tensor_proto))) for event in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_run_that_continues_has_every_step_once(tmp_path, kept):
    first = Board(tmp_path / "events")
    for row in ROWS[:2]:
        first.add(row)
    first.close()
    again = Board(tmp_path / "events", ROWS[:kept])
    for row in ROWS[kept:]:
        again.add(row)
    again.close()
    assert _read(tmp_path / "events") == {"loss": [(2, 3.5), (4, 2.25), (6, 1.0)]}
