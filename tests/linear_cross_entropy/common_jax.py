"""What the tests of the JAX front end share."""

from onchip.ops.linear_cross_entropy.checks import CHECKER
from shared import assert_within_bounds
from shared_jax import assert_same as assert_same
from shared_jax import plain_logits, plain_loss
from shared_jax import small_problem as small_problem

STRATEGIES = ("stash", "recompute")


def assert_right(case, dtype="float32", **how):
    """The op on `case` is within its bounds of the oracle, for every quantity."""
    assert_within_bounds(CHECKER.check_case(case, dtype, **how))


def plain(hidden, weight, labels, bias=0.0, **options):
    """The loss written out."""
    return plain_loss(plain_logits(hidden, weight, bias), labels, **options)
