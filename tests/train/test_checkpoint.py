"""Checkpoints alone: which are kept, and that saving in the background saves what was given."""

import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.errors import UserError
from train.checkpoint import Checkpoints, Counters, Workdir
from train.experiment import Experiment
from train.step import TrainState


def _state(value, size=3):
    zeros = [jnp.zeros((), jnp.int32) for _ in range(3)]
    return TrainState({"w": jnp.full((size,), value)}, {"m": jnp.full((size,), value)}, *zeros)


def _save(checkpoints, step, **figures):
    checkpoints.save(_state(float(step)), Counters(step, 0, {}), {"step": step, **figures})


@pytest.mark.parametrize(
    ("figure", "values", "kept", "best"),
    [
        ("eval_main_loss", [3.0, 1.0, 2.0, 5.0], [2, 4], 2),
        ("acceptance", [0.3, 0.1, 0.2, 0.25], [1, 4], 1),
        ("acceptance", [None, 0.1, None, None], [2, 4], 2),
        ("acceptance", [None, None, None, None], [4], None),
        ("", [3.0, 1.0, 2.0, 5.0], [4], None),
    ],
)
def test_the_best_is_kept_beside_the_latest_also_across_starts(tmp_path, figure, values, kept, best):
    for steps in ((1, 2), (3, 4)):
        checkpoints = Checkpoints(Workdir(tmp_path), keep=1, keep_best=figure)
        for step in steps:
            _save(checkpoints, step, **({figure: values[step - 1]} if figure else {}))
        checkpoints.wait()
        checkpoints.close()
    checkpoints = Checkpoints(Workdir(tmp_path), keep_best=figure)
    assert checkpoints.steps() == kept
    assert checkpoints.best() == best
    like = jax.eval_shape(lambda: _state(0.0))
    for step in kept:
        np.testing.assert_array_equal(checkpoints.restore(step, like)[0].params["w"], [step] * 3)
    checkpoints.close()


def test_a_row_of_another_step_says_nothing_about_a_checkpoint(tmp_path):
    checkpoints = Checkpoints(Workdir(tmp_path), keep=1, keep_best="acceptance")
    checkpoints.save(_state(1.0), Counters(1, 0, {}), {"step": 0, "acceptance": 1.0})
    _save(checkpoints, 2, acceptance=0.1)
    checkpoints.wait()
    assert checkpoints.steps() == [2]
    checkpoints.close()


def test_the_state_may_be_given_away_while_it_is_being_saved(tmp_path):
    """Donated right after `save` returns, and overwritten: what is saved is from before."""
    size = 4_000_000
    overwrite = jax.jit(lambda state: jax.tree.map(lambda x: x * 0 - 1, state), donate_argnums=0)
    checkpoints = Checkpoints(Workdir(tmp_path), keep=0)
    state = _state(7.0, size)
    checkpoints.save(state, Counters(1, 0, {}))
    jax.block_until_ready(overwrite(state))
    checkpoints.wait()
    restored, _ = checkpoints.restore(1, jax.eval_shape(lambda: _state(0.0, size)))
    assert set(np.unique(restored.params["w"])) == {7.0}
    checkpoints.close()


def test_a_folder_where_nothing_can_be_made_is_an_error_at_once(tmp_path, monkeypatch):
    """No thread of Orbax stays that waits for a folder; and the next start finds its way past a probe left behind."""
    checkpoints = Checkpoints(Workdir(tmp_path), keep=1)
    _save(checkpoints, 1)
    checkpoints.wait()
    threads = set(threading.enumerate())

    def refuse(path, *_, **__):
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", refuse)
        with pytest.raises(UserError, match=r"after step 2 cannot be written, those before it stay: .*No space left"):
            _save(checkpoints, 2)
    assert set(threading.enumerate()) <= threads
    checkpoints.close()

    (tmp_path / "checkpoints" / "probe").mkdir()
    checkpoints = Checkpoints(Workdir(tmp_path), keep=1)
    assert checkpoints.latest() == 1
    _save(checkpoints, 2)
    checkpoints.close()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]


def test_keep_best_needs_its_figure_at_every_checkpoint():
    Experiment().override(["keep_best=eval_main_loss", "eval_every=50", "checkpoint_every=100"])
    with pytest.raises(UserError, match="setting eval_every: expected a divisor of checkpoint_every 100"):
        Experiment().override(["keep_best=eval_main_loss", "eval_every=30", "checkpoint_every=100"])
    with pytest.raises(UserError, match="setting acceptance_every: expected a divisor"):
        Experiment().override(["keep_best=acceptance"])
    with pytest.raises(UserError, match="setting keep_best: expected eval_main_loss, "):
        Experiment().override(["keep_best=loss"])
