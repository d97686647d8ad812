"""Small random checkpoints in the published layouts, from numpy alone and the same bytes everywhere.

Names and shapes are written out here a second time, on purpose: these files stand in for published ones, so they
must not come from the code under test. Weights are bent so that logits are far from flat and decays realistic.
Widths differ from each other where the format lets them, so that a swapped axis shows.
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
EXPERTS, EXPERTS_PER_TOKEN, EXPERT_WIDTH, SHARED_WIDTH = 6, 2, 28, 20
GLM_EXPERTS, GLM_EXPERTS_PER_TOKEN = 8, 3

DENSE, MOE, NEXT, GLM = "qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe"
"""Families, by the `model_type` of their published configs."""

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Variant:
    """One checkpoint: `value_heads` over `key_heads` is the share of value heads a key head; `seed` fixes all.

    Attributes:
      dtype: type of all tensors but those that a release keeps apart.
      kept: type of A_log and of DeltaNet's gated norm; float32 in Qwen3.5's releases, not in Qwen3.6's.
      head: whether there are MTP layers.
      mtp_layers: how many, if there are.
      split_head_experts: Qwen3.5-MoE: the head's experts are stored one by one (3.5), not fused (3.6).
      normalise: config key `norm_topk_prob`, where the family has it.
      layers: trunk layers; GLM only, whose MTP layer is numbered after them.
      dense_layers: GLM's first layers without experts.
      qk_norm, copies, groups, scaling, shared_experts: GLM's norms of queries and keys, its MTP layer's copies of
        embedding and output matrix, groups of experts (n_group, topk_group), factor on the experts' weights, and
        width of the shared expert in experts.
    """

    name: str
    seed: int
    tied: bool = True
    key_heads: int = 2
    value_heads: int = 4
    dtype: np.dtype = F32
    prefix: str = "model."
    head: bool = True
    vision: bool = False
    family: str = DENSE
    kept: np.dtype = F32
    mtp_layers: int = 1
    split_head_experts: bool = True
    normalise: bool = True
    layers: int = LAYERS
    dense_layers: int = 1
    qk_norm: bool = True
    copies: bool = True
    groups: tuple[int, int] = (1, 1)
    scaling: float = 1.0
    shared_experts: int = 1

    @property
    def num_mtp_layers(self) -> int:
        """MTP layers that the checkpoint has."""
        return self.mtp_layers if self.head else 0

    @property
    def head_pattern(self) -> str:
        """A regular expression that finds the head's tensors among the names."""
        if self.family != GLM:
            return r"^mtp\."
        return rf"^model\.layers\.({'|'.join(str(self.layers + n) for n in range(self.mtp_layers))})\."


def config_json(variant: Variant) -> dict[str, Any]:
    """What the checkpoint's config.json says: the keys of the family's releases."""
    common = {
        "attention_dropout": 0.0,
        "eos_token_id": 3,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "max_position_embeddings": 4096,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "tie_word_embeddings": variant.tied,
        "vocab_size": VOCAB,
    }
    if variant.family == GLM:
        return {"architectures": ["Glm4MoeForCausalLM"], "model_type": GLM, **common, **_glm_config(variant)}
    common |= {
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": CONV,
        "linear_key_head_dim": KEY_DIM,
        "linear_num_key_heads": variant.key_heads,
        "linear_num_value_heads": variant.value_heads,
        "linear_value_head_dim": VALUE_DIM,
        "num_hidden_layers": LAYERS,
        "rms_norm_eps": 1e-6,
    }
    experts = {
        "moe_intermediate_size": EXPERT_WIDTH,
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": SHARED_WIDTH,
    }
    if variant.family == NEXT:
        return {"architectures": ["Qwen3NextForCausalLM"], "model_type": NEXT, **common, **experts} | {
            "decoder_sparse_step": 1,
            "intermediate_size": MLP_WIDTH,  # of layers without experts, of which there are none
            "mlp_only_layers": [],
            "norm_topk_prob": variant.normalise,
            "partial_rotary_factor": 0.25,
            "rope_scaling": None,
            "rope_theta": 10000000,
            "use_sliding_window": False,
        }
    text = {"model_type": f"{variant.family}_text", **common} | {
        "attention_bias": False,
        "attn_output_gate": True,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": variant.num_mtp_layers,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
    }
    text |= {"intermediate_size": MLP_WIDTH} if variant.family == DENSE else {"mlp_only_layers": [], **experts}
    classes = {DENSE: "Qwen3_5", MOE: "Qwen3_5Moe"}[variant.family]
    if variant.prefix == "model.":
        return {"architectures": [f"{classes}ForCausalLM"], **text}
    return {
        "architectures": [f"{classes}ForConditionalGeneration"],
        "model_type": variant.family,
        "text_config": text,
        "tie_word_embeddings": variant.tied,
        "vision_config": {"model_type": f"{variant.family}_vision", "depth": 1},
    }


def _glm_config(variant: Variant) -> dict[str, Any]:
    return {
        "attention_bias": True,
        "first_k_dense_replace": variant.dense_layers,
        "intermediate_size": MLP_WIDTH,
        "moe_intermediate_size": EXPERT_WIDTH,
        "n_group": variant.groups[0],
        "n_routed_experts": GLM_EXPERTS,
        "n_shared_experts": variant.shared_experts,
        "norm_topk_prob": variant.normalise,
        "num_experts_per_tok": GLM_EXPERTS_PER_TOKEN,
        "num_hidden_layers": variant.layers,
        "num_nextn_predict_layers": variant.num_mtp_layers,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": variant.scaling,
        "topk_group": variant.groups[1],
        "use_qk_norm": variant.qk_norm,
    }


def shapes(variant: Variant) -> Shapes:
    """Names and shapes of all tensors, in the order in which their values are drawn."""
    result: Shapes = {f"{variant.prefix}embed_tokens.weight": (VOCAB, WIDTH)}
    if variant.family == GLM:
        for n in range(variant.layers):
            result.update(_under(f"model.layers.{n}.", _glm_block(variant, dense=n < variant.dense_layers)))
    else:
        mlp = _mlp("mlp.", MLP_WIDTH) if variant.family == DENSE else _qwen_moe(split=variant.family == NEXT)
        for n in range(LAYERS):
            mixer = _attention(gate=True) if n == LAYERS - 1 else _delta_net(variant)
            result.update(_under(f"{variant.prefix}layers.{n}.", {**_norms(), **mixer, **mlp}))
    result[f"{variant.prefix}norm.weight"] = (WIDTH,)
    if not variant.tied:
        result["lm_head.weight"] = (VOCAB, WIDTH)
    if variant.head:
        result.update(_glm_head(variant) if variant.family == GLM else _qwen_head(variant))
    if variant.vision:
        result["model.visual.patch_embed.proj.weight"] = (8, 3, 2, 4, 4)
        result["model.visual.blocks.0.norm1.bias"] = (8,)
    return result


def _under(prefix: str, names: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in names.items()}


def _norms() -> Shapes:
    return {"input_layernorm.weight": (WIDTH,), "post_attention_layernorm.weight": (WIDTH,)}


def _mlp(prefix: str, width: int) -> Shapes:
    result: Shapes = {f"{prefix}{name}_proj.weight": (width, WIDTH) for name in ("gate", "up")}
    return result | {f"{prefix}down_proj.weight": (WIDTH, width)}


def _split_experts(number: int) -> Shapes:
    return {name: shape for n in range(number) for name, shape in _mlp(f"mlp.experts.{n}.", EXPERT_WIDTH).items()}


def _qwen_moe(split: bool) -> Shapes:
    fused: Shapes = {
        "mlp.experts.gate_up_proj": (EXPERTS, 2 * EXPERT_WIDTH, WIDTH),
        "mlp.experts.down_proj": (EXPERTS, WIDTH, EXPERT_WIDTH),
    }
    return {
        "mlp.gate.weight": (EXPERTS, WIDTH),
        **(_split_experts(EXPERTS) if split else fused),
        **_mlp("mlp.shared_expert.", SHARED_WIDTH),
        "mlp.shared_expert_gate.weight": (1, WIDTH),
    }


def _attention(gate: bool) -> Shapes:
    return {
        "self_attn.q_proj.weight": ((2 if gate else 1) * HEADS * HEAD_DIM, WIDTH),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, WIDTH),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, WIDTH),
        "self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_DIM),
        "self_attn.q_norm.weight": (HEAD_DIM,),
        "self_attn.k_norm.weight": (HEAD_DIM,),
    }


def _delta_net(variant: Variant) -> Shapes:
    values = variant.value_heads * VALUE_DIM
    channels = 2 * variant.key_heads * KEY_DIM + values
    fused: Shapes = {
        "in_proj_qkvz.weight": (channels + values, WIDTH),
        "in_proj_ba.weight": (2 * variant.value_heads, WIDTH),
    }
    apart: Shapes = {
        "in_proj_qkv.weight": (channels, WIDTH),
        "in_proj_z.weight": (values, WIDTH),
        "in_proj_b.weight": (variant.value_heads, WIDTH),
        "in_proj_a.weight": (variant.value_heads, WIDTH),
    }
    rest: Shapes = {
        "conv1d.weight": (channels, 1, CONV),
        "A_log": (variant.value_heads,),
        "dt_bias": (variant.value_heads,),
        "norm.weight": (VALUE_DIM,),
        "out_proj.weight": (WIDTH, values),
    }
    return _under("linear_attn.", {**(fused if variant.family == NEXT else apart), **rest})


def _qwen_head(variant: Variant) -> Shapes:
    result: Shapes = {"mtp.fc.weight": (WIDTH, 2 * WIDTH)}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        result[f"mtp.{name}.weight"] = (WIDTH,)
    mlp = _mlp("mlp.", MLP_WIDTH) if variant.family == DENSE else _qwen_moe(variant.split_head_experts)
    for n in range(variant.mtp_layers):
        result.update(_under(f"mtp.layers.{n}.", {**_norms(), **_attention(gate=True), **mlp}))
    return result


def _glm_block(variant: Variant, dense: bool) -> Shapes:
    attention = _attention(gate=False)
    if not variant.qk_norm:
        attention = {name: shape for name, shape in attention.items() if "_norm" not in name}
    for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        attention[f"self_attn.{name}_proj.bias"] = (heads * HEAD_DIM,)
    moe: Shapes = {
        "mlp.gate.weight": (GLM_EXPERTS, WIDTH),
        "mlp.gate.e_score_correction_bias": (GLM_EXPERTS,),
        **_split_experts(GLM_EXPERTS),
        **_mlp("mlp.shared_experts.", variant.shared_experts * EXPERT_WIDTH),
    }
    return {**_norms(), **attention, **(_mlp("mlp.", MLP_WIDTH) if dense else moe)}


def _glm_head(variant: Variant) -> Shapes:
    own: Shapes = {"enorm.weight": (WIDTH,), "hnorm.weight": (WIDTH,), "shared_head.norm.weight": (WIDTH,)}
    own["eh_proj.weight"] = (WIDTH, 2 * WIDTH)
    if variant.copies:
        own |= {"embed_tokens.weight": (VOCAB, WIDTH), "shared_head.head.weight": (VOCAB, WIDTH)}
    block = {**_glm_block(variant, dense=False), **own}
    depths = range(variant.layers, variant.layers + variant.mtp_layers)
    return {name: shape for n in depths for name, shape in _under(f"model.layers.{n}.", block).items()}


def tensors(variant: Variant) -> dict[str, np.ndarray]:
    """The checkpoint's tensors. A_log, linear_attn.norm and a router's bias have types of their own, as released.

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
            plain = variant.family == GLM and name.endswith("norm.weight")
            value = 0.3 * uniform + (1 if plain else 0)
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            value = 0.8 * uniform  # logits of about 3
        elif name.endswith("conv1d.weight"):
            value = 0.8 * uniform
        else:
            value = uniform * np.sqrt(3 / shape[-1])
        return value.astype(np.float32).astype(_dtype(variant, name))

    result: dict[str, np.ndarray] = {}
    for name, shape in shapes(variant).items():
        if name.endswith("shared_head.head.weight"):
            result[name] = result["model.embed_tokens.weight" if variant.tied else "lm_head.weight"]
        elif name.endswith("embed_tokens.weight") and result:
            result[name] = result["model.embed_tokens.weight"]
        else:
            result[name] = draw(name, shape)
    return result


def _dtype(variant: Variant, name: str) -> np.dtype:
    if name.endswith("e_score_correction_bias"):
        return F32
    return variant.kept if name.endswith(("A_log", "linear_attn.norm.weight")) else variant.dtype


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
