"""Low-rank adapters: what they compute, what is trained, what is stored, what merging leaves."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published_base import BASE, SETTINGS, STILL, files_of, of_every_family, of_every_family_slowly, stored
from random_checkpoint import BF16
from small_run import read_rows

from mtp_jax.errors import UserError
from mtp_jax.hf import load_checkpoint, save_checkpoint
from mtp_jax.hf.parameters import flatten, unflatten
from train.batch import Batch
from train.checkpoint import load_for_export
from train.experiment import PROJECTIONS, Experiment
from train.loop import train
from train.lora import ADAPTERS, adapted_paths, adapting, merged, with_adapters
from train.objective import losses
from train.progress import Progress
from train.step import build_model, initial_state, train_step

pytestmark = pytest.mark.usefixtures("compilation_cache")
QUIET = Progress(quiet=True)
RANK, ALPHA = 3, 6.0


@pytest.fixture(scope="module")
def experiment(text_folder, base):
    settings = (*SETTINGS, f"lora_rank={RANK}", f"lora_alpha={ALPHA}", "dtype=float32", "depths=2")
    return Experiment(data=(str(text_folder),), init=str(base)).override(settings)


@pytest.fixture(scope="module")
def checkpoint(base):
    return load_checkpoint(base)


@pytest.fixture(scope="module")
def finished(experiment, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    train(experiment, workdir, QUIET)
    return workdir


def batch(seed=0):
    tokens = np.random.default_rng(seed).integers(0, 317, (2, 21)).astype(np.int32)
    return Batch(tokens, np.ones_like(tokens), np.ones_like(tokens, bool))


def some_adapters(params, experiment):
    """None of them zero, as after training."""
    adapters = with_adapters(params, experiment)[ADAPTERS]
    leaves, key = flatten(adapters), jax.random.key(5)
    drawn = {
        path: leaf if path.endswith("A") else 0.1 * jax.random.normal(jax.random.fold_in(key, number), leaf.shape)
        for number, (path, leaf) in enumerate(leaves.items())
    }
    return unflatten(drawn)


@pytest.mark.parametrize("gradient_mode", ["joint", "detached"])
def test_adapting_computes_what_merged_weights_compute(checkpoint, experiment, gradient_mode):
    """Losses, and gradients in the adapters by the chain rule from those in W: dA = s dW B^T, dB = s A^T dW."""
    experiment = replace(experiment, gradient_mode=gradient_mode)
    model, params = build_model(checkpoint.config, experiment), checkpoint.params
    adapters = some_adapters(params, experiment)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def adapted(adapters):
        every = {**params, ADAPTERS: adapters}
        with adapting(every, experiment):
            return losses(model, every, batch(), jnp.float32(0.3), experiment)

    whole = merged({**params, ADAPTERS: adapters}, experiment)
    plain = jax.jit(
        jax.value_and_grad(lambda whole: losses(model, whole, batch(), jnp.float32(0.3), experiment), has_aux=True)
    )
    (loss, report), gradients = adapted(adapters)
    (expected, expected_report), in_weights = plain(whole)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(report.depth_losses, expected_report.depth_losses, rtol=1e-5)
    in_weights, gradients, leaves = map(flatten, (in_weights, gradients, adapters))
    assert len(gradients) == 2 * (3 * 6 + 7 + 8)
    scale = ALPHA / RANK
    for path in {path.rpartition("/")[0] for path in gradients}:
        d_w, a, b = in_weights[f"{path}/kernel"], leaves[f"{path}/A"], leaves[f"{path}/B"]
        largest = np.abs(d_w).max()
        np.testing.assert_allclose(gradients[f"{path}/A"], scale * d_w @ b.T, rtol=1e-3, atol=1e-4 * largest)
        np.testing.assert_allclose(gradients[f"{path}/B"], scale * a.T @ d_w, rtol=1e-3, atol=1e-4 * largest)


def test_a_step_changes_adapters_and_keeps_moments_of_nothing_else(checkpoint, experiment):
    experiment = replace(experiment, remat="block", accumulate_steps=2)
    model = build_model(checkpoint.config, experiment)
    state = initial_state(model, experiment, jax.tree.map(jnp.array, checkpoint.params))
    start = jax.device_get(state)
    num_adapter_leaves = len(jax.tree.leaves(state.params[ADAPTERS]))
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim]
    assert len(moments) == 2 * num_adapter_leaves
    assert all(RANK in leaf.shape for leaf in moments)
    state, _ = train_step(model, experiment, state, batch(), jnp.float32(0.3))
    state, metrics = train_step(model, experiment, state, batch(), jnp.float32(0.3))  # A moves once B is not zero
    assert np.isfinite(metrics.losses.loss)
    for path, leaf in flatten(state.params).items():
        assert np.array_equal(leaf, flatten(start.params)[path]) == (not path.startswith(ADAPTERS)), path


@pytest.mark.parametrize(
    ("targets", "mode", "expected"),
    [
        ("q_proj", "joint", ["mtp/layers_0/self_attn/q_proj", "trunk/layers_3/self_attn/q_proj"]),
        ("head.q_proj,fc", "joint", ["mtp/fc", "mtp/layers_0/self_attn/q_proj"]),
        ("trunk.out_proj", "joint", [f"trunk/layers_{n}/linear_attn/out_proj" for n in range(3)]),
        ("q_proj,in_proj_z", "head_only", ["mtp/layers_0/self_attn/q_proj"]),
    ],
)
def test_targets_are_found_by_name_and_part(checkpoint, experiment, targets, mode, expected):
    experiment = experiment.override([f"lora_targets={targets}", f"gradient_mode={mode}"])
    assert sorted(adapted_paths(checkpoint.params, experiment)) == expected


def test_targets_that_the_model_lacks_are_an_error(checkpoint, experiment):
    experiment = experiment.override(["lora_targets=in_proj_z", "gradient_mode=head_only"])  # no DeltaNet in the head
    with pytest.raises(UserError, match="lora_targets: the model has no projection in_proj_z"):
        with_adapters(checkpoint.params, experiment)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["lora_targets=in_proj_z", "gradient_mode=head_only"], "lora_targets: the model has no projection in_proj_z"),
        (["lora_rank=1000"], r"lora_rank: expected at most the model's width \d+, got 1000"),
    ],
)
def test_adapters_that_cannot_be_are_refused_before_anything_is_written(experiment, tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        train(experiment.override(settings), tmp_path / "run", QUIET)
    assert not (tmp_path / "run").exists()


def test_adapters_of_a_trunk_that_is_frozen_are_refused(experiment):
    with pytest.raises(UserError, match="lora_targets: expected nothing in the trunk, which gradient_mode=head_only"):
        experiment.override(["lora_targets=fc,trunk.q_proj", "gradient_mode=head_only"])


@of_every_family
def test_every_projection_there_is_can_be_named(checkpoint, experiment):
    adapted = set(adapted_paths(checkpoint.params, experiment))
    kernels = {path.removesuffix("/kernel") for path in flatten(checkpoint.params) if path.endswith("/kernel")}
    left_out = {path.split("/")[-1] for path in kernels - adapted}
    assert left_out <= {"in_proj_a", "in_proj_b", "conv1d", "lm_head", "gate", "shared_expert_gate"}
    assert sum("/fc" in path for path in adapted) == len(checkpoint.params["mtp"].keys() & {"fc", "fc_1"}) > 0


@of_every_family_slowly
def test_merging_untrained_adapters_keeps_every_bit(checkpoint, experiment):
    params = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(-0.0), checkpoint.params)
    result = flatten(merged(with_adapters(params, experiment), experiment))
    for path, leaf in flatten(params).items():
        np.testing.assert_array_equal(np.asarray(result[path]).view(np.uint32), np.asarray(leaf).view(np.uint32), path)


@of_every_family_slowly
def test_an_untrained_run_gives_back_every_byte(experiment, base, tmp_path):
    still = experiment.override([*STILL, "dtype=bfloat16"])
    train(still, tmp_path / "run", QUIET)
    config, params, tokenizer, manifest, _ = load_for_export(tmp_path / "run")
    save_checkpoint(tmp_path / "out", config, params, manifest, tokenizer)
    assert files_of(tmp_path / "out") == files_of(base)


def test_trained_adapters_are_merged_from_float32_with_one_rounding(finished, base, checkpoint, tmp_path):
    learnt = load_for_export(finished)
    save_checkpoint(tmp_path / "out", learnt.config, learnt.params, learnt.manifest)
    before, after = stored(base), stored(tmp_path / "out")
    assert {name for name in before if before[name] != after[name]} == {
        name for name in before if name.split(".")[-2] in PROJECTIONS and "visual" not in name
    }
    import orbax.checkpoint as ocp

    kept = ocp.StandardCheckpointer().restore((finished / "checkpoints" / "2" / "params").absolute())
    assert list(kept) == [ADAPTERS]
    adapters, weights = flatten(kept[ADAPTERS]), flatten(checkpoint.params)
    for path in ("trunk/layers_1/mlp/up_proj", "mtp/fc"):
        a, b = (np.asarray(adapters[f"{path}/{name}"], np.float64) for name in "AB")
        exact = np.asarray(weights[f"{path}/kernel"], np.float64) + ALPHA / RANK * a @ b
        name = "mtp.fc.weight" if path == "mtp/fc" else f"{BASE.prefix}layers.1.mlp.up_proj.weight"
        written = np.frombuffer(after[name][2], BF16).reshape(after[name][1]).T
        # The float32 sum may fall on the other side of a tie.
        assert np.mean(written == exact.astype(BF16)) > 0.999
        np.testing.assert_allclose(written.astype(np.float64), exact, rtol=2**-8 + 1e-6)


@of_every_family_slowly
def test_resuming_gives_the_same_adapters(experiment, finished, tmp_path):
    train(experiment.override(["steps=1"]), tmp_path / "run", QUIET)
    train(experiment, tmp_path / "run", QUIET)
    assert read_rows(tmp_path / "run")[1:] == read_rows(finished)[1:]
    jax.tree.map(
        np.testing.assert_array_equal, load_for_export(tmp_path / "run").params, load_for_export(finished).params
    )
