"""The trunk's layers, from embeddings to the residual stream that the final norm reads."""

from collections.abc import Sequence

from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mtp_jax.config import ModelConfig
from mtp_jax.documents import Documents
from mtp_jax.layers.block import Block, block_class
from mtp_jax.layers.norm import RMSNorm
from mtp_jax.state import State, Trail


class Backbone(nn.Module):
    """Blocks one after another, and the final norm. Layers are unrolled: a scan over stacked weights copies them."""

    config: ModelConfig
    dtype: DTypeLike
    remat: str = "none"

    def setup(self) -> None:
        block = block_class(self.remat)
        self.layers = [block(self.config, kind, self.dtype) for kind in self.config.layer_types]
        self.norm = RMSNorm(self.config.norm_eps)

    def __call__(self, x: Float[Array, "B T D"], docs: Documents) -> Float[Array, "B T D"]:
        """Training; the result is before the final norm."""
        for layer in self.layers:
            x = layer(x, docs)
        return x

    def extend(
        self, x: Float[Array, "B T D"], state: State, lengths: Int[Array, " B"]
    ) -> tuple[Float[Array, "B T D"], State]:
        """Keeps the first `lengths` tokens of each row; the result is after the final norm."""
        x, state = extend_layers(self.layers, x, state, lengths)
        return self.norm(x), state

    def probe(self, x: Float[Array, "B T D"], state: State) -> tuple[Float[Array, "B T D"], Trail]:
        """Leaves the state alone; the result is after the final norm."""
        trails = []
        for layer, layer_state in zip(self.layers, state.layers, strict=True):
            x, trail = layer.probe(x, layer_state, state.length)
            trails.append(trail)
        return self.norm(x), Trail(tuple(trails))


def extend_layers(
    layers: Sequence[Block], x: Float[Array, "B T D"], state: State, lengths: Int[Array, " B"]
) -> tuple[Float[Array, "B T D"], State]:
    """Runs blocks over T tokens and moves their state forward by `lengths`."""
    states = []
    for layer, layer_state in zip(layers, state.layers, strict=True):
        x, layer_state = layer.extend(x, layer_state, state.length, lengths)
        states.append(layer_state)
    return x, State(tuple(states), state.length + lengths)
