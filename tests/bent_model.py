"""Small random models whose head is right about half of the time, without training."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax.config import AttentionConfig, DeltaNetConfig, LayerType, ModelConfig
from mtp_jax.hf import save_checkpoint
from mtp_jax.mtp import MTPModel, init_params
from mtp_jax.text import train_bpe

VOCAB = 61
LINEAR, FULL = LayerType.LINEAR, LayerType.FULL
CONFIG = ModelConfig(
    vocab_size=VOCAB,
    width=24,
    mlp_width=20,
    layer_types=(LINEAR, FULL),
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, rotary_dim=4, rope_theta=1e4),
    delta=DeltaNetConfig(num_v_heads=2, num_k_heads=1, head_k_dim=6, head_v_dim=10),
    tie_embeddings=False,
    max_position_embeddings=256,
)


def bent_params(model: MTPModel, seed: int, trunk_noise: float, head_noise: float) -> dict:
    """Random weights of a trunk that is nearly a table from token to next token, and a head that nearly knows it.

    With all blocks silent, hidden_t is the normed embedding of token t, and W maps it to the next token: a random
    table. A head whose projection passes the embedding half through then reads the same table one token further.
    The blocks' outputs come in again at `trunk_noise` and `head_noise`: the trunk leaves the table, and the head
    misses it.
    """
    params = jax.tree.map(np.array, init_params(model, jax.random.key(seed)))
    rng = np.random.default_rng(seed)
    vocab, width = model.config.vocab_size, model.config.width
    params["embed_tokens"]["embedding"] = rng.normal(size=(vocab, width)).astype(np.float32)
    params["lm_head"]["kernel"] = rng.normal(size=(width, vocab)).astype(np.float32)
    noise = rng.normal(size=(width, width)).astype(np.float32) * head_noise / width**0.5
    params["mtp"]["fc"]["kernel"] = np.concatenate([np.eye(width, dtype=np.float32), noise])
    for stack, scale in (("trunk", trunk_noise), ("mtp", head_noise)):
        for name, layer in params[stack].items():
            if name.startswith("layers_"):
                for part, output in (("linear_attn", "out_proj"), ("self_attn", "o_proj"), ("mlp", "down_proj")):
                    if part in layer:
                        layer[part][output]["kernel"] *= scale
    return jax.tree.map(jnp.asarray, params)


def write_checkpoint(folder: Path) -> None:
    """Saves a bent model with a tokenizer of 295 ids; the model has 307, the last of which have no token."""
    model = MTPModel(replace(CONFIG, vocab_size=307), jnp.dtype("float32"))
    save_checkpoint(folder, model.config, bent_params(model, seed=1, trunk_noise=0.8, head_noise=0.1))
    train_bpe(["def f(x):\n    return x\n"], 295).save(folder)
