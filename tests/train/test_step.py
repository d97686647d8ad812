"""One step: what it changes, what it leaves alone, what it does when something is not finite."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import PRESETS
from mtp_jax.mtp import MTPModel
from train.batch import Batch
from train.objective import count_targets
from train.step import eval_step, initial_state, loss_and_gradients, optimizer, train_step

EXPERIMENT = dataclasses.replace(PRESETS["tiny"](), width=24, mlp_width=40, cross_entropy_chunk=32)
MODEL = MTPModel(config=EXPERIMENT.model_config(), dtype=jnp.dtype(jnp.float32))


@pytest.fixture(scope="module")
def start():
    return jax.device_get(initial_state(MODEL, EXPERIMENT))


def _batch(rows=2, time=21):
    tokens = np.random.default_rng(0).integers(0, EXPERIMENT.vocab_size, (rows, time)).astype(np.int32)
    return Batch(tokens, np.ones_like(tokens), np.ones_like(tokens, bool))


def _step(state, weight=0.3, experiment=EXPERIMENT):
    return train_step(MODEL, experiment, jax.device_put(state), _batch(), jnp.float32(weight))


def test_the_first_loss_is_that_of_a_uniform_guess_and_falls(start):
    state, metrics = _step(start)
    first = float(metrics.losses.main_loss)
    assert first == pytest.approx(np.log(EXPERIMENT.vocab_size), rel=0.02)
    assert metrics.losses.loss == pytest.approx(first + 0.3 * float(metrics.losses.mtp_loss), rel=1e-6)
    for _ in range(8):
        state, metrics = train_step(MODEL, EXPERIMENT, state, _batch(), jnp.float32(0.3))
    assert float(metrics.losses.main_loss) < first - 0.3
    assert int(state.step) == 9


def test_a_loss_that_is_not_finite_changes_nothing_and_is_counted(start):
    state, metrics = _step(start, float("nan"))
    assert (int(metrics.skipped), int(metrics.skipped_in_a_row), int(state.step)) == (1, 1, 1)
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.optimizer), (start.params, start.optimizer))
    state, metrics = train_step(MODEL, EXPERIMENT, state, _batch(), jnp.float32(0.3))
    assert (int(metrics.skipped), int(metrics.skipped_in_a_row)) == (1, 0)
    assert np.isfinite(metrics.grad_norm)


def test_update_is_adamw_of_the_clipped_gradient():
    experiment = dataclasses.replace(EXPERIMENT, clip_norm=0.5, weight_decay=0.2)
    params = {"trunk": {"kernel": jnp.ones((2, 3)), "scale": jnp.ones(3)}, "lm_head": {"kernel": jnp.ones((2, 5))}}
    gradients = jax.tree.map(lambda x: 2.0 * x, params)
    ours = optimizer(experiment)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = ours.update(gradients, ours.init(params), params)
    mask = {"trunk": {"kernel": True, "scale": False}, "lm_head": {"kernel": False}}
    theirs = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1.0, 0.9, 0.95, weight_decay=0.2, mask=mask))
    with jax.numpy_dtype_promotion("standard"):
        expected, _ = theirs.update(gradients, theirs.init(params), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, -b, rtol=1e-6), updates, expected)
    np.testing.assert_allclose(updates["trunk"]["kernel"] - updates["trunk"]["scale"][None], 0.2, rtol=1e-5)


def test_evaluation_equals_the_training_losses(start):
    losses = eval_step(MODEL, EXPERIMENT, start.params, _batch(), count_targets(_batch(), EXPERIMENT.depths))
    _, metrics = _step(start)
    np.testing.assert_allclose(losses.main_loss, metrics.losses.main_loss, rtol=1e-6)
    np.testing.assert_allclose(losses.mtp_loss, metrics.losses.mtp_loss, rtol=1e-6)


def test_bfloat16_products_over_float32_weights(start):
    """The loss is float32's up to rounding and falls, and what is trained and kept stays float32.

    Gradients are not compared: at these small initial activations, rounding the weights alone moves them by 7 %.
    """
    model = dataclasses.replace(MODEL, dtype=jnp.dtype(jnp.bfloat16))
    state, metrics = train_step(model, EXPERIMENT, jax.device_put(start), _batch(), jnp.float32(0.3))
    first = float(metrics.losses.loss)
    assert first == pytest.approx(float(_step(start)[1].losses.loss), rel=2e-3)
    for _ in range(8):
        state, metrics = train_step(model, EXPERIMENT, state, _batch(), jnp.float32(0.3))
    assert float(metrics.losses.loss) < first - 0.3
    assert {leaf.dtype for leaf in jax.tree.leaves((state.params, metrics.losses))} == {jnp.dtype(jnp.float32)}


def _changed(after, before):
    """Names of the leaves that are not bit-equal."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(after), jax.tree.leaves(before), strict=True)
    return {jax.tree_util.keystr(path) for (path, x), y in pairs if not np.array_equal(x, y)}


def _names(params, *top):
    leaves = jax.tree_util.tree_leaves_with_path({name: params[name] for name in top or params})
    return {jax.tree_util.keystr(path) for path, _ in leaves}


def test_one_joint_step_changes_every_parameter(start):
    assert _changed(_step(start)[0].params, start.params) == _names(start.params)


def test_a_head_only_step_changes_every_parameter_of_the_head_and_none_of_the_trunk(start):
    """Bit for bit; and the optimiser holds moments of the head alone."""
    experiment = dataclasses.replace(EXPERIMENT, gradient_mode="head_only")
    begun = initial_state(MODEL, experiment)
    held = jax.tree_util.tree_leaves_with_path(begun.optimizer)
    assert len([path for path, _ in held if "'mtp'" in jax.tree_util.keystr(path)]) == 2 * len(
        _names(start.params, "mtp")
    )
    assert not [path for path, _ in held if "'trunk'" in jax.tree_util.keystr(path)]
    state, metrics = _step(begun, experiment=experiment)
    assert _changed(state.params, start.params) == _names(start.params, "mtp")
    joint = _step(start)[1].losses
    np.testing.assert_allclose(metrics.losses.main_loss, joint.main_loss, rtol=1e-6)
    np.testing.assert_allclose(metrics.losses.mtp_loss, joint.mtp_loss, rtol=1e-6)


def test_the_head_has_a_learning_rate_of_its_own(start):
    def update(scale):
        experiment = dataclasses.replace(EXPERIMENT, head_learning_rate_scale=scale)
        return jax.tree.map(lambda new, old: new - old, _step(start, experiment=experiment)[0].params, start.params)

    one, half = update(1.0), update(0.5)
    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6)
    jax.tree.map(lambda a, b: close(a, 2 * b), one["mtp"], half["mtp"])
    jax.tree.map(close, one["trunk"], half["trunk"])


# Sums of the same float32 terms in another order.
SAME_SUM = partial(np.testing.assert_allclose, rtol=1e-3, atol=2e-6)


def test_accumulation_changes_nothing(start):
    """Also where one part has one target, one has none, and a row is padding."""
    batch = _batch(rows=4)
    uneven = batch.loss_mask.copy()
    uneven[0] = np.arange(21) == 13
    uneven[1] = False
    segment_ids = batch.segment_ids.copy()
    segment_ids[2, 5:] = 2
    segment_ids[3, 4:] = 0
    others = Batch(batch.tokens, segment_ids, uneven & (segment_ids != 0))

    def results(accumulate_steps):
        experiment = dataclasses.replace(EXPERIMENT, accumulate_steps=accumulate_steps, depths=2)
        function = jax.jit(partial(loss_and_gradients, MODEL, experiment))
        return [jax.device_get(function(start.params, b, jnp.float32(0.7))) for b in (batch, others)]

    whole = results(1)
    np.testing.assert_array_equal(whole[1][0].mtp_count, [1 + 0 + 17 + 2, 1 + 0 + 15 + 1])
    for accumulate_steps in (2, 4):
        jax.tree.map(SAME_SUM, results(accumulate_steps), whole)
