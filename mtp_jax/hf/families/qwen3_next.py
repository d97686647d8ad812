"""Qwen3-Next: DeltaNet's input projections are fused by key head, all experts single, and config.json says nothing
of a head."""

from collections.abc import Iterable

from mtp_jax.config import ModelConfig
from mtp_jax.hf.families.blocks import repeats_embedding
from mtp_jax.hf.families.family import Family, Naming
from mtp_jax.hf.families.keys import Keys
from mtp_jax.hf.families.qwen3_5 import head_layer, qwen_experts, qwen_model, qwen_rules
from mtp_jax.hf.layouts import RowsByHead
from mtp_jax.hf.rules import Piece, Rule


def _read(keys: Keys) -> ModelConfig:
    moe = qwen_experts(keys, normalise=keys.flag("norm_topk_prob", True))
    return qwen_model(keys, moe=moe, num_mtp_layers=0, default_interval=4)


def _rules(config: ModelConfig, naming: Naming) -> Iterable[Rule]:
    delta = config.delta
    if delta is None:
        return qwen_rules(config, naming, ())
    share = delta.num_v_heads // delta.num_k_heads  # value heads of a key head
    keys, values = delta.head_k_dim, share * delta.head_v_dim

    def fused(name: str, parameters: tuple[str, ...], rows: tuple[tuple[int, ...], ...]) -> Rule:
        pieces = tuple(Piece(f"linear_attn/{parameter}/kernel") for parameter in parameters)
        return Rule(f"linear_attn.{name}.weight", pieces, RowsByHead(delta.num_k_heads, rows))

    projections = (
        fused("in_proj_qkvz", ("in_proj_qkv", "in_proj_z"), ((keys, keys, values), (values,))),
        fused("in_proj_ba", ("in_proj_b", "in_proj_a"), ((share,), (share,))),
    )
    return qwen_rules(config, naming, projections)


QWEN3_NEXT = Family(
    model_type="qwen3_next",
    read=_read,
    rules=_rules,
    head_layer=head_layer,
    repeats=repeats_embedding,
    head_key=None,
)
