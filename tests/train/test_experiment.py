"""Settings by name: parsing, checks, JSON, which changes a run survives."""

import dataclasses
import json

import pytest

from configs import PRESETS
from mtp_jax.config import LayerType
from mtp_jax.errors import UserError
from mtp_jax.layers.block import REMAT
from train.experiment import REMAT_NAMES, Experiment, setting_lines


def test_values_are_parsed_by_the_settings_type():
    numbers = ["steps=7", "learning_rate=1e-4", "mtp_weights=0.5,0.2,0", "mtp_switch_tokens=3e6,4_000_000"]
    others = ["tie_embeddings=false", "held_out=json/*, csv.py", "dtype=bfloat16"]
    experiment = Experiment().override([*numbers, *others])
    assert experiment.steps == 7
    assert experiment.learning_rate == 1e-4
    assert experiment.mtp_weights == (0.5, 0.2, 0.0)
    assert experiment.mtp_switch_tokens == (3_000_000, 4_000_000)
    assert experiment.tie_embeddings is False
    assert experiment.held_out == ("json/*", "csv.py")


def test_an_empty_value_is_an_empty_list():
    experiment = Experiment().override(["mtp_weights=0.3", "mtp_switch_tokens="])
    assert experiment.mtp_switch_tokens == ()


def test_the_later_of_two_values_counts():
    assert Experiment().override(["steps=7", "steps=8"]).steps == 8


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("steps", "key=value"),
        ("learning_rat=1", "close: learning_rate"),
        ("steps=many", "steps: expected int, got 'many'"),
        ("steps=1.5", "steps: expected int"),
        ("steps=0", "steps: expected more than 0, got 0"),
        ("steps=1e400", "steps: expected int"),
        ("learning_rate=nan", "learning_rate: expected"),
        ("rope_theta=inf", "rope_theta: expected"),
        ("learning_rate=inf", "learning_rate: expected"),
        ("learning_rate=1e300", r"learning_rate: expected at least 0, and no number beyond 3\.4e\+38, got 1e\+300"),
        ("mtp_weights=0.3,1e39", "no number beyond"),  # infinite on the device
        ("tie_embeddings=maybe", "tie_embeddings: expected bool"),
        ("mtp_weights=0.3,x", "mtp_weights: expected floats"),
        ("mtp_weights=0.3,nan", "mtp_weights: expected"),
        ("mtp_weights=", "mtp_weights: expected one or more"),
        ("mtp_weights=-1,0", "mtp_weights: expected"),
        ("mtp_switch_tokens=1,2", "mtp_switch_tokens: expected 1 values"),
        ("mtp_weights=0.3,0.2,0.1", "mtp_switch_tokens: expected 2 values"),
        ("sequence_length=1", "sequence_length: expected at least 2"),
        ("dtype=float16", "dtype: expected float32"),
        ("num_kv_heads=4", "num_heads must be a multiple of num_kv_heads"),
        ("seed=-1", "seed: expected"),
        ("depths=0", "depths: expected at least 1 and below sequence_length 256, got 0"),
        ("depths=256", "depths: expected at least 1 and below sequence_length 256, got 256"),
        ("depth_weights=1,1", "depth_weights: expected equal, decay or 1 numbers, as many as depths"),
        ("depth_weights=falling", "depth_weights: expected equal, decay or 1 numbers"),
        ("depth_weights=-1", "depth_weights: expected"),
        ("depth_weights=0", "depth_weights: expected"),
        ("depth_weights=nan", "depth_weights: expected"),
        ("depth_weights=", "depth_weights: expected"),
        ("head_loss=mse", "head_loss: expected ce, kl or tv, got mse"),
        ("gradient_mode=trunk", "gradient_mode: expected joint, detached or head_only, got trunk"),
        ("remat=all", "remat: expected none, products or block, got all"),
        ("mtp_schedule=cosine", "mtp_schedule: expected step or linear, got cosine"),
        ("learning_rate_shape=step", "learning_rate_shape: expected cosine, linear or constant, got step"),
        ("head_learning_rate_scale=-1", "head_learning_rate_scale: expected at least 0"),
        ("accumulate_steps=3", "accumulate_steps: expected a divisor of batch_size 8, got 3"),
        ("accumulate_steps=0", "accumulate_steps: expected a divisor"),
    ],
)
def test_mistakes_are_named(assignment, message):
    with pytest.raises(UserError, match=message):
        Experiment().override([assignment])


def test_switch_points_rise():
    with pytest.raises(UserError, match="rising"):
        Experiment().override(["mtp_weights=3,2,1", "mtp_switch_tokens=5,5"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [("equal", (1 / 3,) * 3), ("decay", (1 / 1.96, 0.6 / 1.96, 0.36 / 1.96)), ("3,1,0", (0.75, 0.25, 0.0))],
)
def test_depth_weights_sum_to_one(text, expected):
    experiment = Experiment().override(["depths=3", f"depth_weights={text}"])
    assert experiment.depth_weight_values() == pytest.approx(expected)


def test_every_depth_below_the_sequence_length_is_taken():
    assert Experiment().override(["sequence_length=5", "depths=4"]).depths == 4


def test_names_of_rematerialisation_are_the_models():
    assert set(REMAT_NAMES) == set(REMAT)


@pytest.mark.parametrize("name", PRESETS)
def test_json_gives_back_the_same_experiment(name):
    experiment = dataclasses.replace(PRESETS[name](), data=("/a,b/c", "/d"))
    assert Experiment.from_json(json.loads(json.dumps(experiment.to_json()))) == experiment


def test_json_of_another_version_is_refused():
    with pytest.raises(UserError, match="no such setting"):
        Experiment.from_json({"stepz": 1})


def test_a_run_survives_more_steps_and_other_intervals_only():
    old = Experiment(steps=10)
    assert old.refused_changes(old.override(["steps=11", "log_every=1", "checkpoint_every=2"])) == []
    assert old.refused_changes(old.override(["steps=9"])) == ["steps is 10 there and 9 here"]
    refused = old.refused_changes(old.override(["seed=3", "mtp_weights=0.3,0.2"]))
    assert refused == ["seed is 0 there and 3 here", "mtp_weights is 0.3,0.1 there and 0.3,0.2 here"]


def test_every_setting_is_listed_with_default_and_meaning():
    text = "\n".join(setting_lines({name: make() for name, make in PRESETS.items()}))
    for field in dataclasses.fields(Experiment):
        assert f"  {field.name} (" in text
        assert field.metadata["meaning"] in text
    assert "steps (int; default 1000; tiny 24; demo" in text


def test_the_demo_model_is_hybrid_three_to_one_and_small():
    config = PRESETS["demo"]().model_config()
    assert config.layer_types == (LayerType.LINEAR,) * 3 + (LayerType.FULL,)
    assert config.tie_embeddings
    assert config.num_mtp_layers == 1
