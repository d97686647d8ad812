"""The trunk's layers, from embeddings to the residual stream that the final norm reads."""

from collections.abc import Sequence

from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mtp_jax.config import ModelConfig
from mtp_jax.documents import Documents
from mtp_jax.layers.block import Block, block_class
from mtp_jax.layers.norm import LastNorm
from mtp_jax.layers.router import Routing
from mtp_jax.state import State, Trail


class Backbone(nn.Module):
    """Blocks one after another, and the final norm. Layers are unrolled: a scan over stacked weights copies them."""

    config: ModelConfig
    dtype: DTypeLike
    remat: str = "none"

    def setup(self) -> None:
        block = block_class(self.remat)
        config = self.config
        self.layers = [
            block(config, kind, config.layer_moe(n), self.dtype) for n, kind in enumerate(config.layer_types)
        ]
        self.norm = LastNorm(config.norm_eps, config.zero_centred_norms, config.head_reads)

    def __call__(
        self, x: Float[Array, "B T D"], docs: Documents
    ) -> tuple[Float[Array, "B T D"], tuple[Routing | None, ...]]:
        """Training; the result is before the final norm. Also how each layer spread tokens over its experts."""
        routings = []
        for layer in self.layers:
            x, routing = layer(x, docs)
            routings.append(routing)
        return x, tuple(routings)

    def extend(
        self, x: Float[Array, "B T D"], state: State, lengths: Int[Array, " B"]
    ) -> tuple[Float[Array, "B T D"], State]:
        """Keeps the first `lengths` tokens of each row; the result is what the head reads."""
        x, state = extend_layers(self.layers, x, state, lengths)
        return self.norm.hidden(x), state

    def probe(self, x: Float[Array, "B T D"], state: State) -> tuple[Float[Array, "B T D"], Trail]:
        """Leaves the state alone; the result is what the head reads."""
        trails = []
        for layer, layer_state in zip(self.layers, state.layers, strict=True):
            x, trail = layer.probe(x, layer_state, state.length)
            trails.append(trail)
        return self.norm.hidden(x), Trail(tuple(trails))


def extend_layers(
    layers: Sequence[Block], x: Float[Array, "B T D"], state: State, lengths: Int[Array, " B"]
) -> tuple[Float[Array, "B T D"], State]:
    """Runs blocks over T tokens and moves their state forward by `lengths`."""
    states = []
    for layer, layer_state in zip(layers, state.layers, strict=True):
        x, layer_state = layer.extend(x, layer_state, state.length, lengths)
        states.append(layer_state)
    return x, State(tuple(states), state.length + lengths)
