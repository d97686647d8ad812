"""Saving: the same files come back, byte for byte, wherever nothing was trained; or nothing at all is left behind."""

import json
import os
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from random_checkpoint import BF16, F16, F32, Variant, config_json, tensors, write, write_variant

from mtp_jax.errors import UserError
from mtp_jax.hf import config_from_json, load_checkpoint, save_checkpoint
from mtp_jax.hf.parameters import flatten, parameter_shapes, unflatten
from mtp_jax.text import Tokenizer, end_ids, train_bpe

TIED = Variant("tied", 1)
UNTIED = Variant("untied", 2, tied=False)
INDEX = "model.safetensors.index.json"


def files_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_same_files(a, b):
    a, b = files_of(a), files_of(b)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name] == b[name], name


def save_again(folder, out, **options):
    checkpoint = load_checkpoint(folder, **options)
    save_checkpoint(out, checkpoint.config, checkpoint.params, checkpoint.manifest)
    return out


def split(names, layout):
    """Where each tensor goes, in orders that no sorting would give."""
    head = [name for name in names if name.startswith("mtp.")]
    trunk = [name for name in names if not name.startswith("mtp.")]
    if layout == "single":
        return {"model.safetensors": names[::-1]}
    if layout == "head apart":
        return {"model-00001-of-00001.safetensors": trunk, "mtp.safetensors": head}
    return {
        "model-00002-of-00003.safetensors": names[::3],
        "b.safetensors": names[1::3],
        "sub/c.safetensors": names[2::3],
    }


@pytest.mark.parametrize("layout", ["single", "sharded", "head apart"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("prefix", ["model.", "model.language_model."], ids=["text", "multimodal"])
@pytest.mark.parametrize("stored", ["BF16", "F32", "F16", "mixed"])
def test_load_and_save_give_the_same_bytes(tmp_path, layout, tied, prefix, stored):
    types = {"BF16": BF16, "F32": F32, "F16": F16, "mixed": BF16}
    vision = prefix != "model."
    variant = Variant("x", 3, tied=tied, prefix=prefix, dtype=types[stored], vision=vision)
    content = tensors(variant)
    if stored == "mixed":
        for number, name in enumerate(content):
            content[name] = content[name].astype([BF16, F32, F16][number % 3])
    if vision:
        content["model.visual.position_ids"] = np.arange(7)
    folder = write(tmp_path / "in", content, config_json(variant), split(list(content), layout), layout != "single")
    assert_same_files(folder, save_again(folder, tmp_path / "out"))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_type_of_the_parameters_does_not_show_in_the_files(tmp_path, dtype):
    folder = write_variant(tmp_path / "in", UNTIED)  # float32: loading it as bfloat16 rounds
    assert_same_files(folder, save_again(folder, tmp_path / "out", dtype=dtype))


def test_nan_and_negative_zero_keep_their_bits(tmp_path):
    content = tensors(replace(TIED, dtype=BF16))
    odd = content["model.layers.0.mlp.up_proj.weight"].view(np.uint16)
    odd[0, :6] = [0x7FC1, 0xFFC2, 0x7F81, 0x8000, 0x7F80, 0xFF80]
    folder = write(tmp_path / "in", content, config_json(TIED))
    assert_same_files(folder, save_again(folder, tmp_path / "out"))


def test_the_trunk_alone_takes_the_head_along(tmp_path):
    folder = write_variant(tmp_path / "in", UNTIED)
    assert_same_files(folder, save_again(folder, tmp_path / "out", trunk_only=True))


def test_side_files_go_along_and_weights_of_other_kinds_do_not(tmp_path):
    folder = write_variant(tmp_path / "in", TIED)
    train_bpe([], 289).save(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1]}  ')
    (folder / "preprocessor_config.json").write_bytes(b"\xff odd bytes \0")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    assert_same_files(folder, save_again(folder, tmp_path / "out"))
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "a.pkl", "x.gguf", ".hidden"):
        (folder / name).write_bytes(b"x")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("x")
    assert files_of(save_again(folder, tmp_path / "again")) == files_of(tmp_path / "out")


def test_a_side_file_may_not_be_a_link_out_of_the_folder(tmp_path):
    folder = write_variant(tmp_path / "in", TIED)
    (tmp_path / "secret").write_text("x")
    (folder / "notes.txt").symlink_to("../secret")
    with pytest.raises(UserError, match=r"notes\.txt: leads out of the folder"):
        save_again(folder, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "secret"]


@pytest.mark.parametrize("stored", [BF16, F16, F32])
def test_changed_parameters_are_rounded_to_the_stored_type(tmp_path, stored):
    folder = write_variant(tmp_path / "in", replace(UNTIED, dtype=stored))
    checkpoint = load_checkpoint(folder)
    params = jax.tree.map(lambda leaf: leaf, checkpoint.params)
    kernel = params["trunk"]["layers_1"]["mlp"]["up_proj"]["kernel"] * 1.2345
    params["trunk"]["layers_1"]["mlp"]["up_proj"]["kernel"] = kernel
    save_checkpoint(tmp_path / "out", checkpoint.config, params, checkpoint.manifest)
    name = "model.layers.1.mlp.up_proj.weight"
    before, after = (files_of(tmp_path / part)["model.safetensors"] for part in ("in", "out"))
    entry = checkpoint.manifest.files[0].entries[name]
    start = checkpoint.manifest.files[0].data_start
    begin, end = start + entry.begin, start + entry.end
    assert before[:begin] == after[:begin]
    assert before[end:] == after[end:]
    assert after[begin:end] == np.asarray(kernel).T.astype(stored).tobytes() != before[begin:end]


def test_the_repeated_output_matrix_follows_the_embedding(tmp_path):
    content = tensors(TIED)
    content["lm_head.weight"] = content["model.embed_tokens.weight"].copy()
    folder = write(tmp_path / "in", content, config_json(TIED))
    assert_same_files(folder, save_again(folder, tmp_path / "same"))
    checkpoint = load_checkpoint(folder)
    params = {**checkpoint.params, "lm_head": {"kernel": checkpoint.params["lm_head"]["kernel"] * 2}}
    save_checkpoint(tmp_path / "out", checkpoint.config, params, checkpoint.manifest)
    saved = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        np.testing.assert_array_equal(saved[name], content["model.embed_tokens.weight"] * 2)
    load_checkpoint(tmp_path / "out")


def test_a_value_too_large_for_float16_is_an_error_not_infinity(tmp_path):
    folder = write_variant(tmp_path / "in", replace(TIED, dtype=F16))
    checkpoint = load_checkpoint(folder)
    scale = checkpoint.params["trunk"]["norm"]["scale"].at[3].set(1e5)
    params = {**checkpoint.params, "trunk": {**checkpoint.params["trunk"], "norm": {"scale": scale}}}
    with pytest.raises(UserError, match=r"model\.norm\.weight: a value is too large"):
        save_checkpoint(tmp_path / "out", checkpoint.config, params, checkpoint.manifest)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_only_a_new_or_empty_folder_is_written(tmp_path):
    folder = write_variant(tmp_path / "in", TIED)
    (tmp_path / "empty").mkdir()
    assert_same_files(folder, save_again(folder, tmp_path / "empty"))
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    assert_same_files(folder, save_again(folder, tmp_path / "link"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("kept")
    (tmp_path / "file").write_text("kept")
    for name in ("full", "file", "in"):
        before = files_of(tmp_path)
        with pytest.raises(UserError, match=f"{name}: expected a new or an empty folder"):
            save_again(folder, tmp_path / name)
        assert files_of(tmp_path) == before
    with pytest.raises(UserError, match="cannot be written"):
        save_again(folder, tmp_path / "file" / "below")


def test_the_folder_is_as_open_as_any_new_one(tmp_path):
    out = save_again(write_variant(tmp_path / "in", TIED), tmp_path / "a" / "b" / "out")
    assert out.stat().st_mode == (tmp_path / "in").stat().st_mode


def test_an_interruption_leaves_nothing(tmp_path, monkeypatch):
    folder = write_variant(tmp_path / "in", TIED)
    checkpoint = load_checkpoint(folder)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mtp_jax.hf.save._copy_side_files", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path / "out", checkpoint.config, checkpoint.params, checkpoint.manifest)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_source_that_changed_or_went_away_is_an_error(tmp_path):
    folder = write_variant(tmp_path / "in", TIED)
    checkpoint = load_checkpoint(folder)
    write_variant(folder, replace(TIED, dtype=BF16))
    with pytest.raises(UserError, match="changed after it was loaded"):
        save_checkpoint(tmp_path / "out", checkpoint.config, checkpoint.params, checkpoint.manifest)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="cannot be read"):
        save_checkpoint(tmp_path / "out", checkpoint.config, checkpoint.params, checkpoint.manifest)


def test_another_model_or_other_parameters_are_refused(tmp_path):
    checkpoint = load_checkpoint(write_variant(tmp_path / "in", TIED))
    config = replace(checkpoint.config, norm_eps=1e-5)
    with pytest.raises(UserError, match=r"not the one that was loaded: norm_eps \(was 1e-06, got 1e-05\)"):
        save_checkpoint(tmp_path / "out", config, checkpoint.params, checkpoint.manifest)
    params = dict(checkpoint.params)
    del params["mtp"]
    with pytest.raises(ValueError, match="mtp/fc/kernel is missing"):
        save_checkpoint(tmp_path / "out", checkpoint.config, params, checkpoint.manifest)
    params = {**checkpoint.params, "lm_head": {"kernel": jnp.zeros((40, 130))}}
    with pytest.raises(ValueError, match=r"lm_head/kernel should be \(40, 131\), got \(40, 130\)"):
        save_checkpoint(tmp_path / "out", checkpoint.config, params, checkpoint.manifest)


@pytest.fixture(scope="module")
def trained():
    """A model of our own: config and parameters."""
    config = config_from_json({**config_json(UNTIED), "vocab_size": 331})
    random = np.random.default_rng(0)
    leaves = {path: random.normal(size=shape) for path, shape in parameter_shapes(config).items()}
    return config, unflatten({path: jnp.asarray(leaf, jnp.float32) for path, leaf in leaves.items()})


@pytest.mark.parametrize("max_shard_bytes", [10**9, 30_000])
def test_a_model_trained_from_nothing_gets_the_text_layout(tmp_path, trained, max_shard_bytes):
    config, params = trained
    tokenizer = train_bpe([], 289)
    tokenizer.save(tmp_path / "tokenizer")
    out = tmp_path / "out"
    save_checkpoint(out, config, params, None, tmp_path / "tokenizer", max_shard_bytes)
    assert (out / INDEX).exists() == (max_shard_bytes == 30_000)
    loaded = load_checkpoint(out)
    assert loaded.config == config
    types = {name: entry.dtype for file in loaded.manifest.files for name, entry in file.entries.items()}
    assert types.keys() == tensors(UNTIED).keys()
    for name, kind in types.items():
        assert kind == ("F32" if name.endswith(("A_log", "linear_attn.norm.weight")) else "BF16"), name
    expected = {
        path: np.asarray(leaf).astype(ml_dtypes.bfloat16).astype(np.float32)
        for path, leaf in flatten(params).items()
        if not path.endswith(("A_log", "linear_attn/norm/scale"))
    }
    for path, leaf in flatten(loaded.params).items():
        np.testing.assert_array_equal(leaf, expected.get(path, flatten(params)[path]))
    turn = tokenizer.token_id("<|im_end|>")
    assert end_ids(out, None) == {tokenizer.end_id, turn}
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == tokenizer.end_id
    assert Tokenizer.from_folder(out).render_chat([{"role": "user", "content": "a"}]).startswith("<|im_start|>user")
    assert_same_files(out, save_again(out, tmp_path / "again"))
    files = {name: os.stat(out / name).st_size for name in files_of(out) if name.endswith(".safetensors")}
    assert len(files) == 1 or max(files.values()) < 60_000


def test_a_model_trained_from_nothing_needs_no_tokenizer(tmp_path, trained):
    save_checkpoint(tmp_path / "out", *trained)
    assert sorted(files_of(tmp_path / "out")) == ["config.json", "generation_config.json", "model.safetensors"]
    assert end_ids(tmp_path / "out", None) == frozenset()


def test_files_written_here_are_read_by_the_safetensors_library(tmp_path, trained):
    save_checkpoint(tmp_path / "out", *trained)
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "flax") as file:
        assert file.metadata() == {"format": "pt"}
        kernel = trained[1]["mtp"]["fc"]["kernel"]
        assert np.array_equal(file.get_tensor("mtp.fc.weight"), kernel.T.astype(jnp.bfloat16))
