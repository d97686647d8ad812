"""Runs that start from a published checkpoint: what they begin with, on what they continue, what comes out."""

import json
import re
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published_base import (
    SETTINGS,
    SHARDS,
    STILL,
    files_of,
    of_every_family,
    of_every_family_slowly,
    stored,
    write_base,
)
from random_checkpoint import F32, GLM, Variant, write_variant
from small_run import read_rows

from configs import PRESETS
from mtp_jax.config import LayerType
from mtp_jax.errors import UserError
from mtp_jax.hf import load_checkpoint, read_manifest, save_checkpoint, save_head
from mtp_jax.hf.parameters import flatten
from mtp_jax.layers.norm import RMSNorm
from train.checkpoint import load_for_export
from train.experiment import MODEL_SETTINGS, Experiment
from train.loop import train
from train.progress import Progress
from train.start import fresh_head, last_full_attention, read_start

pytestmark = pytest.mark.usefixtures("compilation_cache")
QUIET = Progress(quiet=True)


class Told(Progress):
    """Keeps the log's lines."""

    def __init__(self):
        super().__init__(quiet=True)
        self.lines = []

    def say(self, text):
        self.lines.append(text)


@pytest.fixture(scope="module")
def headless(variant, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        return write_base(tmp_path_factory.mktemp("bases") / "headless", patch, replace(variant, head=False))


@pytest.fixture(scope="module")
def experiment(text_folder, base, variant):
    settings = (*SETTINGS, f"depths={variant.mtp_layers}")
    return replace(PRESETS["finetune"](), data=(str(text_folder),), init=str(base)).override(settings)


@pytest.fixture(scope="module")
def finished(experiment, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    train(experiment, workdir, QUIET)
    return workdir


def export(workdir, out, **options):
    config, params, tokenizer, manifest, _ = load_for_export(workdir, **options)
    save_checkpoint(out, config, params, manifest, tokenizer)
    return out


@of_every_family_slowly
@pytest.mark.parametrize("mode", ["joint", "detached"])
def test_a_run_that_learns_nothing_gives_back_every_byte(experiment, base, tmp_path, mode):
    train(experiment.override([*STILL, f"gradient_mode={mode}"]), tmp_path / "run", QUIET)
    assert files_of(export(tmp_path / "run", tmp_path / "out")) == files_of(base)


@of_every_family
def test_what_was_learnt_is_in_the_files_it_came_from(finished, base, variant, tmp_path):
    out = export(finished, tmp_path / "out")
    before, after = stored(base), stored(out)
    assert [(n, v[:2]) for n, v in after.items()] == [(n, v[:2]) for n, v in before.items()]
    unchanged = {name for name in before if before[name][2] == after[name][2]}
    # Joint steps reach every tensor of the model but the biases that a router chooses by, and experts it never chose.
    idle = {name for name in unchanged if re.search(r"mlp\.experts\.\d", name)}
    assert len(idle) <= sum("mlp.experts" in name for name in before) / 2
    assert unchanged - idle == {name for name in before if "visual" in name or name.endswith("e_score_correction_bias")}
    for name, original in read_manifest(base).copies.items():
        assert after[name] == after[original]
    same = {name for name, content in files_of(base).items() if files_of(out)[name] == content}
    assert same == files_of(base).keys() - set(SHARDS)
    learnt = flatten(load_for_export(finished).params)
    for path, leaf in flatten(load_checkpoint(out).params).items():
        own_type = path.endswith(("A_log", "linear_attn/norm/scale")) and variant.kept == F32
        kept = own_type or path.endswith("gate/bias")
        rounded = np.asarray(learnt[path]) if kept else np.asarray(learnt[path].astype("bfloat16"), np.float32)
        np.testing.assert_array_equal(leaf, rounded, err_msg=path)


def test_the_folder_says_what_the_base_was(finished, base):
    record = json.loads((finished / "base.json").read_text())
    assert record["folder"] == str(base.absolute())
    assert len(record["fingerprint"]) == 64
    assert json.loads((finished / "config.json").read_text())["init"] == str(base.absolute())


def test_a_run_goes_on_where_its_base_has_moved_but_on_no_other(experiment, finished, base, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    moved = shutil.copytree(base, tmp_path / "moved")
    more = replace(experiment, steps=3, init=str(moved))

    shard = moved / SHARDS[0]
    content = bytearray(shard.read_bytes())
    for place in range(len(content) // 2, len(content), 2):  # the same header, values a little off
        content[place] ^= 1
    original = shard.read_bytes()
    shard.write_bytes(content)
    with pytest.raises(UserError, match=r"not the checkpoint that the run started from, or has changed"):
        train(more, tmp_path / "run", QUIET)
    shard.write_bytes(original)
    config = (moved / "config.json").read_text()
    (moved / "config.json").write_text(config + " ")
    with pytest.raises(UserError, match=r"not the checkpoint that the run started from"):
        train(more, tmp_path / "run", QUIET)
    (moved / "config.json").write_text(config)

    train(more, tmp_path / "run", QUIET)
    assert read_rows(tmp_path / "run")[:2] == read_rows(finished)
    assert json.loads((tmp_path / "run" / "base.json").read_text())["folder"] == str(moved)
    with pytest.raises(UserError, match=r"init is .* there and  here"):
        train(replace(more, init=""), tmp_path / "run", QUIET)


def test_export_needs_the_base_and_says_so(finished, base, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    gone = str(tmp_path / "gone")
    (tmp_path / "run" / "config.json").write_text(json.dumps(settings | {"init": gone}))
    with pytest.raises(UserError, match=rf"{gone}: expected the checkpoint that the run.*--base DIR"):
        load_for_export(tmp_path / "run")
    manifest = load_for_export(tmp_path / "run", base=base).manifest
    assert manifest is not None
    assert manifest.folder == base
    other = shutil.copytree(base, tmp_path / "other")
    (other / "config.json").write_text((base / "config.json").read_text() + " ")
    with pytest.raises(UserError, match="not the checkpoint that the run started from"):
        load_for_export(tmp_path / "run", base=other)


@of_every_family_slowly
def test_the_head_alone_is_what_the_export_holds(finished, variant, tmp_path):
    out = export(finished, tmp_path / "out")
    config, params, _, manifest, _ = load_for_export(finished)
    assert manifest is not None
    save_head(tmp_path / "head.safetensors", config, params, manifest)
    (tmp_path / "alone").mkdir()
    (tmp_path / "head.safetensors").rename(tmp_path / "alone" / "head.safetensors")
    head = stored(tmp_path / "alone")
    is_head, copies = re.compile(variant.head_pattern), manifest.copies
    assert head == {n: value for n, value in stored(out).items() if is_head.match(n) and n not in copies}
    assert len(head) >= 15


@of_every_family_slowly
def test_a_fresh_head_starts_with_the_last_layer_of_its_kind(headless, variant, experiment, tmp_path):
    fresh = replace(experiment, init=str(headless), new_head=True)
    told, last = Told(), variant.layers - 1
    train(fresh.override(STILL), tmp_path / "run", told)
    assert f"head: there is none; a fresh one starts with the weights of the trunk's layer {last}" in told.lines
    out = export(tmp_path / "run", tmp_path / "out")
    before, after = stored(headless), stored(out)
    assert {name: after[name] for name in before} == before
    head = {name: after[name] for name in after.keys() - before.keys()}
    one_layer = replace(variant, mtp_layers=1, copies=False, split_head_experts=True)
    assert head.keys() == {name for name in stored(write_back(tmp_path, one_layer)) if name not in before}
    own, norm = (f"model.layers.{variant.layers}.", "shared_head.norm") if variant.family == GLM else ("mtp.", "norm")
    block = own if variant.family == GLM else "mtp.layers.0."
    for name, value in head.items():
        source = name.replace(block, f"{variant.prefix}layers.{last}.")
        assert source not in before or value == before[source], name
    assert sum(name.startswith(f"{variant.prefix}layers.{last}.") for name in before) <= len(head) - 4
    assert head[f"{own}{norm}.weight"] == before[f"{variant.prefix}norm.weight"]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == after.keys()
    same = {name for name, content in files_of(headless).items() if files_of(out)[name] == content}
    # One layer is what config.json should now say, where it says it at all and said something else.
    said_more = {"config.json"} if variant.mtp_layers > 1 else set()
    assert files_of(headless).keys() - same == {"model.safetensors.index.json"} | said_more
    assert load_checkpoint(out).config.num_mtp_layers == 1


def write_back(tmp_path, variant):
    with pytest.MonkeyPatch.context() as patch:
        return write_base(tmp_path / "again", patch, variant)


@of_every_family
def test_a_fresh_head_is_one_layer_more_on_the_hidden_state(headless):
    trunk = load_checkpoint(headless, trunk_only=True)
    params = fresh_head(trunk.params, trunk.config)
    random = np.random.default_rng(0)
    embedded, hidden = random.standard_normal((2, 7, trunk.config.width))
    fused = np.concatenate([embedded, hidden], axis=1) @ np.asarray(params["fc"]["kernel"], np.float64)
    np.testing.assert_array_equal(fused, hidden)
    zero_centred = trunk.config.zero_centred_norms
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        ones = jnp.ones((1, trunk.config.width))
        normed = jnp.asarray(RMSNorm(1e-6, zero_centred).apply({"params": params[name]}, ones))
        np.testing.assert_allclose(normed, ones, rtol=1e-5)
    own, copied = trunk.params["trunk"][f"layers_{trunk.config.num_layers - 1}"], params["layers_0"]
    jax.tree.map(np.testing.assert_array_equal, own, copied)
    buffers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((own, copied, trunk.params["trunk"]["norm"]))}
    assert len(buffers) == len(jax.tree.leaves((own, copied, trunk.params["trunk"]["norm"])))


def test_a_fresh_head_of_a_model_with_experts_and_plain_norms(tmp_path):
    variant = Variant("glm", 1, family=GLM, tied=False, layers=3, copies=False)
    whole = load_checkpoint(write_variant(tmp_path, variant))
    fresh = fresh_head(whole.params, whole.config)
    same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), fresh, whole.params["mtp"])
    assert all(jax.tree.leaves(same))
    assert all(np.all(np.asarray(fresh[f"pre_fc_norm_{name}"]["scale"]) == 1) for name in ("embedding", "hidden"))
    with pytest.raises(UserError, match="no such layer"):
        last_full_attention(replace(whole.config, num_dense_layers=3))


@of_every_family
@pytest.mark.parametrize("declared", [True, False], ids=["declared", "undeclared"])
def test_a_lost_head_is_an_error_that_says_what_to_do(tmp_path, monkeypatch, variant, declared):
    folder = write_base(tmp_path / "base", monkeypatch, replace(variant, head=False), declared=declared)
    with pytest.raises(UserError, match=r"has no MTP head.*graft_head\.py.*--new-head"):
        read_start(Experiment(init=str(folder)))
    start = read_start(Experiment(init=str(folder), new_head=True))
    assert start.config.num_mtp_layers == 1


@of_every_family
def test_a_head_that_is_there_is_not_thrown_away(base):
    with pytest.raises(UserError, match=r"--new-head: .* has a head \(.*\).*without the flag that one is trained"):
        read_start(Experiment(init=str(base), new_head=True))


def test_a_trunk_without_full_attention_has_nothing_to_start_a_head_from(base):
    config = replace(load_checkpoint(base).config, layer_types=(LayerType.LINEAR,) * 4)
    with pytest.raises(UserError, match="no such layer"):
        last_full_attention(config)


def test_a_base_without_a_tokenizer_that_fits_is_refused(tmp_path, monkeypatch, base):
    folder = write_base(tmp_path / "base", monkeypatch, tokenizer=False)
    with pytest.raises(UserError, match=r"expected a tokenizer\.json"):
        read_start(Experiment(init=str(folder)))
    content = json.loads((base / "tokenizer.json").read_text())
    last, next_id = content["added_tokens"][-1], content["added_tokens"][-1]["id"] + 1
    content["added_tokens"] += [last | {"id": n, "content": f"<|new {n}|>"} for n in range(next_id, 321)]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"tokenizer has 321 ids, more than config\.json's vocab_size 320"):
        read_start(Experiment(init=str(folder)))


def test_end_ids_that_are_none_are_refused_before_anything_is_written(tmp_path, monkeypatch, experiment):
    folder = write_base(tmp_path / "base", monkeypatch)
    (folder / "generation_config.json").write_text('{"eos_token_id": "<|im_end|>"}')
    with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id: expected an id"):
        train(replace(experiment, init=str(folder)), tmp_path / "run", QUIET)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("folder", ["absent", "file"])
def test_a_base_that_is_no_folder_is_named(tmp_path, folder):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=rf"{folder}: expected a checkpoint folder"):
        read_start(Experiment(init=str(tmp_path / folder)))


@pytest.mark.parametrize("name", MODEL_SETTINGS)
def test_the_models_shape_is_no_setting_beside_a_base(name):
    default = getattr(Experiment(), name)
    with pytest.raises(UserError, match=rf"setting {name}: expected no value beside init"):
        Experiment(init="base").override([f"{name}={default}"])
    other = (not default) if isinstance(default, bool) else default * 2
    with pytest.raises(UserError, match=rf"setting {name}: expected no value beside init"):
        replace(Experiment(init="base"), **{name: other})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["new_head=true"], "new_head: expected a checkpoint"),
        (["lora_rank=4"], "lora_rank: expected 0 without"),
        (["init=x", "lora_rank=-1"], "lora_rank: expected at least 0"),
        (["init=x", "lora_alpha=0"], "lora_alpha: expected more than 0"),
        (["init=x", "lora_targets="], "lora_targets: expected some of"),
        (["init=x", "lora_targets=q_proj,lm_head"], "lora_targets: expected some of"),
        (["init=x", "lora_targets=trunk.fc"], "fc is the head's"),
        (["init=x", "lora_rank=4", "gradient_mode=head_only", "lora_targets=trunk.q_proj"], "nothing in the trunk"),
        (["init=x", "new_head=true", "lora_rank=4"], "lora_rank: expected 0 with new_head"),
    ],
)
def test_settings_of_a_start_that_make_no_sense(settings, message):
    with pytest.raises(UserError, match=message):
        Experiment().override(settings)
