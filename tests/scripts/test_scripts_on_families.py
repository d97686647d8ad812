"""Command lines on a published checkpoint of each family, as someone who has one calls them."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from goldens.variants import FAMILIES, NEW_TOKENS, TWO_LAYERS, golden_path, kept, prompt_ids
from published_base import files_of, of_every_family, stored, write_base
from random_checkpoint import VOCAB, WIDTH, write_variant

from mtp_jax.hf import load_checkpoint
from mtp_jax.hf.parameters import flatten


@pytest.fixture(scope="module")
def variant(request):
    """Which checkpoint; the mark `of_every_family` makes it one of each family in turn."""
    return request.param


@pytest.fixture(scope="module")
def base(variant, tmp_path_factory):
    """Two shards with a tokenizer and other files beside them; treat it as read-only."""
    with pytest.MonkeyPatch.context() as patch:
        return write_base(tmp_path_factory.mktemp("bases") / "base", patch, variant)


@of_every_family
def test_its_parameters_are_described_as_its_files_hold_them(call, base, variant):
    status, out, err = call("describe", "--checkpoint", base, "--json")
    assert status == 0, err
    parameters = json.loads(out)["parameters"]
    copies = load_checkpoint(base).manifest.copies
    held = {
        name: int(np.prod(shape))
        for name, (_, shape, _) in stored(base).items()
        if name not in copies and "visual" not in name
    }
    assert parameters["total"] == sum(held.values())
    of_head = sum(number for name, number in held.items() if re.match(variant.head_pattern, name))
    assert sum(part["total"] for part in parameters["head"].values()) == of_head > 0


@of_every_family
def test_it_is_exported_as_it_was(call, base, tmp_path):
    status, out, err = call("export_checkpoint", "--checkpoint", base, "--out", tmp_path / "out")
    assert (status, out) == (0, ""), err
    assert files_of(tmp_path / "out") == files_of(base)


@of_every_family
def test_its_head_goes_onto_a_trunk_that_lost_its_own(call, base, variant, tmp_path, monkeypatch):
    status, _, err = call("export_checkpoint", "--checkpoint", base, "--head-only", tmp_path / "head.safetensors")
    assert status == 0, err
    trunk = write_base(tmp_path / "trunk", monkeypatch, replace(variant, head=False, seed=8))
    own = flatten(load_checkpoint(trunk, trunk_only=True).params)
    expected = own | {path: leaf for path, leaf in flatten(load_checkpoint(base).params).items() if "mtp" in path}
    for head in (base, tmp_path / "head.safetensors"):
        out = tmp_path / f"with_{head.stem}"
        status, stdout, err = call("graft_head", "--trunk", trunk, "--head", head, "--out", out)
        assert (status, stdout) == (0, ""), err
        grafted = flatten(load_checkpoint(out).params)
        assert grafted.keys() == expected.keys()
        for path, leaf in grafted.items():
            np.testing.assert_array_equal(leaf, expected[path], err_msg=path)


def of_every_golden(*quick):
    """Marks a test that is then run on each checkpoint whose numbers the peer gave; quickly on those named."""
    variants = [
        pytest.param(variant, id=variant.name, marks=[] if variant.name in quick else [pytest.mark.slow])
        for variant in (*FAMILIES, *TWO_LAYERS)
    ]
    return pytest.mark.parametrize("variant", variants)


@of_every_golden("moe_3_5", "glm_two_mtp_layers")
def test_the_peers_numbers_are_dumped(call, variant, tmp_path):
    folder = write_variant(tmp_path / "checkpoint", variant)
    ids = prompt_ids(variant, "pair")
    np.save(tmp_path / "ids.npy", ids)
    flags = ["--checkpoint", folder, "--ids", tmp_path / "ids.npy", "--out", tmp_path / "out.npz"]
    status, _, err = call("dump_logits", *flags)
    assert status == 0, err
    with np.load(tmp_path / "out.npz") as file:
        result = dict(file)
    (rows, time), last = ids.shape, {"hidden": WIDTH, "hidden_before_norm": WIDTH}
    tokens = {"mtp_logits": time - 1, "chained_logits": 4}
    assert {name: (value.shape, value.dtype.name) for name, value in result.items()} == {
        name: ((rows, tokens.get(name, time), last.get(name, VOCAB)), "float32")
        for name in ("main_logits", "hidden", "hidden_before_norm", "mtp_logits", "chained_logits")
    }
    with np.load(golden_path(variant)) as golden:
        for name, value in result.items():
            expected = golden[f"pair/{name}"]
            # The peer drafts one token a layer if there are several, ours go on.
            ours = value[:, : expected.shape[1]] if name == "chained_logits" else value[:, kept(value.shape[1])]
            np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-4, err_msg=name)


@of_every_golden("glm")
def test_the_peers_tokens_are_generated_with_drafts(call, variant, tmp_path):
    folder = write_variant(tmp_path / "checkpoint", variant)
    ids = ",".join(map(str, prompt_ids(variant, "pair")[1]))
    flags = ["--checkpoint", folder, "--prompt-ids", ids, "--max-new-tokens", NEW_TOKENS, "--ignore-eos", "--json"]
    status, out, err = call("generate", *flags)
    assert status == 0, err
    record = json.loads(out)
    with np.load(golden_path(variant)) as golden:
        assert record["tokens"] == golden["pair/greedy"][1].tolist()
    assert record["drafted"] >= NEW_TOKENS - 1
