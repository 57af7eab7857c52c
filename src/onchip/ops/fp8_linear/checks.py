"""How the op is compared with its oracle: what `onchip check` and the tests run.  No framework."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from onchip.fp8.numbers import Fp8Options
from onchip.ops.fp8_linear import reference
from onchip.ops.fp8_linear.cases import CHECK_CASES, Fp8LinearCase, make_inputs
from onchip.ops.fp8_linear.reference import Array
from onchip.oracle.checks import DEVIATIONS, UNIT_ROUNDOFF, Checker, op_in

# Hopper's FP8 instructions align the addends of a sum to its largest, with 13 bits after the point, and cut the rest: a
# relative error of about 2**-13 for each of the four that make 128 elements.
TENSOR_CORE_ERROR = 2.0**-13 * 4


def limits(
    case: Fp8LinearCase,
    dtype: str,
    how: Mapping[str, Any],
    oracle: reference.Fp8LinearResult,
    given: Mapping[str, Array],
) -> dict[str, tuple[Array, float]]:
    """The op's own error is that of its sums.

    Against the layer without FP8 the noise, ||error|| / ||ref||, may be no louder than `case.snr_db` says.
    """
    own = bounds(case, dtype, tensor_cores=how["backend"] not in ("dequantize", "xla"))
    made = {name: (getattr(oracle, name), limit) for name, limit in own.items()}
    if case.snr_db is not None:
        x, w, g = (given[name] for name in ("x", "weight", "grad_out"))
        exact = {"out": x @ w.T + given.get("bias", 0), "grad_x": g @ w, "grad_weight": g.T @ x}
        made |= {f"{name} unquantised": (right, 10 ** (-case.snr_db / 20)) for name, right in exact.items()}
    return made


def in_range(case: Fp8LinearCase, dtype: str) -> Fp8LinearCase:
    """The case with numbers, and results, that float16 can hold if that is the dtype."""
    if dtype != "float16":
        return case
    return replace(case, spread=min(case.spread, 1.0), grad_std=max(case.grad_std, 1e-3))


def bounds(case: Fp8LinearCase, dtype: str, *, tensor_cores: bool) -> dict[str, float]:
    """Limits of the relative errors of the results, sums of products that are rounded to `dtype` at the end."""

    def bound(depth: int, of_products: bool = True) -> float:
        # Partial sums grow as they go: the walk's variance is a third of that at full size, of a twelfth of an ulp.
        walk = float(np.finfo(np.float32).eps) * (1 + float(np.sqrt(depth / 24)))
        rounding = 0.0 if dtype == "float32" else UNIT_ROUNDOFF[dtype]
        return DEVIATIONS * walk + rounding + (TENSOR_CORE_ERROR if tensor_cores and of_products else 0.0)

    made = {"out": bound(case.k), "grad_x": bound(case.n), "grad_weight": bound(case.m)}
    return made | {"grad_bias": bound(case.m, of_products=False)}


def plain_refusals(
    device: str, dtype: str = "bfloat16", framework: str = "torch", given: Mapping[str, Any] = {}
) -> dict[str, str | None]:
    """As `kernel_refusals`, of the two options that are `given`."""
    options = Fp8Options(**{name: given[name] for name in ("grad_dtype", "scale") if name in given})
    if framework == "jax":
        from onchip.ops.fp8_linear import jax_op
        from onchip.oracle.jax import platform_of

        return jax_op.refusals(platform_of(device), options)
    import torch

    from onchip.fp8 import torch_products

    return torch_products.refusals(torch.device(device), options.grad_dtype)


def _call(
    fw: Any, how: Mapping[str, Any], x: Any, weight: Any, bias: Any, grad_out: Any, **options: Any
) -> dict[str, Any]:
    weight = weight.T if how.get("weight_layout") == "kn" else weight
    return {"out": op_in(fw, "fp8_linear")(x, weight, bias, **how, **options)}


CHECKER = Checker(
    names=("x", "weight", "bias", "grad_out"),
    inputs=lambda case, dtype: make_inputs(in_range(case, dtype)),
    oracle=reference.fp8_linear,
    call=_call,
    cases=CHECK_CASES,
    hows=lambda fw: [{"weight_layout": x} for x in ("nk", "kn")] if fw.NAME == "jax" else [{}],
    refusals=plain_refusals,
    values=("out",),
    keywords=lambda inputs: {},
    defaults={"torch": {"backend": "dequantize"}, "jax": {"backend": "xla", "weight_layout": "nk"}},
    constant=lambda name, inputs, how: name == "grad_out",  # among the arguments to be rounded as they are
    limits=limits,
)
