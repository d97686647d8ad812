"""The model: a trunk, its multi-token-prediction head, and the vocabulary matrices they share."""

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.backbone import Backbone
from mtp_jax.config import LayerType, ModelConfig
from mtp_jax.documents import Documents, documents
from mtp_jax.layers.block import block_class
from mtp_jax.layers.norm import LastNorm, RMSNorm
from mtp_jax.layers.router import Routing
from mtp_jax.sharding import DATA, FSDP, ROWS, spread, spread_parameters
from mtp_jax.state import ChainState, State, Trail, empty_head_state, empty_trunk_state, last_inputs, pair_up

M = TypeVar("M", bound=nn.Module)


class MTPHead(nn.Module):
    """Decoder layers, most often one, that guess further tokens: the first, token t+2 from the trunk's hidden state h^0
    at t and the embedding of token t+1; the next, one token further from what the first says, and so on.

        h^d_t = norm(block(W_fc [norm_e(embed(x_{t+d})); norm_h(h^{d-1}_t)]))       the guess of token t+d+1

    At depths past the last layer that layer runs on its own output. Rotary positions count like the embedded token.
    With `head_reads` BEFORE_NORM, h^d are the streams before the trunk's final norm and before these.

    Reference: DeepSeek-V3, arXiv:2412.19437, section 2.2, with the embedding half first and post-norm chaining.
    """

    config: ModelConfig
    dtype: DTypeLike
    remat: str = "none"

    def setup(self) -> None:
        config = self.config
        norm = config.norm_eps, config.zero_centred_norms
        block = block_class(self.remat)
        self.layers = [
            block(config, LayerType.FULL, config.moe, self.dtype, position_offset=k + 1)
            for k in range(config.num_mtp_layers)
        ]
        suffixes = [""] if config.mtp_layers_share else [f"_{k}" if k else "" for k in range(config.num_mtp_layers)]
        self.embedding_norms = [RMSNorm(*norm, name=f"pre_fc_norm_embedding{suffix}") for suffix in suffixes]
        self.hidden_norms = [RMSNorm(*norm, name=f"pre_fc_norm_hidden{suffix}") for suffix in suffixes]
        self.projections = [
            nn.Dense(config.width, use_bias=False, dtype=self.dtype, name=f"fc{suffix}") for suffix in suffixes
        ]
        self.norms = [LastNorm(*norm, config.head_reads, name=f"norm{suffix}") for suffix in suffixes]

    def __call__(
        self, hidden: Float[Array, "B T D"], embedded: Sequence[Float[Array, "B T D"]], docs: Documents
    ) -> tuple[list[Float[Array, "B T D"]], tuple[Routing | None, ...]]:
        """Training, documents kept apart: once for each depth.

        Args:
          embedded: for depth d, at index t, the embedding of token t+d.

        Returns:
          what the next depth reads of each; at depth d, index t is the guess of token t+d+1. And how each layer spread
          tokens over its experts, at all depths together.
        """
        states: list[ChainState | None] = [None] * len(self.layers)
        routings: list[Routing | None] = [None] * len(self.layers)
        outputs = []
        for depth, next_embedded in enumerate(embedded, 1):
            k = self.layer_at(depth)
            fused = self._fuse(k, hidden, next_embedded)
            x, states[k], routing = self.layers[k].chain(fused, docs.reaching(depth), states[k])
            before = routings[k]
            routings[k] = routing if before is None else jax.tree.map(jnp.add, before, routing)
            hidden = self._of(self.norms, k).hidden(x)
            outputs.append(hidden)
        return outputs, tuple(routings)

    def extend(
        self,
        hidden: Float[Array, "B T D"],
        embedded: Float[Array, "B T D"],
        state: State,
        lengths: Int[Array, " B"],
        depth: int = 1,
    ) -> tuple[Float[Array, "B T D"], State]:
        """Keeps the first `lengths` pairs of each row.

        Args:
          depth: of the guess that is asked for. Layers before its own are left where they are: they would read
            tokens that are only guessed.

        Returns:
          hidden states of the layer of that depth, and the state, in which the layers after it follow one behind.
        """
        layers, waiting = list(state.layers), list(state.waiting)
        first = self.layer_at(depth)
        kept, asked_for = lengths, None
        for k in range(first, len(layers)):
            if k > first:
                window = jnp.concatenate([waiting[k - 1], hidden], axis=1)
                waiting[k - 1], before = last_inputs(window, kept, 2), waiting[k - 1][:, 1]
                hidden, embedded, kept = pair_up(before, hidden, embedded, kept, state.length < k)
            held = jnp.maximum(state.length - k, 0)
            x, layers[k] = self.layers[k].extend(self._fuse(k, hidden, embedded), layers[k], held, kept)
            hidden = self._of(self.norms, k).hidden(x)
            asked_for = hidden if asked_for is None else asked_for
        assert asked_for is not None
        return asked_for, State(tuple(layers), state.length + lengths, tuple(waiting))

    def output(self, hidden: Float[Array, "*batch D"], depth: int) -> Float[Array, "*batch D"]:
        """What the output matrix reads, of a hidden state of that depth."""
        return self._of(self.norms, self.layer_at(depth)).output(hidden)

    def layer_at(self, depth: int) -> int:
        """Index of the layer that guesses `depth` tokens ahead, 1 or more."""
        return min(depth, self.config.num_mtp_layers) - 1

    def _fuse(self, k: int, hidden: Float[Array, "B T D"], embedded: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        halves = [self._of(self.embedding_norms, k)(embedded), self._of(self.hidden_norms, k)(hidden)]
        return self._of(self.projections, k)(jnp.concatenate(halves, axis=-1))

    def _of(self, modules: Sequence[M], k: int) -> M:
        return modules[0 if self.config.mtp_layers_share else k]


class OutputMatrix(nn.Module):
    """W [D, vocab]: hidden states to logits and, when tied, tokens to embeddings by taking columns.

    One copy serves both: at a few rows a product with it is twice as fast as with a row-major [vocab, D] table.
    """

    config: ModelConfig
    dtype: DTypeLike

    def setup(self) -> None:
        shape = (self.config.width, self.config.vocab_size)
        self.kernel = self.param("kernel", nn.initializers.normal(0.02), shape, jnp.float32)

    def logits(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch vocab"]:
        """Scores of every token, in float32 whatever the compute dtype."""
        kernel = self.kernel.astype(self.dtype)
        return jnp.matmul(hidden.astype(self.dtype), kernel, preferred_element_type=jnp.float32)

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Columns of W."""
        return jnp.moveaxis(jnp.take(self.kernel, tokens, axis=1), 0, -1).astype(self.dtype)


class MTPModel(nn.Module):
    """Trunk, MTP head, and the vocabulary matrices shared between them.

    Three ways through tokens: `__call__`, `mtp` and `mtp_chain` (training, packed documents); `extend` and
    `mtp_extend` (how many tokens to keep is known before the call); `probe`, then `mtp_jax.state.commit`
    (known only after looking at the result).

    Attributes:
      dtype: of matrix products and of the residual stream. Memory, decays, softmax, norms and logits are
        float32 regardless.
      remat: what training makes again in the backward pass, by name (`mtp_jax.layers.block.REMAT`).
    """

    config: ModelConfig
    dtype: DTypeLike = jnp.float32
    remat: str = "none"

    def setup(self) -> None:
        config = self.config
        if not config.tie_embeddings:
            self.embed_tokens = nn.Embed(config.vocab_size, config.width, dtype=self.dtype)
        self.lm_head = OutputMatrix(config, self.dtype)
        self.trunk = Backbone(config, self.dtype, self.remat)
        if config.num_mtp_layers:
            self.mtp_head = MTPHead(config, self.dtype, self.remat, name="mtp")

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Token embeddings in the compute dtype; ids must lie within the vocabulary."""
        # Each device looks up its part of the width for all rows that its neighbours along `fsdp` hold: to exchange the
        # results costs less than to gather the matrix.
        tokens = spread(tokens, DATA)
        embedded = self.lm_head.embed(tokens) if self.config.tie_embeddings else self.embed_tokens(tokens)
        return spread(spread(embedded, DATA, None, FSDP), ROWS)

    def logits(self, output: Float[Array, "*batch D"]) -> Float[Array, "*batch vocab"]:
        """float32 scores of the next token from `trunk_output` or `head_output`."""
        return self.lm_head.logits(output)

    def trunk_output(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """What the output matrix reads, of a hidden state as the trunk gives it: after the final norm."""
        return self.trunk.norm.output(hidden)

    def head_output(self, hidden: Float[Array, "*batch D"], depth: int = 1) -> Float[Array, "*batch D"]:
        """What the output matrix reads, of a hidden state as the head gives it at that depth: after its last norm."""
        return self.mtp_head.output(hidden, depth)

    def hidden_before_norm(self, tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The trunk's residual stream after its last block."""
        return self.trunk(self.embed(tokens), documents(segment_ids))[0]

    def final_norm(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The trunk's final norm."""
        return self.trunk.norm(x)

    def __call__(self, tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The trunk's hidden states, as the head reads them; every change of segment id starts a document."""
        return self.trunk.norm.hidden(self.hidden_before_norm(tokens, segment_ids))

    def routed(
        self, tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"], counted: Bool[Array, "B T"]
    ) -> tuple[Float[Array, "B T D"], tuple[Routing | None, ...]]:
        """As `__call__`; also how each layer spread the counted tokens over its experts, None where it has none."""
        x, routings = self.trunk(self.embed(tokens), documents(segment_ids, counted))
        return self.trunk.norm.hidden(x), routings

    def mtp(
        self,
        hidden: Float[Array, "B T D"],
        next_tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
    ) -> Float[Array, "B T D"]:
        """The head's hidden states; entry t reads hidden[t] and the embedding of next_tokens[t].

        At a document's last token the next token belongs to its neighbour: leave that entry out of the loss.
        """
        (own,), _ = self.mtp_head(hidden, [self.embed(next_tokens)], documents(segment_ids))
        return own

    def mtp_chain(
        self,
        hidden: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        depths: int,
        counted: Bool[Array, "B T"] | None = None,
    ) -> tuple[list[Float[Array, "B T D"]], tuple[Routing | None, ...]]:
        """The head's hidden states at depths 1, 2, .. as decoding chains them, at every index at once.

            own_1[t] = head(hidden[t], e(token t+1)),    own_d[t] = head(own_{d-1}[t], e(token t+d))

        At depth d the head at index t sees its depth-1 keys up to t and those of its own chain, like a draft that
        follows token t. Entries whose tokens t+1 .. t+d are not all of t's document mean nothing.

        Returns:
          hidden states by depth, and how each of the head's layers spread the counted tokens over its experts, at each
          depth without the entries that mean nothing.
        """
        embedded = self.embed(tokens)
        ahead = [
            jnp.pad(embedded[:, depth:], [(0, 0), (0, min(depth, tokens.shape[1])), (0, 0)])
            for depth in range(1, depths + 1)
        ]
        return self.mtp_head(hidden, ahead, documents(segment_ids, counted))

    def extend(
        self, tokens: Int[Array, "B T"], state: State, lengths: Int[Array, " B"]
    ) -> tuple[Float[Array, "B T D"], State]:
        """Feeds T tokens and keeps the first `lengths` of each row, 0 <= lengths <= T.

        Hidden states, as the head reads them, are of no meaning past a row's length. Needs length + T <= S slots.
        """
        return self.trunk.extend(self.embed(tokens), state, lengths)

    def probe(self, tokens: Int[Array, "B T"], state: State) -> tuple[Float[Array, "B T D"], Trail]:
        """Feeds T tokens and keeps none; `commit(state, trail, n)` keeps the first n. Needs length + T <= S slots."""
        return self.trunk.probe(self.embed(tokens), state)

    def mtp_extend(
        self,
        hidden: Float[Array, "B T D"],
        next_tokens: Int[Array, "B T"],
        state: State,
        lengths: Int[Array, " B"],
        depth: int = 1,
    ) -> tuple[Float[Array, "B T D"], State]:
        """Feeds the head T pairs (hidden_t, token t+1) and keeps the first `lengths` of each row.

        A chained draft, at depth 2 and up, feeds the head's own result of the depth before as `hidden`; put `length`
        and `waiting` back afterwards to forget it.
        """
        return self.mtp_head.extend(hidden, self.embed(next_tokens), state, lengths, depth)

    def empty_state(self, batch: int, num_slots: int) -> tuple[State, State]:
        """States of trunk and head before the first token."""
        return (
            empty_trunk_state(self.config, batch, num_slots, self.dtype),
            empty_head_state(self.config, batch, num_slots, self.dtype),
        )

    def touch(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T vocab"]:
        """Runs every parameter once; what `init_params` traces."""
        segment_ids = jnp.zeros_like(tokens)
        hidden = self(tokens, segment_ids)
        outputs = [self.trunk_output(hidden)]
        if depths := self.config.num_mtp_layers:
            chained, _ = self.mtp_chain(hidden, tokens, segment_ids, depths)
            outputs += [self.head_output(own, depth) for depth, own in enumerate(chained, 1)]
        return self.logits(sum(outputs[1:], start=outputs[0]))


@partial(jax.jit, static_argnames="model")
def init_params(model: MTPModel, key: Array) -> dict:
    """Random float32 parameters as a nested dict; shapes alone by `jax.eval_shape`."""
    params = dict(model.init(key, jnp.zeros((1, 2), jnp.int32), method="touch")["params"])
    return spread_parameters(params, model.config)
