"""A head put back and fitted again: the whole way of a checkpoint that lost its head."""

import re
from dataclasses import replace

import pytest
from published_base import SETTINGS, of_every_family_slowly, stored, write_base
from small_run import read_rows

from configs import PRESETS
from mtp_jax.hf import graft_head, save_checkpoint, save_head
from train.checkpoint import load_for_export
from train.loop import train
from train.progress import Progress

pytestmark = pytest.mark.usefixtures("compilation_cache")
QUIET = Progress(quiet=True)
COPIES = (".embed_tokens.weight", "shared_head.head.weight")
EXPERT = re.compile(r"mlp\.experts\.\d")  # may never have been chosen


@of_every_family_slowly
@pytest.mark.parametrize("head_loss", ["kl", "ce"])
def test_a_head_is_put_back_and_fitted_and_the_trunk_keeps_every_byte(
    text_folder, tmp_path, monkeypatch, variant, base, head_loss
):
    trunk = write_base(tmp_path / "trunk", monkeypatch, replace(variant, head=False, seed=8))
    graft_head(trunk, base, tmp_path / "grafted")
    settings = (*SETTINGS, "steps=6", "checkpoint_every=6", f"head_loss={head_loss}", f"depths={variant.mtp_layers}")
    experiment = replace(PRESETS["realign"](), data=(str(text_folder),), init=str(tmp_path / "grafted"))
    train(experiment.override(settings), tmp_path / "run", QUIET)
    rows = read_rows(tmp_path / "run")
    assert rows[-1]["mtp_loss"] < rows[0]["mtp_loss"] - 0.1

    learnt = load_for_export(tmp_path / "run")
    save_checkpoint(tmp_path / "out", learnt.config, learnt.params, learnt.manifest)
    before, after = stored(tmp_path / "grafted"), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert {name for name in changed if not EXPERT.search(name)} == {
        name
        for name in before
        if re.match(variant.head_pattern, name)
        and not EXPERT.search(name)
        and not name.endswith((*COPIES, "e_score_correction_bias"))
    }
    assert all(re.match(variant.head_pattern, name) for name in changed)

    # The head alone, put on the trunk that lost its own, is the same again.
    save_head(tmp_path / "head.safetensors", learnt.config, learnt.params, learnt.manifest)
    graft_head(trunk, tmp_path / "head.safetensors", tmp_path / "again")
    assert stored(tmp_path / "again") == after


@of_every_family_slowly
def test_a_checkpoint_of_the_run_holds_the_head_alone(text_folder, tmp_path, variant, base):
    experiment = replace(PRESETS["realign"](), data=(str(text_folder),), init=str(base)).override(SETTINGS)
    train(experiment, tmp_path / "straight", QUIET)
    train(experiment.override(["steps=1"]), tmp_path / "stopped", QUIET)
    size = sum(
        path.stat().st_size for path in (tmp_path / "stopped" / "checkpoints" / "1").rglob("*") if path.is_file()
    )
    stored_head = sum(len(value[2]) for name, value in stored(base).items() if re.match(variant.head_pattern, name))
    trunk = sum(len(value[2]) for name, value in stored(base).items()) - stored_head
    # Parameters and two moments in float32, where the files have bfloat16.
    assert size < 3 * 2 * stored_head + trunk
    train(experiment, tmp_path / "stopped", QUIET)
    assert read_rows(tmp_path / "stopped")[1:] == read_rows(tmp_path / "straight")[1:]
