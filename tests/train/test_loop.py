"""Whole small runs: rows, resuming, stopping, what is refused."""

import dataclasses
import json
import os
import shutil
import signal
from contextlib import contextmanager

import jax
import numpy as np
import pytest
from small_run import read_rows

from mtp_jax.errors import UserError
from mtp_jax.text import Tokenizer
from train.checkpoint import Workdir, load_for_export
from train.corpus import packed_rows, read_corpus
from train.loop import train
from train.pipeline import Batches
from train.progress import Progress

pytestmark = pytest.mark.usefixtures("compilation_cache")

KEYS = ["step", "tokens", "loss", "main_loss", "mtp_loss", "mtp_weight", "mtp_accuracy", "mtp_agreement"]
KEYS += ["learning_rate", "grad_norm", "tokens_per_second"]
EVAL_KEYS = ["eval_main_loss", "eval_mtp_loss", "eval_mtp_accuracy", "eval_mtp_agreement"]
QUIET = Progress(quiet=True)


@pytest.fixture(scope="module")
def finished(small_experiment, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "deep" / "finished"
    train(small_experiment, workdir, QUIET)
    return workdir


def _contents(folder):
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def _assert_same_run(workdir, finished):
    assert read_rows(workdir) == read_rows(finished)
    jax.tree.map(np.testing.assert_array_equal, load_for_export(workdir)[1], load_for_export(finished)[1])


def test_rows_say_what_the_interface_promises(finished):
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [list(row) for row in rows] == [KEYS] * 5 + [KEYS + EVAL_KEYS]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    before = [0, *(row["tokens"] for row in rows[:-1])]
    assert [row["mtp_weight"] for row in rows] == [0.3 if tokens < 128 else 0.1 for tokens in before]
    for row in rows:
        assert row["loss"] == pytest.approx(row["main_loss"] + row["mtp_weight"] * row["mtp_loss"], rel=1e-6)
    assert rows[0]["main_loss"] == pytest.approx(np.log(320), rel=0.02)
    assert json.loads((finished / "data.json").read_text())["held_out"] == ["b.txt"]


def test_nothing_is_compiled_after_the_first_steps(small_experiment, tmp_path, compiled):
    """Evaluation and checkpoints at every step come with the first."""
    heard = {}

    class Counting(Progress):
        @contextmanager
        def training(self, steps, done):
            yield lambda step, row: heard.update({step: len(compiled)})

    train(small_experiment.override(["eval_every=1", "checkpoint_every=1"]), tmp_path, Counting(quiet=True))
    assert list(heard) == [1, 2, 3, 4, 5, 6]
    assert 0 < heard[2] == heard[6] == len(compiled)


def test_a_finished_run_is_left_as_it_is(small_experiment, finished):
    before = _contents(finished)
    row = train(small_experiment, finished, QUIET)
    assert row["step"] == 6
    assert _contents(finished) == before


def test_resuming_gives_the_same_run(small_experiment, finished, tmp_path):
    """As if killed while the step-4 checkpoint was being written and a row was cut short."""
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir)
    shutil.rmtree(workdir / "checkpoints" / "6")
    (workdir / "checkpoints" / "4").rename(workdir / "checkpoints" / "4.orbax-checkpoint-tmp")
    with open(workdir / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "tok')
    train(small_experiment, workdir, QUIET)
    _assert_same_run(workdir, finished)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_the_run(small_experiment, finished, tmp_path, number):
    class Interrupting(Progress):
        @contextmanager
        def training(self, steps, done):
            yield lambda step, row: os.kill(os.getpid(), number) if step == 3 else None

    handler = signal.getsignal(number)
    if number == signal.SIGINT:
        with pytest.raises(KeyboardInterrupt):
            train(small_experiment, tmp_path, Interrupting(quiet=True))
    else:
        train(small_experiment, tmp_path, Interrupting(quiet=True))
    assert signal.getsignal(number) == handler
    saved = max(int(p.name) for p in (tmp_path / "checkpoints").iterdir())
    assert 3 <= saved < 6
    assert len(read_rows(tmp_path)) == saved
    train(small_experiment, tmp_path, QUIET)
    assert read_rows(tmp_path) == read_rows(finished)


def test_more_steps_continue_a_finished_run(small_experiment, finished, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir)
    more = dataclasses.replace(small_experiment, steps=7, log_every=3)
    train(more, workdir, QUIET)
    assert read_rows(workdir)[:6] == read_rows(finished)
    assert json.loads((workdir / "config.json").read_text())["steps"] == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [("seed=3", "seed is 0 there and 3 here"), ("steps=5", "steps is 6 there and 5 here")],
)
def test_another_runs_folder_is_refused(small_experiment, finished, change, message):
    before = _contents(finished)
    with pytest.raises(UserError, match=message):
        train(small_experiment.override([change]), finished, QUIET)
    assert _contents(finished) == before


def test_a_mixture_with_bad_rows_and_held_out_rows_resumes_across_epochs(small_experiment, tmp_path):
    lines = [json.dumps({"text": f"number {i} is {i * i}"}) for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines, "{"]))
    (tmp_path / "prose.txt").write_text("It was a dark night. " * 9)
    paths = (str(tmp_path / "rows.jsonl"), str(tmp_path / "prose.txt"))
    settings = ["data_weights=1,2", "held_out=", "held_out_every=5", "skip_bad=true", "steps=9", "checkpoint_every=4"]
    mixed = dataclasses.replace(small_experiment, data=paths).override(settings)
    train(mixed, tmp_path / "straight", QUIET)
    shutil.copytree(tmp_path / "straight", tmp_path / "run")
    for step in ("8", "9"):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / step)
    train(mixed, tmp_path / "run", QUIET)
    _assert_same_run(tmp_path / "run", tmp_path / "straight")
    record = json.loads((tmp_path / "run" / "data.json").read_text())
    assert (record["bad_rows"], record["held_out_documents"]) == (1, 4)


def test_changed_data_is_refused(small_experiment, finished, text_folder, tmp_path):
    workdir, texts = tmp_path / "run", tmp_path / "texts"
    shutil.copytree(finished, workdir)
    shutil.rmtree(workdir / "checkpoints")
    shutil.copytree(text_folder, texts)
    (texts / "a.txt").write_text("something else")
    moved = dataclasses.replace(small_experiment, data=(str(texts),))
    settings = json.loads((workdir / "config.json").read_text())
    (workdir / "config.json").write_text(json.dumps(settings | {"data": [str(texts)]}))
    with pytest.raises(UserError, match="the data has changed"):
        train(moved, workdir, QUIET)


@pytest.mark.parametrize("content", ["x", "[]", "{}"])
def test_a_damaged_data_json_is_refused(small_experiment, finished, tmp_path, content):
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "data.json").write_text(content)
    with pytest.raises(UserError, match=r"data\.json"):
        train(small_experiment.override(["steps=7"]), tmp_path / "run", QUIET)


def test_lines_that_are_no_rows_are_dropped(small_experiment, finished, tmp_path):
    """Wherever they stand: rows behind them stay."""
    shutil.copytree(finished, tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    first, *others = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([first, "\0\n", *others, '[1]\n{}\n{"step": "a"}\nx\n']))
    assert train(small_experiment, tmp_path / "run", QUIET)["step"] == 6
    Workdir(tmp_path / "run").keep_rows_up_to(6)
    assert read_rows(tmp_path / "run") == read_rows(finished)


def test_a_damaged_checkpoint_is_named(small_experiment, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6" / "params")
    with pytest.raises(UserError, match=r"checkpoints/6: the checkpoint is damaged"):
        train(small_experiment.override(["steps=7"]), tmp_path / "run", QUIET)
    with pytest.raises(UserError, match=r"checkpoints/6: the checkpoint is damaged"):
        load_for_export(tmp_path / "run")


def test_mistakes_leave_nothing_behind(small_experiment, tmp_path):
    workdir = tmp_path / "run"
    (tmp_path / "binary").write_bytes(b"\0")
    without_text = dataclasses.replace(small_experiment, data=(str(tmp_path / "binary"),))
    with pytest.raises(UserError, match="expected UTF-8 text"):
        train(without_text, workdir, QUIET)
    with pytest.raises(UserError):
        train(small_experiment.override(["vocab_size=200"]), workdir, QUIET)
    assert not workdir.exists()


def test_a_folder_with_something_else_in_it_is_refused(small_experiment, tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match=r"got letter\.txt in it"):
        train(small_experiment, tmp_path, QUIET)
    with pytest.raises(UserError, match="got a file"):
        train(small_experiment, tmp_path / "letter.txt", QUIET)
    assert [p.name for p in tmp_path.iterdir()] == ["letter.txt"]


def test_a_run_that_diverges_stops_with_a_reason(small_experiment, tmp_path):
    wild = small_experiment.override(["learning_rate=1e30", "max_skipped_steps=2", "warmup_steps=0"])
    with pytest.raises(UserError, match=r"2 steps in a row without a finite loss .*batch_of_step_\d\.npz"):
        train(wild, tmp_path, QUIET)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert any(None in (row["loss"], row["grad_norm"]) for row in rows)

    # The batch that the last of them read is beside the rows.
    (path,) = tmp_path.glob("batch_of_step_*.npz")
    number = int(path.stem.rpartition("_")[2])
    tokenizer = Tokenizer.from_folder(tmp_path / "tokenizer")
    assert tokenizer is not None
    training = packed_rows(wild, read_corpus(wild, QUIET), tokenizer, QUIET).training
    batches = Batches(training, wild.batch_size, wild.seed)
    expected = [next(batches) for _ in range(number)][-1]
    batches.close()
    with np.load(path) as saved:
        for name, array in expected._asdict().items():
            np.testing.assert_array_equal(saved[name], array)


def test_export_reads_any_checkpoint(small_experiment, finished, tmp_path):
    config, params, tokenizer, manifest, _ = load_for_export(finished, 2)
    assert manifest is None
    assert config == small_experiment.model_config()
    assert params["lm_head"]["kernel"].shape == (16, 320)
    assert Tokenizer.from_folder(tokenizer) is not None
    latest = load_for_export(finished)[1]
    assert not np.array_equal(params["lm_head"]["kernel"], latest["lm_head"]["kernel"])
    with pytest.raises(UserError, match=r"there are 2, 4, 6"):
        load_for_export(finished, 3)
    with pytest.raises(UserError, match=r"no config\.json"):
        load_for_export(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_export_takes_the_best_checkpoint(small_experiment, finished, tmp_path):
    """Trained at a rate that soon makes the loss worse, so that the best is not the last."""
    with pytest.raises(UserError, match="--best: expected a run that kept its best checkpoint, keep_best was not set"):
        load_for_export(finished, best=True)
    settings = ["keep_best=eval_main_loss", "eval_every=1", "checkpoint_every=1", "keep_checkpoints=1", "log_every=1"]
    wild = small_experiment.override([*settings, "learning_rate=3", "steps=4", "learning_rate_shape=constant"])
    train(wild, tmp_path, QUIET)
    losses = {row["step"]: row["eval_main_loss"] for row in read_rows(tmp_path)}
    best = min(losses, key=lambda step: losses[step])
    assert best < 4
    learnt = load_for_export(tmp_path, best=True)
    assert learnt.step == best
    jax.tree.map(np.testing.assert_array_equal, learnt.params, load_for_export(tmp_path, best).params)


def test_keep_best_needs_something_held_out(small_experiment, tmp_path):
    settings = ["held_out=", "keep_best=eval_main_loss", "eval_every=1"]
    with pytest.raises(UserError, match="setting keep_best: eval_main_loss needs held-out documents, there are none"):
        train(small_experiment.override(settings), tmp_path / "run", QUIET)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["", "checkpoints", "metrics.jsonl", ".."])
def test_a_folder_that_cannot_be_written_is_told_before_the_data_is_read(
    small_experiment, finished, tmp_path, monkeypatch, name
):
    """Each place that a run writes to; of a new folder, where it is to be made. A finished run writes nothing."""
    workdir = tmp_path / "new" if name == ".." else shutil.copytree(finished, tmp_path / "run")
    closed = (workdir / name).resolve()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and path != closed)
    monkeypatch.setattr("train.loop.read_corpus", None)  # is not called
    with pytest.raises(UserError, match=rf"cannot be written: {closed} may not be written to"):
        train(dataclasses.replace(small_experiment, steps=7), workdir, QUIET)
    if name != "..":
        assert train(small_experiment, workdir, QUIET)["step"] == 6


def test_a_second_run_in_the_same_folder_is_refused(small_experiment, finished, tmp_path):
    """While the first goes on, also one that finds the folder only when it makes it; afterwards it may."""
    shutil.copytree(finished, tmp_path / "run")
    more = small_experiment.override(["steps=7"])
    first = Workdir(tmp_path / "run")
    first.claim()
    before = _contents(tmp_path / "run")
    with pytest.raises(UserError, match="another run is training in it"):
        train(more, tmp_path / "run", QUIET)

    class Late(Progress):
        def say(self, text):
            if not (tmp_path / "new").exists():
                (tmp_path / "new").mkdir()
                second.claim()

    second = Workdir(tmp_path / "new")
    with pytest.raises(UserError, match="another run is training in it"):
        train(small_experiment, tmp_path / "new", Late(quiet=True))
    assert list((tmp_path / "new").iterdir()) == []
    assert _contents(tmp_path / "run") == before
    first.close()
    second.close()
    assert train(more, tmp_path / "run", QUIET)["step"] == 7


def test_depths_parts_and_a_frozen_trunk_run_and_resume(small_experiment, tmp_path):
    """Rows name each depth; the optimiser of the head alone comes back from a checkpoint; the trunk stays."""
    settings = ["steps=4", "depths=2", "head_loss=kl", "gradient_mode=head_only", "accumulate_steps=2", "remat=block"]
    experiment = small_experiment.override(settings)
    train(experiment, tmp_path / "run", QUIET)
    rows = read_rows(tmp_path / "run")
    depth_keys = ["mtp_loss_d1", "mtp_loss_d2", "mtp_accuracy_d2", "mtp_agreement_d2"]
    assert set(rows[0]) == {*KEYS, *depth_keys} - {"tokens_per_second"}
    assert {f"eval_{key}" for key in depth_keys} < set(rows[-1])
    for row in rows:
        assert row["mtp_loss"] == pytest.approx((row["mtp_loss_d1"] + row["mtp_loss_d2"]) / 2, rel=1e-5)
    begun, ended = (load_for_export(tmp_path / "run", step)[1] for step in (2, 4))
    jax.tree.map(np.testing.assert_array_equal, begun["trunk"], ended["trunk"])
    assert not np.array_equal(begun["mtp"]["fc"]["kernel"], ended["mtp"]["fc"]["kernel"])

    shutil.copytree(tmp_path / "run", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "4")
    train(experiment, tmp_path / "resumed", QUIET)
    assert read_rows(tmp_path / "resumed") == rows
    jax.tree.map(np.testing.assert_array_equal, load_for_export(tmp_path / "resumed")[1], ended)
