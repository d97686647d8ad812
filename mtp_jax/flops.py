"""Floating-point operations of a model's products, for each token.

A product of a token with a matrix of n values takes 2 n. So a pass takes, with `active` from `mtp_jax.sizes`,

    2 sum of active values of all matrices
    + 4 H K S                                  each attention layer: scores and values over S slots
    + H (6 K V + C (6 K + 4 V) + 3/4 C^2)      each DeltaNet layer: memory; pairs within a chunk of C; their inverse

Everything that is no product (norms, activations, softmax, the short convolution, gates) is left out: a few percent at
the released sizes. `tests/mtp_jax/test_flops.py` compares with what XLA counts in compiled programs.
"""

from functools import lru_cache
from typing import NamedTuple

from mtp_jax.config import DeltaNetConfig, LayerType, ModelConfig
from mtp_jax.layers.delta_rule import CHUNK
from mtp_jax.sizes import Stage, parameters


class PassFlops(NamedTuple):
    """What one token takes in each part of a model."""

    trunk: int  # all its layers
    head: int  # one of its layers, with the projection; 0 without a head
    output: int  # one product with the output matrix


def pass_flops(config: ModelConfig, slots: int, chunk: int) -> PassFlops:
    """A token that attends to so many slots, among `chunk` tokens that DeltaNet reads at once."""
    trunk, head, output = (product_flops(config)[stage] for stage in (Stage.TRUNK, Stage.HEAD, Stage.OUTPUT))
    attends = attention_flops(config, slots)
    trunk += config.layer_types.count(LayerType.FULL) * attends
    if config.delta is not None:  # GLM has no such layers
        trunk += config.layer_types.count(LayerType.LINEAR) * _delta_rule(config.delta, chunk)
    return PassFlops(trunk, head + attends if config.num_mtp_layers else 0, output)


def attention_flops(config: ModelConfig, slots: int) -> int:
    """Of one attention layer: scores and values of a token over so many slots, or of several over their sum."""
    return 4 * config.attention.num_heads * config.attention.head_dim * slots


class TokenFlops(NamedTuple):
    """What one token takes, by what is done with it. Without a head its part is 0."""

    decode: int  # a plain step; verifying J drafts takes J + 1 of these
    draft: int  # one layer of the head, with its logits
    prefill: int  # of the trunk, the mean over a prompt of `context` tokens; logits of the last token only
    prefill_head: int  # all layers of the head, reading along
    train: int  # forward and backward, without the MTP loss
    train_mtp: int  # what the MTP loss at depth 1 adds


def token_flops(config: ModelConfig, context: int) -> TokenFlops:
    """Operations for each token at a context of so many tokens.

    Decoding attends to all of them, and a prompt's tokens to half of them in the mean. In training each token's scores
    are made over the whole row of `context` tokens and masked afterwards, and a backward pass takes two forward passes.
    """
    decode = pass_flops(config, context, chunk=1)
    prefill = pass_flops(config, (context + 1) // 2, chunk=CHUNK)
    train = pass_flops(config, context, chunk=CHUNK)
    drafts = config.num_mtp_layers > 0
    return TokenFlops(
        decode=decode.trunk + decode.output,
        draft=(decode.head + decode.output) * drafts,
        prefill=prefill.trunk,
        prefill_head=prefill.head * config.num_mtp_layers,
        train=3 * (train.trunk + train.output),
        train_mtp=3 * (train.head + train.output) * drafts,
    )


@lru_cache
def product_flops(config: ModelConfig) -> dict[Stage, int]:
    """Of the products of one token with matrices, by part of the model; not those of attention and the delta rule."""
    flops = dict.fromkeys(Stage, 0)
    for parameter in parameters(config):
        if parameter.is_matrix and parameter.stage:
            flops[parameter.stage] += 2 * parameter.active
    return flops


def _delta_rule(config: DeltaNetConfig, chunk: int) -> int:
    """The products of `mtp_jax.layers.delta_rule`, for one token of one layer."""
    k, v = config.head_k_dim, config.head_v_dim
    memory = 3 * 2 * k * v  # read by queries and by keys, written
    pairs = chunk * (6 * k + 4 * v)  # k k, q k, inverse k; inverse v, scores u
    return config.num_v_heads * (memory + pairs + 3 * chunk**2 // 4)
