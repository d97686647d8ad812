"""config.json <-> ModelConfig for Qwen3.5 dense.

Everything that changes the computation is either built or refused by name; nothing is guessed, except what the
format itself leaves out: values that the published configs never change (see `_get`'s defaults).
"""

import math
from collections.abc import Mapping
from typing import Any

from mtp_jax.config import AttentionConfig, DeltaNetConfig, LayerType, ModelConfig, interleaved
from mtp_jax.errors import UserError

MULTIMODAL = "qwen3_5"
TEXT = "qwen3_5_text"
SUPPORTED = (MULTIMODAL, TEXT)

MAX_INTEGER = 2**31 - 1
MAX_LAYERS = 4096
"""More than any model has, so that a broken config.json does not fill the memory."""

# Key, the values with which it means what is built here. Absent or null is always one of them.
_ONLY: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("attn_output_gate", (True,)),
    ("output_gate_type", ("swish",)),
    ("hidden_act", ("silu",)),
    ("attention_bias", (False,)),
    ("attention_dropout", (0,)),
    ("mtp_use_dedicated_embeddings", (False,)),
    ("quantization_config", ()),
    ("sliding_window", ()),
    ("use_sliding_window", (False,)),
    ("num_experts", (0,)),
    ("mlp_only_layers", ([],)),
    ("decoder_sparse_step", (0,)),
)


def config_from_json(values: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """The model that a config.json describes.

    Args:
      values: the file's object; `qwen3_5` nests the language model in `text_config`, `qwen3_5_text` is flat.
      where: the file, for error messages.

    Raises:
      UserError: if the model type is another, a key is missing, has a wrong type, or asks for what is not built;
        the message names the key.
    """
    model_type = values.get("model_type")
    if model_type is None and "mtp_weights" in values:
        raise UserError(
            f"{where}: these are the settings of a training run, not a model's config; write a checkpoint from it with "
            "export_checkpoint.py --workdir"
        )
    if model_type not in SUPPORTED:
        raise UserError(f"{where}: model_type must be one of {', '.join(SUPPORTED)}, got {model_type!r}")
    text = values
    if model_type == MULTIMODAL:
        text = values.get("text_config")
        if not isinstance(text, Mapping):
            raise UserError(f"{where}: {MULTIMODAL} keeps the language model in text_config, got {text!r}")
        inner = text.get("model_type", TEXT)
        if inner != TEXT:
            raise UserError(f"{where}: text_config.model_type must be {TEXT}, got {inner!r}")
        _refuse_unsupported({"quantization_config": values.get("quantization_config")}, where)
    _refuse_unsupported(text, where)
    num_layers = _integer(text, "num_hidden_layers", where)
    if num_layers > MAX_LAYERS:
        raise UserError(f"{where}: num_hidden_layers must be at most {MAX_LAYERS}, got {num_layers}")
    head_dim = _integer(text, "head_dim", where)
    theta, rotary_factor = _rotary(text, where)
    # Either level may say it; a wrong one cannot pass unseen, since the files then lack or repeat a matrix.
    tied = any(_get(level, "tie_word_embeddings", where, bool, False) for level in (values, text))
    num_mtp_layers = _integer(text, "mtp_num_hidden_layers", where, 0)
    if num_mtp_layers > 1:
        raise UserError(f"{where}: mtp_num_hidden_layers must be 0 or 1, got {num_mtp_layers}")
    layer_types = _layer_types(text, num_layers, where)
    try:
        return ModelConfig(
            vocab_size=_integer(text, "vocab_size", where),
            width=_integer(text, "hidden_size", where),
            mlp_width=_integer(text, "intermediate_size", where),
            layer_types=layer_types,
            attention=AttentionConfig(
                num_heads=_integer(text, "num_attention_heads", where),
                num_kv_heads=_integer(text, "num_key_value_heads", where),
                head_dim=head_dim,
                rotary_dim=int(head_dim * rotary_factor),
                rope_theta=theta,
            ),
            delta=DeltaNetConfig(
                num_v_heads=_integer(text, "linear_num_value_heads", where),
                num_k_heads=_integer(text, "linear_num_key_heads", where),
                head_k_dim=_integer(text, "linear_key_head_dim", where),
                head_v_dim=_integer(text, "linear_value_head_dim", where),
                conv_width=_integer(text, "linear_conv_kernel_dim", where),
            ),
            norm_eps=_number(text, "rms_norm_eps", where),
            tie_embeddings=tied,
            num_mtp_layers=num_mtp_layers,
            max_position_embeddings=_integer(text, "max_position_embeddings", where),
        )
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error


def config_to_json(config: ModelConfig, eos_token_id: int | None = None) -> dict[str, Any]:
    """The config.json of a model trained here: `qwen3_5_text`, which `transformers` 5.24 loads."""
    attention = config.attention
    # Published text configs have these keys whether or not a layer uses them.
    delta = config.delta or DeltaNetConfig(num_v_heads=1, num_k_heads=1, head_k_dim=1, head_v_dim=1)
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": TEXT,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "layer_types": [str(layer_type) for layer_type in config.layer_types],
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "attn_output_gate": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": attention.rope_theta,
            "partial_rotary_factor": _rotary_factor(attention),
        },
        "linear_num_value_heads": delta.num_v_heads,
        "linear_num_key_heads": delta.num_k_heads,
        "linear_key_head_dim": delta.head_k_dim,
        "linear_value_head_dim": delta.head_v_dim,
        "linear_conv_kernel_dim": delta.conv_width,
        "mamba_ssm_dtype": "float32",
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_embeddings,
        "mtp_num_hidden_layers": config.num_mtp_layers,
        "mtp_use_dedicated_embeddings": False,
        "eos_token_id": eos_token_id,
        "dtype": "bfloat16",
    }


def _rotary_factor(attention: AttentionConfig) -> float:
    """The share of a head that rotates; readers round head_dim times it down, so it may not be a hair too small."""
    factor = attention.rotary_dim / attention.head_dim
    exact = int(attention.head_dim * factor) == attention.rotary_dim
    return factor if exact else math.nextafter(factor, 1.0)


def _refuse_unsupported(values: Mapping[str, Any], where: str) -> None:
    for key, supported in _ONLY:
        value = values.get(key)
        if value is not None and value not in supported:
            expected = " or ".join(map(repr, supported)) or "nothing"
            raise UserError(f"{where}: {key}: only {expected} is supported, got {value!r}")


def _get(values: Mapping[str, Any], key: str, where: str, kind: type | tuple, default: Any = None) -> Any:
    value = values.get(key)
    if value is None:
        value = default
    if value is None:
        raise UserError(f"{where}: {key} is missing")
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if type(value) not in kinds:  # not isinstance: True is an int to Python
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise UserError(f"{where}: {key} must be {expected}, got {value!r}")
    return value


def _integer(values: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = _get(values, key, where, int, default)
    if not 0 <= value <= MAX_INTEGER:
        raise UserError(f"{where}: {key} must be between 0 and {MAX_INTEGER}, got {value}")
    return value


def _number(values: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    value = _get(values, key, where, (int, float), default)
    if not abs(value) < math.inf:  # JSON as Python reads it may hold NaN and Infinity
        raise UserError(f"{where}: {key} must be a finite number, got {value}")
    return float(value)


def _rotary(text: Mapping[str, Any], where: str) -> tuple[float, float]:
    """Base of the frequencies and the share of a head that rotates: nested in newer files, flat in older ones."""
    nested: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):  # the older name first: the newer one counts
        given = text.get(name)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise UserError(f"{where}: {name} must be an object, got {given!r}")
        for key in ("rope_type", "type"):
            if given.get(key, "default") != "default":
                raise UserError(f"{where}: {name}.{key}: only 'default' is supported, got {given[key]!r}")
        nested.update(given)
    both = {**text, **nested}
    if both.get("rope_theta") is None:
        raise UserError(f"{where}: rope_theta is missing, in rope_parameters or beside it; none is assumed")
    theta = _number(both, "rope_theta", where)
    factor = _number(both, "partial_rotary_factor", where, 0.25)
    if not 0 < factor <= 1:
        raise UserError(f"{where}: partial_rotary_factor must be in (0, 1], got {factor}")
    return theta, factor


def _layer_types(text: Mapping[str, Any], num_layers: int, where: str) -> tuple[LayerType, ...]:
    given = text.get("layer_types")
    if given is None:
        if text.get("full_attention_interval") is None:
            raise UserError(f"{where}: layer_types or full_attention_interval is missing")
        interval = _integer(text, "full_attention_interval", where)
        if interval == 0:
            raise UserError(f"{where}: full_attention_interval must be positive, got 0")
        return interleaved(num_layers, interval)
    known = [str(layer_type) for layer_type in LayerType]
    if not isinstance(given, list) or len(given) != num_layers or any(name not in known for name in given):
        raise UserError(
            f"{where}: layer_types must list num_hidden_layers {num_layers} of {', '.join(known)}, got {given!r}"
        )
    return tuple(map(LayerType, given))
