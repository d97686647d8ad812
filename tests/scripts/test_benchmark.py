"""scripts/benchmark.py on a small model: what it reports, not how fast that is."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
from bent_model import CONFIG
from safetensors.numpy import load_file, save_file

from infer.carry import Plan
from infer.generator import Generator
from infer.settings import Settings
from infer.speculative import decode, idle
from mtp_jax.hf import load_checkpoint, save_checkpoint
from mtp_jax.layers.delta_rule import DeltaAlgorithm
from mtp_jax.mtp import MTPModel, init_params
from mtp_jax.sizes import Stage
from scripts.benchmarks import limits
from scripts.benchmarks.scripted import scripted_drafter, standing


@pytest.fixture
def bench(call, tmp_path, monkeypatch):
    """`bench("decode", *flags)` is the JSON record; little is read to find the limit."""
    monkeypatch.setattr(limits, "STREAMED_BYTES", 2**22)

    def run(mode, *flags):
        status, out, err = call("benchmark", mode, *flags, "--json", tmp_path / "out.json")
        assert status == 0, err
        assert out
        return json.loads((tmp_path / "out.json").read_text())

    return run


def test_decode(bench, checkpoint):
    record = bench("decode", "--checkpoint", checkpoint, "--steps", 150, "--repeats", 1, "--draft-vocab", 20)
    for key in ("seconds_per_step", "share_of_limit", "verify_4_over_plain", "draft_over_plain", "commit_over_plain"):
        assert record[key] > 0, key
    # The trunk's matrices and the output matrix, once each: the embedding is looked up, the head not used.
    matrices = 4 * matrices_of(["trunk", "output"])
    assert matrices < record["bytes_per_step"] < 1.1 * matrices
    assert record["share_of_limit"] == pytest.approx(
        record["bytes_per_step"] / record["seconds_per_step"] / record["limit_bytes_per_second"]
    )
    assert record["draft_vocabulary"] == 20


@pytest.mark.slow
def test_drafts_that_stand_at_given_rates(bench, checkpoint):
    flags = ("--steps", 100, "--repeats", 1, "--acceptance", "0,0.5,1", "--num-draft-tokens", "1,3")
    record = bench("decode", "--checkpoint", checkpoint, *flags, "--new-tokens", 40)
    results = record["speculative"]
    assert [(r["rate"], r["num_draft_tokens"], r["way"]) for r in results] == [
        (rate, *size) for rate in (0, 0.5, 1) for size in ((1, "mtp_jax"), (3, "mtp_jax"), (1, "textbook"))
    ]
    assert all(r["identical"] for r in results)
    for result in results:
        if result["way"] == "mtp_jax":
            assert result["acceptance"] == pytest.approx(result["rate"], abs=0.15 * (0 < result["rate"] < 1))
            drafts = result["num_draft_tokens"]
            expected = {0: 1, 1: drafts + 1}.get(result["rate"])
            assert expected is None or result["tokens_per_round"] == pytest.approx(expected, rel=0.05)
    assert record["best"].keys() == {"0", "0.5", "1"}


def test_scripts_hold_their_rate_and_a_seed_gives_the_same():
    script = standing(0.52, 100, seed=3)
    assert script.sum() == 52
    np.testing.assert_array_equal(script, standing(0.52, 100, seed=3))
    assert (script != standing(0.52, 100, seed=4)).any()


@pytest.mark.slow
def test_the_head_whose_drafts_are_replaced_still_runs(checkpoint):
    generator = Generator.from_pretrained(checkpoint)
    settings = Settings(num_draft_tokens=2, draft_vocabulary=range(0, 60, 2))
    decoding = generator.decoding(settings, 1)
    carry = generator.programs.call(idle, batch=1, num_slots=32, num_logprobs=None)

    def flops(drafter):
        args = (decoding.rule, decoding.vocabulary, carry, np.int32(1), np.bool_(False))
        plan = Plan(num_drafts=2, drafter=drafter)
        program = decode.lower(generator.model, generator.programs.params, *args, plan=plan).compile()
        return program.cost_analysis()["flops"]

    def without_head(model, rule, vocabulary, carry, noise, num_drafts):
        drafts = scripted(model, rule, vocabulary, carry, noise, num_drafts)
        return drafts._replace(tokens=jax.numpy.zeros_like(drafts.tokens), head=carry.context.head)

    scripted = scripted_drafter(range(40), [standing(0.5, 30, 0)], CONFIG.vocab_size)
    head = flops(None)
    assert flops(scripted) >= head > 1.1 * flops(without_head)


@pytest.mark.slow
def test_decode_without_a_head_measures_the_rest(bench, call, tmp_path):
    model = MTPModel(replace(CONFIG, num_mtp_layers=0))
    save_checkpoint(tmp_path / "bare", model.config, init_params(model, jax.random.key(0)))
    record = bench("decode", "--checkpoint", tmp_path / "bare", "--steps", 100, "--repeats", 1)
    assert record["draft_over_plain"] is None
    assert record["verify_4_over_plain"] > 0
    status, _, err = call("benchmark", "decode", "--checkpoint", tmp_path / "bare", "--acceptance", "0.5")
    assert (status, err.count("\n")) == (2, 1)
    assert "has no MTP head" in err


def matrices_of(stages):
    """Values of the small model's matrices, written out."""
    width, delta, full = CONFIG.width, CONFIG.delta, CONFIG.attention
    keys, values = delta.num_k_heads * delta.head_k_dim, delta.num_v_heads * delta.head_v_dim
    attention = width * full.head_dim * (3 * full.num_heads + 2 * full.num_kv_heads)
    mlp = 3 * width * CONFIG.mlp_width
    delta_net = width * (2 * keys + 3 * values + 2 * delta.num_v_heads)
    sizes = {"trunk": delta_net + attention + 2 * mlp, "head": 2 * width**2 + attention + mlp, "output": width * 307}
    return sum(sizes[stage] for stage in stages)


def test_prefill(bench, checkpoint):
    record = bench("prefill", "--checkpoint", checkpoint, "--lengths", "48,16", "--repeats", 1)
    assert [result["length"] for result in record["lengths"]] == [48, 16]
    for result in record["lengths"]:
        length = result["length"]
        assert result["tokens_per_second"] == pytest.approx(length / result["seconds"])
        assert result["flops"] == 2 * (length * matrices_of(["trunk"]) + matrices_of(["output"]))
        scores = sum(CONFIG.attention.num_heads * CONFIG.attention.head_dim * 2 * (i + 1) for i in range(length))
        assert result["attention_flops"] == 2 * scores  # one layer has attention, and values take as much
        assert result["share_of_limit"] > 0
    assert record["tokens_per_second"] == record["lengths"][0]["tokens_per_second"]
    assert record["share_of_limit"] == record["lengths"][0]["share_of_limit"]


def test_the_rate_with_attention_is_shown_beside_that_of_weights(call, capsys, monkeypatch):
    from scripts.benchmarks import prefill  # with command-line modules, which `call` makes ready

    monkeypatch.setenv("COLUMNS", "120")
    result = {"length": 48, "seconds": 2e-6, "flops": 300_000, "attention_flops": 24_000, "tokens_per_second": 24e6}
    result |= {"limit_flops_per_second": 3e11, "share_of_limit": 0.5}
    prefill.show(result | {"dtype": "float32", "peer_dtype": None, "lengths": [result]})
    _, _, header, _, row, *_ = capsys.readouterr().out.splitlines()
    cells = dict(zip(*(map(str.strip, line.replace("┃", "│").split("│")) for line in (header, row)), strict=True))
    assert (cells["GFLOP/s"], cells["+ attention"], cells["limit"]) == ("150", "162", "300")


@pytest.mark.slow
def test_train(bench, checkpoint):
    record = bench("train", "--checkpoint", checkpoint, "--length", 24, "--repeats", 1)
    assert record["tokens_per_second"] == pytest.approx(24 / record["seconds"])
    assert record["flops"] == 6 * 24 * matrices_of(["trunk", "output"])
    assert record["mtp_flops"] == 6 * 24 * matrices_of(["trunk", "output", "head", "output"])
    assert record["share_of_limit"] > 0
    assert record["mtp_share_of_limit"] > 0
    assert record["peak_bytes"] > 2**20
    assert record["mtp_peak_bytes"] > 2**20


@pytest.mark.slow
def test_training_is_measured_with_the_losses_that_training_has(checkpoint):
    from scripts.benchmarks import train_side

    loss, gradients = train_side.main_loss(checkpoint, "float32", 24)()
    report, _ = train_side.mtp_loss(checkpoint, "float32", 24)()
    assert float(loss) == pytest.approx(float(report.main_loss), rel=1e-5)
    assert "mtp" not in gradients


@pytest.mark.slow
def test_products_make_all_that_they_count(checkpoint):
    checkpoint = load_checkpoint(checkpoint)
    stages = [(Stage.TRUNK, 11), (Stage.HEAD, 7), (Stage.OUTPUT, 5)]
    products = limits.Products.of(checkpoint.config, checkpoint.params, stages)
    for backward in (False, True):
        program, args = products.program(np.float32, backward)
        counted = jax.jit(program).lower(*args).compile().cost_analysis()["flops"]
        expected = limits.flops_of(checkpoint.config, stages) * (3 if backward else 1)
        assert expected <= counted < 1.02 * expected


@pytest.mark.slow
def test_delta_rule(bench, checkpoint):
    record = bench("delta-rule", "--checkpoint", checkpoint, "--lengths", "70,5", "--repeats", 1)
    assert record["heads"] == CONFIG.delta.num_v_heads
    for result in record["lengths"]:
        for passed in ("forward", "forward_and_backward"):
            assert result[passed].keys() == {"chunked", "recurrent"}
            assert min(result[passed].values()) > 0
        assert result["share_of_limit"] > 0


def test_the_delta_rules_that_are_timed_give_the_same(call):
    from scripts.benchmarks import delta_rule  # with command-line modules, which `call` makes ready

    inputs = delta_rule.random_inputs(CONFIG.delta, 70)
    (chunked, slopes), (recurrent, expected) = (
        [program(inputs) for program in delta_rule.programs(algorithm)] for algorithm in DeltaAlgorithm
    )
    np.testing.assert_allclose(chunked, recurrent, atol=1e-5)
    for name, slope in slopes.items():
        np.testing.assert_allclose(slope, expected[name], atol=1e-4, err_msg=name)


def test_load(bench, checkpoint):
    record = bench("load", "--checkpoint", checkpoint, "--repeats", 1)
    assert record["load_over_numpy"] == pytest.approx(1 / record["share_of_limit"])
    assert record["load_over_numpy"] > 0
    entries = json.loads((checkpoint / "model.safetensors").read_bytes()[8:].split(b"}}")[0] + b"}}")
    assert record["bytes"] == max(entry["data_offsets"][1] for entry in entries.values() if "data_offsets" in entry)


def test_numpy_converts_as_loading_does(call):
    from scripts.benchmarks import load

    values = np.random.default_rng(0).normal(size=100).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(load.converted(values.view(np.uint16), "BF16", "float32"), values.astype(np.float32))
    half = values.astype(np.float16)
    np.testing.assert_array_equal(load.converted(half, "F16", "float32"), half.astype(np.float32))


@pytest.mark.slow
def test_startup(bench, checkpoint):
    record = bench("startup", "--checkpoint", checkpoint, "--repeats", 1)
    assert record["seconds"] > record["limit_seconds"] > 0
    assert record["share_of_limit"] == pytest.approx(record["limit_seconds"] / record["seconds"])
    assert not record["compilation_cache"]  # as in all tests


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("decode", "--steps", 100),
        ("prefill", "--lengths", "16"),
        ("train", "--length", 16),
        ("delta-rule", "--lengths", "70"),
        ("load",),
        ("startup",),
    ],
    ids=lambda flags: flags[0],
)
def test_the_peer_is_measured_beside(bench, checkpoint, flags):
    pytest.importorskip("transformers", reason="the peer is absent: pip install '.[peer]'")
    record = bench(*flags, "--checkpoint", checkpoint, "--repeats", 1, "--vs", "transformers")
    assert "transformers" in record["versions"]
    keys = {
        "decode": ["peer_seconds_per_step", "ratio"],
        "prefill": ["peer_tokens_per_second", "ratio"],
        "train": ["peer_tokens_per_second", "peer_peak_bytes", "ratio", "mtp_ratio"],
        "delta-rule": [],
    }.get(flags[0], ["peer_seconds", "ratio"])
    assert all(record[key] > 0 for key in keys)
    if flags[0] == "delta-rule":
        assert record["lengths"][0]["forward"]["transformers"] > 0
        assert record["lengths"][0]["largest_difference"] < 1e-5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "MODE"),
        (["fly"], "invalid choice: 'fly'"),
        (["decode", "--shape", "9000b"], "--shape"),
        (["decode", "--checkpoint", "/nowhere"], "/nowhere"),
        (["decode", "--acceptance", "1.5"], "expected different rates from 0 to 1, such as 0.52,0.89, got '1.5'"),
        (["decode", "--acceptance", "0.5,0.5"], "expected different rates"),
        (["decode", "--acceptance", "0.5", "--num-draft-tokens", "0"], "expected different numbers of drafts"),
        (["decode", "--num-draft-tokens", "2"], "--num-draft-tokens goes with --acceptance"),
        (["decode", "--peer-dtype", "bfloat16"], "--peer-dtype goes with --vs transformers"),
        (["prefill", "--steps", "3"], "unrecognized arguments: --steps 3"),
        (["prefill", "--lengths", "16,16"], "expected different lengths"),
        (["prefill", "--lengths", "999999"], "--lengths 999999: that takes 1,000,000 positions"),
        (["train", "--length", "999999"], "--length 999999: that takes 999,999 positions"),
        (["decode", "--steps", "999999"], "--steps 999999: that takes"),
        (["decode", "--acceptance", "0.5", "--new-tokens", "999999"], "--new-tokens 999999: that takes"),
        (["delta-rule", "--lengths", "5,999999"], "--lengths 999999: that takes 999,999 positions"),
        (["delta-rule", "--shape", "glm-4.5-air"], "glm-4.5-air: expected a model with Gated DeltaNet layers"),
        (["train", "--shape", "397b-a17b", "--length", "999999"], "--length 999999: that takes 999,999 positions"),
        (
            ["decode", "--acceptance", "1", "--num-draft-tokens", "1,129"],
            "--num-draft-tokens: expected at most 128, got",
        ),
        (["delta-rule", "--dtype", "bfloat16"], "unrecognized arguments: --dtype bfloat16"),
        (["load", "--lengths", "5"], "unrecognized arguments: --lengths 5"),
        (["startup", "--peer-dtype", "bfloat16"], "unrecognized arguments"),
        (["train", "--length", "2"], "at least 3 tokens"),
        (["decode", "--repeats", "0"], "at least 1, got '0'"),
    ],
)
def test_a_mistake_in_measuring_is_one_line_and_status_2(call, flags, message):
    status, out, err = call("benchmark", *flags)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_the_peer_is_asked_for_before_anything_is_measured(call, checkpoint, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    status, _, err = call("benchmark", "train", "--checkpoint", checkpoint, "--vs", "transformers")
    assert status == 2
    assert "--vs transformers: torch not installed" in err.replace("transformers and ", "")


def test_a_lost_head_is_told_before_anything_is_measured(call, tmp_path, checkpoint):
    folder = tmp_path / "lost"
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: x for name, x in tensors.items() if "mtp" not in name}, folder / "model.safetensors")
    status, _, err = call("benchmark", "train", "--checkpoint", folder, "--length", 24)
    assert status == 2
    assert "missing: mtp." in err


@pytest.mark.skipif(sys.platform != "linux", reason="about /proc")
def test_the_peak_of_a_process_is_not_its_parents():
    parents = b"x" * (1 << 29)
    program = "from scripts.benchmarks.train_side import peak_bytes; print(peak_bytes('products'))"
    peak = int(
        subprocess.check_output([sys.executable, "-c", program], text=True, env=os.environ | {"PYTHONPATH": "."})
    )
    assert peak < len(parents)
