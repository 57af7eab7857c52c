"""A comparison with an oracle and its bounds.  No framework."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# Rounding errors are taken to add up like a random walk; so many of its standard deviations are allowed.
DEVIATIONS = 4


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


def relative_error(out: npt.NDArray[Any], ref: npt.NDArray[Any]) -> float:
    """||out - ref|| / ||ref||, or ||out|| where ref is 0.  Infinities must be the same ones, and count as 0."""
    if out.shape != ref.shape:
        raise AssertionError(f"shape {out.shape} where {ref.shape} is right")
    got = out.astype(np.float64)
    same_infinity = np.isinf(ref) & (got == ref)
    norm = float(np.linalg.norm(np.where(same_infinity, 0, ref)))
    error = float(np.linalg.norm(np.where(same_infinity, 0, got - np.where(same_infinity, 0, ref))))
    return error / norm if norm > 0 else error


def compare(
    case: str,
    dtype: str,
    implementation: str,
    results: Mapping[str, npt.NDArray[Any]],
    oracle: Any,
    bounds: Mapping[str, float],
    plain: Mapping[str, float],
    *,
    choice: str,
) -> list[Check]:
    """Compare `results`, named like the oracle's fields, with the oracle.

    `bounds` are those of float32.  `plain` holds the errors that the plain framework expression makes in a 16-bit
    dtype: the op may make twice those.  `choice` is the result that depends on which logit is the largest.
    """
    limits = dict(bounds) | {n: max(bounds[n], 2 * error) for n, error in plain.items() if np.isfinite(error)}
    checks = [
        Check(case, dtype, implementation, name, relative_error(out, getattr(oracle, name)), limits[name])
        for name, out in results.items()
        if name != choice
    ]
    # What ties in float64 or nearly so may come out either way; a wrong index anywhere else does not.
    right = getattr(oracle, choice)
    wrong = float(np.mean(results[choice] != right)) if right.size else 0.0
    return [*checks, Check(case, dtype, implementation, choice, wrong, 0.02 if right.size > 50 else 0.0)]


def softmax_bounds(case: Any, oracle: Any, names: Sequence[str], *, hidden: int = 0) -> dict[str, float]:
    """Limits of the relative errors in float32 of the oracle's fields, from its precision and the lengths of the sums.

    A logit has one rounding at its size and, where it is a sum of H products, the error of a random walk of H steps
    (H / 24 in units of variance, since partial sums grow as they go); `hidden` 0: it is given.  Exponentials turn it
    into a relative error of probabilities.
    """
    eps = float(np.finfo(np.float32).eps)
    scale = float(case.options.get("logit_scale", 1.0)) / float(case.options.get("temperature", 0.5))
    spread = float(case.logit_std) * scale
    largest = abs(float(case.logit_offset)) * scale + spread * float(np.sqrt(2 * np.log(case.vocab + 1)))
    if case.target_prob is not None:
        largest = max(largest, float(np.abs(oracle.lse).max(initial=0)))
    logit = eps * (1 + largest + spread * float(np.sqrt(hidden / 24)))
    sums = eps * float(np.sqrt((case.tokens + case.vocab) / 24))

    def bound(name: str) -> float:
        if name.startswith("grad_"):
            return DEVIATIONS * (logit + sums)
        # d entropy / d logit is up to about log V times a probability.
        error = logit * float(1 + np.log(case.vocab)) if name == "entropy" else logit
        ref = getattr(oracle, name)
        rms = float(np.sqrt(np.mean(np.square(ref[np.isfinite(ref)])))) if np.isfinite(ref).any() else 0.0
        return DEVIATIONS * (eps + error / rms if rms > 0 else error)

    return {name: bound(name) for name in names}
