"""The file of records, and what makes a run done."""

import itertools
import json

import pytest

from configs import PRESETS
from mtp_jax.errors import UserError
from train.ablation.grid import grid, parse_vary
from train.ablation.records import GridFolder, commit, make_record, read_records, thinned, training_seconds

TINY = PRESETS["tiny"]()
MEASURED = {"parameters": 7, "seconds": 9.0, "training_seconds": 3.0, "cores": 2, "commit": None, "unigram_loss": 4.0}


def _row(step, **more):
    row = {"step": step, "tokens": 10 * step, "loss": 1.0, "main_loss": 0.7, "mtp_loss": 1.0, "mtp_weight": 0.3}
    return {**row, "tokens_per_second": 5.0, **more}


def _record(run, **settings):
    rows = [_row(1), _row(2, eval_main_loss=2.0, acceptance=0.5)]
    return make_record(run, rows, {**run.experiment.to_json(), **settings}, **MEASURED)


@pytest.fixture
def runs():
    return grid(TINY, (0.0, 0.3), (), parse_vary(["depths=1,2"]), 1)


@pytest.fixture
def folder(tmp_path):
    return GridFolder(tmp_path / "grid")


def test_a_record_says_all_that_was_agreed(runs):
    run = runs[-1]
    record = _record(run)
    assert json.loads(json.dumps(record)) == record
    assert (record["name"], record["label"]) == ("0.3_depths=2-seed0", "0.3 depths=2")
    assert (record["schedule"], record["mtp_weights"], record["mtp_switch_tokens"]) == ("0.3", [0.3], [])
    assert (record["varied"], record["seed"], record["steps"], record["tokens"]) == ({"depths": 2}, 0, 2, 20)
    assert record["settings"]["depths"] == 2
    assert record["figures"] == _row(2, eval_main_loss=2.0, acceptance=0.5)
    assert record["rows"][-1] == {
        "step": 2,
        "tokens": 20,
        "main_loss": 0.7,
        "mtp_loss": 1.0,
        "mtp_weight": 0.3,
        "eval_main_loss": 2.0,
    }
    assert set(record["versions"]) == {"python", "jax", "flax", "optax", "mtp_jax"}
    assert all(record["versions"].values())
    assert MEASURED.items() <= record.items()


def test_many_rows_are_thinned_and_evaluations_stay():
    rows = [_row(step, **({"eval_main_loss": 1.0} if step in (7, 401) else {})) for step in range(1, 1001)]
    steps = [row["step"] for row in thinned(rows, 60)]
    assert len(steps) <= 60
    assert {1, 7, 401, 1000} <= set(steps)
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 20
    assert [row["step"] for row in thinned(rows[:9], 60)] == list(range(1, 10))


def test_time_of_the_steps():
    assert training_seconds([_row(1, tokens_per_second=10.0), _row(4, tokens_per_second=15.0)]) == pytest.approx(3.0)


def test_a_line_that_was_cut_short_is_replaced(folder, runs):
    folder.claim()
    records = [_record(run) for run in runs]
    folder.append(records[0])
    with open(folder.records, "a") as file:
        file.write('{"name": "0.3-se')
    assert folder.read() == records[:1]
    folder.append(records[1])
    assert read_records(folder.records) == records[:2]
    folder.close()


@pytest.mark.parametrize("line", ["x", "[]", "{}", '{"name": 1, "settings": {}}', '{"name": "0", "settings": 1}'])
def test_a_line_that_is_no_record_is_named(folder, line):
    folder.root.mkdir()
    folder.records.write_text(line + "\n")
    with pytest.raises(UserError, match=r"records\.jsonl, line 1: expected a record of a run"):
        folder.read()


def test_what_is_done(folder, runs):
    """By the file of records, or by the run's own, which nobody was there to collect."""
    folder.claim()
    folder.append(_record(runs[1], log_every=5))  # changes nothing of a finished run
    own = folder.workdir(runs[2].name)
    own.mkdir()
    (own / "record.json").write_text(json.dumps(_record(runs[2])))
    begun = folder.workdir(runs[3].name)
    begun.mkdir()
    (begun / "config.json").write_text(json.dumps({**runs[3].experiment.to_json(), "dtype": "float32"}))
    assert set(folder.finished(runs)) == {runs[1].name, runs[2].name}
    folder.close()


def test_other_settings_under_the_same_name_are_refused(folder, runs):
    folder.claim()
    folder.append(_record(runs[0], width=64))
    with pytest.raises(
        UserError, match=r"run 0_depths=1-seed0 is recorded with other settings: width is 64 there and 32"
    ):
        folder.finished(runs)
    begun = folder.workdir(runs[3].name)
    begun.mkdir()
    (begun / "config.json").write_text(json.dumps({**runs[3].experiment.to_json(), "held_out": ["x"]}))
    with pytest.raises(UserError, match=r"has begun with other settings: held_out is x there and bisect\.py here"):
        folder.finished(runs[3:])
    folder.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lambda": 1}, "cannot be compared: setting lambda: this version has no such setting; name another --workdir"),
        ({"steps": "x"}, "cannot be compared: setting steps: expected int, got 'x'; name another --workdir"),
    ],
)
def test_settings_of_another_version_are_told_with_their_run(folder, runs, settings, message):
    folder.claim()
    folder.append({"name": runs[0].name, "settings": settings})
    with pytest.raises(UserError) as error:
        folder.finished(runs)
    assert f"{folder.root}: run {runs[0].name} is recorded with settings that {message}" == str(error.value)
    folder.close()


def test_a_run_s_own_record_that_is_none_is_named(folder, runs):
    folder.workdir(runs[0].name).mkdir(parents=True)
    (folder.workdir(runs[0].name) / "record.json").write_text("{}")
    with pytest.raises(UserError, match=r"record\.json: expected a record of a run: no name or no settings"):
        folder.finished(runs)


def test_a_folder_where_others_keep_their_runs_is_not_taken(tmp_path):
    (tmp_path / "runs").mkdir()
    GridFolder(tmp_path)  # stopped before its first run began
    (tmp_path / "runs" / "mine").mkdir()
    with pytest.raises(UserError, match="one that an ablation was written to, got runs in it"):
        GridFolder(tmp_path)
    (tmp_path / "notes.txt").touch()
    (tmp_path / "runs" / "0.3-seed0.log").touch()
    GridFolder(tmp_path)


def test_a_folder_is_for_one_grid_at_a_time(folder):
    folder.claim()
    with pytest.raises(UserError, match="another grid is running in it"):
        GridFolder(folder.root).claim()
    folder.close()
    again = GridFolder(folder.root)
    again.claim()
    again.close()


def test_the_commit_is_that_of_this_clone_or_none(tmp_path):
    found = commit()
    assert found is None or len(found.removesuffix("-dirty")) == 40
    assert commit(tmp_path) is None
