"""What the tests of the JAX front end share."""

import jax.numpy as jnp
import numpy as np


def small_problem(ids=None, tokens=24, hidden=16, vocab=70, seed=0):
    """(hidden [2, T/2, H], weight [V, H], ids [2, T/2] or [2, T/2, K], bias [V])."""
    rng = np.random.default_rng(seed)
    h, w, b = (jnp.float32(rng.standard_normal(s)) for s in ((2, tokens // 2, hidden), (vocab, hidden), (vocab,)))
    shape = (2, tokens // 2) if ids is None else (2, tokens // 2, ids)
    return h, w, jnp.asarray(rng.integers(vocab, size=shape), jnp.int32), b
