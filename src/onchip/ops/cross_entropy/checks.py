"""What the comparisons of every front end with the float64 oracle share.  No framework."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from onchip.ops.cross_entropy import reference
from onchip.ops.cross_entropy.cases import Case
from onchip.ops.linear_cross_entropy.checks import Check, relative_error

# Rounding errors are taken to add up like a random walk; so many of its standard deviations are allowed.
_DEVIATIONS = 4


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
    checks = [
        Check(case.name, dtype, implementation, name, relative_error(out, getattr(oracle, name)), bounds[name])
        for name, out in results.items()
        if name != "correct"
    ]
    # What ties in float64 or nearly so may come out either way; a wrong index anywhere else does not.
    wrong = float(np.mean(results["correct"] != oracle.correct)) if oracle.correct.size else 0.0
    return [*checks, Check(case.name, dtype, implementation, "correct", wrong, 0.02 if case.tokens > 50 else 0.0)]


def float32_bounds(case: Case, oracle: reference.Result) -> dict[str, float]:
    """Limits of the relative errors in float32, from its precision and from the lengths of the sums.

    The logits themselves are exact; what is left is a few roundings of a logit at its size, before and after it is
    scaled.  Exponentials turn them into a relative error of probabilities.
    """
    eps = float(np.finfo(np.float32).eps)
    scale = float(case.options.get("logit_scale", 1.0)) / float(case.options.get("temperature", 0.5))
    spread = case.logit_std * scale
    largest = abs(case.logit_offset) * scale + spread * float(np.sqrt(2 * np.log(case.vocab + 1)))
    if case.target_prob is not None:
        largest = max(largest, float(np.abs(oracle.lse).max(initial=0)))
    logit = eps * (1 + largest)

    def per_token(ref: Any, error: float) -> float:
        rms = float(np.sqrt(np.mean(np.square(ref[np.isfinite(ref)])))) if np.isfinite(ref).any() else 0.0
        return _DEVIATIONS * (eps + error / rms) if rms > 0 else _DEVIATIONS * error

    sums = eps * float(np.sqrt((case.tokens + case.vocab) / 24))
    return {
        "loss": per_token(oracle.loss, logit),
        "lse": per_token(oracle.lse, logit),
        "log_prob": per_token(oracle.log_prob, logit),
        # d entropy / d logit is up to about log V times a probability.
        "entropy": per_token(oracle.entropy, logit * float(1 + np.log(case.vocab))),
        "grad_logits": _DEVIATIONS * (logit + sums),
    }
