"""Compare the PyTorch op with the float64 oracle: what `onchip check` and the tests run."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.frontend.torch_inputs import dtype_name
from onchip.ops.linear_cross_entropy import reference
from onchip.ops.linear_cross_entropy.cases import CHECK_CASES, Case, Inputs, make_inputs
from onchip.ops.linear_cross_entropy.checks import float32_bounds
from onchip.ops.linear_cross_entropy.torch_op import linear_cross_entropy
from onchip.oracle.checks import Check, compare
from onchip.oracle.torch_checks import (
    DTYPES,
    as_array,
    detached,
    for_oracle,
    linear_arguments,
    plain_cross_entropy,
    relative_error,
)
from onchip.vocab.triton.plan import refusal


def planned_checks(device: str) -> list[Callable[[], list[Check]]]:
    """All cases on `device` in all dtypes, with both strategies and each backend that can run them, one by one."""
    return [
        partial(check_case, case, dtype, device, strategy=strategy, backend=backend)
        for case, dtype, strategy in product(CHECK_CASES, DTYPES, ("stash", "recompute"))
        for backend, reason in plain_refusals(device, dtype_name(dtype)).items()
        if reason is None
    ]


def plain_refusals(device: str, dtype: str) -> dict[str, str | None]:
    """Why each backend can't serve a call without options on the current "cpu" or "cuda" device, or None."""
    return {"torch": None, "triton": refusal(device, None, getattr(torch, dtype))}


def as_arguments(case: Case, inputs: Inputs, dtype: torch.dtype, device: str) -> tuple[list[Any], dict[str, Any]]:
    """(hidden, weight, target, bias), floats as leaves that need gradients, and the keyword arguments of the op."""
    keywords = dict(case.options)
    for name in ("token_weight", "temperature"):
        if (value := getattr(inputs, name)) is not None:
            keywords[name] = torch.from_numpy(value).to(device)
    return linear_arguments(inputs, inputs.target, dtype, device), keywords


def check_case(
    case: Case,
    dtype: torch.dtype,
    device: str,
    *,
    strategy: str = "auto",
    scratch_bytes: int | None = None,
    backend: str = "torch",
) -> list[Check]:
    """Run the op on `case`, forward and backward, and compare all that it returns with the oracle."""
    inputs = make_inputs(case)
    arguments, keywords = as_arguments(case, inputs, dtype, device)
    oracle = run_oracle(arguments, keywords, inputs.grad_loss)
    loss, stats = linear_cross_entropy(
        *arguments,
        **keywords,
        strategy=strategy,
        scratch_bytes=scratch_bytes,
        backend=backend,
        return_stats=True,
    )
    loss.backward(torch.from_numpy(np.asarray(inputs.grad_loss)).to(device))
    grads = [x.grad for x in (arguments[0], arguments[1], arguments[3]) if x is not None]
    quantities = ("loss", "lse", "log_prob", "entropy", "correct", "grad_hidden", "grad_weight", "grad_bias")
    results = {name: as_array(x) for name, x in zip(quantities, (loss, *stats, *grads), strict=False)}
    plain = {} if dtype == torch.float32 else plain_errors(arguments, keywords, inputs.grad_loss, oracle)
    bounds, name = float32_bounds(case, oracle), f"{backend} {strategy}"
    return compare(case.name, dtype_name(dtype), name, results, oracle, bounds, plain, choice="correct")


def run_oracle(arguments: list[Any], keywords: Mapping[str, Any], grad_loss: Any) -> reference.Result:
    """The oracle on exactly the numbers that the op was given."""
    return reference.linear_cross_entropy(
        *map(for_oracle, arguments),
        grad_loss=grad_loss,
        **{name: for_oracle(value) for name, value in keywords.items()},
    )


def plain_errors(
    arguments: list[Any], keywords: Mapping[str, Any], grad_loss: Any, oracle: reference.Result
) -> dict[str, float]:
    """The errors that the plain framework expression makes in the arguments' dtype."""
    leaves = detached(arguments)
    loss = plain_linear_cross_entropy(*leaves, **keywords)
    loss.backward(torch.from_numpy(np.asarray(grad_loss)).to(loss))
    named = {"grad_hidden": leaves[0], "grad_weight": leaves[1], "grad_bias": leaves[3]}
    errors = {name: relative_error(x.grad, getattr(oracle, name)) for name, x in named.items() if x is not None}
    return errors | {"loss": relative_error(loss, oracle.loss)}


def plain_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """The same loss written with the framework's own functions in hidden's dtype, logits and all."""
    return plain_cross_entropy(F.linear(hidden, weight, bias), target, **options)
