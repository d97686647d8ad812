"""dump_logits.py: what it writes, and what it refuses before any long work."""

import numpy as np
import pytest
from goldens.variants import VARIANTS, golden_path, kept, prompt_ids
from random_checkpoint import VOCAB, write_variant

from infer.logits import all_logits
from mtp_jax.hf import load_checkpoint
from mtp_jax.mtp import MTPModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_variant(tmp_path_factory.mktemp("dump") / "checkpoint", VARIANTS[0])


@pytest.fixture
def dump(call, folder, tmp_path):
    def run(ids, *flags):
        np.save(tmp_path / "ids.npy", ids)
        out = tmp_path / "out.npz"
        status, stdout, stderr = call(
            "dump_logits", "--checkpoint", folder, "--ids", tmp_path / "ids.npy", "--out", out, *flags
        )
        assert stdout == ""
        if not out.exists():
            return status, stderr, None
        with np.load(out) as file:
            return status, stderr, dict(file)

    return run


def test_the_file_holds_the_peers_numbers(dump):
    ids = prompt_ids(VARIANTS[0], "batch")
    status, _, result = dump(ids)
    assert status == 0
    assert {value.dtype for value in result.values()} == {np.dtype(np.float32)}
    assert result["mtp_logits"].shape == (3, 64, VOCAB)
    assert result["chained_logits"].shape == (3, 4, VOCAB)
    with np.load(golden_path(VARIANTS[0])) as golden:
        expected = golden["batch/main_logits"]
    np.testing.assert_allclose(result["main_logits"][:, kept(65)], expected, rtol=0, atol=2e-4)


def test_one_token_and_the_trunk_alone(dump):
    _, _, result = dump(np.array([[5]], np.uint8))
    assert result["mtp_logits"].shape == (1, 0, VOCAB)
    _, _, alone = dump(np.array([[5]]), "--trunk-only")
    assert sorted(alone) == ["hidden", "hidden_before_norm", "main_logits"]
    np.testing.assert_allclose(alone["main_logits"], result["main_logits"], atol=1e-5)


def test_the_head_can_read_what_the_final_norm_reads(dump):
    ids = np.array([[5, 3, 9]])
    _, _, after = dump(ids, "--head-reads", "after_norm")
    _, _, before = dump(ids, "--head-reads", "before_norm")
    for name in ("main_logits", "hidden", "hidden_before_norm"):
        np.testing.assert_array_equal(before[name], after[name])
    for name in ("mtp_logits", "chained_logits"):
        assert np.abs(before[name] - after[name]).max() > 1e-3


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.array([[0, VOCAB]]), f"ids must be in 0..{VOCAB - 1}, got {VOCAB} at row 0, column 1"),
        (np.array([[0], [-1]]), f"ids must be in 0..{VOCAB - 1}, got -1 at row 1, column 0"),
        (np.array([[2**40]]), f"got {2**40}"),
        (np.array([1, 2]), "ids must have shape [B, T]"),
        (np.zeros((2, 0), np.int64), "ids must have shape [B, T]"),
        (np.array([[1.0]]), "ids must be integers, got float64"),
        (np.array([[True]]), "ids must be integers, got bool"),
    ],
)
def test_ids_that_make_no_sense_are_refused(dump, ids, message):
    status, stderr, result = dump(ids)
    assert (status, result) == (2, None)
    assert message in stderr
    assert stderr.count("\n") == 1


def npy(header):
    return b"\x93NUMPY\x01\0" + len(header).to_bytes(2, "little") + header


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"not an array", b"\x93NUMPY\x01\x00", npy(b"(((\n")),
        npy(b"{'descr': '<i8', 'fortran_order': False, 'shape': (10000000000000, 10)}\n"),
        npy(b"{'descr': '<i8', 'fortran_order': False, 'shape': (99999999999999999999, 10)}\n"),
    ],
)
def test_a_broken_file_is_named(call, folder, tmp_path, content):
    (tmp_path / "ids.npy").write_bytes(content)
    status, _, stderr = call(
        "dump_logits", "--checkpoint", folder, "--ids", tmp_path / "ids.npy", "--out", tmp_path / "o.npz"
    )
    assert status == 2
    assert "ids.npy: expected a .npy file of integers: " in stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.npy"]


def test_pickles_and_archives_are_not_read(call, folder, tmp_path):
    np.save(tmp_path / "pickle.npy", np.array([{}]), allow_pickle=True)
    np.savez(tmp_path / "archive.npz", a=np.array([[1]]))
    for name in ("pickle.npy", "archive.npz", "absent.npy"):
        flags = ["--ids", tmp_path / name, "--out", tmp_path / "o.npz"]
        status, _, stderr = call("dump_logits", "--checkpoint", folder, *flags)
        assert status == 2
        assert name in stderr


def test_no_folder_for_the_result_is_said_at_once(call, folder, tmp_path):
    flags = ["--ids", tmp_path / "ids.npy", "--out", tmp_path / "no" / "o.npz"]
    status, _, stderr = call("dump_logits", "--checkpoint", folder, *flags)
    assert status == 2
    assert "--out" in stderr


def test_many_rows_are_the_rows_one_by_one(folder, monkeypatch):
    monkeypatch.setattr("infer.logits._TOKENS_AT_ONCE", 6)
    checkpoint = load_checkpoint(folder)
    ids = prompt_ids(VARIANTS[0], "batch")[:, :3]
    result = all_logits(MTPModel(checkpoint.config), checkpoint.params, ids)
    alone = all_logits(MTPModel(checkpoint.config), checkpoint.params, ids[2:])
    for name, value in result.items():
        assert len(value) == 3
        np.testing.assert_allclose(value[2:], alone[name], atol=1e-5)
    empty = all_logits(MTPModel(checkpoint.config), checkpoint.params, ids[:0])
    assert empty["chained_logits"].shape == (0, 4, VOCAB)
