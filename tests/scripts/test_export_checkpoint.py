"""export_checkpoint.py: from a training run and from a checkpoint."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors
from random_checkpoint import Variant, config_json, tensors, write, write_variant

from mtp_jax.hf import load_checkpoint
from mtp_jax.text import Tokenizer

ROOT = Path(__file__).parent.parent.parent
HEADLESS = Variant("headless", 1, head=False)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_checkpoint_comes_back_as_it_was(call, tmp_path):
    folder = write_variant(tmp_path / "in", Variant("x", 1))
    status, stdout, _ = call("export_checkpoint", "--checkpoint", folder, "--out", tmp_path / "out")
    assert (status, stdout) == (0, "")
    assert contents(folder) == contents(tmp_path / "out")


def test_a_declared_head_that_is_not_there_needs_trunk_only(call, tmp_path):
    folder = write(tmp_path / "in", tensors(HEADLESS), config_json(Variant("x", 1)))
    status, _, stderr = call("export_checkpoint", "--checkpoint", folder, "--out", tmp_path / "out")
    assert status == 2
    assert "mtp.fc.weight" in stderr
    assert "--trunk-only" in stderr
    assert not (tmp_path / "out").exists()
    status, _, _ = call("export_checkpoint", "--checkpoint", folder, "--out", tmp_path / "out", "--trunk-only")
    assert status == 0
    assert contents(folder) == contents(tmp_path / "out")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--workdir --checkpoint is required"),
        (["--checkpoint", "in", "--workdir", "x"], "not allowed with"),
        (["--checkpoint", "in", "--step", "3"], "--step goes with --workdir"),
        (["--workdir", "x", "--trunk-only"], "--trunk-only goes with --checkpoint"),
        (["--workdir", "absent"], "absent"),
        (["--checkpoint", "absent"], "absent: expected a checkpoint folder"),
        (["--checkpoint", "in", "--base", "x"], "--base goes with --workdir"),
        (["--checkpoint", "in", "--head-only", "h.safetensors"], "not allowed with"),
    ],
)
def test_flags_that_make_no_sense(call, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    write_variant(tmp_path / "in", HEADLESS)
    status, _, stderr = call("export_checkpoint", *flags, "--out", "out")
    assert status == 2
    assert message in stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_a_folder_with_files_is_never_written_into(call, tmp_path):
    folder = write_variant(tmp_path / "in", HEADLESS)
    before = contents(folder)
    status, _, stderr = call("export_checkpoint", "--checkpoint", folder, "--out", folder)
    assert status == 2
    assert "expected a new or an empty folder" in stderr
    assert contents(folder) == before


def test_the_head_alone(call, tmp_path):
    whole = Variant("x", 1)
    folder = write_variant(tmp_path / "in", whole)
    file = tmp_path / "head.safetensors"
    status, stdout, _ = call("export_checkpoint", "--checkpoint", folder, "--head-only", file)
    assert (status, stdout) == (0, "")
    with safetensors.safe_open(file, "numpy") as head:
        assert head.metadata() == {
            "format": "pt",
            "rotary_dim": "8",
            "rope_theta": "10000000.0",
            "rms_norm_eps": "1e-06",
            "head_reads": "after_norm",
        }
        expected = {name: value for name, value in tensors(whole).items() if name.startswith("mtp.")}
        assert set(head.keys()) == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(head.get_tensor(name), value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["in", "--head-only", "head.bin"], "--head-only: expected a new file named .safetensors, got head.bin"),
        (["in", "--head-only", "in/model.safetensors"], "--head-only: expected a new file"),
        (["in", "--head-only", "h.safetensors", "--trunk-only"], "--trunk-only leaves no head"),
        (["in", "--head-only", "h.safetensors"], "expected a model with an MTP head"),
        (["in"], "--out --head-only is required"),
    ],
)
def test_a_head_alone_that_cannot_be_written(call, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    before = contents(write_variant(tmp_path / "in", HEADLESS))
    status, _, stderr = call("export_checkpoint", "--checkpoint", *flags)
    assert status == 2
    assert message in stderr
    assert contents(tmp_path / "in") == before
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.slow
def test_the_shipped_model_comes_back_from_a_run_that_learns_nothing(call, tmp_path):
    """Through both command lines, with every file that lies beside the weights."""
    base = ROOT / "models" / "demo"
    (tmp_path / "text.txt").write_text("def add(a, b):\n    return a + b\n" * 200)
    flags = ["--config", "finetune", "--init", base, "--data", tmp_path / "text.txt", "--workdir", tmp_path / "run"]
    settings = ["steps=1", "learning_rate=0", "sequence_length=32", "batch_size=1"]
    command = [sys.executable, ROOT / "scripts" / "train.py", *flags, "--set", *settings]
    subprocess.run(command, check=True, capture_output=True)
    status, _, stderr = call("export_checkpoint", "--workdir", tmp_path / "run", "--out", tmp_path / "out")
    assert status == 0, stderr
    assert contents(tmp_path / "out") == contents(base)


@pytest.mark.slow
def test_a_training_run_is_exported_with_its_tokenizer(call, tmp_path):
    (tmp_path / "text.txt").write_text("def add(a, b):\n    return a + b\n" * 200)
    flags = ["--config", "tiny", "--data", tmp_path / "text.txt", "--workdir", tmp_path / "run"]
    # A process of its own: the run is a means here, not what is tested.
    command = [sys.executable, ROOT / "scripts" / "train.py", *flags, "--set", "steps=2"]
    subprocess.run(command, check=True, capture_output=True)
    status, _, stderr = call("export_checkpoint", "--workdir", tmp_path / "run", "--out", tmp_path / "out")
    assert status == 0, stderr
    checkpoint = load_checkpoint(tmp_path / "out")
    assert checkpoint.config.num_mtp_layers == 1
    assert len(Tokenizer.from_folder(tmp_path / "out")) <= checkpoint.config.vocab_size
    flags = ["--workdir", tmp_path / "run", "--step", "9", "--out", tmp_path / "again"]
    status, _, stderr = call("export_checkpoint", *flags)
    assert status == 2
    assert "--step 9" in stderr
