"""Which runs a grid has, what they are called, and what is refused."""

import dataclasses

import pytest

from configs import PRESETS
from mtp_jax.errors import UserError
from train.ablation.grid import grid, parse_schedules, parse_vary, parse_weights, preset_for

TINY = PRESETS["tiny"]()  # 24 steps of 4 rows of 128: 12,288 tokens; its switch point is 6,144


def _grid(weights="", schedules="constant", vary=(), seeds=1, base=TINY):
    return grid(base, parse_weights(weights), parse_schedules(schedules), parse_vary(vary), seeds)


def test_each_weight_and_each_schedule_times_values_times_seeds():
    runs = _grid("0,0.30,1.0", "constant,0.3-then-0.1", ["depths=1,2", "head_loss=ce,kl"], seeds=2)
    assert len(runs) == (3 + 1) * 2 * 2 * 2
    assert len({run.name for run in runs}) == len(runs)
    assert [run.label for run in runs[:5]] == [
        "0 depths=1 head_loss=ce",
        "0 depths=1 head_loss=kl",
        "0 depths=2 head_loss=ce",
        "0 depths=2 head_loss=kl",
        "0.3 depths=1 head_loss=ce",
    ]
    assert [run.experiment.seed for run in runs] == [0] * 16 + [1] * 16
    last = runs[-1]
    assert last.name == "0.3-then-0.1_depths=2_head_loss=kl-seed1"
    assert (last.schedule, last.varied) == ("0.3-then-0.1", {"depths": 2, "head_loss": "kl"})
    assert (last.experiment.depths, last.experiment.head_loss) == (2, "kl")
    assert last.experiment.mtp_weights == (0.3, 0.1)
    assert all(run.experiment.mtp_switch_tokens == () for run in runs if run.schedule != "0.3-then-0.1")
    # All are measured alike, whatever they train.
    assert {run.experiment.measured_depths for run in runs} == {2}
    assert {run.experiment.acceptance_every for run in runs} == {24}


def test_nothing_else_differs_between_the_arms_of_a_seed():
    runs = _grid("0,0.3", "0.3-then-0.1", seeds=2)
    plain = {dataclasses.replace(run.experiment, mtp_weights=(0.0,), mtp_switch_tokens=()) for run in runs}
    assert len(plain) == 2  # one a seed


@pytest.mark.parametrize(
    ("schedule", "settings", "points"),
    [
        ("0.3-then-0.1", [], (6144,)),  # the preset's own
        ("0.3-then-0.1", ["mtp_switch_tokens=2000"], (2000,)),
        ("0.3-then-0.1", ["mtp_switch_tokens=12288"], (6144,)),  # at its end no token is left
        ("0.3-then-0.1", ["steps=6"], (1536,)),
        ("1-then-0.3-then-0.1", [], (4096, 8192)),
        ("1-then-0.3-then-0.1", ["mtp_switch_tokens=10,20"], (10, 20)),  # more than the preset's own schedule has
        ("0.3-then-0.1", ["mtp_switch_tokens="], (6144,)),
    ],
)
def test_where_a_schedule_switches(schedule, settings, points):
    (run,) = _grid(schedules=schedule, base=preset_for(TINY, settings).override(settings))
    assert run.experiment.mtp_switch_tokens == points


@pytest.mark.parametrize("setting", ["seed=1", "mtp_weights=0.5,0.2", " mtp_weights =0.5"])
def test_what_the_grid_sets_is_not_to_be_set(setting):
    key = setting.partition("=")[0].strip()
    with pytest.raises(UserError, match=f"--set {key}: the grid sets {key} by itself; see --"):
        preset_for(TINY, ["steps=3", setting])


def test_a_varied_length_moves_the_switch_point():
    assert [
        (run.tokens, run.experiment.mtp_switch_tokens) for run in _grid(schedules="1-then-0", vary=["steps=4,8"])
    ] == [
        (4 * 512, (1024,)),
        (8 * 512, (2048,)),
    ]


def test_values_with_commas_and_names_that_no_file_may_have():
    runs = _grid("0.3", vary=["depth_weights=equal;0.5,0.5", "depths=2", "held_out=a/*;b/*"])
    assert [run.varied["depth_weights"] for run in runs] == ["equal", "equal", "0.5,0.5", "0.5,0.5"]
    assert runs[0].varied["held_out"] == ["a/*"]
    assert runs[0].experiment.held_out == ("a/*",)
    assert all("/" not in run.name and "*" not in run.name for run in runs)
    assert len({run.name for run in runs}) == 4
    (long,) = _grid("0.3", vary=["held_out=" + "x" * 300])
    assert len(long.name) < 130


@pytest.mark.parametrize(
    ("weights", "schedules", "vary", "message"),
    [
        ("", "constant", [], "--weights: expected one or more"),
        ("0.1,x", "constant", [], "--weights: expected finite numbers, none negative, got 'x'"),
        ("0.1,-1", "constant", [], "got '-1'"),
        ("nan", "constant", [], "got 'nan'"),
        ("inf", "constant", [], "got 'inf'"),
        ("0.1,,1", "constant", [], "got ''"),
        ("0.3,0.30", "constant", [], "--weights: 0.3 is given twice"),
        ("0,-0.0", "constant", [], "--weights: 0 is given twice"),
        ("0", "cosine", [], "--schedules: expected constant or weights like 0.3-then-0.1, got 'cosine'"),
        ("0", "0.3", [], "got '0.3'"),
        ("0", "0.3-then-x", [], "--schedules 0.3-then-x: expected finite numbers"),
        ("0", "0.3-then-0.3", [], "another weight after each -then-"),
        ("0", "0.3-then-0.1,0.30-then-0.1", [], "--schedules: 0.3-then-0.1 is given twice"),
        ("0", "constant", ["depht=1,2"], "--vary depht: setting depht: there is no such setting; close: depths"),
        ("0", "constant", ["depths=1,x"], "--vary depths: setting depths: expected int, got 'x'"),
        ("0", "constant", ["depths=1,1.0"], "--vary depths: 1 is given twice"),
        ("0", "constant", ["depths=1", "depths=2"], "--vary depths: given twice"),
        ("0", "constant", ["depths"], "--vary depths: expected KEY=V1,V2"),
        ("0", "constant", ["depths="], "--vary depths=: expected KEY=V1,V2"),
        ("0", "constant", ["depths=1,"], "one is missing"),
        ("0", "constant", ["seed=1,2"], "--vary seed: the grid sets seed by itself; see --seeds"),
        ("0", "constant", ["mtp_weights=0.1;0.3"], "see --weights"),
        ("0", "constant", ["head_loss=ce,l2"], "run 0_head_loss=l2-seed0: setting head_loss: expected ce, kl or tv"),
        ("0", "constant", ["depths=1,2", "depth_weights=0.5,0.5;equal"], "run 0_depths=1_depth_weights=0.5,0.5-seed0"),
    ],
)
def test_mistakes(weights, schedules, vary, message):
    with pytest.raises(UserError) as error:
        _grid(weights, schedules, vary)
    assert message in str(error.value)
