"""Small random checkpoints in the published Qwen3.5 layout, from numpy alone and the same bytes everywhere.

Names and shapes are written out here a second time, on purpose: these files stand in for published ones, so they
must not come from the code under test. Weights are bent so that logits are far from flat and decays realistic.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
F16 = np.dtype(np.float16)
_NAMES = {BF16: "BF16", F32: "F32", F16: "F16", np.dtype(np.int64): "I64", np.dtype(np.uint8): "U8"}

WIDTH, MLP_WIDTH, VOCAB = 40, 72, 131
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
KEY_DIM, VALUE_DIM, CONV = 16, 24, 4
LAYERS = 4


@dataclass(frozen=True)
class Variant:
    """One checkpoint: `value_heads` over `key_heads` is the share of value heads a key head; `seed` fixes all."""

    name: str
    seed: int
    tied: bool = True
    key_heads: int = 2
    value_heads: int = 4
    dtype: np.dtype = F32
    prefix: str = "model."
    head: bool = True
    vision: bool = False


def config_json(variant: Variant) -> dict[str, Any]:
    """What the checkpoint's config.json says."""
    text = {
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "eos_token_id": 3,
        "full_attention_interval": 4,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "intermediate_size": MLP_WIDTH,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_conv_kernel_dim": CONV,
        "linear_key_head_dim": KEY_DIM,
        "linear_num_key_heads": variant.key_heads,
        "linear_num_value_heads": variant.value_heads,
        "linear_value_head_dim": VALUE_DIM,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 4096,
        "mtp_num_hidden_layers": int(variant.head),
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": variant.tied,
        "vocab_size": VOCAB,
    }
    if variant.prefix == "model.":
        return {"architectures": ["Qwen3_5ForCausalLM"], **text}
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": variant.tied,
        "vision_config": {"model_type": "qwen3_5_vision", "depth": 1},
    }


def shapes(variant: Variant) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors, in the order in which their values are drawn."""
    values = variant.value_heads * VALUE_DIM
    channels = 2 * variant.key_heads * KEY_DIM + values
    norms = {"input_layernorm.weight": (WIDTH,), "post_attention_layernorm.weight": (WIDTH,)}
    mlp = {
        "mlp.gate_proj.weight": (MLP_WIDTH, WIDTH),
        "mlp.up_proj.weight": (MLP_WIDTH, WIDTH),
        "mlp.down_proj.weight": (WIDTH, MLP_WIDTH),
    }
    linear = {
        "linear_attn.in_proj_qkv.weight": (channels, WIDTH),
        "linear_attn.in_proj_z.weight": (values, WIDTH),
        "linear_attn.in_proj_b.weight": (variant.value_heads, WIDTH),
        "linear_attn.in_proj_a.weight": (variant.value_heads, WIDTH),
        "linear_attn.conv1d.weight": (channels, 1, CONV),
        "linear_attn.A_log": (variant.value_heads,),
        "linear_attn.dt_bias": (variant.value_heads,),
        "linear_attn.norm.weight": (VALUE_DIM,),
        "linear_attn.out_proj.weight": (WIDTH, values),
    }
    full = {
        "self_attn.q_proj.weight": (2 * HEADS * HEAD_DIM, WIDTH),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, WIDTH),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, WIDTH),
        "self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_DIM),
        "self_attn.q_norm.weight": (HEAD_DIM,),
        "self_attn.k_norm.weight": (HEAD_DIM,),
    }
    result: dict[str, tuple[int, ...]] = {f"{variant.prefix}embed_tokens.weight": (VOCAB, WIDTH)}
    for n in range(LAYERS):
        mixer = full if n == LAYERS - 1 else linear
        result.update({f"{variant.prefix}layers.{n}.{key}": shape for key, shape in {**norms, **mixer, **mlp}.items()})
    result[f"{variant.prefix}norm.weight"] = (WIDTH,)
    if not variant.tied:
        result["lm_head.weight"] = (VOCAB, WIDTH)
    if variant.head:
        result["mtp.fc.weight"] = (WIDTH, 2 * WIDTH)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            result[f"mtp.{name}.weight"] = (WIDTH,)
        result.update({f"mtp.layers.0.{key}": shape for key, shape in {**norms, **full, **mlp}.items()})
    if variant.vision:
        result["model.visual.patch_embed.proj.weight"] = (8, 3, 2, 4, 4)
        result["model.visual.blocks.0.norm1.bias"] = (8,)
    return result


def tensors(variant: Variant) -> dict[str, np.ndarray]:
    """The checkpoint's tensors. A_log and linear_attn.norm are float32 as released, the rest is `dtype`.

    Only exactly rounded operations, on a generator whose stream numpy has frozen: the same bytes on any machine.
    """
    random = np.random.RandomState(variant.seed)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        uniform = random.random_sample(shape) * 2 - 1
        if name.endswith("A_log"):
            value = 1.4 + 1.4 * uniform  # decay rates from 1 to 16
        elif name.endswith("dt_bias"):
            value = -4 + 2 * uniform  # time steps from 0.002 to 0.13
        elif name.endswith("linear_attn.norm.weight"):
            value = 1 + 0.3 * uniform
        elif len(shape) == 1:
            value = 0.3 * uniform
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            value = 0.8 * uniform  # logits of about 3
        elif name.endswith("conv1d.weight"):
            value = 0.8 * uniform
        else:
            value = uniform * np.sqrt(3 / shape[1])
        kept = name.endswith(("A_log", "linear_attn.norm.weight"))
        return value.astype(np.float32).astype(F32 if kept else variant.dtype)

    return {name: draw(name, shape) for name, shape in shapes(variant).items()}


def file_bytes(content: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file with tensors in the order given."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name, value in content.items():
        offsets = [begin, begin + value.nbytes]
        header[name] = {"dtype": _NAMES[value.dtype], "shape": list(value.shape), "data_offsets": offsets}
        begin += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(value.tobytes() for value in content.values())


def write(
    folder: Path,
    content: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    files: Mapping[str, Iterable[str]] | None = None,
    index: bool = False,
) -> Path:
    """Writes a checkpoint folder; `files` says which tensors go where, by default all into model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    parts = {name: list(names) for name, names in (files or {"model.safetensors": content}).items()}
    for file, names in parts.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(file_bytes({name: content[name] for name in names}, {"format": "pt"}))
    if index:
        weight_map = {name: file for file, names in parts.items() for name in names}
        total = sum(value.nbytes for value in content.values())
        value = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(value))
    return folder


def write_variant(folder: Path, variant: Variant) -> Path:
    """Writes a variant as one file."""
    return write(folder, tensors(variant), config_json(variant))


def checkpoint_hash(folder: Path) -> str:
    """sha256 over the tensor files, in order of their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
