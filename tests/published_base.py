"""A small checkpoint in the published layout to start runs from, and settings for such runs."""

from dataclasses import replace

import pytest
import random_checkpoint
import safetensors
from random_checkpoint import BF16, GLM, MOE, NEXT, Variant, config_json, tensors, write

from mtp_jax.text import train_bpe

VOCAB = 320
BASE = Variant("base", 7, tied=False, dtype=BF16, prefix="model.language_model.", vision=True)
BASES = (
    BASE,
    replace(BASE, name="moe", family=MOE),
    Variant("next", 7, tied=False, dtype=BF16, kept=BF16, family=NEXT),
    Variant("glm", 7, tied=False, dtype=BF16, family=GLM, layers=2),
)
"""One of each family."""
OTHER_BASES = (
    replace(BASE, name="moe-fused", family=MOE, kept=BF16, split_head_experts=False),
    replace(BASE, name="moe-two", family=MOE, prefix="model.", vision=False, mtp_layers=2),
    Variant("glm-two", 7, tied=False, dtype=BF16, family=GLM, layers=2, mtp_layers=2, copies=False, qk_norm=False),
)
"""What else releases of a family have: the head's experts in one tensor, heads of several layers."""


def _of_bases(num_quick):
    bases = [
        pytest.param(variant, id=variant.name, marks=[] if n < num_quick else [pytest.mark.slow])
        for n, variant in enumerate((*BASES, *OTHER_BASES))
    ]
    return pytest.mark.parametrize("variant", bases, indirect=True, scope="module")


of_every_family = _of_bases(len(BASES))
"""Marks a test, whose fixture `variant` is then each of the bases: one of each family quickly, the others in the slow
run."""
of_every_family_slowly = _of_bases(1)
"""The same; quickly on the first family only."""


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SETTINGS = ("steps=2", "batch_size=2", "sequence_length=32", "log_every=1", "checkpoint_every=1", "keep_checkpoints=0")
SETTINGS += ("warmup_steps=0", "held_out=b.txt", "learning_rate=3e-2", "cross_entropy_chunk=64")
STILL = ("learning_rate=0", "steps=1")


def write_base(folder, monkeypatch, variant=BASE, tokenizer=True, declared=True):
    """Two shards with a tokenizer and other files beside them; a head that is not there may still be declared."""
    with monkeypatch.context() as patch:
        patch.setattr(random_checkpoint, "VOCAB", VOCAB)
        content = tensors(variant)
        names = list(content)
        config = config_json(variant)
        key = {GLM: "num_nextn_predict_layers", NEXT: None}.get(variant.family, "mtp_num_hidden_layers")
        if key:
            config.get("text_config", config)[key] = variant.mtp_layers if declared else 0
        write(folder, content, config, {SHARDS[0]: names[::2], SHARDS[1]: names[1::2]}, index=True)
    if tokenizer:
        train_bpe([], VOCAB - 3).save(folder)
    (folder / "preprocessor_config.json").write_text('{"size":  1}')
    return folder


def files_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stored(folder):
    """Type, shape and bytes of every tensor."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, value in safetensors.deserialize(path.read_bytes()):
            found[name] = (value["dtype"], tuple(value["shape"]), bytes(value["data"]))
    return dict(sorted(found.items()))
