"""What changes over a run: the weight of the MTP loss by tokens seen, the learning rate by step."""

import jax.numpy as jnp
import numpy as np
import optax

from train.experiment import Experiment


def mtp_weight(experiment: Experiment, tokens_seen: int) -> float:
    """lambda: the i-th weight holds at the i-th switch point (the first at 0) and, after the last, to the end.

    Between two points it stays (`mtp_schedule=step`) or moves on a line to the next weight (`linear`).

    Args:
      tokens_seen: non-padding input tokens of all earlier steps; at exactly a switch point the new weight holds.
    """
    weights, switches = experiment.mtp_weights, experiment.mtp_switch_tokens
    if experiment.mtp_schedule == "linear":
        return float(np.interp(tokens_seen, (0, *switches), weights))
    return weights[sum(tokens_seen >= switch for switch in switches)]


def learning_rate_schedule(experiment: Experiment) -> optax.Schedule:
    """Step (from 0) -> learning rate: W steps of linear warm-up, then a curve that ends after the last step.

        lr(s) = peak (s + 1) / (W + 1)             s <= W
        lr(s) = peak (f + (1 - f) c(x))            s > W, with f the final fraction and x = (s - W) / (steps - W)
        c(x)  = (1 + cos(pi x)) / 2,  1 - x,  1    cosine, linear, constant

    The first step already moves (s + 1, not s).
    """
    peak = experiment.learning_rate
    warmup = min(experiment.warmup_steps, experiment.steps - 1)
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    fall = {
        "cosine": optax.cosine_decay_schedule(peak, experiment.steps - warmup, alpha=experiment.final_learning_rate),
        "linear": optax.linear_schedule(peak, peak * experiment.final_learning_rate, experiment.steps - warmup),
        "constant": optax.constant_schedule(peak),
    }[experiment.learning_rate_shape]
    joined = optax.join_schedules([rise, fall], [warmup])
    return lambda step: joined(jnp.asarray(step, jnp.float32))
