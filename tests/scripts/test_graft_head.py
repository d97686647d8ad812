"""graft_head.py: a trunk that lost its head gets it back, and nothing else changes."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy
from random_checkpoint import BF16, F16, Variant, config_json, file_bytes, tensors, write

from mtp_jax.hf import load_checkpoint, save_head
from mtp_jax.hf.parameters import flatten

WHOLE = Variant("whole", 5, tied=False, dtype=BF16)
MULTIMODAL = replace(WHOLE, prefix="model.language_model.", vision=True)
INDEX = "model.safetensors.index.json"
SHARDED = "sharded"


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def split(content):
    names = [name for name in content if not name.startswith("mtp.")]
    head = {name: content[name] for name in content if name.startswith("mtp.")}
    return {name: content[name] for name in names}, head


def write_trunk(folder, variant, layout=SHARDED, declared=True):
    """A checkpoint whose head another tool has lost: shards of it are left as they were cut."""
    trunk, _ = split(tensors(variant))
    names = list(trunk)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    config = config_json(replace(variant, head=declared))
    write(folder, trunk, config, files if layout == SHARDED else None, index=layout == SHARDED)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "x"}  ')
    return folder


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "undeclared"])
@pytest.mark.parametrize("layout", [SHARDED, "single"])
@pytest.mark.parametrize("variant", [WHOLE, MULTIMODAL], ids=["text", "multimodal"])
def test_the_head_is_back_and_every_other_byte_is_as_it_was(call, tmp_path, variant, layout, declared):
    trunk = write_trunk(tmp_path / "trunk", variant, layout, declared)
    # The base model may be named by the other convention, and its trunk is another one.
    other = WHOLE if variant is MULTIMODAL else MULTIMODAL
    base = write(tmp_path / "base", tensors(replace(other, seed=6)), config_json(other))
    before = contents(trunk)
    status, stdout, stderr = call("graft_head", "--trunk", trunk, "--head", base, "--out", tmp_path / "out")
    assert (status, stdout) == (0, ""), stderr
    assert "15 tensors of a head" in stderr
    after = contents(tmp_path / "out")
    assert contents(trunk) == before
    if layout == "single":  # under its old name it would hide the other file from `transformers`
        before["model-00001-of-00002.safetensors"] = before.pop("model.safetensors")
    changed = {"mtp.safetensors", INDEX} | (set() if declared else {"config.json"})
    assert {name for name in after if after[name] != before.get(name)} == changed
    assert before.keys() <= after.keys()

    head = safetensors.numpy.load_file(tmp_path / "out" / "mtp.safetensors")
    assert {name: value.tobytes() for name, value in head.items()} == {
        name: value.tobytes() for name, value in split(tensors(replace(other, seed=6)))[1].items()
    }
    index = json.loads(after[INDEX])
    every = {**split(tensors(variant))[0], **head}
    assert index["weight_map"].keys() == every.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in every.values())
    loaded = load_checkpoint(tmp_path / "out")
    assert loaded.config == load_checkpoint(base).config
    np.testing.assert_array_equal(loaded.params["mtp"]["fc"]["kernel"], head["mtp.fc.weight"].astype(np.float32).T)


def test_weights_are_links_where_there_are_links(call, tmp_path):
    trunk = write_trunk(tmp_path / "trunk", WHOLE)
    base = write(tmp_path / "base", tensors(WHOLE), config_json(WHOLE))
    call("graft_head", "--trunk", trunk, "--head", base, "--out", tmp_path / "out")
    shard = "model-00001-of-00002.safetensors"
    assert os.path.samefile(trunk / shard, tmp_path / "out" / shard)
    assert not os.path.samefile(trunk / "config.json", tmp_path / "out" / "config.json")


def test_where_links_fail_weights_are_copied(call, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no links here")

    trunk = write_trunk(tmp_path / "trunk", WHOLE)
    base = write(tmp_path / "base", tensors(WHOLE), config_json(WHOLE))
    monkeypatch.setattr(os, "link", refuse)
    assert call("graft_head", "--trunk", trunk, "--head", base, "--out", tmp_path / "out")[0] == 0
    assert load_checkpoint(tmp_path / "out").config.num_mtp_layers == 1


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model."])
def test_a_head_comes_from_a_file_too_whatever_stands_before_its_names(call, tmp_path, prefix):
    trunk = write_trunk(tmp_path / "trunk", WHOLE)
    head = {prefix + name: value for name, value in split(tensors(WHOLE))[1].items()}
    (tmp_path / "h.safetensors").write_bytes(file_bytes({**head, "model.norm.weight": np.zeros(3, BF16)}))
    flags = ["--trunk", trunk, "--head", tmp_path / "h.safetensors", "--out", tmp_path / "out"]
    assert call("graft_head", *flags)[0] == 0
    whole = flatten(load_checkpoint(write(tmp_path / "base", tensors(WHOLE), config_json(WHOLE))).params)
    for path, leaf in flatten(load_checkpoint(tmp_path / "out").params).items():
        np.testing.assert_array_equal(leaf, whole[path], err_msg=path)


def drop(name):
    return lambda head, config: head.pop(name)


def put(name, value):
    return lambda head, config: head.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("mtp.norm.weight"), "lacks mtp.norm.weight"),
        (put("mtp.extra.weight", np.zeros(2, BF16)), "unlike a head of this trunk: mtp.extra.weight"),
        (put("mtp.fc.weight", np.zeros((40, 82), BF16)), "mtp.fc.weight: the trunk's config.json asks for [40, 80]"),
        (
            put("mtp.norm.weight", np.zeros(40, F16)),
            "mtp.norm.weight: expected a type of the trunk (BF16, F32), got F16",
        ),
        (put("model.mtp.norm.weight", np.zeros(40, BF16)), "written twice: mtp.norm.weight"),
        (
            lambda head, config: config["rope_parameters"].update(rope_theta=1e4),
            "rope_theta: the trunk's is 10000000.0",
        ),
        (lambda head, config: config.update(rms_norm_eps=1e-5), "rms_norm_eps: the trunk's is 1e-06"),
        (
            lambda head, config: head.clear(),
            "expected the tensors of a head (mtp.fc.weight and others), found none among",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused(call, tmp_path, change, message):
    trunk = write_trunk(tmp_path / "trunk", WHOLE)
    rest, head = split(tensors(WHOLE))
    config = config_json(WHOLE)
    change(head, config)
    base = write(tmp_path / "base", {**rest, **head}, config)
    status, _, stderr = call("graft_head", "--trunk", trunk, "--head", base, "--out", tmp_path / "out")
    assert status == 2
    assert message in stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "trunk"]


def test_a_file_with_a_head_says_what_shapes_do_not(call, tmp_path):
    trunk = write_trunk(tmp_path / "trunk", WHOLE)
    config = config_json(WHOLE)
    config["rope_parameters"]["rope_theta"] = 1e4
    base = load_checkpoint(write(tmp_path / "base", tensors(WHOLE), config))
    save_head(tmp_path / "h.safetensors", base.config, base.params, base.manifest)
    flags = ["--trunk", trunk, "--head", tmp_path / "h.safetensors", "--out", tmp_path / "out"]
    status, _, stderr = call("graft_head", *flags)
    assert status == 2
    assert "rope_theta: the trunk's is 10000000.0, the head was trained with 10000.0" in stderr


def test_a_trunk_that_has_a_head_is_refused(call, tmp_path):
    whole = write(tmp_path / "whole", tensors(WHOLE), config_json(WHOLE))
    status, _, stderr = call("graft_head", "--trunk", whole, "--head", whole, "--out", tmp_path / "out")
    assert status == 2
    assert "expected a trunk without a head, found mtp.fc.weight" in stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_with_files_is_never_written_into(call, tmp_path):
    trunk = write_trunk(tmp_path / "trunk", WHOLE)
    base = write(tmp_path / "base", tensors(WHOLE), config_json(WHOLE))
    before = contents(base)
    status, _, stderr = call("graft_head", "--trunk", trunk, "--head", base, "--out", base)
    assert status == 2
    assert "expected a new or an empty folder" in stderr
    assert contents(base) == before


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/x.safetensors"])
def test_an_index_may_not_lead_out_of_its_folder(call, tmp_path, name):
    (tmp_path / "secret.safetensors").write_bytes(file_bytes(split(tensors(WHOLE))[1]))
    trunk = write_trunk(tmp_path / "trunk", WHOLE)
    base = write_trunk(tmp_path / "base", WHOLE)
    for folder in (trunk, base):
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"]["mtp.fc.weight"] = name
        original = (folder / INDEX).read_bytes()
        (folder / INDEX).write_text(json.dumps(index))
        status, _, stderr = call("graft_head", "--trunk", trunk, "--head", base, "--out", tmp_path / "out")
        assert status == 2
        assert "expected the name of a file inside the folder" in stderr
        (folder / INDEX).write_bytes(original)


@pytest.mark.parametrize(("head", "message"), [("absent", "expected a checkpoint folder or"), ("x.bin", "x.bin")])
def test_a_head_that_is_not_there_is_named(call, tmp_path, head, message):
    trunk = write_trunk(tmp_path / "trunk", WHOLE)
    (tmp_path / "x.bin").write_bytes(b"x")
    status, _, stderr = call("graft_head", "--trunk", trunk, "--head", tmp_path / head, "--out", tmp_path / "out")
    assert status == 2
    assert message in stderr
