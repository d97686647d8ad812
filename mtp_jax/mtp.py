"""The model: a trunk, its multi-token-prediction head, and the vocabulary matrices they share."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mtp_jax.backbone import Backbone, extend_layers
from mtp_jax.config import LayerType, ModelConfig
from mtp_jax.documents import Documents, documents
from mtp_jax.layers.block import block_class
from mtp_jax.layers.norm import RMSNorm
from mtp_jax.state import ChainState, State, Trail, empty_head_state, empty_trunk_state


class MTPHead(nn.Module):
    """One decoder layer that guesses token t+2 from the trunk's hidden state at t and the embedding of token t+1.

        h'_t = norm(block(W_fc [norm_e(embed(x_{t+1})); norm_h(h_t)]))

    Its output takes the place of h when drafts are chained. Rotary positions count like the embedded token.

    Reference: DeepSeek-V3, arXiv:2412.19437, section 2.2, with the embedding half first and post-norm chaining.
    """

    config: ModelConfig
    dtype: DTypeLike
    remat: str = "none"

    def setup(self) -> None:
        eps = self.config.norm_eps
        block = block_class(self.remat)
        self.pre_fc_norm_embedding = RMSNorm(eps)
        self.pre_fc_norm_hidden = RMSNorm(eps)
        self.fc = nn.Dense(self.config.width, use_bias=False, dtype=self.dtype)
        self.layers = [
            block(self.config, LayerType.FULL, self.dtype, position_offset=1) for _ in range(self.config.num_mtp_layers)
        ]
        self.norm = RMSNorm(eps)

    def __call__(
        self, hidden: Float[Array, "B T D"], embedded: Sequence[Float[Array, "B T D"]], docs: Documents
    ) -> list[Float[Array, "B T D"]]:
        """Training, documents kept apart: the head run on its own output, once for each depth.

        Args:
          embedded: for depth d, at index t, the embedding of token t+d.

        Returns:
          the normed output of each depth; at depth d, index t is the guess of token t+d+1.
        """
        states: list[ChainState | None] = [None] * len(self.layers)
        outputs = []
        for next_embedded in embedded:
            x = self._fuse(hidden, next_embedded)
            for i, layer in enumerate(self.layers):
                x, states[i] = layer.chain(x, docs, states[i])
            hidden = self.norm(x)
            outputs.append(hidden)
        return outputs

    def extend(
        self,
        hidden: Float[Array, "B T D"],
        embedded: Float[Array, "B T D"],
        state: State,
        lengths: Int[Array, " B"],
    ) -> tuple[Float[Array, "B T D"], State]:
        """Keeps the first `lengths` pairs of each row."""
        x, state = extend_layers(self.layers, self._fuse(hidden, embedded), state, lengths)
        return self.norm(x), state

    def _fuse(self, hidden: Float[Array, "B T D"], embedded: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        halves = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        return self.fc(jnp.concatenate(halves, axis=-1))


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
        return self.lm_head.embed(tokens) if self.config.tie_embeddings else self.embed_tokens(tokens)

    def logits(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch vocab"]:
        """float32 scores of the token after a normed hidden state, the trunk's or the head's."""
        return self.lm_head.logits(hidden)

    def hidden_before_norm(self, tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The trunk's residual stream after its last block."""
        return self.trunk(self.embed(tokens), documents(segment_ids))

    def final_norm(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The trunk's final norm."""
        return self.trunk.norm(x)

    def __call__(self, tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The trunk's hidden states after the final norm; every change of segment id starts a document."""
        return self.final_norm(self.hidden_before_norm(tokens, segment_ids))

    def mtp(
        self,
        hidden: Float[Array, "B T D"],
        next_tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
    ) -> Float[Array, "B T D"]:
        """The head's normed hidden states; entry t reads hidden[t] and the embedding of next_tokens[t].

        At a document's last token the next token belongs to its neighbour: leave that entry out of the loss.
        """
        return self.mtp_head(hidden, [self.embed(next_tokens)], documents(segment_ids))[0]

    def mtp_chain(
        self,
        hidden: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        depths: int,
    ) -> list[Float[Array, "B T D"]]:
        """The head's normed hidden states at depths 1, 2, .. as decoding chains them, at every index at once.

            own_1[t] = head(hidden[t], e(token t+1)),    own_d[t] = head(own_{d-1}[t], e(token t+d))

        At depth d the head at index t sees its depth-1 keys up to t and those of its own chain, like a draft that
        follows token t. Entries whose tokens t+1 .. t+d are not all of t's document mean nothing.
        """
        embedded = self.embed(tokens)
        ahead = [
            jnp.pad(embedded[:, depth:], [(0, 0), (0, min(depth, tokens.shape[1])), (0, 0)])
            for depth in range(1, depths + 1)
        ]
        return self.mtp_head(hidden, ahead, documents(segment_ids))

    def extend(
        self, tokens: Int[Array, "B T"], state: State, lengths: Int[Array, " B"]
    ) -> tuple[Float[Array, "B T D"], State]:
        """Feeds T tokens and keeps the first `lengths` of each row, 0 <= lengths <= T.

        Hidden states (after the final norm) past a row's length are of no meaning. Needs length + T <= S slots.
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
    ) -> tuple[Float[Array, "B T D"], State]:
        """Feeds the head T pairs (hidden_t, token t+1) and keeps the first `lengths` of each row.

        A chained draft feeds the head's own result as `hidden`; put `length` back afterwards to forget it.
        """
        return self.mtp_head.extend(hidden, self.embed(next_tokens), state, lengths)

    def empty_state(self, batch: int, num_slots: int) -> tuple[State, State]:
        """States of trunk and head before the first token."""
        return (
            empty_trunk_state(self.config, batch, num_slots, self.dtype),
            empty_head_state(self.config, batch, num_slots, self.dtype),
        )

    def touch(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T vocab"]:
        """Runs every parameter once; what `init_params` traces."""
        hidden = self(tokens, jnp.zeros_like(tokens))
        if self.config.num_mtp_layers:
            hidden = self.mtp(hidden, tokens, jnp.zeros_like(tokens))
        return self.logits(hidden)


@partial(jax.jit, static_argnames="model")
def init_params(model: MTPModel, key: Array) -> dict:
    """Random float32 parameters as a nested dict; shapes alone by `jax.eval_shape`."""
    return dict(model.init(key, jnp.zeros((1, 2), jnp.int32), method="touch")["params"])
