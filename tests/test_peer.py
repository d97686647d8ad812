"""Side by side with `transformers`, which must be installed (extra `peer`): `make peer`."""

import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens.variants import ALL, FAMILIES, NEW_TOKENS, TWO_LAYERS, VARIANTS, golden_path, prompt_ids
from published_base import BASES, SETTINGS, write_base
from random_checkpoint import BF16, DENSE, MOE, NEXT, Variant, config_json, tensors, write, write_variant

from infer.logits import all_logits
from mtp_jax.config import MoEConfig
from mtp_jax.errors import UserError
from mtp_jax.hf import config_from_json, graft_head, load_checkpoint, save_checkpoint
from mtp_jax.hf.parameters import flatten, parameter_shapes, unflatten
from mtp_jax.layers.router import balancing_loss, choose, routing
from mtp_jax.mtp import MTPModel
from train.checkpoint import load_for_export
from train.experiment import Experiment
from train.loop import train
from train.progress import Progress

transformers = pytest.importorskip("transformers", reason="the peer is absent: pip install '.[peer]'")
pytest.importorskip("torch", reason="torch is absent: pip install '.[peer]'")

pytestmark = [
    pytest.mark.peer,
    # The peer's own calls use its own deprecated names.
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
]


DENSE_ONES = (Variant("tied", 0), Variant("untied", 0, tied=False))
TYPES = {DENSE: "Qwen3_5", MOE: "Qwen3_5Moe"}


def by_variant(variants):
    return pytest.mark.parametrize("variant", variants, ids=lambda variant: variant.name)


@by_variant(ALL)
def test_the_goldens_are_what_the_peer_gives(variant):
    from goldens.make_goldens import golden

    ours = golden(variant)
    with np.load(golden_path(variant)) as file:
        theirs = dict(file)
    assert ours.keys() == theirs.keys()
    record, expected = (json.loads(str(values.pop("record"))) for values in (ours, theirs))
    gaps = {name: 0 for name in record if name.endswith("gap")}
    assert {**record, **gaps} == {**expected, **gaps}
    for name, value in theirs.items():
        # Another machine may add up in another order; in bfloat16 that shows in the last of 8 bits.
        tolerance = 0.2 if name.startswith("bfloat16/") else 5e-5
        np.testing.assert_allclose(ours[name], value, rtol=0, atol=tolerance, err_msg=name)


def test_the_rendered_texts_are_what_the_peer_gives():
    import published_text
    from goldens.make_text_goldens import FOLDER, PreTrainedTokenizerFast, rendered

    if not (published_text.TOKENIZER / "tokenizer.json").exists():
        pytest.skip("the whole published vocabulary is absent: python tests/published_text.py fetches it")
    peer = PreTrainedTokenizerFast(tokenizer_file=str(published_text.TOKENIZER / "tokenizer.json"))
    assert rendered(peer) == json.loads((FOLDER / "rendered.json").read_text())["rows"]


@by_variant([VARIANTS[0], VARIANTS[3], *FAMILIES])
def test_what_the_peer_saves_loads_here_without_a_head(tmp_path, variant):
    folder = write_variant(tmp_path / "in", variant)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model.save_pretrained(tmp_path / "saved")
    if variant.family != NEXT:  # whose config does not say that there should be a head
        with pytest.raises(UserError, match=rf"{variant.head_pattern.strip('^')}.*--trunk-only"):
            load_checkpoint(tmp_path / "saved")
    ours = load_checkpoint(tmp_path / "saved", trunk_only=True)
    source = load_checkpoint(folder, trunk_only=True)
    assert ours.config == source.config
    expected = flatten(source.params)
    for path, leaf in flatten(ours.params).items():
        # The peer keeps one type for the model but for routers, so what else was float32 in a bfloat16 file is rounded.
        rounds = variant.dtype == BF16 and "/gate/" not in path
        rounded = expected[path].astype(jnp.bfloat16).astype(leaf.dtype) if rounds else expected[path]
        np.testing.assert_array_equal(leaf, rounded, err_msg=path)


# Models trained from nothing are written as Qwen3.5, which others are not: they are refused.
@by_variant([*DENSE_ONES, *FAMILIES[:3]])
def test_a_model_of_ours_loads_in_the_peer(tmp_path, variant):
    from goldens.peer import Peer

    config = replace(config_from_json(config_json(variant)), num_mtp_layers=1)
    key = jax.random.key(1)
    leaves = {
        path: jax.random.normal(jax.random.fold_in(key, number), shape) * (0.3 if path.endswith("scale") else 0.15)
        for number, (path, shape) in enumerate(parameter_shapes(config).items())
    }
    save_checkpoint(tmp_path / "out", config, unflatten(leaves))
    _, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    ids = prompt_ids(variant, "65")
    assert_same_outputs(tmp_path / "out", ids, variant)
    assert Peer(tmp_path / "out", variant).greedy(ids, NEW_TOKENS)[0].shape == (1, NEW_TOKENS)


@by_variant([*FAMILIES, TWO_LAYERS[1]])
def test_what_was_changed_here_loads_in_the_peer(tmp_path, variant):
    checkpoint = load_checkpoint(write_variant(tmp_path / "in", variant))
    params = jax.tree.map(lambda leaf: leaf * jnp.asarray(1.125, leaf.dtype), checkpoint.params)
    save_checkpoint(tmp_path / "out", checkpoint.config, params, checkpoint.manifest)
    ids = prompt_ids(variant, "65")
    assert_same_outputs(tmp_path / "out", ids, variant)
    before = all_logits(MTPModel(checkpoint.config), checkpoint.params, ids)["main_logits"]
    after = all_logits(MTPModel(checkpoint.config), params, ids)["main_logits"]
    assert np.abs(before - after).max() > 0.1


@by_variant([*DENSE_ONES, Variant("moe", 0, tied=False, family=MOE)])
def test_a_multimodal_model_of_the_peer_loads_here_and_comes_back(tmp_path, variant):
    import torch

    text = {**config_json(variant), "mtp_num_hidden_layers": 0}
    del text["architectures"]
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 40}
    of_type = TYPES[variant.family]
    config = getattr(transformers, f"{of_type}Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=variant.tied
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{of_type}ForConditionalGeneration")(config).eval()
    model.save_pretrained(tmp_path / "in")
    checkpoint = load_checkpoint(tmp_path / "in")
    assert len(checkpoint.manifest.carried) > 10
    assert all(name.startswith("model.visual.") for name in checkpoint.manifest.carried)
    ids = prompt_ids(VARIANTS[0], "65")
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids)).logits.numpy()
    ours = all_logits(MTPModel(checkpoint.config), checkpoint.params, ids)["main_logits"]
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-4)
    save_checkpoint(tmp_path / "out", checkpoint.config, checkpoint.params, checkpoint.manifest)
    for path in (tmp_path / "in").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name


def assert_same_outputs(folder, ids, variant=VARIANTS[0]):
    """Trunk and head, ours and the peer's, from the same files in float32."""
    from goldens.peer import Peer

    checkpoint = load_checkpoint(folder)
    ours = all_logits(MTPModel(checkpoint.config), checkpoint.params, ids)
    theirs = Peer(folder, variant).outputs(ids)
    assert {"main_logits", "hidden", "mtp_logits", "chained_logits"} <= theirs.keys() & ours.keys()
    for name in theirs.keys() & ours.keys():
        # The peer drafts one token a layer if there are several, ours go on.
        value = ours[name][:, : theirs[name].shape[1]]
        np.testing.assert_allclose(value, theirs[name], rtol=0, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("adapters", [False, True], ids=["weights", "adapters"])
@by_variant([replace(variant, prefix="model.", vision=False) for variant in BASES])
def test_what_was_fine_tuned_loads_in_the_peer(tmp_path, monkeypatch, variant, adapters):
    base = write_base(tmp_path / "base", monkeypatch, variant)
    (tmp_path / "b.txt").write_text("held out")
    (tmp_path / "a.txt").write_text("def double(x):\n    return x + x\n" * 9)
    experiment = Experiment(data=(str(tmp_path / "a.txt"), str(tmp_path / "b.txt")), init=str(base))
    experiment = experiment.override([*SETTINGS, "lora_rank=4"] if adapters else SETTINGS)
    train(experiment, tmp_path / "run", Progress(quiet=True))
    learnt = load_for_export(tmp_path / "run")
    save_checkpoint(tmp_path / "out", learnt.config, learnt.params, learnt.manifest)
    ids = prompt_ids(VARIANTS[0], "65")
    assert_same_outputs(tmp_path / "out", ids, variant)
    before, after = (
        all_logits(MTPModel(learnt.config), load_checkpoint(folder).params, ids)["main_logits"]
        for folder in (base, tmp_path / "out")
    )
    assert np.abs(before - after).max() > 0.1


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "single"])
@by_variant([VARIANTS[0], *FAMILIES])
def test_a_head_that_was_put_back_is_found_by_the_peer(tmp_path, variant, sharded):
    write_variant(tmp_path / "base", variant)
    without = {
        name: value
        for name, value in tensors(replace(variant, seed=1)).items()
        if not re.search(variant.head_pattern, name)
    }
    names = list(without)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    write(tmp_path / "trunk", without, config_json(variant), files if sharded else None, index=sharded)
    graft_head(tmp_path / "trunk", tmp_path / "base", tmp_path / "out")
    assert_same_outputs(tmp_path / "out", prompt_ids(variant, "65"), variant)


def test_the_balancing_loss_is_the_peers():
    """Of one layer; of several ours is the mean of theirs, where the peer's counts all tokens of all layers as one."""
    import torch
    from transformers.models.qwen3_next.modeling_qwen3_next import load_balancing_loss_func

    config = MoEConfig(num_experts=7, experts_per_token=3, expert_width=4, shared_width=4)
    logits = np.random.default_rng(0).normal(size=(30, 7)).astype(np.float32) * 2
    counted = np.arange(30) % 15 < 11  # two rows of 15 tokens, the last four of each padding
    mask = torch.from_numpy(counted.reshape(2, 15).astype(np.int64))
    expected = load_balancing_loss_func((torch.from_numpy(logits),), 7, 3, mask)
    ours = balancing_loss(routing(choose(jnp.asarray(logits), None, config), jnp.asarray(counted)))
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
