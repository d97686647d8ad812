"""The work of a mixture's experts: every token gets all of its own, and no matrix of another is read.

Choices, each a token and one of its experts, are sorted by expert and laid in blocks of a few rows with one expert. A
loop goes over the blocks and takes each one's matrices where they lie; gathering them first takes 9 times as long for 4
tokens on a CPU.

Milliseconds on 2 shared CPU cores, float32, medians of interleaved runs, by rows of a block; 8 experts a token, chosen
at random. `apart` is three such loops, one for each of the matrices, with all rows of all choices between them.

    experts            tokens   apart       4       8      16      32      64     128
    128 [1024, 512]        16      67      52      59      74
                           64     157     100      87     110
                        1,024     380                             277     271     297    7 MB of memory; apart 200
      with gradients    1,024    1374                            1314    1313    1442   12 MB; apart 671
    64 [512, 256]          64     7.3             7.0     6.5     8.5
                          512      31                              22      19      22
      with gradients      512     121                             116      88     111

For 1 and 4 tokens, 8 of 128: 3.2 and 10.6, where one product with matrices as large as all that are chosen takes about
1.1 and 9: XLA copies each matrix on a CPU, and neither smaller pieces, nor two experts a step, nor a sum of products in
place of a product was faster.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from mtp_jax.sharding import ROWS, TENSOR, axis_size

FEWEST_ROWS, MOST_ROWS = 4, 64


class Experts(NamedTuple):
    """The matrices of N experts, each a SwiGLU."""

    gate: Float[Array, "N D F"]
    up: Float[Array, "N D F"]
    down: Float[Array, "N F D"]


class Blocks(NamedTuple):
    """Choices, numbered through token by token, in blocks of one expert each.

    Attributes:
      expert: of each block.
      choice: of each row of a block; M k, past the last, in rows that hold none.
      used: blocks that hold any; they come first.
    """

    expert: Int[Array, " blocks"]
    choice: Int[Array, "blocks rows"]
    used: Int[Array, ""]


def mix_experts(
    x: Float[Array, "M D"], choice: Int[Array, "M k"], weights: Float[Array, "M k"], experts: Experts
) -> Float[Array, "M D"]:
    """y = sum_e w_e W_down^e (silu(W_gate^e x) * W_up^e x), e over the token's choices, which must differ.

    Products are taken in x's dtype; they and the sum add up in float32, as which y is returned.
    """
    if not x.shape[0]:
        return x.astype(jnp.float32)
    if axis_size((*ROWS, TENSOR)) > 1:
        return _mix_on_mesh(x, choice, weights, experts)
    return _mix(x, choice, weights, experts, experts.gate.shape[0])


def _mix_on_mesh(
    x: Float[Array, "M D"], choice: Int[Array, "M k"], weights: Float[Array, "M k"], experts: Experts
) -> Float[Array, "M D"]:
    """Each device mixes for its own tokens what its own experts, N over `tensor`, say; their sum is the result.

    By hand: left to the partitioner, the sort would see all tokens on every device, and the loop fetch matrices from
    one device after another.
    """
    num_experts = experts.gate.shape[0]
    rows = ROWS if x.shape[0] % axis_size(ROWS) == 0 else None
    parts = axis_size(TENSOR) if num_experts % axis_size(TENSOR) == 0 else 1
    over = TENSOR if parts > 1 else None

    def own(x: Array, choice: Array, weights: Array, experts: Experts) -> Array:
        if over:
            choice = choice - jax.lax.axis_index(TENSOR).astype(choice.dtype) * (num_experts // parts)
            # Those of other devices go past the last.
            choice = jnp.where((choice >= 0) & (choice < num_experts // parts), choice, num_experts // parts)
        return _mix(x, choice, weights, experts, num_experts)[None]

    tokens, matrices = PartitionSpec(rows), PartitionSpec(over)
    mixed = jax.shard_map(
        own, in_specs=(tokens, tokens, tokens, matrices), out_specs=PartitionSpec(over, rows), check_vma=False
    )(x, choice, weights, experts)
    return jnp.sum(mixed, axis=0)


def _mix(
    x: Float[Array, "M D"], choice: Int[Array, "M k"], weights: Float[Array, "M k"], experts: Experts, spread_over: int
) -> Float[Array, "M D"]:
    """Args: experts: N of the `spread_over` that are chosen from. A choice of N or more is of one that is not here."""
    # For a CPU, and for CUDA up to jaxlib 0.10.2 (openxla/xla pull request 45995), `ragged_dot` becomes a product of
    # every row with every expert.
    if jax.default_backend() == "tpu":
        return mix_ragged(x, choice, weights, experts)
    rows = block_rows(choice.shape[0], choice.shape[1], spread_over)
    return mix_blocks(x, weights, experts, sort_by_expert(choice, experts.gate.shape[0], rows))


def mix_ragged(
    x: Float[Array, "M D"], choice: Int[Array, "M k"], weights: Float[Array, "M k"], experts: Experts
) -> Float[Array, "M D"]:
    """`mix_experts` by grouped products."""
    order, begin, end = _sorted(choice, experts.gate.shape[0])
    token = order // choice.shape[1]
    product = partial(jax.lax.ragged_dot, group_sizes=end - begin, preferred_element_type=jnp.float32)
    gate, up = (product(x[token], matrices.astype(x.dtype)) for matrices in (experts.gate, experts.up))
    y = product((jax.nn.silu(gate) * up).astype(x.dtype), experts.down.astype(x.dtype))
    y = jnp.where((jnp.arange(y.shape[0]) < end[-1])[:, None], y, 0.0)
    return jnp.zeros(x.shape, jnp.float32).at[token].add(y * weights.reshape(-1)[order][:, None])


def block_rows(tokens: int, chosen: int, num_experts: int) -> int:
    """Rows of a block for so many tokens with so many choices each: about twice an expert's share.

    With fewer, matrices are fetched more often; with more, more rows are empty.
    """
    twice_the_share = -(-2 * tokens * chosen // num_experts)
    rows = min(MOST_ROWS, max(FEWEST_ROWS, 1 << (twice_the_share - 1).bit_length()))
    return min(rows, tokens)  # none of which goes to an expert twice


def _sorted(choice: Int[Array, "M k"], num_experts: int) -> tuple[Array, Array, Array]:
    """The choices' numbers by expert, and where each expert's begin and end among them."""
    order = jnp.argsort(choice.reshape(-1), stable=True).astype(jnp.int32)
    each = jnp.arange(num_experts, dtype=choice.dtype)
    end = jnp.searchsorted(choice.reshape(-1)[order], each, side="right").astype(jnp.int32)
    return order, jnp.pad(end, (1, 0))[:-1], end


def sort_by_expert(choice: Int[Array, "M k"], num_experts: int, rows: int) -> Blocks:
    """The choices in blocks of so many rows."""
    order, begin, end = _sorted(choice, num_experts)
    end_block = jnp.cumsum((end - begin + rows - 1) // rows)
    # Every expert that is chosen at all may leave rows - 1 rows of its last block empty.
    num_blocks = (choice.size + min(choice.size, num_experts) * (rows - 1)) // rows
    block = jnp.arange(num_blocks, dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(end_block, block, side="right"), num_experts - 1).astype(jnp.int32)
    first_row = begin[expert] + (block - jnp.pad(end_block, (1, 0))[expert]) * rows
    place = first_row[:, None] + jnp.arange(rows, dtype=jnp.int32)[None]
    numbers = jnp.where(place < end[expert][:, None], order.at[place].get(mode="clip"), choice.size)
    return Blocks(expert, numbers, end_block[-1])


@jax.custom_vjp
def mix_blocks(
    x: Float[Array, "M D"], weights: Float[Array, "M k"], experts: Experts, blocks: Blocks
) -> Float[Array, "M D"]:
    """`mix_experts`, block by block."""

    def add_block(n, y):
        block = _Block.take(n, x, weights, experts, blocks)
        return block.add(y, _product(block.hidden()[-1], block.experts.down) * block.weights[:, None])

    return jax.lax.fori_loop(0, blocks.used, add_block, jnp.zeros(x.shape, jnp.float32))


def _forward(x, weights, experts, blocks):
    return mix_blocks(x, weights, experts, blocks), (x, weights, experts, blocks)


def _backward(residuals, dy):
    """Makes each block's hidden layer again, and adds to its expert's gradient in place: autodiff of the loop would
    keep every block's, and add up gradients as large as all experts for each."""
    x, weights, experts, blocks = residuals

    def add_block(n, gradients):
        dx, d_weights, d_experts = gradients
        block = _Block.take(n, x, weights, experts, blocks)
        gate, up, hidden = block.hidden()
        dy_rows = _rows(dy, block.token)
        d_weighted = _product(dy_rows.astype(x.dtype), block.experts.down.T)
        d_hidden = d_weighted * block.weights[:, None]
        activated, pull_silu = jax.vjp(jax.nn.silu, gate)
        d_gate, d_up = pull_silu(d_hidden * up)[0].astype(x.dtype), (d_hidden * activated).astype(x.dtype)
        d_matrices = Experts(
            gate=_product(block.x.T, d_gate),
            up=_product(block.x.T, d_up),
            down=_product(hidden.T, (dy_rows * block.weights[:, None]).astype(x.dtype)),
        )
        d_weight = jnp.sum(d_weighted * hidden.astype(jnp.float32), axis=1)
        return (
            block.add(dx, _product(d_gate, block.experts.gate.T) + _product(d_up, block.experts.up.T)),
            d_weights.at[block.choice].set(d_weight, mode="drop"),
            jax.tree.map(lambda total, one: total.at[blocks.expert[n]].add(one), d_experts, d_matrices),
        )

    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), (x, weights.reshape(-1), experts))
    dx, d_weights, d_experts = jax.lax.fori_loop(0, blocks.used, add_block, zeros)
    d_experts = jax.tree.map(lambda total, matrices: total.astype(matrices.dtype), d_experts, experts)
    return dx.astype(x.dtype), d_weights.reshape(weights.shape), d_experts, None


mix_blocks.defvjp(_forward, _backward)


class _Block(NamedTuple):
    """One block's rows, zero where they hold no choice, and its expert's matrices."""

    x: Array
    weights: Array
    experts: Experts
    choice: Array
    token: Array

    @staticmethod
    def take(n: Array, x: Array, weights: Array, experts: Experts, blocks: Blocks) -> "_Block":
        """The n-th. Its matrices alone are converted to x's dtype."""
        choice = blocks.choice[n]
        token = choice // weights.shape[1]  # M, past the last, where there is no choice
        matrices = jax.tree.map(lambda of_all: of_all[blocks.expert[n]].astype(x.dtype), experts)
        return _Block(_rows(x, token), _rows(weights.reshape(-1), choice), matrices, choice, token)

    def hidden(self) -> tuple[Array, Array, Array]:
        """W_gate x and W_up x in float32, and silu(W_gate x) * W_up x in x's dtype."""
        gate, up = _product(self.x, self.experts.gate), _product(self.x, self.experts.up)
        return gate, up, (jax.nn.silu(gate) * up).astype(self.x.dtype)

    def add(self, total: Array, rows: Array) -> Array:
        """Each row added to its token's."""
        return total.at[self.token].add(rows, mode="drop")


def _rows(values: Array, index: Array) -> Array:
    return values.at[index].get(mode="fill", fill_value=0)


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)
