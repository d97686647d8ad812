"""A small checkpoint in the published layout to start runs from, and settings for such runs."""

import random_checkpoint
import safetensors
from random_checkpoint import BF16, Variant, config_json, tensors, write

from mtp_jax.text import train_bpe

VOCAB = 320
BASE = Variant("base", 7, tied=False, dtype=BF16, prefix="model.language_model.", vision=True)
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
        config.get("text_config", config)["mtp_num_hidden_layers"] = int(declared)
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
