"""The law that a token is drawn from, one position at a time, in float64 and by sorting."""

import numpy as np

from infer.sampling import Sampling


def reference_law(logits, sampling: Sampling, prompt=(), new=(), num_ids=None, end_ids=()):
    """Probabilities [vocab] after a prompt and new tokens, of which any may be drafts; one-hot at temperature 0."""
    x = np.array(logits, np.float64)
    if num_ids is not None:
        x[num_ids:] = -np.inf
    for i in {*prompt, *new}:
        x[i] = x[i] / sampling.repetition_penalty if x[i] > 0 else x[i] * sampling.repetition_penalty
    for i in set(new):
        x[i] -= sampling.presence_penalty + sampling.frequency_penalty * list(new).count(i)
    for i, bias in sampling.logit_bias.items():
        x[i] += bias
    x[list(sampling.banned_ids)] = -np.inf
    if len(new) < sampling.min_new_tokens:
        x[list(end_ids)] = -np.inf
    if sampling.temperature == 0:
        return np.eye(len(x))[np.argmax(x)]
    x = x / sampling.temperature
    order = np.sort(x)[::-1]
    if sampling.top_k:
        x[x < order[min(sampling.top_k, len(x)) - 1]] = -np.inf
    if sampling.top_p < 1:
        order = np.sort(x)[::-1]
        mass = np.cumsum(_softmax(order))
        x[x < order[np.argmax(mass >= sampling.top_p)]] = -np.inf
    p = _softmax(x)
    p[p < sampling.min_p * p.max()] = 0
    return p / p.sum()


def _softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()
