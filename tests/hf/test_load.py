"""Loading: what is accepted gives the right parameters; what is not is named, all of it together."""

import json
import mmap
import random
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from random_checkpoint import BF16, F16, F32, Variant, config_json, file_bytes, tensors, write, write_variant

from mtp_jax.errors import UserError
from mtp_jax.hf import layouts, load, load_checkpoint, read_manifest, read_params
from mtp_jax.hf.parameters import flatten
from mtp_jax.mtp import MTPModel, init_params

TIED = Variant("tied", 1)
UNTIED = Variant("untied", 2, tied=False)
INDEX = "model.safetensors.index.json"


def leaves(folder, **options):
    return flatten(load_checkpoint(folder, **options).params)


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        np.testing.assert_array_equal(np.asarray(a[name]), np.asarray(b[name]), err_msg=name)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_variant(tmp_path_factory.mktemp("plain") / "c", TIED)


@pytest.mark.parametrize("variant", [TIED, UNTIED, replace(TIED, head=False)], ids=["tied", "untied", "headless"])
def test_every_parameter_is_written_once_in_its_shape(tmp_path, variant):
    checkpoint = load_checkpoint(write_variant(tmp_path, variant))
    expected = jax.eval_shape(lambda: init_params(MTPModel(checkpoint.config), jax.random.key(0)))
    assert jax.tree.structure(checkpoint.params) == jax.tree.structure(expected)
    shapes = jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, checkpoint.params, expected)
    assert all(jax.tree.leaves(shapes))


def test_matrices_are_transposed_and_the_convolution_reads_oldest_first(plain):
    stored, ours = tensors(TIED), leaves(plain)
    name = "model.layers.0.linear_attn.conv1d.weight"
    np.testing.assert_array_equal(ours["trunk/layers_0/linear_attn/conv1d/kernel"][0], stored[name][:, 0, 0])
    np.testing.assert_array_equal(ours["lm_head/kernel"], stored["model.embed_tokens.weight"].T)
    np.testing.assert_array_equal(ours["mtp/fc/kernel"], stored["mtp.fc.weight"].T)
    np.testing.assert_array_equal(ours["trunk/norm/scale"], stored["model.norm.weight"])


def test_both_prefixes_give_the_same_parameters(tmp_path, plain):
    variant = replace(TIED, prefix="model.language_model.")
    checkpoint = load_checkpoint(write_variant(tmp_path, variant))
    assert_same(flatten(checkpoint.params), leaves(plain))
    assert checkpoint.config == load_checkpoint(plain).config


@pytest.mark.parametrize("index", [True, False])
def test_any_split_over_files_gives_the_same_parameters(tmp_path, plain, index):
    content = tensors(TIED)
    head = [name for name in content if name.startswith("mtp.")]
    trunk = [name for name in content if not name.startswith("mtp.")]
    files = {"model-1.safetensors": trunk[::2], "model-2.safetensors": trunk[1::2], "mtp.safetensors": head}
    folder = write(tmp_path, content, config_json(TIED), files, index)
    assert_same(leaves(folder), leaves(plain))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("stored", [BF16, F16, F32])
def test_stored_types_become_the_type_asked_for(tmp_path, stored, dtype):
    variant = replace(UNTIED, dtype=stored)
    content, ours = tensors(variant), leaves(write_variant(tmp_path, variant), dtype=dtype)
    for path, leaf in ours.items():
        kept = path.endswith(("scale", "A_log", "dt_bias"))
        assert leaf.dtype == (jnp.float32 if kept else dtype), path
    expected = content["lm_head.weight"].T.astype(np.float32).astype(np.dtype(dtype))
    np.testing.assert_array_equal(np.asarray(ours["lm_head/kernel"]), expected)


def test_the_trunk_alone_leaves_the_head_out_on_purpose(tmp_path, plain):
    with_head, alone = load_checkpoint(plain), load_checkpoint(plain, trunk_only=True)
    assert alone.config == replace(with_head.config, num_mtp_layers=0)
    assert "mtp" not in alone.params
    without = write_variant(tmp_path, replace(TIED, head=False))
    config = json.loads((plain / "config.json").read_text())
    (without / "config.json").write_text(json.dumps(config))
    assert load_checkpoint(without, trunk_only=True).config.num_mtp_layers == 0


def test_a_declared_head_without_tensors_says_which_and_how_to_go_on(tmp_path):
    folder = write(tmp_path, tensors(replace(TIED, head=False)), config_json(TIED))
    with pytest.raises(UserError, match=r"missing: mtp\.fc\.weight.*--trunk-only") as error:
        load_checkpoint(folder)
    missing = [name for name in tensors(TIED) if name.startswith("mtp.")]
    assert len(missing) == 15
    assert all(name in str(error.value) for name in missing)


def test_a_head_that_is_not_declared_is_unexpected(tmp_path):
    folder = write(tmp_path, tensors(TIED), config_json(replace(TIED, head=False)))
    with pytest.raises(UserError, match=r"unexpected: .*mtp\.fc\.weight in model\.safetensors.*mtp_num_hidden_layers"):
        load_checkpoint(folder)


def test_all_faults_are_reported_together_by_name(tmp_path):
    content = tensors(UNTIED)
    first, second = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    del content["model.norm.weight"]
    content[first] = content[first][:-1]
    content[second] = content[second].astype(np.int64)
    content["model.layers.9.surprise"] = np.zeros(3, np.float32)
    names = list(content)
    files = {"a.safetensors": names, "b.safetensors": ["lm_head.weight"]}
    folder = write(tmp_path, content, config_json(UNTIED), files)
    with pytest.raises(UserError) as error:
        load_checkpoint(folder)
    message = str(error.value)
    assert "\n" not in message
    for part in (
        "missing: model.norm.weight",
        "unexpected: model.layers.9.surprise in a.safetensors",
        "written twice: lm_head.weight, in a.safetensors and b.safetensors",
        f"{first} in a.safetensors (expected [72, 40], got [71, 40])",
        f"{second} in a.safetensors (expected one of F32, BF16, F16, got I64)",
    ):
        assert part in message, part


def test_the_prefixes_may_not_be_mixed(tmp_path):
    content = tensors(replace(TIED, prefix="model.language_model."))
    content["model.norm.weight"] = content.pop("model.language_model.norm.weight")
    folder = write(tmp_path, content, config_json(TIED))
    with pytest.raises(UserError, match=r"missing: model\.language_model\.norm.*unexpected: model\.norm"):
        load_checkpoint(folder)


def test_a_tied_checkpoint_may_repeat_the_matrix_only_unchanged(tmp_path, plain):
    content = tensors(TIED)
    content["lm_head.weight"] = content["model.embed_tokens.weight"].copy()
    assert_same(leaves(write(tmp_path / "same", content, config_json(TIED))), leaves(plain))
    content["lm_head.weight"][5, 7] += 1
    with pytest.raises(UserError, match=r"tie_word_embeddings.*lm_head\.weight.*not equal"):
        load_checkpoint(write(tmp_path / "other", content, config_json(TIED)))
    content["lm_head.weight"] = content["model.embed_tokens.weight"].astype(BF16)
    with pytest.raises(UserError, match="not equal"):
        load_checkpoint(write(tmp_path / "type", content, config_json(TIED)))


def test_an_untied_checkpoint_needs_its_output_matrix(tmp_path):
    folder = write(tmp_path, tensors(TIED), config_json(UNTIED))
    with pytest.raises(UserError, match=r"missing: lm_head\.weight"):
        load_checkpoint(folder)


def sharded(folder):
    content = tensors(TIED)
    names = list(content)
    files = {"one.safetensors": names[:20], "two.safetensors": names[20:]}
    return write(folder, content, config_json(TIED), files, index=True)


def change_index(folder, change):
    value = json.loads((folder / INDEX).read_text())
    change(value["weight_map"])
    (folder / INDEX).write_text(json.dumps(value))


def test_index_and_files_must_agree(tmp_path):
    folder = sharded(tmp_path)

    def change(weight_map):
        weight_map["model.ghost"] = "one.safetensors"
        del weight_map["model.norm.weight"]
        weight_map["mtp.norm.weight"] = "one.safetensors"

    change_index(folder, change)
    (folder / "stray.safetensors").write_bytes(file_bytes({"x": np.zeros(1, np.float32)}))
    with pytest.raises(UserError) as error:
        load_checkpoint(folder)
    for part in (
        "unexpected: x in stray.safetensors",
        "puts into one.safetensors, which lacks them: model.ghost, mtp.norm.weight",
        "two.safetensors holds, unlike model.safetensors.index.json says: model.norm.weight, mtp.norm.weight",
    ):
        assert part in str(error.value), part


def test_a_head_in_a_file_that_the_index_leaves_out_is_found(tmp_path, plain):
    folder = sharded(tmp_path)
    content = tensors(TIED)
    head = {name: content[name] for name in content if name.startswith("mtp.")}
    trunk = {name: content[name] for name in content if name not in head}
    for name in ("one.safetensors", "two.safetensors"):
        (folder / name).unlink()
    (folder / "one.safetensors").write_bytes(file_bytes(trunk))
    (folder / "mtp.safetensors").write_bytes(file_bytes(head))
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(trunk, "one.safetensors")}))
    assert_same(leaves(folder), leaves(plain))
    (folder / "copy.safetensors").write_bytes(file_bytes(head))
    with pytest.raises(UserError, match=r"written twice: mtp\.fc\.weight, in copy\.safetensors and mtp\.safetensors"):
        load_checkpoint(folder)


def test_a_missing_file_of_the_index_is_named(tmp_path):
    folder = sharded(tmp_path)
    (folder / "two.safetensors").unlink()
    with pytest.raises(UserError, match=r"two\.safetensors: cannot be read: No such file"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    "name", ["/etc/x.safetensors", "../x.safetensors", "a/../../x.safetensors", "x.bin", 3, "", "..\\x.safetensors"]
)
def test_the_index_may_not_lead_out_of_the_folder(tmp_path, name):
    folder = sharded(tmp_path / "c")
    (tmp_path / "x.safetensors").write_bytes((folder / "one.safetensors").read_bytes())
    change_index(folder, lambda weight_map: weight_map.update({"model.norm.weight": name}))
    with pytest.raises(UserError, match="expected the name of a"):
        load_checkpoint(folder)


def test_a_name_that_no_file_can_have_is_refused(tmp_path):
    folder = sharded(tmp_path)
    change_index(folder, lambda weight_map: weight_map.update({"model.norm.weight": "\ud800.safetensors"}))
    with pytest.raises(UserError, match="cannot be read"):
        load_checkpoint(folder)


def test_links_may_not_lead_out_of_the_folder(tmp_path):
    folder = sharded(tmp_path / "c")
    (folder / "two.safetensors").rename(tmp_path / "two.safetensors")
    (folder / "two.safetensors").symlink_to("../two.safetensors")
    with pytest.raises(UserError, match="leads out of the folder"):
        load_checkpoint(folder)
    (tmp_path / "d").mkdir()
    (folder / "config.json").rename(tmp_path / "d" / "config.json")
    (folder / "config.json").symlink_to("../d/config.json")
    with pytest.raises(UserError, match="leads out of the folder"):
        load_checkpoint(folder)


def test_a_loop_of_links_is_an_error(tmp_path):
    folder = sharded(tmp_path)
    (folder / "two.safetensors").unlink()
    (folder / "two.safetensors").symlink_to("two.safetensors")
    with pytest.raises(UserError, match=r"two\.safetensors"):
        load_checkpoint(folder)


def test_a_model_hubs_cache_may_link_to_its_blobs(tmp_path, plain):
    folder = sharded(tmp_path / "models--x" / "snapshots" / "abc")
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../../blobs/{number}")
    assert_same(leaves(folder), leaves(plain))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "JSON object"),
        ("{", "JSON"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": []}', "weight_map"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_a_broken_index_is_named(tmp_path, content, message):
    folder = sharded(tmp_path)
    (folder / INDEX).write_text(content)
    with pytest.raises(UserError, match=rf"{INDEX}.*{message}"):
        load_checkpoint(folder)


def test_nothing_but_safetensors_is_read(tmp_path):
    with pytest.raises(UserError, match="expected a checkpoint folder, got nothing"):
        load_checkpoint(tmp_path / "absent")
    with pytest.raises(UserError, match=r"config\.json: expected the model's config"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_json(TIED)))
    with pytest.raises(UserError, match=r"expected \*\.safetensors files, got none$"):
        load_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"pytorch_model\.bin: this form can run code and is not read"):
        load_checkpoint(tmp_path)


def test_any_truncation_is_named(plain, tmp_path):
    whole = (plain / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    (tmp_path / "config.json").write_bytes((plain / "config.json").read_bytes())
    for size in [0, 1, 7, 8, 9, start // 2, start - 1, start, start + 1, len(whole) // 2, len(whole) - 1]:
        (tmp_path / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"model\.safetensors: truncated"):
            load_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(whole + b"\0")
    with pytest.raises(UserError, match="some belong to none"):
        load_checkpoint(tmp_path)


def test_damaged_headers_never_end_in_anything_but_a_user_error(plain, tmp_path):
    whole = (plain / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    (tmp_path / "config.json").write_bytes((plain / "config.json").read_bytes())
    path, dice, refused = tmp_path / "model.safetensors", random.Random(5), 0
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(dice.choice([1, 2, 5])):
            damaged[dice.randrange(start)] = dice.randrange(256)
        path.write_bytes(damaged)
        try:
            load_checkpoint(tmp_path)
        except UserError as error:
            refused += "model.safetensors" in str(error) or "missing" in str(error)
    assert refused > 140  # the rest hit padding, or a digit or letter that changed to itself


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[]", "JSON object"),
        (b"{" * 100_000, "expected JSON"),
        (b'{"a": ' * 100_000, "expected JSON"),
        (b'{"a": 3}', "damaged header"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": {}}', "written twice in the header: a"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "damaged header"),
        (b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}', "damaged header"),
        (b'{"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}', "damaged header"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}', "damaged header"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}', "damaged header"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "has 8 bytes, the header gives it 4"),
        (b'{"a": {"dtype": "F32", "shape": [99999999999], "data_offsets": [0, 4]}}', "has 399999999996 bytes"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', "expected its bytes to start at 0"),
        (b'{"__metadata__": 3}', "__metadata__"),
        (b"\xff\xff", "expected JSON"),
    ],
)
def test_headers_that_lie_are_refused(plain, tmp_path, header, message):
    (tmp_path / "config.json").write_bytes((plain / "config.json").read_bytes())
    content = len(header).to_bytes(8, "little") + header + b"\0" * 8
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("length", [100_000_001, 2**62, 2**64 - 1])
def test_an_absurd_header_length_does_not_fill_the_memory(plain, tmp_path, length):
    (tmp_path / "config.json").write_bytes((plain / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"\0" * 99)
    with pytest.raises(UserError, match="a header of at most 100000000 bytes"):
        load_checkpoint(tmp_path)


def test_files_of_the_safetensors_library_are_read(tmp_path, plain):
    (tmp_path / "config.json").write_bytes((plain / "config.json").read_bytes())
    safetensors.numpy.save_file(tensors(TIED), tmp_path / "model.safetensors")
    assert_same(leaves(tmp_path), leaves(plain))


def test_a_step_can_write_over_parameters_that_are_read_for_it(plain):
    """Memory that was not JAX's own would be copied first, all parameters at once."""
    params = read_params(read_manifest(plain), donated=True)
    assert_same(flatten(params), leaves(plain))
    places = {path: leaf.unsafe_buffer_pointer() for path, leaf in flatten(params).items()}
    stepped = jax.jit(lambda params: jax.tree.map(jnp.negative, params), donate_argnums=0)(params)
    assert {path: leaf.unsafe_buffer_pointer() for path, leaf in flatten(stepped).items()} == places


def test_no_tensor_is_converted_long_before_its_parameter_is_placed(plain, monkeypatch):
    """However slow a device is, the host holds but few."""
    manifest, written, ahead = read_manifest(plain), [], []
    monkeypatch.setattr(load, "write", lambda *args: written.append(layouts.write(*args)))
    place = jax.device_put

    def slowly(array):
        time.sleep(0.01)
        ahead.append(len(written) - len(ahead))
        return place(array)

    monkeypatch.setattr(jax, "device_put", slowly)
    read_params(manifest)
    pieces = max(len(slot.pieces) for slot in manifest.slots.values())
    assert max(ahead) <= (2 + load._AHEAD) * pieces < len(written) / 2


def test_a_kernel_without_huge_pages_loads_too(plain, monkeypatch):
    class Memory(mmap.mmap):
        def madvise(self, *_):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Memory)
    leaves(plain)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the host's memory is the device's on a CPU alone")
def test_parameters_stay_where_they_were_converted(plain, monkeypatch):
    made, empty = [], load._empty
    monkeypatch.setattr(load, "_empty", lambda *args: made.append(empty(*args)) or made[-1])
    ours = leaves(plain)
    assert sorted(x.unsafe_buffer_pointer() for x in ours.values()) == sorted(x.ctypes.data for x in made)


def test_another_compute_type_is_refused(plain):
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        load_checkpoint(plain, dtype=jnp.float16)
