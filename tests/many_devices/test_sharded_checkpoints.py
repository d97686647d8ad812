"""What a run saves from one mesh is read on another, and the run goes on as if it had one device."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from meshes import SMALLEST, mesh

from configs import PRESETS
from mtp_jax.mtp import MTPModel
from mtp_jax.sharding import laid_out, on_mesh, parameter_shardings
from train.checkpoint import Checkpoints, Counters, Workdir, load_for_export
from train.experiment import Experiment
from train.loop import train
from train.progress import Progress
from train.step import initial_state


def test_saved_on_one_mesh_and_restored_on_others(tmp_path):
    experiment = replace(PRESETS["tiny"](), dtype="float32")
    shapes = jax.eval_shape(lambda: initial_state(MTPModel(SMALLEST), experiment))
    rng = np.random.default_rng(0)
    values = jax.tree.map(lambda x: (rng.normal(size=x.shape) * 9).astype(x.dtype), shapes)
    overwrite = jax.jit(lambda state: jax.tree.map(lambda x: x * 0 - 1, state), donate_argnums=0)
    checkpoints = Checkpoints(Workdir(tmp_path), keep=0)
    with on_mesh(mesh("data:2,fsdp:2,tensor:2")):
        state = laid_out(values, SMALLEST)
        checkpoints.save(state, Counters(1, 0, {}))
        jax.block_until_ready(overwrite(state))  # the next step does so while the state is being saved
    checkpoints.wait()
    for devices in ("fsdp:4,tensor:2", "data:8"):
        with on_mesh(mesh(devices)):
            restored, _ = checkpoints.restore(1, laid_out(shapes, SMALLEST))
        assert jax.tree.map(lambda x: x.sharding, restored) == parameter_shardings(shapes, SMALLEST, mesh(devices))
        jax.tree.map(np.testing.assert_array_equal, restored, values)
    alone, _ = checkpoints.restore(1, shapes)
    assert {len(x.devices()) for x in jax.tree.leaves(alone)} == {1}
    jax.tree.map(np.testing.assert_array_equal, alone, values)
    checkpoints.close()


@pytest.mark.slow
def test_a_run_that_changes_devices_is_the_same_run(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("".join(f"value_{i} = {i * i}\n" for i in range(60)))
    (texts / "b.txt").write_text("def double(x):\n    return x + x\n" * 3)
    settings = "steps=4 batch_size=8 sequence_length=32 log_every=1 warmup_steps=1 learning_rate_shape=constant"
    settings += " held_out=b.txt acceptance_every=4 acceptance_prompts=2 acceptance_new_tokens=6 vocab_size=300"
    settings += " width=16 mlp_width=24 num_layers=2 full_attention_interval=2 num_heads=2 num_kv_heads=1 head_dim=8"
    settings += " rotary_dim=4 delta_v_heads=2 delta_k_heads=1 delta_head_k_dim=8 delta_head_v_dim=8 dtype=float32"
    experiment = Experiment(data=(str(texts),)).override(settings.split())
    quiet = Progress(quiet=True)
    last = train(experiment, tmp_path / "one", quiet)
    train(experiment.override(["steps=2", "mesh=data:2,fsdp:2,tensor:2"]), tmp_path / "many", quiet)
    train(experiment.override(["steps=3", "mesh=fsdp:4,tensor:2"]), tmp_path / "many", quiet)
    row = train(experiment, tmp_path / "many", quiet)
    assert row.keys() == last.keys()
    assert row["acceptance_identical"] == last["acceptance_identical"] == 1
    for name in row.keys() - {"tokens_per_second"}:
        assert row[name] == pytest.approx(last[name], rel=1e-3, abs=1e-6), name
    one, many = (load_for_export(tmp_path / name).params for name in ("one", "many"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), many, one)
