"""A model that recites a text: greedy decoding gives one token after the other, for tests of what text does."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import numpy as np
from bent_model import CONFIG, bent_params

from infer.generator import Generator
from mtp_jax.mtp import MTPModel
from mtp_jax.text import Tokenizer, train_bpe

WIDTH = 48  # of the model: a text may have so many tokens, all different
VOCAB = 307


@cache
def byte_tokenizer() -> Tokenizer:
    """One token a byte, and special tokens."""
    return train_bpe([], 289)


def recite(tokens: Sequence[int], end_ids: Sequence[int] = ()) -> Generator:
    """After each token comes the next, and after the last the first. The head knows it too: all drafts stand.

    Args:
      tokens: all different, since the next token depends on the last one alone.
    """
    assert len(set(tokens)) == len(tokens) <= WIDTH
    model = MTPModel(replace(CONFIG, width=WIDTH, vocab_size=VOCAB), jnp.dtype("float32"))
    params = bent_params(model, seed=0, trunk_noise=0.0, head_noise=0.0)
    embedding, kernel = np.zeros((VOCAB, WIDTH), np.float32), np.zeros((WIDTH, VOCAB), np.float32)
    for i, token in enumerate(tokens):
        embedding[token, i] = 1
        kernel[i, tokens[(i + 1) % len(tokens)]] = 1
    params["embed_tokens"]["embedding"], params["lm_head"]["kernel"] = jnp.asarray(embedding), jnp.asarray(kernel)
    return Generator(model, params, byte_tokenizer(), end_ids)
