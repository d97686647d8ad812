"""The delta rule as its paper writes it, in NumPy float64: what the fast forms are measured against."""

import numpy as np


def delta_rule_float64(q, k, v, g, beta, memory, document=None):
    """Steps M <- exp(g) M; u = beta (v - M^T k); M <- M + k u^T; o = M^T q, forgetting M where `document` changes."""
    q, k, v, g, beta, memory = (np.array(x, np.float64) for x in (q, k, v, g, beta, memory))
    batch, time, heads, _ = q.shape
    o = np.zeros(v.shape)
    for b in range(batch):
        for h in range(heads):
            m = memory[b, h].copy()
            for t in range(time):
                if document is not None and t > 0 and document[b, t] != document[b, t - 1]:
                    m[:] = 0.0
                m *= np.exp(g[b, t, h])
                u = beta[b, t, h] * (v[b, t, h] - m.T @ k[b, t, h])
                m += np.outer(k[b, t, h], u)
                o[b, t, h] = m.T @ q[b, t, h]
            memory[b, h] = m
    return o, memory
