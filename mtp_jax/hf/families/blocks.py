"""Rules for the parts that families name alike. A published module and ours mostly have the same name."""

from collections.abc import Callable, Iterable, Iterator

from mtp_jax.config import AttentionConfig, LayerType, ModelConfig, MoEConfig, RouterType
from mtp_jax.hf.families.family import Naming
from mtp_jax.hf.layouts import Convolution, Rows
from mtp_jax.hf.rules import Piece, Rule, inside, kernel, scale, whole

OUTPUT_MATRIX = "lm_head.weight"

NORMS = tuple(scale(name, name) for name in ("input_layernorm", "post_attention_layernorm"))

DELTA_NET = (
    Rule("linear_attn.conv1d.weight", (Piece("linear_attn/conv1d/kernel"),), Convolution()),
    whole("linear_attn.A_log", "linear_attn/A_log"),
    whole("linear_attn.dt_bias", "linear_attn/dt_bias"),
    scale("linear_attn.norm", "linear_attn/norm"),
    kernel("linear_attn.out_proj", "linear_attn/out_proj"),
)
"""Gated DeltaNet without its input projections."""

_SWIGLU = ("gate_proj", "up_proj", "down_proj")


def trunk(config: ModelConfig, naming: Naming, block: Callable[[LayerType, int], Iterable[Rule]]) -> Iterator[Rule]:
    """Everything but the head; `block` gives a layer's rules from its type and its number."""
    tied = config.tie_embeddings
    embedding = kernel("embed_tokens", "lm_head") if tied else whole("embed_tokens.weight", "embed_tokens/embedding")
    yield from inside([embedding], naming.prefix, "")
    for n, layer_type in enumerate(config.layer_types):
        yield from inside(block(layer_type, n), f"{naming.prefix}layers.{n}.", f"trunk/layers_{n}/")
    yield from inside([scale("norm", "norm")], naming.prefix, "trunk/")
    if not tied:
        yield kernel("lm_head", "lm_head")


def repeats_embedding(config: ModelConfig, naming: Naming, name: str) -> str | None:
    """A tied checkpoint may repeat the embedding as its output matrix."""
    return f"{naming.prefix}embed_tokens.weight" if config.tie_embeddings and name == OUTPUT_MATRIX else None


def attention(config: AttentionConfig) -> Iterator[Rule]:
    """Full attention."""
    names = [f"{name}_proj" for name in "qkv"]
    for name in (*names, "o_proj"):
        yield kernel(f"self_attn.{name}", f"self_attn/{name}")
    if config.bias:
        for name in names:
            yield whole(f"self_attn.{name}.bias", f"self_attn/{name}/bias")
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield scale(f"self_attn.{name}", f"self_attn/{name}")


def feed_forward(moe: MoEConfig | None, fused: bool, shared: str) -> Iterator[Rule]:
    """A dense MLP, or a mixture of experts.

    Args:
      fused: all experts of the layer are one tensor, gate and up projection together.
      shared: published name of the expert that all tokens use.
    """
    if moe is None:
        yield from _swiglu("mlp", "mlp")
        return
    yield kernel("mlp.gate", "mlp/gate")
    if moe.router is RouterType.SIGMOID:
        yield whole("mlp.gate.e_score_correction_bias", "mlp/gate/bias")
    yield from _fused_experts() if fused else _split_experts(moe.num_experts)
    yield from _swiglu(f"mlp.{shared}", "mlp/shared_expert")
    if moe.shared_gate:
        yield kernel("mlp.shared_expert_gate", "mlp/shared_expert_gate")


def _swiglu(published: str, path: str) -> Iterator[Rule]:
    for name in _SWIGLU:
        yield kernel(f"{published}.{name}", f"{path}/{name}")


def _fused_experts() -> Iterator[Rule]:
    gate, up, down = (Piece(f"mlp/experts/{name}") for name in _SWIGLU)
    yield Rule("mlp.experts.gate_up_proj", (gate, up), Rows(2))
    yield Rule("mlp.experts.down_proj", (down,), Rows())


def _split_experts(num_experts: int) -> Iterator[Rule]:
    for n in range(num_experts):
        for name in _SWIGLU:
            yield Rule(f"mlp.experts.{n}.{name}.weight", (Piece(f"mlp/experts/{name}", n),), Rows())
