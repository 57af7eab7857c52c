"""Compare the PyTorch op with the float64 oracle: what `onchip check` and the tests run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.ops.linear_cross_entropy import reference
from onchip.ops.linear_cross_entropy.cases import CHECK_CASES, Case, Inputs, make_inputs
from onchip.ops.linear_cross_entropy.torch_op import linear_cross_entropy
from onchip.ops.linear_cross_entropy.triton_op import refusal

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
    quantities = ("loss", "lse", "log_prob", "entropy", "grad_hidden", "grad_weight", "grad_bias")
    errors = {
        name: relative_error(out, getattr(oracle, name))
        for name, out in zip(quantities, (loss, stats.lse, stats.log_prob, stats.entropy, *grads), strict=False)
    }
    # What ties in float64 or nearly so may come out either way; a wrong index anywhere else does not.
    wrong = float(np.mean(stats.correct.cpu().numpy() != oracle.correct)) if oracle.correct.size else 0.0
    bounds = float32_bounds(case, oracle)
    if dtype != torch.float32:
        plain = plain_errors(arguments, keywords, inputs.grad_loss, oracle)
        bounds |= {name: max(bounds[name], 2 * error) for name, error in plain.items() if np.isfinite(error)}
    name = str(dtype).removeprefix("torch.")
    implementation = f"{backend} {strategy}"
    checks = [Check(case.name, name, implementation, q, e, bounds[q]) for q, e in errors.items()]
    return [*checks, Check(case.name, name, implementation, "correct", wrong, 0.02 if case.tokens > 50 else 0.0)]


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
    """||out - ref|| / ||ref||, or ||out|| where ref is 0.  Infinities must be the same ones, and count as 0."""
    got = out.detach().double().cpu().numpy()
    if got.shape != ref.shape:
        raise AssertionError(f"shape {got.shape} where {ref.shape} is right")
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
