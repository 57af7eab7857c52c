"""What the tests of the JAX front end share."""

import jax.numpy as jnp
import numpy as np

from onchip.ops.linear_cross_entropy.checks import CHECKER
from shared import assert_within_bounds
from shared_jax import assert_same as assert_same
from shared_jax import plain_logits, plain_loss

STRATEGIES = ("stash", "recompute")


def small_problem(tokens=24, hidden=16, vocab=70, dtype="float32", seed=0):
    """(hidden [2, T/2, H], weight [V, H], labels [2, T/2], bias [V])."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    labels = jnp.asarray(rng.integers(vocab, size=(2, tokens // 2)), jnp.int32)
    return normal(2, tokens // 2, hidden), normal(vocab, hidden), labels, normal(vocab)


def assert_right(case, dtype="float32", **how):
    """The op on `case` is within its bounds of the oracle, for every quantity."""
    assert_within_bounds(CHECKER.check_case(case, dtype, **how))


def plain(hidden, weight, labels, bias=0.0, **options):
    """The loss written out."""
    return plain_loss(plain_logits(hidden, weight, bias), labels, **options)
