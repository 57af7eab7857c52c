"""Compare the PyTorch op with the float64 oracle: what `onchip check` and the tests run."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.ops.linear_cross_entropy import checks, reference
from onchip.ops.linear_cross_entropy.cases import CHECK_CASES, Case, Inputs, make_inputs
from onchip.ops.linear_cross_entropy.checks import Check, compare
from onchip.ops.linear_cross_entropy.torch_op import linear_cross_entropy
from onchip.ops.linear_cross_entropy.triton_op import refusal


def planned_checks(device: str) -> list[Callable[[], list[Check]]]:
    """All cases on `device` in all dtypes, with both strategies and each backend that can run them, one by one."""
    dtypes, strategies = (torch.float32, torch.bfloat16, torch.float16), ("stash", "recompute")
    index = torch.cuda.current_device() if device == "cuda" else None
    return [
        partial(check_case, case, dtype, device, strategy=strategy, backend=backend)
        for case, dtype, strategy, backend in product(CHECK_CASES, dtypes, strategies, ("torch", "triton"))
        if backend == "torch" or refusal(device, index, dtype) is None
    ]


def as_arguments(case: Case, inputs: Inputs, dtype: torch.dtype, device: str) -> tuple[list[Any], dict[str, Any]]:
    """(hidden, weight, target, bias), floats as leaves that need gradients, and the keyword arguments of the op."""

    def leaf(x: Any) -> Tensor | None:
        return None if x is None else torch.from_numpy(x).to(device=device, dtype=dtype).requires_grad_()

    keywords = dict(case.options)
    for name in ("token_weight", "temperature"):
        if (value := getattr(inputs, name)) is not None:
            keywords[name] = torch.from_numpy(value).to(device)
    target = torch.from_numpy(inputs.target).to(device)
    return [leaf(inputs.hidden), leaf(inputs.weight), target, leaf(inputs.bias)], keywords


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
    results = {name: _array(x) for name, x in zip(quantities, (loss, *stats, *grads), strict=False)}
    plain = {} if dtype == torch.float32 else plain_errors(arguments, keywords, inputs.grad_loss, oracle)
    return compare(case, str(dtype).removeprefix("torch."), f"{backend} {strategy}", results, oracle, plain)


def run_oracle(arguments: list[Any], keywords: Mapping[str, Any], grad_loss: Any) -> reference.Result:
    """The oracle on exactly the numbers that the op was given."""

    def array(x: Any) -> Any:
        return x.detach().double().cpu().numpy() if isinstance(x, Tensor) and x.is_floating_point() else x

    hidden, weight, target, bias = arguments
    return reference.linear_cross_entropy(
        array(hidden),
        array(weight),
        target.cpu().numpy(),
        array(bias),
        grad_loss=grad_loss,
        **{name: array(value) for name, value in keywords.items()},
    )


def relative_error(out: Tensor, ref: Any) -> float:
    """||out - ref|| / ||ref||, as `checks.relative_error`."""
    return checks.relative_error(_array(out), ref)


def _array(x: Tensor) -> Any:
    x = x.detach()
    return (x.double() if x.is_floating_point() else x).cpu().numpy()


def plain_errors(
    arguments: list[Any], keywords: Mapping[str, Any], grad_loss: Any, oracle: reference.Result
) -> dict[str, float]:
    """The errors that the plain framework expression makes in the arguments' dtype."""
    leaves: list[Any] = [None if x is None else x.detach().clone().requires_grad_(x.requires_grad) for x in arguments]
    loss = plain_linear_cross_entropy(*leaves, **keywords)
    loss.backward(torch.from_numpy(np.asarray(grad_loss)).to(loss))
    named = {"grad_hidden": leaves[0], "grad_weight": leaves[1], "grad_bias": leaves[3]}
    errors = {name: relative_error(x.grad, getattr(oracle, name)) for name, x in named.items() if x is not None}
    return errors | {"loss": relative_error(loss, oracle.loss)}


def plain_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: float | None = None,
    token_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
) -> Tensor:
    """The same loss written with the framework's own functions in hidden's dtype, logits and all."""
    z = F.linear(hidden, weight, bias) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z / (temperature[..., None].to(z) if isinstance(temperature, Tensor) else temperature)
    kept = target != ignore_index
    y = target.masked_fill(~kept, 0)
    log_p = F.log_softmax(z, -1)
    lse = torch.logsumexp(z, -1)
    loss = -(1 - label_smoothing) * log_p.gather(-1, y[..., None])[..., 0] + z_loss * lse**2
    if label_smoothing > 0:
        loss = loss - label_smoothing * log_p.mean(-1)
    if token_weight is not None:
        loss = loss * token_weight.to(z)
    loss = loss.masked_fill(~kept, 0)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (kept.sum().clamp(min=1) if normalizer is None else normalizer)
