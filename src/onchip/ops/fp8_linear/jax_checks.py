"""Compare the JAX op with the oracle: what `onchip check` and the tests run."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onchip.fp8.numbers import Options
from onchip.ops.fp8_linear import reference
from onchip.ops.fp8_linear.cases import CHECK_CASES, Case, Inputs, make_inputs
from onchip.ops.fp8_linear.checks import compare, compare_with_unquantized, in_range
from onchip.ops.fp8_linear.jax_op import LAYOUTS, fp8_linear, refusals
from onchip.oracle.checks import Check
from onchip.oracle.jax_checks import DTYPES, platform_of


def planned_checks(device: str) -> list[Callable[[], list[Check]]]:
    """All cases on "cpu" or "cuda" in all dtypes with both layouts of weight, by each backend that can run them."""
    platform = platform_of(device)
    return [
        partial(check_case, case, dtype, platform, weight_layout=layout, backend=backend)
        for case, layout, dtype in product(CHECK_CASES, LAYOUTS, DTYPES)
        for backend, reason in refusals(platform, Options(**case.options)).items()
        if reason is None
    ]


def plain_refusals(platform: str, dtype: str) -> dict[str, str | None]:
    """Why each backend can't serve a call without options on "cpu", "gpu" or "tpu", or None."""
    return refusals(platform, Options())


def check_case(
    case: Case, dtype: str, device: str = "cpu", *, weight_layout: str = "nk", backend: str = "xla"
) -> list[Check]:
    """Run the op on `case`, forward and backward under jit, and compare all that it returns with the oracle."""
    with jax.default_device(jax.devices(device)[0]):
        leaves = [None if a is None else jnp.asarray(a, dtype) for a in make_inputs(in_range(case, dtype))]
        arrays: list[Any] = [None if a is None else np.asarray(a.astype(jnp.float32)) for a in leaves]
        *arguments, grad_out = leaves

        def step(arguments: Any, grad_out: Any) -> Any:
            def op(x: Any, weight: Any, bias: Any) -> Any:
                weight = weight if weight_layout == "nk" else weight.T
                return fp8_linear(x, weight, bias, weight_layout=weight_layout, backend=backend, **case.options)

            out, pullback = jax.vjp(op, *arguments)
            return out, *pullback(grad_out)

        made = jax.jit(step)(arguments, grad_out)
    given = Inputs(*arrays)
    oracle = reference.fp8_linear(given.x, given.weight, given.bias, grad_out=given.grad_out, **case.options)
    results = {
        name: np.asarray(a, np.float64) for name, a in zip(reference.Result._fields, made, strict=True) if a is not None
    }
    name = f"{backend} {weight_layout}"
    checks = compare(case, dtype, name, results, oracle, tensor_cores=backend == "mosaic_gpu")
    return checks + compare_with_unquantized(case, dtype, name, results, given)
