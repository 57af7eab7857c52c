"""How far every front end may be from the float64 oracle.  No framework."""

from onchip.ops.linear_cross_entropy import reference
from onchip.ops.linear_cross_entropy.cases import Case
from onchip.oracle.checks import softmax_bounds

_BOUNDED = ("loss", "lse", "log_prob", "entropy", "grad_hidden", "grad_weight", "grad_bias")


def float32_bounds(case: Case, oracle: reference.Result) -> dict[str, float]:
    """Limits of the relative errors in float32, from its precision and from the lengths of the sums."""
    return softmax_bounds(case, oracle, _BOUNDED, hidden=case.hidden)
