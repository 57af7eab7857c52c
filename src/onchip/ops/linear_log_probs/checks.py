"""What the comparisons of both front ends with the float64 oracle share.  No framework."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from onchip.ops.linear_cross_entropy import checks
from onchip.ops.linear_cross_entropy import reference as cross_entropy
from onchip.ops.linear_cross_entropy.checks import Check, relative_error
from onchip.ops.linear_log_probs import reference
from onchip.ops.linear_log_probs.cases import Case


def compare(
    case: Case,
    dtype: str,
    implementation: str,
    results: Mapping[str, npt.NDArray[Any]],
    oracle: reference.Result,
    plain: Mapping[str, float],
) -> list[Check]:
    """Compare `results`, named like the oracle's fields, with the oracle.

    `plain` holds the errors that the plain framework expression makes in a 16-bit dtype: the op may make twice those.
    """
    bounds = float32_bounds(case, oracle)
    bounds |= {name: max(bounds[name], 2 * error) for name, error in plain.items() if np.isfinite(error)}
    made = [
        Check(case.name, dtype, implementation, name, relative_error(out, getattr(oracle, name)), bounds[name])
        for name, out in results.items()
        if name != "top1"
    ]
    # What ties in float64 or nearly so may come out either way; a wrong index anywhere else does not.
    wrong = float(np.mean(results["top1"] != oracle.top1)) if oracle.top1.size else 0.0
    return [*made, Check(case.name, dtype, implementation, "top1", wrong, 0.02 if case.tokens > 50 else 0.0)]


def float32_bounds(case: Case, oracle: reference.Result) -> dict[str, float]:
    """Limits of the relative errors in float32, from its precision and from the lengths of the sums."""
    grads = (oracle.grad_hidden, oracle.grad_weight, oracle.grad_bias)
    # A log-probability has the error of a loss: it is one.
    as_loss = cross_entropy.Result(
        oracle.log_prob, oracle.lse, oracle.log_prob, oracle.entropy, np.zeros(0, np.bool_), *grads
    )
    bounds = checks.float32_bounds(case, as_loss)
    del bounds["loss"]
    return bounds
