"""What the tests of the JAX front end share."""

import jax.numpy as jnp
import numpy as np

from onchip.ops.cross_entropy.checks import CHECKER
from shared import assert_within_bounds
from shared_jax import assert_same as assert_same


def small_problem(tokens=24, vocab=70, dtype="float32", seed=0):
    """(logits [2, T/2, V], labels [2, T/2])."""
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(rng.standard_normal((2, tokens // 2, vocab)), dtype)
    return logits, jnp.asarray(rng.integers(vocab, size=(2, tokens // 2)), jnp.int32)


def assert_right(case, dtype="float32", **how):
    """The op on `case` is within its bounds of the oracle, for every quantity."""
    assert_within_bounds(CHECKER.check_case(case, dtype, **how))
