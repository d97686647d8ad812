"""Keys of a config.json: read with their types checked, and what several families say in the same words.

Everything that changes the computation is either built or refused by name; nothing is guessed, except what the
format itself leaves out: values that the published configs never change (the defaults given where a key is read).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtp_jax.config import AttentionConfig, DeltaNetConfig, HeadReads, LayerType, interleaved
from mtp_jax.errors import UserError

MAX_INTEGER = 2**31 - 1
MAX_LAYERS = MAX_EXPERTS = 4096
MAX_HEAD_LAYERS = 64
"""More than any model has, so that a broken config.json does not fill the memory."""

HEAD_READS = "mtp_head_reads"
"""Not a published key: which hidden state the head reads, where that is not the one after the norm."""

_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

# What no family here may ask for: the values with which a key means what is built. Absent or null is always one.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0,),
    "mtp_use_dedicated_embeddings": (False,),
    "quantization_config": (),
    "sliding_window": (),
    "use_sliding_window": (False,),
}


@dataclass(frozen=True)
class Keys:
    """An object of a config.json; whatever is wrong with a key is an error that names the file and the key."""

    values: Mapping[str, Any]
    where: str

    def error(self, message: str) -> UserError:
        """To be raised: what is wrong."""
        return UserError(f"{self.where}: {message}")

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """A value of that type; the default, if there is one, where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{key} is missing")
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if type(value) not in kinds:  # not isinstance: True is an int to Python
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise self.error(f"{key} must be {expected}, got {value!r}")
        return value

    def integer(self, key: str, default: int | None = None, at_least: int = 1, at_most: int = MAX_INTEGER) -> int:
        """A count."""
        value = self.get(key, int, default)
        if not at_least <= value <= at_most:
            raise self.error(f"{key} must be between {at_least} and {at_most}, got {value}")
        return value

    def multiple(self, key: str, of: str) -> int:
        """A count that another one divides."""
        value, divisor = self.integer(key), self.integer(of)
        if value % divisor:
            raise self.error(f"{key} must be a multiple of {of} {divisor}, got {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0. It is computed with in float32, where it must be neither 0 nor infinite."""
        value = self.get(key, (int, float), default)
        if not _LEAST <= value <= _MOST:  # JSON as Python reads it may also hold NaN
            raise self.error(f"{key} must be a positive number that float32 holds, got {value}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return self.get(key, bool, default)

    def only(self, supported: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuses, by name, other values of these keys; absent or null is fine."""
        for key, values in supported.items():
            value = self.values.get(key)
            if value is not None and value not in values:
                expected = " or ".join(map(repr, values)) or "nothing"
                raise self.error(f"{key}: only {expected} is supported, got {value!r}")


def common(keys: Keys) -> dict[str, Any]:
    """Fields of `ModelConfig` that all families give in the same words."""
    keys.only(_ONLY)
    reads = keys.get(HEAD_READS, str, str(HeadReads.AFTER_NORM))
    known = [str(kind) for kind in HeadReads]
    if reads not in known:
        raise keys.error(f"{HEAD_READS} must be one of {', '.join(known)}, got {reads!r}")
    return {
        "vocab_size": keys.integer("vocab_size"),
        "width": keys.integer("hidden_size"),
        "norm_eps": keys.number("rms_norm_eps"),
        "tie_embeddings": keys.flag("tie_word_embeddings", False),
        "max_position_embeddings": keys.integer("max_position_embeddings"),
        "head_reads": HeadReads(reads),
    }


def attention(keys: Keys, rotary_factor: float, **kind: bool) -> AttentionConfig:
    """Full attention.

    Args:
      rotary_factor: the share of a head that rotates, where the config does not say.
      kind: what else it has (`output_gate`, `qk_norm`, `bias`).
    """
    head_dim = keys.integer("head_dim")
    theta, factor = _rotary(keys, rotary_factor)
    rotary_dim = int(head_dim * factor)
    if rotary_dim % 2:
        raise keys.error(
            f"partial_rotary_factor must leave an even number of head_dim {head_dim} channels, got {factor}, "
            f"which leaves {rotary_dim}"
        )
    return AttentionConfig(
        num_heads=keys.multiple("num_attention_heads", "num_key_value_heads"),
        num_kv_heads=keys.integer("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=theta,
        **kind,
    )


def delta_net(keys: Keys) -> DeltaNetConfig:
    """Gated DeltaNet."""
    return DeltaNetConfig(
        num_v_heads=keys.multiple("linear_num_value_heads", "linear_num_key_heads"),
        num_k_heads=keys.integer("linear_num_key_heads"),
        head_k_dim=keys.integer("linear_key_head_dim"),
        head_v_dim=keys.integer("linear_value_head_dim"),
        conv_width=keys.integer("linear_conv_kernel_dim"),
    )


def layer_types(keys: Keys, default_interval: int | None = None) -> tuple[LayerType, ...]:
    """One type a layer: from `layer_types`, else every so-manieth layer is full attention."""
    num_layers = keys.integer("num_hidden_layers", at_most=MAX_LAYERS)
    if keys.values.get("layer_types") is None:
        if default_interval is None and keys.values.get("full_attention_interval") is None:
            raise keys.error("layer_types or full_attention_interval is missing")
        return interleaved(num_layers, keys.integer("full_attention_interval", default_interval))
    return tuple(map(LayerType, _one_a_layer(keys, "layer_types", num_layers, [str(kind) for kind in LayerType])))


def num_dense_layers(keys: Keys, default: int) -> int:
    """How many layers come before those with experts, by `mlp_layer_types` if it is given."""
    num_layers = keys.integer("num_hidden_layers", at_most=MAX_LAYERS)
    if keys.values.get("mlp_layer_types") is None:
        return default
    kinds = _one_a_layer(keys, "mlp_layer_types", num_layers, ["dense", "sparse"])
    dense = kinds.count("dense")
    if "dense" in kinds[dense:]:
        raise keys.error(f"mlp_layer_types: dense layers must come first, got {kinds!r}")
    return dense


def _one_a_layer(keys: Keys, key: str, num_layers: int, known: list[str]) -> list[str]:
    given = keys.values[key]
    if not isinstance(given, list) or len(given) != num_layers or any(name not in known for name in given):
        raise keys.error(f"{key} must list num_hidden_layers {num_layers} of {', '.join(known)}, got {given!r}")
    return given


def _rotary(keys: Keys, default_factor: float) -> tuple[float, float]:
    """Base of the frequencies and the share of a head that rotates: nested in newer files, flat in older ones."""
    nested: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):  # the older name first: the newer one counts
        given = keys.values.get(name)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise keys.error(f"{name} must be an object, got {given!r}")
        for key in ("rope_type", "type"):
            if given.get(key, "default") != "default":
                raise keys.error(f"{name}.{key}: only 'default' is supported, got {given[key]!r}")
        nested.update(given)
    both = Keys({**keys.values, **nested}, keys.where)
    if both.values.get("rope_theta") is None:
        raise keys.error("rope_theta is missing, in rope_parameters or beside it; none is assumed")
    theta = both.number("rope_theta")
    factor = both.number("partial_rotary_factor", default_factor)
    if factor > 1:
        raise keys.error(f"partial_rotary_factor must be at most 1, got {factor}")
    return theta, factor
