"""Acceptance as a run measures it, beside its two checks."""

import dataclasses

import jax
import pytest
from small_run import read_rows

from infer.completion import Completion
from mtp_jax.errors import UserError
from mtp_jax.hf import load_checkpoint
from mtp_jax.mtp import MTPModel, init_params
from mtp_jax.text import Tokenizer, end_ids
from train.acceptance import Acceptance, accepted_shares, held_out_prompts
from train.corpus import read_corpus
from train.experiment import Experiment
from train.loop import train
from train.progress import Progress

QUIET = Progress(quiet=True)
KEYS = {"acceptance", "acceptance_d2", "tokens_per_round", "acceptance_identical", "acceptance_control"}


def _completion(draft_positions, round_drafts):
    count = len(draft_positions)
    return Completion([1] * count, None, "length", draft_positions, round_drafts, [-1] * count, 2, None, 1.0, 0.0)


def test_a_share_is_of_the_rounds_that_could_emit_a_draft_there():
    """Rounds after prefill's token: both drafts stand; the first does; none does; then room for one draft, refused."""
    one = _completion([0, 1, 2, 0, 1, 0, 0], [-1, 2, -1, -1, 2, -1, 2])
    other = _completion([0, 0], [-1, 1])
    assert accepted_shares([one, other]) == [2 / 4, 1 / 3]
    assert accepted_shares([_completion([0], [-1])]) == [None, None]


@pytest.mark.usefixtures("compilation_cache")
def test_rows_have_it_when_it_is_due_and_training_goes_on_as_without(small_experiment, tmp_path):
    settings = ["depths=2", "steps=4", "acceptance_every=3", "acceptance_prompts=2", "acceptance_new_tokens=6"]
    measured = small_experiment.override(settings)
    train(measured, tmp_path / "measured", QUIET)
    train(dataclasses.replace(measured, acceptance_every=0), tmp_path / "plain", QUIET)
    rows, plain = read_rows(tmp_path / "measured"), read_rows(tmp_path / "plain")
    assert [set(row) - set(other) for row, other in zip(rows, plain, strict=True)] == [set(), set(), KEYS, KEYS]
    for row, other in zip(rows, plain, strict=True):
        assert {key: value for key, value in row.items() if key not in KEYS} == other
    assert [rows[step - 1]["acceptance_identical"] for step in (3, 4)] == [1.0, 1.0]
    assert 1.0 <= rows[3]["tokens_per_round"] <= 3.0


@pytest.mark.slow
@pytest.mark.usefixtures("compilation_cache")
def test_more_depths_can_be_measured_than_are_trained(small_experiment, tmp_path):
    """What is trained stays to the bit; the further depths' figures are those that a run with them reports."""
    settings = ["steps=2", "acceptance_every=2", "acceptance_prompts=2", "acceptance_new_tokens=6", "learning_rate=0"]
    experiment = small_experiment.override(settings)
    train(experiment, tmp_path / "one", QUIET)
    train(dataclasses.replace(experiment, measured_depths=3), tmp_path / "measured", QUIET)
    train(dataclasses.replace(experiment, depths=3), tmp_path / "three", QUIET)
    one, measured, three = (read_rows(tmp_path / name)[-1] for name in ("one", "measured", "three"))
    assert {key: measured[key] for key in one} == pytest.approx(one, rel=1e-6)
    own = {key for key in measured if key.startswith(("eval_", "acceptance", "tokens_per"))} - {"eval_mtp_loss"}
    assert {"eval_mtp_loss_d1", "eval_mtp_loss_d3", "eval_mtp_agreement_d3", "acceptance_d3"} <= own
    assert {key: measured[key] for key in own} == pytest.approx({key: three[key] for key in own}, rel=1e-6)
    assert measured["eval_mtp_loss"] == pytest.approx(measured["eval_mtp_loss_d1"])


def test_the_shipped_models_drafts_stand_and_the_controls_do_not(script, no_programs_dropped):
    demo = script("_cli").DEMO_CHECKPOINT
    checkpoint, tokenizer = load_checkpoint(demo), Tokenizer.from_folder(demo)
    assert tokenizer is not None
    prompts = [tokenizer.encode("def add(self, key, value):\n    "), tokenizer.encode("import os\n\nclass Reader:\n")]
    experiment = Experiment(depths=1, acceptance_new_tokens=40, acceptance_every=1)
    acceptance = Acceptance(experiment, MTPModel(checkpoint.config), tokenizer, end_ids(demo, tokenizer), prompts)
    figures = acceptance.measure(checkpoint.params)
    assert figures["acceptance_identical"] == 1.0
    assert figures["acceptance"] > 0.4
    assert figures["acceptance_control"] < 0.15

    seconds = acceptance.generator.programs.compile_seconds
    untrained = acceptance.measure(init_params(MTPModel(checkpoint.config), jax.random.key(0)))
    assert untrained["acceptance"] < figures["acceptance"]
    assert acceptance.generator.programs.compile_seconds == seconds, "other parameters compile nothing"


def test_prompts_are_different_and_no_longer_than_a_row(small_experiment, text_folder):
    tokenizer = Tokenizer.from_folder("models/demo")
    assert tokenizer is not None
    corpus = read_corpus(small_experiment, QUIET)
    prompts = held_out_prompts(small_experiment, corpus, tokenizer)
    assert prompts == [tokenizer.encode("def triple(x):\n"), tokenizer.encode("    return x + x + x\n")]
    short = dataclasses.replace(small_experiment, sequence_length=2)
    assert [len(ids) for ids in held_out_prompts(short, corpus, tokenizer)] == [2, 2]
    nothing = dataclasses.replace(small_experiment, held_out=(), acceptance_every=1)
    with pytest.raises(UserError, match="acceptance_every: 1 needs held-out documents"):
        held_out_prompts(nothing, read_corpus(nothing, QUIET), tokenizer)
