"""What the comparisons of every front end with the oracle share.  No framework."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from onchip.ops.fp8_linear import reference
from onchip.ops.fp8_linear.cases import Case, Inputs
from onchip.ops.fp8_linear.reference import Array
from onchip.oracle.checks import DEVIATIONS, Check, relative_error

UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-11}
# Hopper's FP8 instructions align the addends of a sum to its largest, with 13 bits after the point, and cut the rest: a
# relative error of about 2**-13 for each of the four that make 128 elements.
TENSOR_CORE_ERROR = 2.0**-13 * 4


def compare(
    case: Case,
    dtype: str,
    implementation: str,
    results: Mapping[str, Array],
    oracle: reference.Result,
    *,
    tensor_cores: bool,
) -> list[Check]:
    """Compare `results`, named like the oracle's fields, with the oracle: the op's own error is that of its sums."""
    depths = {"out": case.k, "grad_x": case.n, "grad_weight": case.m, "grad_bias": case.m}
    return [
        Check(
            case.name,
            dtype,
            implementation,
            name,
            relative_error(made, getattr(oracle, name)),
            bound(depths[name], dtype, tensor_cores=tensor_cores and name != "grad_bias"),
        )
        for name, made in results.items()
    ]


def in_range(case: Case, dtype: str) -> Case:
    """The case with numbers, and results, that float16 can hold if that is the dtype."""
    if dtype != "float16":
        return case
    return replace(case, spread=min(case.spread, 1.0), grad_std=max(case.grad_std, 1e-3))


def bound(depth: int, dtype: str, *, tensor_cores: bool) -> float:
    """Limit of the relative error of a sum of so many products, rounded to `dtype` at the end."""
    # Partial sums grow as they go: the random walk's variance is a third of that at full size, of a twelfth of an ulp.
    walk = float(np.finfo(np.float32).eps) * (1 + float(np.sqrt(depth / 24)))
    rounding = 0.0 if dtype == "float32" else UNIT_ROUNDOFF[dtype]
    return DEVIATIONS * walk + rounding + (TENSOR_CORE_ERROR if tensor_cores else 0.0)


def compare_with_unquantized(
    case: Case, dtype: str, implementation: str, results: Mapping[str, Array], inputs: Inputs
) -> list[Check]:
    """Compare with the layer without FP8: the noise, ||error|| / ||ref||, may be no louder than `case.snr_db` says."""
    if case.snr_db is None:
        return []
    x, w, g = (a.astype(np.float64) for a in (inputs.x, inputs.weight, inputs.grad_out))
    exact = {"out": x @ w.T + (0 if inputs.bias is None else inputs.bias), "grad_x": g @ w, "grad_weight": g.T @ x}
    loudest = 10 ** (-case.snr_db / 20)
    return [
        Check(case.name, dtype, implementation, f"{name} unquantised", relative_error(results[name], ref), loudest)
        for name, ref in exact.items()
    ]
