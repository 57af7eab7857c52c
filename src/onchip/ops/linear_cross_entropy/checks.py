"""What the comparisons of every front end with the float64 oracle share.  No framework."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onchip.ops.linear_cross_entropy import reference
from onchip.ops.linear_cross_entropy.cases import Case

# Rounding errors are taken to add up like a random walk; so many of its standard deviations are allowed.
_DEVIATIONS = 4


@dataclass(frozen=True)
class Check:
    """One comparison with the oracle.  The error of `quantity` is ||out - ref|| / ||ref||, `bound` its limit."""

    case: str
    dtype: str
    implementation: str
    quantity: str
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound  # False for NaN


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


def relative_error(out: npt.NDArray[Any], ref: npt.NDArray[Any]) -> float:
    """||out - ref|| / ||ref||, or ||out|| where ref is 0.  Infinities must be the same ones, and count as 0."""
    if out.shape != ref.shape:
        raise AssertionError(f"shape {out.shape} where {ref.shape} is right")
    got = out.astype(np.float64)
    same_infinity = np.isinf(ref) & (got == ref)
    norm = float(np.linalg.norm(np.where(same_infinity, 0, ref)))
    error = float(np.linalg.norm(np.where(same_infinity, 0, got - np.where(same_infinity, 0, ref))))
    return error / norm if norm > 0 else error


def float32_bounds(case: Case, oracle: reference.Result) -> dict[str, float]:
    """Limits of the relative errors in float32, from its precision and from the lengths of the sums.

    A logit is a sum of H products: its error is a random walk of H steps (H / 24 in units of variance, since partial
    sums grow as they go) plus one rounding at its size.  Exponentials turn it into a relative error of probabilities.
    """
    eps = float(np.finfo(np.float32).eps)
    scale = float(case.options.get("logit_scale", 1.0)) / float(case.options.get("temperature", 0.5))
    spread = case.logit_std * scale
    largest = abs(case.logit_offset) * scale + spread * float(np.sqrt(2 * np.log(case.vocab + 1)))
    if case.target_prob is not None:
        largest = max(largest, float(np.abs(oracle.lse).max(initial=0)))
    logit = eps * (1 + largest + spread * float(np.sqrt(case.hidden / 24)))

    def per_token(ref: Any, error: float) -> float:
        rms = float(np.sqrt(np.mean(np.square(ref[np.isfinite(ref)])))) if np.isfinite(ref).any() else 0.0
        return _DEVIATIONS * (eps + error / rms) if rms > 0 else _DEVIATIONS * error

    sums = eps * float(np.sqrt((case.tokens + case.vocab) / 24))
    gradient = _DEVIATIONS * (logit + sums)
    return {
        "loss": per_token(oracle.loss, logit),
        "lse": per_token(oracle.lse, logit),
        "log_prob": per_token(oracle.log_prob, logit),
        # d entropy / d logit is up to about log V times a probability.
        "entropy": per_token(oracle.entropy, logit * float(1 + np.log(case.vocab))),
        "grad_hidden": gradient,
        "grad_weight": gradient,
        "grad_bias": gradient,
    }
