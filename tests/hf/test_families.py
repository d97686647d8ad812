"""Every family's layout: loaded whole, written back byte for byte, its head taken off and put on again."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from random_checkpoint import BF16, DENSE, F32, GLM, MOE, NEXT, Variant, config_json, tensors, write, write_variant

from mtp_jax.errors import UserError
from mtp_jax.hf import graft_head, load, load_checkpoint, read_config, save_checkpoint, save_head
from mtp_jax.hf.parameters import flatten, unflatten
from mtp_jax.mtp import MTPModel, init_params

NESTED = "model.language_model."
VARIANTS = {
    "qwen3.5": Variant("a", 1),
    "qwen3.5, two MTP layers": Variant("b", 2, tied=False, mtp_layers=2),
    "qwen3.5-moe": Variant("c", 3, family=MOE, tied=False, prefix=NESTED, vision=True, dtype=BF16),
    "qwen3.5-moe, fused head": Variant("d", 4, family=MOE, tied=False, split_head_experts=False, dtype=BF16, kept=BF16),
    "qwen3.5-moe, two MTP layers": Variant("e", 5, family=MOE, mtp_layers=2),
    "qwen3-next": Variant("f", 6, family=NEXT, tied=False, dtype=BF16),
    "qwen3-next, a value head a key head": Variant("g", 7, family=NEXT, tied=False, value_heads=2),
    "glm-4.5": Variant("h", 8, family=GLM, tied=False, layers=3, dtype=BF16),
    "glm-4.5-air": Variant("i", 9, family=GLM, tied=False, layers=2, qk_norm=False, dense_layers=0),
    "glm-4.6": Variant("j", 10, family=GLM, tied=False, layers=12, copies=False, dense_layers=11, groups=(4, 2)),
    "glm, two MTP layers": Variant("k", 11, family=GLM, tied=False, layers=2, mtp_layers=2, shared_experts=2),
    "glm, tied": Variant("l", 12, family=GLM, layers=2),
}
INDEX = "model.safetensors.index.json"

over_families = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


def is_head(variant, name):
    if variant.family != GLM:
        return name.startswith("mtp.")
    return any(name.startswith(f"model.layers.{variant.layers + n}.") for n in range(variant.mtp_layers))


def is_copy(variant, name):
    return is_head(variant, name) and name.endswith(("embed_tokens.weight", "shared_head.head.weight"))


def split(variant):
    """The tensors of the trunk and those of the head."""
    content = tensors(variant)
    head = {name: value for name, value in content.items() if is_head(variant, name)}
    return {name: value for name, value in content.items() if name not in head}, head


def write_shards(folder, variant):
    """Three files, so that the experts of a layer are not in one."""
    names = list(tensors(variant))
    files = {f"model-{n}.safetensors": names[n::3] for n in range(3)}
    return write(folder, tensors(variant), config_json(variant), files, index=True)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stored(folder):
    """All tensors of a folder."""
    return {
        name: value
        for path in folder.glob("*.safetensors")
        for name, value in safetensors.numpy.load_file(path).items()
    }


def assert_equal_params(a, b):
    a, b = flatten(a), flatten(b)
    assert a.keys() == b.keys()
    for path, leaf in a.items():
        np.testing.assert_array_equal(leaf, b[path], err_msg=path)


@over_families
def test_the_parameters_are_those_of_the_model(tmp_path, variant):
    checkpoint = load_checkpoint(write_shards(tmp_path, variant))
    expected = jax.eval_shape(lambda: init_params(MTPModel(checkpoint.config), jax.random.key(0)))
    assert checkpoint.config.num_mtp_layers == variant.mtp_layers
    assert jax.tree.structure(checkpoint.params) == jax.tree.structure(expected)
    same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), checkpoint.params, expected)
    assert all(jax.tree.leaves(same))


@over_families
@pytest.mark.parametrize("trunk_only", [False, True], ids=["whole", "trunk only"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_load_and_save_give_the_same_bytes(tmp_path, variant, dtype, trunk_only):
    folder = write_shards(tmp_path / "in", variant)
    checkpoint = load_checkpoint(folder, trunk_only, dtype)
    assert ("mtp" in checkpoint.params) != trunk_only
    save_checkpoint(tmp_path / "out", checkpoint.config, checkpoint.params, checkpoint.manifest)
    assert contents(tmp_path / "out") == contents(folder)


@over_families
def test_routers_stay_float32(tmp_path, variant):
    leaves = flatten(load_checkpoint(write_variant(tmp_path, variant), dtype=jnp.bfloat16).params)
    kept = {path.split("/", 2)[-1] for path, leaf in leaves.items() if leaf.dtype == jnp.float32}
    assert ("mlp/gate/kernel" in kept) == (variant.family != DENSE)
    assert ("mlp/gate/bias" in kept) == (variant.family == GLM)
    assert not any("expert" in path or "proj" in path for path in kept)


@pytest.mark.parametrize("name", ["qwen3.5-moe", "qwen3-next", "glm-4.5"])
def test_experts_are_where_they_belong(tmp_path, name):
    variant = VARIANTS[name]
    content = tensors(variant)
    params = load_checkpoint(write_variant(tmp_path, variant)).params
    layer, number = (1, 3), 5  # trunk layer and expert
    at = f"{variant.prefix}layers.{layer[0]}.mlp.experts."
    trunk, head = params["trunk"]["layers_1"]["mlp"]["experts"], params["mtp"]["layers_0"]["mlp"]["experts"]
    if f"{at}gate_up_proj" in content:
        gate, up = np.split(content[f"{at}gate_up_proj"][number], 2)
        down = content[f"{at}down_proj"][number]
    else:
        gate, up, down = (content[f"{at}{number}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    for part, expected in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
        np.testing.assert_array_equal(trunk[part][number], expected.astype(np.float32).T)
        (own,) = [key for key in content if is_head(variant, key) and key.endswith(f"experts.{number}.{part}.weight")]
        np.testing.assert_array_equal(head[part][number], content[own].astype(np.float32).T)


def test_the_parts_of_glm_are_where_they_belong(tmp_path):
    variant = VARIANTS["glm, two MTP layers"]
    content = tensors(variant)
    params = load_checkpoint(write_variant(tmp_path, variant)).params
    for n, suffix in enumerate(("", "_1")):
        at = f"model.layers.{variant.layers + n}."
        head = params["mtp"]
        np.testing.assert_array_equal(head[f"fc{suffix}"]["kernel"], content[f"{at}eh_proj.weight"].T)
        for ours, theirs in (
            ("pre_fc_norm_embedding", "enorm"),
            ("pre_fc_norm_hidden", "hnorm"),
            ("norm", "shared_head.norm"),
        ):
            np.testing.assert_array_equal(head[f"{ours}{suffix}"]["scale"], content[f"{at}{theirs}.weight"])
        mlp = head[f"layers_{n}"]["mlp"]
        np.testing.assert_array_equal(mlp["gate"]["bias"], content[f"{at}mlp.gate.e_score_correction_bias"])
        shared = content[f"{at}mlp.shared_experts.up_proj.weight"]
        np.testing.assert_array_equal(mlp["shared_expert"]["up_proj"]["kernel"], shared.T)
        bias = content[f"{at}self_attn.k_proj.bias"]
        np.testing.assert_array_equal(head[f"layers_{n}"]["self_attn"]["k_proj"]["bias"], bias)


def test_fused_projections_give_the_parameters_of_those_apart(tmp_path):
    """Qwen3.5-MoE keeps apart what Qwen3-Next fuses: row for row, as a loop over the value heads sorts them."""
    fused = replace(VARIANTS["qwen3-next"], key_heads=2, value_heads=6, dtype=F32)
    content = tensors(fused)
    ours = load_checkpoint(write_variant(tmp_path, fused)).params["trunk"]["layers_0"]["linear_attn"]
    keys, values = 16, 24
    rows = content["model.layers.0.linear_attn.in_proj_qkvz.weight"].reshape(2, 2 * keys + 2 * 3 * values, -1)
    beta_and_decay = content["model.layers.0.linear_attn.in_proj_ba.weight"].reshape(2, 6, -1)
    queries, others, read = np.split(ours["in_proj_qkv"]["kernel"].T, [2 * keys, 4 * keys])
    for j in range(6):
        group, i = divmod(j, 3)
        own = rows[group]
        at = 2 * keys + i * values
        np.testing.assert_array_equal(read[j * values : (j + 1) * values], own[at : at + values])
        at += 3 * values
        np.testing.assert_array_equal(
            ours["in_proj_z"]["kernel"].T[j * values : (j + 1) * values], own[at : at + values]
        )
        np.testing.assert_array_equal(queries[group * keys : (group + 1) * keys], own[:keys])
        np.testing.assert_array_equal(others[group * keys : (group + 1) * keys], own[keys : 2 * keys])
        np.testing.assert_array_equal(ours["in_proj_b"]["kernel"].T[j], beta_and_decay[group, i])
        np.testing.assert_array_equal(ours["in_proj_a"]["kernel"].T[j], beta_and_decay[group, 3 + i])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("name", "in_trunk", "in_head"),
    [
        ("qwen3.5-moe", f"{NESTED}layers.1.mlp.experts.gate_up_proj", "mtp.layers.0.mlp.experts.3.down_proj.weight"),
        ("qwen3.5-moe, fused head", "model.layers.1.mlp.experts.gate_up_proj", "mtp.layers.0.mlp.experts.down_proj"),
        ("qwen3-next", "model.layers.1.mlp.experts.2.up_proj.weight", "mtp.layers.0.mlp.experts.3.down_proj.weight"),
        ("glm-4.5", "model.layers.1.mlp.experts.2.up_proj.weight", "model.layers.3.mlp.experts.3.down_proj.weight"),
    ],
)
def test_one_expert_that_was_trained_is_all_that_changes(tmp_path, name, in_trunk, in_head, dtype):
    """Loading float32 as bfloat16 rounds; saving what was not trained must not show it."""
    variant = replace(VARIANTS[name], dtype=F32, kept=F32)
    checkpoint = load_checkpoint(write_shards(tmp_path / "in", variant), dtype=dtype)
    leaves = flatten(checkpoint.params)
    for path, expert in (("trunk/layers_1/mlp/experts/up_proj", 2), ("mtp/layers_0/mlp/experts/down_proj", 3)):
        leaves[path] = leaves[path].at[expert].multiply(3)
    save_checkpoint(tmp_path / "out", checkpoint.config, unflatten(leaves), checkpoint.manifest)
    before, after = tensors(variant), stored(tmp_path / "out")
    changed_rows = {key: int((before[key] != after[key]).any(axis=-1).sum()) for key in before}
    assert {key: rows for key, rows in changed_rows.items() if rows} == {in_trunk: 28, in_head: 40}


def test_one_of_several_fused_projections_that_was_trained_is_all_that_changes(tmp_path):
    variant = VARIANTS["qwen3-next"]
    checkpoint = load_checkpoint(write_variant(tmp_path / "in", variant))
    leaves = flatten(checkpoint.params)
    leaves["trunk/layers_0/linear_attn/in_proj_z/kernel"] *= 3
    save_checkpoint(tmp_path / "out", checkpoint.config, unflatten(leaves), checkpoint.manifest)
    before, after = tensors(variant), stored(tmp_path / "out")
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    assert [key for key in before if before[key].tobytes() != after[key].tobytes()] == [name]
    before, after = (each[name].reshape(2, 2 * 16 + 2 * 48, 40) for each in (before, after))
    np.testing.assert_array_equal(after[:, :-48], before[:, :-48])
    np.testing.assert_array_equal(after[:, -48:], before[:, -48:] * 3)


# The head, taken off and put back


@over_families
@pytest.mark.parametrize("source", ["folder", "file"])
def test_a_head_that_was_lost_comes_back(tmp_path, variant, source):
    trunk, head = split(variant)
    base = write_variant(tmp_path / "base", variant)
    lost = write(tmp_path / "lost", trunk, config_json(variant))
    if source == "file":
        loaded = load_checkpoint(base)
        save_head(tmp_path / "h.safetensors", loaded.config, loaded.params, loaded.manifest)
        apart = safetensors.numpy.load_file(tmp_path / "h.safetensors")
        assert apart.keys() == {name for name in head if not is_copy(variant, name)}
    graft_head(lost, base if source == "folder" else tmp_path / "h.safetensors", tmp_path / "out")
    after = stored(tmp_path / "out")
    assert {name: value.tobytes() for name, value in after.items()} == {
        name: value.tobytes() for name, value in {**trunk, **head}.items()
    }
    assert_equal_params(load_checkpoint(tmp_path / "out").params, load_checkpoint(base).params)
    assert (tmp_path / "out" / "config.json").read_bytes() == (base / "config.json").read_bytes()


@over_families
def test_what_a_trunk_without_a_head_says_of_it(tmp_path, variant):
    """No head declared: it is declared when there is one. Qwen3-Next has no words for that."""
    trunk, _ = split(variant)
    folder = write(tmp_path / "trunk", trunk, config_json(replace(variant, head=False)))
    assert read_config(folder).num_mtp_layers == load_checkpoint(folder).config.num_mtp_layers == 0
    base = write_variant(tmp_path / "base", variant)
    graft_head(folder, base, tmp_path / "out")
    assert load_checkpoint(tmp_path / "out").config == load_checkpoint(base).config
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config_json(variant)


@over_families
def test_a_head_made_for_a_trunk_is_written_beside_it(tmp_path, variant):
    trunk, head = split(variant)
    folder = write(tmp_path / "trunk", trunk, config_json(replace(variant, head=False)))
    whole, alone = load_checkpoint(write_variant(tmp_path / "base", variant)), load_checkpoint(folder)
    save_checkpoint(tmp_path / "out", whole.config, {**alone.params, "mtp": whole.params["mtp"]}, alone.manifest)
    assert_equal_params(load_checkpoint(tmp_path / "out").params, whole.params)
    head = {name: value for name, value in head.items() if not is_copy(variant, name)}
    if variant.split_head_experts:
        written = stored(tmp_path / "out")
        assert {name: value.tobytes() for name, value in written.items()} == {
            name: value.tobytes() for name, value in {**trunk, **head}.items()
        }


def test_grafted_copies_are_those_of_the_trunk(tmp_path):
    variant = VARIANTS["glm-4.5"]
    trunk, _ = split(variant)
    _, other = split(replace(variant, seed=99))
    base = write_variant(tmp_path / "base", replace(variant, seed=99))
    graft_head(write(tmp_path / "lost", trunk, config_json(variant)), base, tmp_path / "out")
    after = stored(tmp_path / "out")
    copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    for name, original in copies.items():
        assert after[f"model.layers.3.{name}"].tobytes() == trunk[original].tobytes()
        assert after[f"model.layers.3.{name}"].tobytes() != other[f"model.layers.3.{name}"].tobytes()
    assert after["model.layers.3.eh_proj.weight"].tobytes() == other["model.layers.3.eh_proj.weight"].tobytes()


def test_what_a_head_file_says_of_copies_adds_nothing_else(tmp_path):
    variant = VARIANTS["glm-4.5"]
    trunk, head = split(variant)
    lost = write(tmp_path / "lost", trunk, config_json(variant))
    head = {name: value for name, value in head.items() if not is_copy(variant, name)}
    metadata = {"copies": "lm_head.weight,../x,model.layers.3.eh_proj.weight,"}
    safetensors.numpy.save_file(head, tmp_path / "other.safetensors", metadata)
    graft_head(lost, tmp_path / "other.safetensors", tmp_path / "fewer")
    assert stored(tmp_path / "fewer").keys() == trunk.keys() | head.keys()


@pytest.mark.parametrize(
    ("trunk", "head", "message"),
    [
        ("glm-4.5", "glm-4.5-air", r"lacks .*model\.layers\.3\.eh_proj"),
        ("glm-4.5", "qwen3-next", r"expected the tensors of a head \(model\.layers\.3\.eh_proj\.weight and others\)"),
        ("qwen3.5", "qwen3.5-moe", r"lacks .*mtp\.layers\.0\.mlp\.gate_proj.*unlike a head.*mtp\.layers\.0\.mlp\.gate"),
    ],
)
def test_a_head_of_another_kind_is_refused(tmp_path, trunk, head, message):
    lost = write(tmp_path / "lost", split(VARIANTS[trunk])[0], config_json(VARIANTS[trunk]))
    with pytest.raises(UserError, match=message):
        graft_head(lost, write_variant(tmp_path / "base", VARIANTS[head]), tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"routed_scaling_factor": 2.5}, "scaling: the trunk's is 1.0, the head was trained with 2.5"),
        ({"norm_topk_prob": False}, "normalise: the trunk's is True, the head was trained with False"),
        ({"num_experts_per_tok": 2}, "experts_per_token: the trunk's is 3, the head was trained with 2"),
        ({"n_group": 4, "topk_group": 2}, "num_groups: the trunk's is 1, the head was trained with 4"),
        ({"mtp_head_reads": "before_norm"}, "head_reads: the trunk's is after_norm, the head was trained with before"),
    ],
)
def test_a_head_that_was_trained_otherwise_is_refused(tmp_path, change, message):
    variant = VARIANTS["glm-4.5"]
    lost = write(tmp_path / "lost", split(variant)[0], config_json(variant))
    base = write(tmp_path / "base", tensors(variant), {**config_json(variant), **change})
    with pytest.raises(UserError, match=message):
        graft_head(lost, base, tmp_path / "out")


# Copies of the vocabulary matrices

WITH_COPIES = ["glm-4.5", "glm, two MTP layers", "glm, tied"]


@pytest.mark.parametrize("name", WITH_COPIES)
@pytest.mark.parametrize("trunk_only", [False, True], ids=["whole", "trunk only"])
def test_copies_follow_what_they_repeat(tmp_path, name, trunk_only):
    variant = VARIANTS[name]
    checkpoint = load_checkpoint(write_shards(tmp_path / "in", variant), trunk_only)
    leaves = flatten(checkpoint.params)
    for path in ("lm_head/kernel", "embed_tokens/embedding"):
        if path in leaves:
            leaves[path] = leaves[path] * 2
    save_checkpoint(tmp_path / "out", checkpoint.config, unflatten(leaves), checkpoint.manifest)
    before, after = tensors(variant), stored(tmp_path / "out")
    doubled = {key for key in before if key.endswith(("embed_tokens.weight", "head.weight"))}
    assert len(doubled) == 2 * (variant.mtp_layers + 1) - variant.tied
    for key, value in before.items():
        np.testing.assert_array_equal(after[key], value * 2 if key in doubled else value, err_msg=key)


@pytest.mark.parametrize("name", WITH_COPIES)
def test_copies_may_be_absent(tmp_path, name):
    variant = VARIANTS[name]
    with_copies = load_checkpoint(write_variant(tmp_path / "with", variant))
    without = load_checkpoint(write_variant(tmp_path / "without", replace(variant, copies=False)))
    assert_equal_params(with_copies.params, without.params)


@pytest.mark.parametrize("trunk_only", [False, True], ids=["whole", "trunk only"])
@pytest.mark.parametrize(
    ("copy", "original"),
    [
        ("model.layers.3.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.layers.3.shared_head.head.weight", "lm_head.weight"),
    ],
)
def test_a_copy_that_is_none_is_named(tmp_path, copy, original, trunk_only):
    variant = VARIANTS["glm-4.5"]
    content = tensors(variant)
    content[copy] = content[copy].copy()
    content[copy][7, 5] *= -1
    folder = write(tmp_path, content, config_json(variant))
    with pytest.raises(
        UserError, match=rf"{copy} in model\.safetensors is not equal to {original} in model\.s"
    ) as error:
        load_checkpoint(folder, trunk_only)
    assert str(error.value).count("not equal") == 1


# Faults


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("qwen3.5-moe", "model.language_model.layers.2.mlp.experts.down_proj"),
        ("qwen3.5-moe", "mtp.layers.0.mlp.experts.4.up_proj.weight"),
        ("qwen3.5-moe, fused head", "mtp.layers.0.mlp.experts.gate_up_proj"),
        ("qwen3-next", "model.layers.3.mlp.experts.0.gate_proj.weight"),
        ("qwen3-next", "model.layers.1.linear_attn.in_proj_ba.weight"),
        ("glm-4.5", "model.layers.2.mlp.experts.7.down_proj.weight"),
        ("glm-4.5", "model.layers.3.mlp.gate.e_score_correction_bias"),
        ("glm-4.5", "model.layers.1.self_attn.v_proj.bias"),
    ],
)
def test_a_lost_tensor_is_the_only_one_named(tmp_path, name, lost):
    content = tensors(VARIANTS[name])
    del content[lost]
    with pytest.raises(UserError) as error:
        load_checkpoint(write(tmp_path, content, config_json(VARIANTS[name])))
    assert str(error.value).startswith(f"{tmp_path}: missing: {lost}")
    assert "weight," not in str(error.value)


@pytest.mark.parametrize(
    ("name", "tensor", "cut", "message"),
    [
        ("glm-4.5", "model.layers.1.mlp.gate.e_score_correction_bias", np.s_[:-1], r"expected \[8\], got \[7\]"),
        ("qwen3.5-moe", "mtp.layers.0.mlp.gate.weight", np.s_[1:], r"expected \[6, 40\], got \[5, 40\]"),
        ("qwen3-next", "model.layers.0.linear_attn.in_proj_ba.weight", np.s_[1:], r"expected \[8, 40\], got \[7, 40\]"),
        (
            "qwen3.5-moe, fused head",
            "mtp.layers.0.mlp.experts.gate_up_proj",
            np.s_[:, 2:],
            r"expected \[6, 56, 40\], got \[6, 54, 40\]",
        ),
    ],
)
def test_a_tensor_of_another_shape_is_named(tmp_path, name, tensor, cut, message):
    content = tensors(VARIANTS[name])
    content[tensor] = content[tensor][cut]
    with pytest.raises(UserError, match=rf"{tensor} in model\.safetensors \({message}"):
        load_checkpoint(write(tmp_path, content, config_json(VARIANTS[name])))


@over_families
def test_a_head_that_is_declared_but_lost_is_named(tmp_path, variant):
    trunk, head = split(variant)
    folder = write(tmp_path, trunk, config_json(variant))
    if variant.family == NEXT:
        assert load_checkpoint(folder).config.num_mtp_layers == 0
        return
    with pytest.raises(UserError, match=r"graft_head\.py puts back.*--trunk-only") as error:
        load_checkpoint(folder)
    first = next(name for name in head if not is_copy(variant, name) and ".experts." not in name)
    assert first in str(error.value)
    assert load_checkpoint(folder, trunk_only=True).config.num_mtp_layers == 0


@pytest.mark.parametrize("name", ["qwen3.5-moe", "glm-4.5"])
def test_a_head_that_is_not_declared_is_unexpected(tmp_path, name):
    variant = VARIANTS[name]
    folder = write(tmp_path, tensors(variant), config_json(replace(variant, head=False)))
    key = "num_nextn_predict_layers" if variant.family == GLM else "mtp_num_hidden_layers"
    with pytest.raises(UserError, match=rf"unexpected: .*declares no MTP head: {key} is 0 or absent"):
        load_checkpoint(folder)


def test_many_faults_are_counted_not_listed(tmp_path):
    content = {name: value for name, value in tensors(VARIANTS["qwen3-next"]).items() if ".experts." not in name}
    with pytest.raises(UserError, match=r"missing: model\.layers\.0\.mlp\.experts\.0\.gate_proj\.weight.* and 30 more"):
        load_checkpoint(write(tmp_path, content, config_json(VARIANTS["qwen3-next"])))


def test_a_file_that_is_there_twice_is_told_in_bounds(tmp_path):
    folder = write_variant(tmp_path, VARIANTS["qwen3-next"])
    (folder / "copy.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match=r"written twice: model\.embed_tokens\.weight, in copy.* and \d+ more faults$"):
        load_checkpoint(folder)


def test_a_number_of_a_layer_that_no_model_has_does_not_fill_the_memory(tmp_path):
    content = tensors(VARIANTS["qwen3-next"])
    content["mtp.layers.999999999.input_layernorm.weight"] = np.zeros(40, np.float32)
    with pytest.raises(UserError, match=r"missing: mtp\.layers\.1\.input.*unexpected: mtp\.layers\.999999999\.input"):
        load_checkpoint(write(tmp_path, content, config_json(VARIANTS["qwen3-next"])))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3.5", {"layer_types": ["full_attention"] * 4096, "num_hidden_layers": 4096}, "4096 layers, so for more"),
        ("glm-4.5", {"n_routed_experts": 4096}, "3 layers with 4096 experts each, so for more than 8195 tensors; the"),
    ],
)
def test_a_far_larger_model_than_the_files_hold_is_refused_at_once(tmp_path, monkeypatch, name, changes, message):
    folder = write(tmp_path, tensors(VARIANTS[name]), config_json(VARIANTS[name]) | changes)
    monkeypatch.setattr("mtp_jax.hf.load.slots", None)  # what takes minutes
    with pytest.raises(UserError, match=rf"config\.json asks for {message}.* files hold \d+$"):
        load_checkpoint(folder)


def test_experts_may_be_fused_in_every_layer_or_in_none(tmp_path):
    variant = VARIANTS["qwen3-next"]
    content = tensors(variant)
    at = "model.layers.2.mlp.experts."
    split_names = [name for name in content if name.startswith(at)]
    gate, up, down = (
        np.stack([content[f"{at}{n}.{part}_proj.weight"] for n in range(6)]) for part in ("gate", "up", "down")
    )
    for name in split_names:
        del content[name]
    content |= {f"{at}gate_up_proj": np.concatenate([gate, up], axis=1), f"{at}down_proj": down}
    with pytest.raises(UserError, match=r"missing: .*layers\.0\.mlp\.experts\.gate_up_proj.*unexpected: .*experts\.0"):
        load_checkpoint(write(tmp_path, content, config_json(variant)))


@over_families
def test_large_tensors_are_read_some_rows_at_a_time(variant, tmp_path, monkeypatch):
    """Here any tensor over 64 bytes is large, so that there are more runs than tensors, and not all are as long."""
    folder = write_shards(tmp_path, variant)
    whole, runs, write_part = load_checkpoint(folder), [], load.write
    for number, row_limit in (load._RUN_BYTES, 128), (64, 1), (200, 3):
        monkeypatch.setattr(load, "_RUN_BYTES", number)
        monkeypatch.setattr(load, "ROWS_AT_ONCE", row_limit)
        monkeypatch.setattr(load, "write", lambda *args: runs[-1].append(write_part(*args)))
        runs.append([])
        assert_equal_params(load_checkpoint(folder).params, whole.params)
    assert len(runs[0]) < len(runs[2]) < len(runs[1])
