"""Schedules at their boundaries."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from train.experiment import Experiment
from train.schedules import learning_rate_schedule, mtp_weight


def _weight(tokens, weights, switches, schedule="step"):
    experiment = Experiment(mtp_weights=weights, mtp_switch_tokens=switches, mtp_schedule=schedule)
    return mtp_weight(experiment, tokens)


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0.3), (99, 0.3), (100, 0.1), (101, 0.1), (499, 0.1), (500, 0.0), (10**12, 0.0)]
)
def test_a_weight_holds_from_its_switch_point_on(tokens, expected):
    assert _weight(tokens, (0.3, 0.1, 0.0), (100, 500)) == expected


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0.3), (50, 0.2), (100, 0.1), (300, 0.3), (500, 0.5), (501, 0.5), (10**12, 0.5)]
)
def test_a_weight_moves_on_a_line_between_switch_points(tokens, expected):
    assert _weight(tokens, (0.3, 0.1, 0.5), (100, 500), "linear") == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["step", "linear"])
def test_a_single_weight_holds_throughout(schedule):
    assert _weight(10**9, (0.2,), (), schedule) == 0.2


@pytest.mark.parametrize("schedule", ["step", "linear"])
def test_a_switch_at_zero_leaves_nothing_to_the_first_weight(schedule):
    assert _weight(0, (0.3, 0.1), (0,), schedule) == 0.1


def _rates(**settings):
    experiment = dataclasses.replace(Experiment(), **settings)
    schedule = learning_rate_schedule(experiment)
    return np.array([float(schedule(jnp.asarray(step, jnp.int32))) for step in range(experiment.steps)])


def test_warm_up_and_cosine():
    rates = _rates(steps=11, warmup_steps=4, learning_rate=1.0, final_learning_rate=0.1)
    warm_up = [0.2, 0.4, 0.6, 0.8, 1.0]
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * s / 7)) / 2 for s in range(1, 7)]
    np.testing.assert_allclose(rates, warm_up + cosine, rtol=1e-6)


def test_warm_up_and_a_line():
    rates = _rates(steps=7, warmup_steps=2, learning_rate=1.0, final_learning_rate=0.5, learning_rate_shape="linear")
    np.testing.assert_allclose(rates, [1 / 3, 2 / 3, 1.0, 0.9, 0.8, 0.7, 0.6], rtol=1e-6)


def test_warm_up_and_a_constant():
    rates = _rates(steps=5, warmup_steps=2, learning_rate=1.0, learning_rate_shape="constant")
    np.testing.assert_allclose(rates, [1 / 3, 2 / 3, 1.0, 1.0, 1.0], rtol=1e-6)


@pytest.mark.parametrize("settings", [{"steps": 1}, {"steps": 3, "warmup_steps": 0}, {"steps": 3, "warmup_steps": 50}])
def test_short_runs_have_positive_rates_up_to_the_peak(settings):
    rates = _rates(learning_rate=0.5, **settings)
    assert (rates > 0).all()
    assert rates.max() == pytest.approx(0.5)
