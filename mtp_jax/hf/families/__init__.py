"""The families of published checkpoints: each is a reader of its config.json and a table of its tensors' names."""

from mtp_jax.hf.families.family import MULTIMODAL_PREFIX as MULTIMODAL_PREFIX
from mtp_jax.hf.families.family import TEXT_PREFIX as TEXT_PREFIX
from mtp_jax.hf.families.family import Family as Family
from mtp_jax.hf.families.family import Naming as Naming
from mtp_jax.hf.families.family import slots as slots
from mtp_jax.hf.families.glm4_moe import GLM4_MOE as GLM4_MOE
from mtp_jax.hf.families.qwen3_5 import QWEN3_5 as QWEN3_5
from mtp_jax.hf.families.qwen3_5 import QWEN3_5_MOE as QWEN3_5_MOE
from mtp_jax.hf.families.qwen3_next import QWEN3_NEXT as QWEN3_NEXT

FAMILIES = (QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, GLM4_MOE)
MODEL_TYPES = {model_type: family for family in FAMILIES for model_type in family.model_types}


def released_naming(model_type: str) -> Naming:
    """How released checkpoints of a `model_type` name their tensors."""
    family = MODEL_TYPES[model_type]
    prefix = MULTIMODAL_PREFIX if model_type == family.multimodal_type else TEXT_PREFIX
    return Naming(family, prefix, family.fused_trunk, family.fused_head)
