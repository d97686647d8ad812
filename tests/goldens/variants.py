"""What the goldens cover: checkpoints, prompts, and which positions of a prompt are kept."""

from pathlib import Path

import numpy as np
from random_checkpoint import BF16, DENSE, GLM, MOE, NEXT, VOCAB, Variant

FOLDER = Path(__file__).parent
NEW_TOKENS = 24

VARIANTS = (
    Variant("tied_2_value_heads", seed=11, key_heads=2, value_heads=4),
    Variant("untied_1_value_head", seed=12, tied=False, key_heads=2, value_heads=2),
    Variant("untied_4_value_heads", seed=23, tied=False, key_heads=1, value_heads=4),
    Variant("tied_bfloat16", seed=14, dtype=BF16),
)
"""Dense, named by value heads a key head. The last one has float32 A_log and gated norms, like the others."""

FAMILIES = (
    Variant("moe_3_5", 31, False, family=MOE, prefix="model.language_model.", dtype=BF16),
    Variant("moe_3_6", 32, False, family=MOE, split_head_experts=False),
    Variant("next", 43, False, family=NEXT, dtype=BF16, kept=BF16),
    Variant("next_not_normalised", 34, False, family=NEXT, key_heads=1, value_heads=3, normalise=False),
    Variant("glm", 35, False, family=GLM, layers=3, groups=(4, 2), scaling=2.5),
    Variant("glm_air", 45, False, family=GLM, layers=2, qk_norm=False, copies=False, shared_experts=2, dtype=BF16),
)
"""The other families, each once in the types of its releases."""

TWO_LAYERS = (
    Variant("two_mtp_layers", 37, family=DENSE, mtp_layers=2),
    Variant("glm_two_mtp_layers", 41, False, family=GLM, layers=2, mtp_layers=2, copies=False),
)
"""Heads of two MTP layers."""

ALL = VARIANTS + FAMILIES + TWO_LAYERS
SMALL = FAMILIES + TWO_LAYERS

PROMPTS = {"1": (1, 1), "63": (1, 63), "64": (1, 64), "65": (1, 65), "130": (1, 130), "batch": (3, 65), "pair": (2, 17)}
"""Rows and tokens: around the chunk of 64, and over two of them."""

_KEPT = (0, 1, 2, 7, 15, 16, 17, 31, 32, 47, 48, 61, 62, 63, 64, 65, 100, 127, 128, 129)


def prompts(variant: Variant) -> tuple[str, ...]:
    """Names of a variant's prompts: fewer for the other families, since chunks do the same to them."""
    return ("1", "65", "pair") if variant in SMALL else ("1", "63", "64", "65", "130", "batch")


def has_states(variant: Variant, name: str) -> bool:
    """Whether a variant's golden holds the recurrent states after a prompt."""
    return name == "65" if variant in SMALL else name != "batch"


def has_bfloat16(variant: Variant, name: str) -> bool:
    """Whether a variant's golden also holds what the peer computes in bfloat16 at a prompt."""
    return variant.dtype == BF16 and (name == "65" or variant not in SMALL)


def prompt_ids(variant: Variant, name: str) -> np.ndarray:
    """The prompt's ids [B, T], the same on every machine."""
    return np.random.RandomState(variant.seed + PROMPTS[name][1]).randint(0, VOCAB, PROMPTS[name])


def kept(length: int) -> list[int]:
    """Positions of which a golden holds values."""
    return [position for position in _KEPT if position < length]


def golden_path(variant: Variant) -> Path:
    """Where a variant's golden lies."""
    return FOLDER / f"{variant.name}.npz"
