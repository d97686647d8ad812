"""Where the table says that parameters lie; several devices are not needed for that."""

from dataclasses import replace
from math import prod

import jax
import pytest
from jax.sharding import PartitionSpec
from small_models import MODELS

from configs import PRESETS
from configs.released import RELEASED
from mtp_jax.errors import UserError
from mtp_jax.hf.parameters import parameter_shapes
from mtp_jax.mesh_shape import MeshShape, parse_mesh
from mtp_jax.mtp import MTPModel
from mtp_jax.sharding import make_mesh, parameter_spec, parameter_specs
from train.step import initial_state

SIZES = {"data": 2, "fsdp": 4, "tensor": 8}


def specs(config, sizes=SIZES):
    return {path: parameter_spec(path, shape, config, sizes) for path, shape in parameter_shapes(config).items()}


def test_all_but_a_hundredth_of_a_released_model_is_spread():
    config = RELEASED["qwen3.5-0.8b"]
    found, shapes = specs(config), parameter_shapes(config)
    held = sum(
        prod(shape) / prod(SIZES[axis] for axis in found[path] if axis is not None) for path, shape in shapes.items()
    )
    assert held < sum(map(prod, shapes.values())) * (1 / 32 + 1 / 100)


@pytest.mark.parametrize("name", MODELS)
def test_the_table_names_every_parameter_once(name):
    config = MODELS[name].config
    for tied in (True, False):
        for layers in (1, 2):
            specs(replace(config, tie_embeddings=tied, num_mtp_layers=layers, mtp_layers_share=layers == 1))


def test_heads_stay_whole_and_few_are_replicated():
    config = replace(MODELS["hybrid"].config, width=48)
    attention = "trunk/layers_1/self_attn"
    found = specs(config, {"data": 1, "fsdp": 2, "tensor": 3})
    assert found[f"{attention}/q_proj/kernel"] == PartitionSpec("fsdp", "tensor")  # 6 heads over 3
    assert found[f"{attention}/k_proj/kernel"] == PartitionSpec("fsdp", None)
    assert found[f"{attention}/o_proj/kernel"] == PartitionSpec("tensor", "fsdp")
    # 20 channels of 2 heads: 5 would divide them, and cut the heads.
    assert specs(config, {"data": 1, "fsdp": 1, "tensor": 5})[f"{attention}/k_proj/kernel"] == PartitionSpec(
        "fsdp", None
    )


def test_experts_are_spread_whole():
    config = MODELS["grouped experts"].config
    found = specs(config, {"data": 1, "fsdp": 2, "tensor": 4})
    assert found["trunk/layers_1/mlp/experts/down_proj"] == PartitionSpec("tensor", None, "fsdp")
    assert found["trunk/layers_1/mlp/gate/kernel"] == PartitionSpec("fsdp", None)


def test_moments_and_adapters_follow_their_parameters():
    experiment = replace(PRESETS["finetune"](), lora_rank=4, init="somewhere", dtype="float32")
    model = MODELS["hybrid"]
    state = jax.eval_shape(lambda: initial_state(MTPModel(model.config), experiment))
    sizes = {"data": 1, "fsdp": 2, "tensor": 2}
    found = parameter_specs(state, model.config, sizes)
    mlp = found.params["adapters"]["trunk"]["layers_0"]["mlp"]
    assert mlp["up_proj"] == {"A": PartitionSpec("fsdp", None), "B": PartitionSpec(None, "tensor")}
    assert mlp["down_proj"] == {"A": PartitionSpec("tensor", None), "B": PartitionSpec(None, "fsdp")}
    is_spec = dict(is_leaf=lambda x: isinstance(x, PartitionSpec))
    moments = found.optimizer[1]
    for moment in (moments.mu, moments.nu):
        assert jax.tree.leaves(moment, **is_spec) == jax.tree.leaves({"adapters": found.params["adapters"]}, **is_spec)
    assert found.step == moments.count == PartitionSpec()


def test_meshes_as_people_write_them():
    assert parse_mesh(["fsdp:2", "tensor:4"], "setting mesh") == MeshShape(1, 2, 4)
    assert parse_mesh([], "setting mesh") is None
    for words, message in (
        (["fsdp"], r"--mesh: expected AXIS:DEVICES .*, got 'fsdp'"),
        (["model:2"], "got 'model:2'"),
        (["data:0"], "got 'data:0'"),
        (["data:²"], "got 'data:²'"),
        (["data:2", "data:2"], "--mesh: axis data comes twice"),
    ):
        with pytest.raises(UserError, match=message):
            parse_mesh(words, "--mesh")
    with pytest.raises(UserError, match=r"--mesh: data:1,fsdp:1,tensor:1024 takes 1024 devices, there are \d"):
        make_mesh(MeshShape(tensor=1024), "--mesh")
