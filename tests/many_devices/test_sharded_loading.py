"""A checkpoint is read onto a mesh part by part: the same parameters, and no model in the host's memory beside them."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bent_model import CONFIG
from meshes import mesh
from random_checkpoint import BF16, GLM, MOE, NEXT, Variant, config_json, tensors, write

from mtp_jax.config import AttentionConfig, LayerType
from mtp_jax.errors import UserError
from mtp_jax.hf import load_checkpoint, read_manifest, read_params, save_checkpoint
from mtp_jax.hf.parameters import parameter_shapes, unflatten
from mtp_jax.sharding import parameter_shardings

VARIANTS = {
    "qwen3.5": Variant("a", 1, prefix="model.language_model.", vision=True, tied=False),
    "qwen3.5-moe": Variant("b", 2, family=MOE, dtype=BF16),
    "qwen3-next": Variant("c", 3, family=NEXT, tied=False, dtype=BF16),
    "glm-4.5": Variant("d", 4, family=GLM, tied=False, layers=3, dtype=BF16),
}


def write_shards(folder, variant):
    """Three files, so that the experts of a layer are not in one."""
    names = list(tensors(variant))
    write(
        folder,
        tensors(variant),
        config_json(variant),
        {f"model-{n}.safetensors": names[n::3] for n in range(3)},
        index=True,
    )
    return folder


@pytest.mark.parametrize("devices", ["data:2,fsdp:2,tensor:2", "fsdp:4,tensor:2"])
@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_are_those_of_one_device(name, devices, tmp_path):
    folder = write_shards(tmp_path / "checkpoint", VARIANTS[name])
    alone = load_checkpoint(folder, dtype=jnp.bfloat16)
    spread = load_checkpoint(folder, dtype=jnp.bfloat16, mesh=mesh(devices)).params
    assert jax.tree.map(lambda x: x.sharding, spread) == parameter_shardings(alone.params, alone.config, mesh(devices))
    assert jax.tree.map(lambda x: x.dtype, spread) == jax.tree.map(lambda x: x.dtype, alone.params)
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((spread, alone.params)))
    assert len({x.sharding.spec for x in jax.tree.leaves(spread)}) > 3


def test_a_file_cut_after_its_header_was_read(tmp_path):
    folder = write_shards(tmp_path / "checkpoint", VARIANTS["qwen3.5"])
    manifest = read_manifest(folder)
    path = folder / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"model-1\.safetensors: truncated inside "):
        read_params(manifest, jnp.float32, mesh("fsdp:8"))


@pytest.mark.slow
def test_little_is_held_beside_the_parameters(tmp_path):
    attention = AttentionConfig(num_heads=8, num_kv_heads=4, head_dim=64, rotary_dim=16, rope_theta=1e4)
    config = replace(
        CONFIG, vocab_size=32_768, width=512, mlp_width=2_048, layer_types=(LayerType.FULL,) * 4, attention=attention
    )
    rng = np.random.default_rng(0)
    leaves = {path: rng.random(shape, dtype=np.float32) for path, shape in parameter_shapes(config).items()}
    save_checkpoint(tmp_path / "checkpoint", config, unflatten(leaves))
    script = Path(__file__).with_name("load_peak.py")
    command = [sys.executable, str(script), str(tmp_path / "checkpoint")]
    for devices in ("fsdp:8", "fsdp:2,tensor:4"):
        done = subprocess.run([*command, devices], check=True, capture_output=True, text=True)
        found = json.loads(done.stdout)
        assert found["parameters"] > 200
        # Less than the largest parameter, which would take 64: a part of it, and pages of the file.
        assert found["peak"] - found["parameters"] < 48, found
