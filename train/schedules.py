"""What changes over a run: the weight of the MTP loss by tokens seen, the learning rate by step."""

import jax.numpy as jnp
import optax

from train.experiment import Experiment


def mtp_weight(weights: tuple[float, ...], switch_tokens: tuple[int, ...], tokens_seen: int) -> float:
    """lambda: the i-th weight holds from the i-th switch point on (the first from 0).

    Args:
      tokens_seen: non-padding input tokens of all earlier steps; at exactly a switch point the new weight holds.
    """
    return weights[sum(tokens_seen >= switch for switch in switch_tokens)]


def learning_rate_schedule(experiment: Experiment) -> optax.Schedule:
    """Step (from 0) -> learning rate: W steps of linear warm-up, then a cosine that ends after the last step.

        lr(s) = peak (s + 1) / (W + 1)                                      s <= W
        lr(s) = peak (f + (1 - f) (1 + cos(pi (s - W) / (steps - W))) / 2)  s > W, with f the final fraction

    The first step already moves (s + 1, not s).
    """
    peak = experiment.learning_rate
    warmup = min(experiment.warmup_steps, experiment.steps - 1)
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    fall = optax.cosine_decay_schedule(peak, experiment.steps - warmup, alpha=experiment.final_learning_rate)
    joined = optax.join_schedules([rise, fall], [warmup])
    return lambda step: joined(jnp.asarray(step, jnp.float32))
