"""The tensors of released checkpoints, written down from their tables: what presets and rules are held against.

Nothing here is taken from the package, so that a slip there does not repeat itself here.
"""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

Tensors = Iterator[tuple[str, tuple[int, ...]]]


class Shape(NamedTuple):
    """A line of the table. Experts: how many, of which a token uses, and the width of each."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    value_heads: int = 0
    mlp: int = 0
    experts: tuple[int, int, int] = (0, 0, 0)
    tied: bool = False
    vocab: int = 248320
    dense_layers: int = 0
    qk_norm: bool = True

    @property
    def expert_width(self) -> int:
        return self.experts[2]


SHAPES = {
    "qwen3.5-0.8b": Shape(1024, 24, 8, 2, 16, 3584, tied=True),
    "qwen3.5-2b": Shape(2048, 24, 8, 2, 16, 6144, tied=True),
    "qwen3.5-4b": Shape(2560, 32, 16, 4, 32, 9216, tied=True),
    "qwen3.5-9b": Shape(4096, 32, 16, 4, 32, 12288),
    "qwen3.5-27b": Shape(5120, 64, 24, 4, 48, 17408),
    "qwen3.5-35b-a3b": Shape(2048, 40, 16, 2, 32, experts=(256, 8, 512)),
    "qwen3.5-122b-a10b": Shape(3072, 48, 32, 2, 64, experts=(256, 8, 1024)),
    "qwen3.5-397b-a17b": Shape(4096, 60, 32, 2, 64, experts=(512, 10, 1024)),
    "qwen3-next-80b-a3b": Shape(2048, 48, 16, 2, 32, experts=(512, 10, 512), vocab=151936),
    "glm-4.5": Shape(5120, 92, 96, 8, 0, 12288, (160, 8, 1536), vocab=151552, dense_layers=3),
    "glm-4.5-air": Shape(4096, 46, 96, 8, 0, 10944, (128, 8, 1408), vocab=151552, dense_layers=1, qk_norm=False),
}

# Billions of parameters: trunk with embeddings, then the head apart, as far as they are known.
BILLIONS = {
    "qwen3.5-0.8b": ("0.752", "0.020452864"),
    "qwen3.5-2b": ("1.882", "0.0608"),
    "qwen3.5-4b": ("4.206", "0.1206"),
    "qwen3.5-9b": ("8.954", "0.243"),
    "qwen3.5-27b": ("26.896", "0.425"),
    "qwen3.5-35b-a3b": ("34.66", "0.845"),
    "qwen3.5-122b-a10b": ("122.1", None),
    "qwen3.5-397b-a17b": ("396.3", None),
    "qwen3-next-80b-a3b": ("79.67", None),
}


def published(name: str) -> dict[str, tuple[int, ...]]:
    """All tensors of a released checkpoint but those of a vision tower, with their shapes."""
    return dict((_glm if name.startswith("glm") else _qwen)(name, SHAPES[name]))


def num_parameters(name: str) -> tuple[int, int]:
    """Of the trunk, then of the head. What repeats another tensor is counted once."""
    sizes = {tensor: prod(shape) for tensor, shape in published(name).items() if tensor not in aliases(name)}
    in_head = sum(size for tensor, size in sizes.items() if tensor.startswith(head_prefix(name)))
    return sum(sizes.values()) - in_head, in_head


def num_active(name: str) -> int:
    """Parameters that one token uses, the head's included: of the embedding a row, of the routed experts a few."""
    shape = SHAPES[name]
    total = sum(num_parameters(name))
    if not shape.tied:
        total -= (shape.vocab - 1) * shape.width
    experts, chosen, hidden = shape.experts
    layers = shape.layers - shape.dense_layers + 1 if experts else 0
    return total - layers * (experts - chosen) * 3 * shape.width * hidden


def head_prefix(name: str) -> str:
    """What the names of the head's tensors begin with."""
    return f"model.layers.{SHAPES[name].layers}." if name.startswith("glm") else "mtp."


def aliases(name: str) -> set[str]:
    """Tensors that repeat another."""
    repeated = ("embed_tokens.weight", "shared_head.head.weight") if name.startswith("glm") else ()
    return {head_prefix(name) + tensor for tensor in repeated}


def _qwen(name: str, shape: Shape) -> Tensors:
    is_next = name.startswith("qwen3-next")
    prefix = "model." if is_next else "model.language_model."
    width, vocab = shape.width, shape.vocab

    def block(prefix: str, attends: bool, split_experts: bool) -> Tensors:
        yield from _norms(prefix, width)
        if attends:
            yield from _attention(f"{prefix}self_attn.", shape, head_dim=256, gated=True)
        else:
            yield from _delta_net(f"{prefix}linear_attn.", shape, fused=is_next)
        if shape.mlp:
            yield from _mlp(f"{prefix}mlp.", width, shape.mlp)
            return
        yield f"{prefix}mlp.gate.weight", (shape.experts[0], width)
        yield from _experts(f"{prefix}mlp.experts.", shape, split_experts)
        yield from _mlp(f"{prefix}mlp.shared_expert.", width, shape.expert_width)
        yield f"{prefix}mlp.shared_expert_gate.weight", (1, width)

    yield f"{prefix}embed_tokens.weight", (vocab, width)
    yield f"{prefix}norm.weight", (width,)
    if not shape.tied:
        yield "lm_head.weight", (vocab, width)
    for n in range(shape.layers):
        yield from block(f"{prefix}layers.{n}.", n % 4 == 3, split_experts=is_next)
    yield "mtp.fc.weight", (width, 2 * width)
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        yield f"mtp.{norm}.weight", (width,)
    yield from block("mtp.layers.0.", True, split_experts=True)


def _glm(name: str, shape: Shape) -> Tensors:
    width, vocab = shape.width, shape.vocab
    yield "model.embed_tokens.weight", (vocab, width)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (vocab, width)
    for n in range(shape.layers + 1):
        prefix = f"model.layers.{n}."
        yield from _norms(prefix, width)
        yield from _attention(f"{prefix}self_attn.", shape, head_dim=128, gated=False)
        for projection, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            yield f"{prefix}self_attn.{projection}_proj.bias", (heads * 128,)
        if n < shape.dense_layers:
            yield from _mlp(f"{prefix}mlp.", width, shape.mlp)
            continue
        yield f"{prefix}mlp.gate.weight", (shape.experts[0], width)
        yield f"{prefix}mlp.gate.e_score_correction_bias", (shape.experts[0],)
        yield from _experts(f"{prefix}mlp.experts.", shape, split=True)
        yield from _mlp(f"{prefix}mlp.shared_experts.", width, shape.expert_width)
    head = head_prefix(name)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        yield f"{head}{norm}.weight", (width,)
    yield f"{head}eh_proj.weight", (width, 2 * width)
    yield f"{head}embed_tokens.weight", (vocab, width)
    yield f"{head}shared_head.head.weight", (vocab, width)


def _norms(prefix: str, width: int) -> Tensors:
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}{norm}.weight", (width,)


def _attention(prefix: str, shape: Shape, head_dim: int, gated: bool) -> Tensors:
    yield f"{prefix}q_proj.weight", (shape.heads * head_dim * (2 if gated else 1), shape.width)
    for projection in ("k_proj", "v_proj"):
        yield f"{prefix}{projection}.weight", (shape.kv_heads * head_dim, shape.width)
    yield f"{prefix}o_proj.weight", (shape.width, shape.heads * head_dim)
    if shape.qk_norm:
        for norm in ("q_norm", "k_norm"):
            yield f"{prefix}{norm}.weight", (head_dim,)


def _delta_net(prefix: str, shape: Shape, fused: bool) -> Tensors:
    heads, keys, values = shape.value_heads, 16 * 128, shape.value_heads * 128
    if fused:
        yield f"{prefix}in_proj_qkvz.weight", (2 * keys + 2 * values, shape.width)
        yield f"{prefix}in_proj_ba.weight", (2 * heads, shape.width)
    else:
        yield f"{prefix}in_proj_qkv.weight", (2 * keys + values, shape.width)
        yield f"{prefix}in_proj_z.weight", (values, shape.width)
        yield f"{prefix}in_proj_b.weight", (heads, shape.width)
        yield f"{prefix}in_proj_a.weight", (heads, shape.width)
    yield f"{prefix}conv1d.weight", (2 * keys + values, 1, 4)
    yield f"{prefix}A_log", (heads,)
    yield f"{prefix}dt_bias", (heads,)
    yield f"{prefix}norm.weight", (128,)
    yield f"{prefix}out_proj.weight", (shape.width, values)


def _mlp(prefix: str, width: int, hidden: int) -> Tensors:
    yield f"{prefix}gate_proj.weight", (hidden, width)
    yield f"{prefix}up_proj.weight", (hidden, width)
    yield f"{prefix}down_proj.weight", (width, hidden)


def _experts(prefix: str, shape: Shape, split: bool) -> Tensors:
    count, _, hidden = shape.experts
    if split:
        for expert in range(count):
            yield from _mlp(f"{prefix}{expert}.", shape.width, hidden)
    else:
        yield f"{prefix}gate_up_proj", (count, 2 * hidden, shape.width)
        yield f"{prefix}down_proj", (count, shape.width, hidden)
