"""Compare the PyTorch op with the float64 oracle: what `onchip check` and the tests run."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onchip.frontend.torch_inputs import dtype_name
from onchip.kernels.triton.launch import device_refusal
from onchip.ops.cross_entropy import reference
from onchip.ops.cross_entropy.cases import CHECK_CASES, Case, Inputs, make_inputs
from onchip.ops.cross_entropy.checks import float32_bounds
from onchip.ops.cross_entropy.torch_op import cross_entropy
from onchip.oracle.checks import Check, compare
from onchip.oracle.torch_checks import DTYPES, as_array, for_oracle, plain_cross_entropy, relative_error


def planned_checks(device: str) -> list[Callable[[], list[Check]]]:
    """All cases on `device` in all dtypes, with a new gradient and one over the logits, with each backend that can run
    them, one by one.
    """
    return [
        partial(check_case, case, dtype, device, inplace=inplace, backend=backend)
        for case, dtype, inplace in product(CHECK_CASES, DTYPES, (False, True))
        for backend, reason in plain_refusals(device, dtype_name(dtype)).items()
        if reason is None
    ]


def plain_refusals(device: str, dtype: str) -> dict[str, str | None]:
    """Why each backend can't serve a call without options on the current "cpu" or "cuda" device, or None."""
    return {"torch": None, "triton": device_refusal(device, None, getattr(torch, dtype))}


def as_arguments(case: Case, inputs: Inputs, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """(logits, target) and the keyword arguments of the op; logits is a leaf, sliced if the case says so."""
    keywords = dict(case.options)
    for name in ("token_weight", "temperature"):
        if (value := getattr(inputs, name)) is not None:
            keywords[name] = torch.from_numpy(value).to(device)
    logits = torch.from_numpy(inputs.logits).to(device=device, dtype=dtype)[:, : case.vocab].detach()
    return logits.requires_grad_(), torch.from_numpy(inputs.target).to(device), keywords


def check_case(
    case: Case,
    dtype: torch.dtype,
    device: str,
    *,
    inplace: bool = False,
    scratch_bytes: int | None = None,
    backend: str = "torch",
) -> list[Check]:
    """Run the op on `case`, forward and backward, and compare all that it returns with the oracle."""
    inputs = make_inputs(case)
    logits, target, keywords = as_arguments(case, inputs, dtype, device)
    oracle = run_oracle(logits, target, keywords, inputs.grad_loss)
    given = Computed.apply(logits) if inplace else logits
    loss, stats = cross_entropy(
        given,
        target,
        **keywords,
        scratch_bytes=scratch_bytes,
        backend=backend,
        inplace_backward=inplace,
        return_stats=True,
    )
    (gradient,) = torch.autograd.grad(loss, logits, torch.from_numpy(np.asarray(inputs.grad_loss)).to(device))
    names = ("loss", "lse", "log_prob", "entropy", "correct", "grad_logits")
    results = {name: as_array(x) for name, x in zip(names, (loss, *stats, gradient), strict=True)}
    plain = {} if dtype == torch.float32 else plain_errors(logits, target, keywords, inputs.grad_loss, oracle)
    implementation = f"{backend} in place" if inplace else backend
    bounds = float32_bounds(case, oracle)
    return compare(case.name, dtype_name(dtype), implementation, results, oracle, bounds, plain, choice="correct")


class Computed(torch.autograd.Function):
    """The same numbers in the same layout, as a layer's output would be: neither a leaf nor a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        return out.copy_(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def run_oracle(logits: Tensor, target: Tensor, keywords: Mapping[str, Any], grad_loss: Any) -> reference.Result:
    """The oracle on exactly the numbers that the op was given."""
    return reference.cross_entropy(
        as_array(logits),
        as_array(target),
        grad_loss=grad_loss,
        **{name: for_oracle(value) for name, value in keywords.items()},
    )


def plain_errors(
    logits: Tensor, target: Tensor, keywords: Mapping[str, Any], grad_loss: Any, oracle: reference.Result
) -> dict[str, float]:
    """The errors that the plain framework expression makes in the logits' dtype."""
    leaf = logits.detach().clone().requires_grad_()
    loss = plain_cross_entropy(leaf, target, **keywords)
    (gradient,) = torch.autograd.grad(loss, leaf, torch.from_numpy(np.asarray(grad_loss)).to(loss))
    return {
        "loss": relative_error(loss, oracle.loss),
        "grad_logits": relative_error(gradient, oracle.grad_logits),
    }
