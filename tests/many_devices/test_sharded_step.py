"""A training step over several devices equals one on a single device: losses, gradients and what the optimiser does."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from bent_model import CONFIG, FAMILIES
from meshes import SMALLEST, assert_close, mesh

from configs import PRESETS
from mtp_jax.mtp import MTPModel
from mtp_jax.sharding import all_rows, laid_out, on_mesh, own_rows, parameter_shardings
from train.batch import Batch
from train.objective import count_targets
from train.step import TrainState, build_model, eval_step, initial_state, train_step

EXPERIMENT = replace(PRESETS["tiny"](), cross_entropy_chunk=32, dtype="float32")
WEIGHT = np.float32(0.3)
MODELS = {
    "smallest": SMALLEST,
    "tied hybrid": replace(CONFIG, tie_embeddings=True),
    "hybrid with experts": FAMILIES["hybrid with experts"],
    "attention with experts": FAMILIES["attention with experts"],
}


def batch() -> Batch:
    """Packed and padded rows of unequal documents, one of them empty: targets are spread unevenly over devices."""
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (8, 21)).astype(np.int32)
    segment_ids = np.ones_like(tokens)
    segment_ids[0, 5:] = 2
    segment_ids[1, 5:] = 0
    segment_ids[7] = 0
    return Batch(tokens, segment_ids, segment_ids > 0)


def random_state(model: MTPModel, experiment) -> TrainState:
    """Step 0 with weights of no particular kind, which need no compiling."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(lambda: initial_state(model, experiment))
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    return zeros._replace(
        params=jax.tree.map(lambda x: rng.normal(size=x.shape, scale=0.2).astype(x.dtype), shapes.params)
    )


_SINGLE: dict = {}


def single(model: MTPModel, experiment=EXPERIMENT):
    """The state before a step on one device, and what the step gives; kept, since compiling it takes seconds."""
    if (model, experiment) not in _SINGLE:
        start = random_state(model, experiment)
        after = jax.device_get(train_step(model, experiment, jax.device_put(start), batch(), WEIGHT))
        _SINGLE[model, experiment] = start, after
    return _SINGLE[model, experiment]


def in_units_of_gradients(optimizer: optax.OptState) -> optax.OptState:
    """With the second moments' roots: of a square, rounding is twice as large a part."""
    clip, adam, *others = jax.device_get(optimizer)
    return clip, adam._replace(nu=jax.tree.map(np.sqrt, adam.nu)), *others


def check_step(name: str, devices: str, **changes):
    experiment = replace(EXPERIMENT, **changes)
    model = build_model(MODELS[name], experiment)
    start, (expected, expected_metrics) = single(model, experiment)
    with on_mesh(mesh(devices)):
        state = laid_out(jax.device_put(start), model.config)
        state, metrics = train_step(model, experiment, state, own_rows(batch()), WEIGHT)
        shardings = parameter_shardings(state, model.config, mesh(devices))
    # The first moment is the clipped gradient but for a factor, so gradients are compared with it.
    assert_close(in_units_of_gradients(state.optimizer), in_units_of_gradients(expected.optimizer))
    assert_close(metrics, expected_metrics)
    # AdamW's first update is the gradient's sign, which near 0 rounding may turn.
    move = 2 * float(expected_metrics.learning_rate) + 1e-6
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=move), *jax.device_get((state, expected)))
    jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or pytest.fail(str(x.sharding)), state, shardings)


def test_a_step():
    check_step("smallest", "data:2,fsdp:2,tensor:2")


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["data:8", "fsdp:8", "data:2,fsdp:2,tensor:2", "fsdp:2,tensor:4"])
@pytest.mark.parametrize("name", ["tied hybrid", "hybrid with experts", "attention with experts"])
def test_a_step_on_other_meshes(name, devices):
    """With tensor:4 no head of keys and values, no key head and no expert has a device of its own."""
    check_step(name, devices)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"depths": 3, "head_loss": "tv", "accumulate_steps": 2},
        {"gradient_mode": "head_only", "remat": "block"},
        {"gradient_mode": "detached", "head_loss": "kl", "remat": "products"},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_a_step_of_every_kind(changes):
    check_step("tied hybrid", "data:2,fsdp:2,tensor:2", **changes)


@pytest.mark.slow
def test_evaluation():
    model = build_model(MODELS["tied hybrid"], EXPERIMENT)
    counts = np.asarray(count_targets(batch(), EXPERIMENT.depths))
    params = random_state(model, EXPERIMENT).params
    expected = eval_step(model, EXPERIMENT, params, batch(), counts)
    with on_mesh(mesh("data:2,fsdp:2,tensor:2")):
        losses = eval_step(model, EXPERIMENT, laid_out(params, model.config), all_rows(batch()), counts)
    assert_close(losses, expected)
