"""Which experts a token goes to, and with what weight; float32 whatever the compute dtype."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.config import MoEConfig, RouterType


class Choice(NamedTuple):
    """Of each of M tokens, the experts it goes to."""

    experts: Int[Array, "M k"]  # distinct
    weights: Float[Array, "M k"]
    probabilities: Float[Array, "M N"]  # of all experts, each row adding up to 1: what is balanced


class Routing(NamedTuple):
    """Sums over tokens of how a layer spread them over its experts. Routings add up, also over layers."""

    load: Float[Array, " N"]  # tokens that chose each expert
    probability: Float[Array, " N"]
    tokens: Float[Array, ""]


def choose(logits: Float[Array, "M N"], bias: Float[Array, " N"] | None, config: MoEConfig) -> Choice:
    """The k experts of each token.

        softmax   p = softmax(logits); the k largest p, w = p
        sigmoid   s = sigmoid(logits); of the groups whose two largest s + bias add up to most, the k largest
                  s + bias, w = s

    then w / sum(w) if `normalise`, times `scaling`. Of equals the first is taken. The sum has 1e-20 added under
    sigmoid, where all may be 0. The bias gets no gradient: a choice has none.

    Reference: Shazeer et al. 2017, arXiv:1701.06538; DeepSeek-V3, arXiv:2412.19437, section 2.1.2, for sigmoid, bias
    and groups, as GLM-4.5 uses them.
    """
    if config.router is RouterType.SOFTMAX:
        probabilities = jax.nn.softmax(logits, axis=-1)
        weights, experts = jax.lax.top_k(probabilities, config.experts_per_token)
        total = jnp.sum(weights, axis=-1, keepdims=True)
    else:
        assert bias is not None
        scores = jax.nn.sigmoid(logits)
        probabilities = scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)
        preference = _within_best_groups(scores + bias[None], config)
        _, experts = jax.lax.top_k(preference, config.experts_per_token)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        total = jnp.sum(weights, axis=-1, keepdims=True) + 1e-20
    if config.normalise:
        weights = weights / total
    return Choice(experts, weights * config.scaling, probabilities)


def _within_best_groups(preference: Float[Array, "M N"], config: MoEConfig) -> Float[Array, "M N"]:
    """-inf for experts outside the groups that a token may choose from."""
    if config.num_groups == 1:
        return preference
    tokens = preference.shape[0]
    grouped = preference.reshape(tokens, config.num_groups, config.group_size)
    of_group = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
    _, best = jax.lax.top_k(of_group, config.groups_per_token)
    allowed = jnp.any(best[:, :, None] == jnp.arange(config.num_groups)[None, None], axis=1)
    return jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(preference.shape)


def routing(choice: Choice, counted: Bool[Array, " M"]) -> Routing:
    """Sums over the counted tokens."""
    weight = counted.astype(jnp.float32)
    num_experts = choice.probabilities.shape[1]
    chosen = jnp.zeros((num_experts,), jnp.float32)
    load = chosen.at[choice.experts].add(jnp.broadcast_to(weight[:, None], choice.experts.shape))
    return Routing(load, jnp.sum(choice.probabilities * weight[:, None], axis=0), jnp.sum(weight))


def balancing_loss(routing: Routing) -> Float[Array, ""]:
    """N sum_e f_e P_e, f_e the tokens that chose expert e by token and P_e its mean probability; k where all is even.

    The gradient goes through P. Sums over several layers give their joint loss.

    Reference: Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6, with k choices a token.
    """
    count = jnp.maximum(routing.tokens, 1.0)
    frequency = jax.lax.stop_gradient(routing.load) / count
    return routing.load.shape[0] * jnp.sum(frequency * routing.probability / count)


def balanced_bias(bias: Float[Array, " N"], load: Float[Array, " N"], rate: float) -> Float[Array, " N"]:
    """The bias after a step: up by `rate` for experts that got less than the mean, down for those that got more.

    Reference: Wang et al. 2024, arXiv:2408.15664.
    """
    return bias + rate * jnp.sign(jnp.mean(load) - load)
