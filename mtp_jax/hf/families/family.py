"""What a family of published checkpoints is to this package: how it names things."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache

from mtp_jax.config import ModelConfig
from mtp_jax.hf.families.keys import Keys
from mtp_jax.hf.parameters import parameter_shapes
from mtp_jax.hf.rules import Rule, Slot, expanded

TEXT_PREFIX = "model."
MULTIMODAL_PREFIX = "model.language_model."


@dataclass(frozen=True)
class Family:
    """Models that are published in one way.

    Attributes:
      model_type: of a config.json that describes a language model.
      read: the model, from such an object.
      rules: the table for a model.
      head_layer: the number of the head's layer that owns the tensor of that name; None: it is not the head's. Where
        the layers share something, that is the first one's.
      repeats: of which tensor the one of that name may be a copy; None: of none.
      head_key: of config.json, says how many layers the head has; None: only the tensors do.
      multimodal_type: `model_type` of a config.json that keeps a language model in `text_config`; None: there is none.
      carried: how names begin of tensors that are no part of a language model.
      fused_trunk, fused_head: whether the released experts of a layer are one tensor. Both forms load.
    """

    model_type: str
    read: Callable[[Keys], ModelConfig]
    rules: "Callable[[ModelConfig, Naming], Iterable[Rule]]"
    head_layer: Callable[[ModelConfig, str], int | None]
    repeats: "Callable[[ModelConfig, Naming, str], str | None]"
    head_key: str | None
    multimodal_type: str | None = None
    carried: tuple[str, ...] = ()
    fused_trunk: bool = False
    fused_head: bool = False

    @property
    def model_types(self) -> tuple[str, ...]:
        """All that config.json may say."""
        return (self.model_type,) if self.multimodal_type is None else (self.multimodal_type, self.model_type)

    def is_head(self, config: ModelConfig, name: str) -> bool:
        """Whether a model's head owns the tensor of that name."""
        return self.head_layer(config, name) is not None

    def num_head_layers(self, config: ModelConfig, names: Iterable[str]) -> int:
        """How many of the head's layers own some of these tensors."""
        return len({self.head_layer(config, name) for name in names} - {None})

    def naming(self, config: ModelConfig, names: Collection[str]) -> "Naming":
        """How a checkpoint of that model names its tensors, seen from the names in its files."""
        head = {name for name in names if self.is_head(config, name)}
        multimodal = self.multimodal_type is not None and any(name.startswith(MULTIMODAL_PREFIX) for name in names)
        return Naming(
            self,
            MULTIMODAL_PREFIX if multimodal else TEXT_PREFIX,
            _are_fused([name for name in names if name not in head], self.fused_trunk),
            _are_fused(head, self.fused_head),
        )


@dataclass(frozen=True)
class Naming:
    """How a checkpoint names its tensors.

    Attributes:
      prefix: of the trunk's.
      fused_trunk, fused_head: whether all experts of a layer are one tensor.
    """

    family: Family
    prefix: str
    fused_trunk: bool
    fused_head: bool

    def copies(self, config: ModelConfig, names: Iterable[str]) -> dict[str, str]:
        """Of these tensors those that may repeat another, with that one's name."""
        repeated = {name: self.family.repeats(config, self, name) for name in names}
        return {name: original for name, original in repeated.items() if original is not None}


@lru_cache(maxsize=8)  # a table may have 75,000 entries
def slots(config: ModelConfig, naming: Naming) -> dict[str, Slot]:
    """What each published tensor of a model is to it, by published name."""
    return expanded(naming.family.rules(config, naming), parameter_shapes(config))


def _are_fused(names: Collection[str], default: bool) -> bool:
    experts = [name for name in names if ".mlp.experts." in name]
    return any(name.endswith(("gate_up_proj", "down_proj")) for name in experts) if experts else default
