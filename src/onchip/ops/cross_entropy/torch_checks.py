"""Compare the PyTorch op with the float64 oracle: what `onchip check` and the tests run."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.ops.cross_entropy import reference, triton_op
from onchip.ops.cross_entropy.cases import CHECK_CASES, Case, Inputs, make_inputs
from onchip.ops.cross_entropy.checks import compare
from onchip.ops.cross_entropy.torch_op import BACKENDS, cross_entropy
from onchip.ops.linear_cross_entropy.checks import Check, relative_error


def planned_checks(device: str) -> list[Callable[[], list[Check]]]:
    """All cases on `device` in all dtypes, with a new tensor for the gradient and over the logits, with each backend that
    can run them, one by one.
    """
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return [
        partial(check_case, case, dtype, device, inplace=inplace, backend=backend)
        for case, dtype, inplace, backend in product(CHECK_CASES, dtypes, (False, True), BACKENDS)
        if backend == "torch" or triton_op.refusal(torch.empty(0, 1, dtype=dtype, device=device)) is None
    ]


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
    results = {name: _array(x) for name, x in zip(names, (loss, *stats, gradient), strict=True)}
    plain = {} if dtype == torch.float32 else plain_errors(logits, target, keywords, inputs.grad_loss, oracle)
    implementation = f"{backend} in place" if inplace else backend
    return compare(case, str(dtype).removeprefix("torch."), implementation, results, oracle, plain)


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

    def array(x: Any) -> Any:
        return x.detach().double().cpu().numpy() if isinstance(x, Tensor) else x

    return reference.cross_entropy(
        array(logits),
        target.cpu().numpy(),
        grad_loss=grad_loss,
        **{name: array(value) for name, value in keywords.items()},
    )


def _array(x: Tensor) -> Any:
    x = x.detach()
    return (x.double() if x.is_floating_point() else x).cpu().numpy()


def plain_errors(
    logits: Tensor, target: Tensor, keywords: Mapping[str, Any], grad_loss: Any, oracle: reference.Result
) -> dict[str, float]:
    """The errors that the plain framework expression makes in the logits' dtype."""
    leaf = logits.detach().clone().requires_grad_()
    loss = plain_cross_entropy(leaf, target, **keywords)
    (gradient,) = torch.autograd.grad(loss, leaf, torch.from_numpy(np.asarray(grad_loss)).to(loss))
    return {
        "loss": relative_error(_array(loss), oracle.loss),
        "grad_logits": relative_error(_array(gradient), oracle.grad_logits),
    }


def plain_cross_entropy(
    logits: Tensor,
    target: Tensor,
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
    """The same loss written with the framework's own functions in logits' dtype."""
    z = logits * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z / (temperature[..., None].to(z) if isinstance(temperature, Tensor) else temperature)
    kept = target != ignore_index
    y = target.masked_fill(~kept, 0)
    log_p = F.log_softmax(z, -1)
    loss = -(1 - label_smoothing) * log_p.gather(-1, y[..., None])[..., 0]
    if z_loss > 0:
        loss = loss + z_loss * torch.logsumexp(z, -1) ** 2
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
