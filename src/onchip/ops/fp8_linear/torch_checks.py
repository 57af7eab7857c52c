"""Compare the PyTorch op with the oracle: what `onchip check` and the tests run."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onchip.fp8 import triton_refusal as triton_op
from onchip.fp8.torch_products import scaled_mm_refusal
from onchip.frontend.torch_inputs import dtype_name
from onchip.ops.fp8_linear import reference
from onchip.ops.fp8_linear.cases import CHECK_CASES, Case, Inputs, make_inputs
from onchip.ops.fp8_linear.checks import compare, compare_with_unquantized, in_range
from onchip.ops.fp8_linear.torch_op import BACKENDS, fp8_linear
from onchip.oracle.checks import Check


def planned_checks(device: str) -> list[Callable[[], list[Check]]]:
    """All cases on `device` in all dtypes, with each backend that can run them, one by one."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return [
        partial(check_case, case, dtype, device, backend=backend)
        for case, dtype, backend in product(CHECK_CASES, dtypes, BACKENDS)
        if refusals(device, **case.options)[backend] is None
    ]


def plain_refusals(device: str, dtype: str = "bfloat16") -> dict[str, str | None]:
    """Why each backend can't serve a call without options on the current "cpu" or "cuda" device, or None."""
    return refusals(device)


def refusals(device: str, grad_dtype: str = "e4m3", **_: Any) -> dict[str, str | None]:
    """The same for a call with options."""
    scaled_mm = scaled_mm_refusal(torch.device(device), grad_dtype)
    reasons = {"scaled_mm": scaled_mm, "triton": triton_op.refusal(device, None)}
    return {backend: reasons.get(backend) for backend in BACKENDS}


def as_arguments(inputs: Inputs, dtype: torch.dtype, device: str) -> tuple[list[Any], Tensor]:
    """(x, weight, bias) as leaves that need gradients, and the output's gradient."""

    def tensor(x: Any) -> Any:
        return None if x is None else torch.from_numpy(x).to(device=device, dtype=dtype)

    leaves = [None if x is None else tensor(x).requires_grad_() for x in inputs[:3]]
    return leaves, tensor(inputs.grad_out)


def check_case(case: Case, dtype: torch.dtype, device: str, *, backend: str = "dequantize") -> list[Check]:
    """Run the op on `case`, forward and backward, and compare all that it returns with the oracle."""
    leaves, grad_out = as_arguments(make_inputs(in_range(case, dtype_name(dtype))), dtype, device)
    # The oracle on exactly the numbers that the op was given.
    tensors = (*leaves, grad_out)
    arrays: list[Any] = [None if t is None else t.detach().float().cpu().numpy() for t in tensors]
    given = Inputs(*arrays)
    oracle = reference.fp8_linear(given.x, given.weight, given.bias, grad_out=given.grad_out, **case.options)
    out = fp8_linear(*leaves, backend=backend, **case.options)
    out.backward(grad_out)
    made = (out, *(x.grad for x in leaves if x is not None))
    results = {name: x.detach().double().cpu().numpy() for name, x in zip(reference.Result._fields, made, strict=False)}
    name = dtype_name(dtype)
    checks = compare(case, name, backend, results, oracle, tensor_cores=backend != "dequantize")
    return checks + compare_with_unquantized(case, name, backend, results, given)


def relative(made: Tensor, expected: Any) -> float:
    """||made - expected|| / ||expected|| in float64."""
    ref = np.asarray(expected, np.float64)
    return float(np.linalg.norm(made.detach().double().cpu().numpy() - ref) / np.linalg.norm(ref))
