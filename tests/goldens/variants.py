"""What the goldens cover: checkpoints, prompts, and which positions of a prompt are kept."""

from pathlib import Path

import numpy as np
from random_checkpoint import BF16, VOCAB, Variant

FOLDER = Path(__file__).parent
NEW_TOKENS = 24

VARIANTS = (
    Variant("tied_2_value_heads", seed=11, key_heads=2, value_heads=4),
    Variant("untied_1_value_head", seed=12, tied=False, key_heads=2, value_heads=2),
    Variant("untied_4_value_heads", seed=23, tied=False, key_heads=1, value_heads=4),
    Variant("tied_bfloat16", seed=14, dtype=BF16),
)
"""Named by value heads a key head. The last one has float32 A_log and gated norms, like the others."""

PROMPTS = {"1": (1, 1), "63": (1, 63), "64": (1, 64), "65": (1, 65), "130": (1, 130), "batch": (3, 65)}
"""Rows and tokens: around the chunk of 64, and over two of them."""

WITH_STATES = ("1", "63", "64", "65", "130")

_KEPT = (0, 1, 2, 7, 15, 16, 17, 31, 32, 47, 48, 61, 62, 63, 64, 65, 100, 127, 128, 129)


def prompt_ids(variant: Variant, name: str) -> np.ndarray:
    """The prompt's ids [B, T], the same on every machine."""
    return np.random.RandomState(variant.seed + PROMPTS[name][1]).randint(0, VOCAB, PROMPTS[name])


def kept(length: int) -> list[int]:
    """Positions of which a golden holds values."""
    return [position for position in _KEPT if position < length]


def golden_path(variant: Variant) -> Path:
    """Where a variant's golden lies."""
    return FOLDER / f"{variant.name}.npz"
