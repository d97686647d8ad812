"""Small random models whose head is right about half of the time, without training."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax.config import AttentionConfig, DeltaNetConfig, HeadReads, LayerType, ModelConfig, MoEConfig, RouterType
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
EXPERTS = MoEConfig(num_experts=6, experts_per_token=2, expert_width=10, shared_width=12)
GROUPED = replace(EXPERTS, shared_gate=False, router=RouterType.SIGMOID, scaling=1.5, num_groups=3, groups_per_token=2)
PLAIN = replace(CONFIG.attention, output_gate=False, qk_norm=False, bias=True)
FAMILIES = {
    "dense hybrid": CONFIG,
    "hybrid with experts": replace(CONFIG, mlp_width=0, moe=EXPERTS),
    "attention with experts": replace(
        CONFIG,
        layer_types=(FULL, FULL),
        attention=PLAIN,
        delta=None,
        moe=GROUPED,
        num_dense_layers=1,
        zero_centred_norms=False,
    ),
    "two head layers": replace(CONFIG, num_mtp_layers=2, mtp_layers_share=False),
    "head reads before the norm": replace(CONFIG, head_reads=HeadReads.BEFORE_NORM),
}
"""What decoding does is tested on each of these; Qwen3-Next computes as the hybrid with experts does."""


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
    for name in params["mtp"]:
        if name.startswith("fc"):  # one, or one of each layer
            params["mtp"][name]["kernel"] = np.concatenate([np.eye(width, dtype=np.float32), noise])
    outputs = ("out_proj", "o_proj", "down_proj")

    def scaled(path: tuple, leaf: np.ndarray) -> np.ndarray:
        names = [entry.key for entry in path]
        noise = {"trunk": trunk_noise, "mtp": head_noise}.get(names[0], 1.0)
        return leaf * np.float32(noise if set(outputs) & set(names) else 1.0)

    return jax.tree.map(jnp.asarray, jax.tree_util.tree_map_with_path(scaled, params))


def write_checkpoint(folder: Path) -> None:
    """Saves a bent model with a tokenizer of 295 ids; the model has 307, the last of which have no token."""
    model = MTPModel(replace(CONFIG, vocab_size=307), jnp.dtype("float32"))
    save_checkpoint(folder, model.config, bent_params(model, seed=1, trunk_noise=0.8, head_noise=0.1))
    train_bpe(["def f(x):\n    return x\n"], 295).save(folder)
