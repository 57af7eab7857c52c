"""Compare the PyTorch op with the float64 oracle: what `onchip check` and the tests run."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.frontend.torch_inputs import dtype_name
from onchip.ops.linear_log_probs import reference
from onchip.ops.linear_log_probs.cases import CHECK_CASES, Case, Inputs, make_inputs
from onchip.ops.linear_log_probs.checks import float32_bounds
from onchip.ops.linear_log_probs.torch_op import LogProbs, linear_log_probs
from onchip.oracle.checks import Check, compare
from onchip.oracle.torch_checks import DTYPES, as_array, detached, for_oracle, linear_arguments, relative_error
from onchip.vocab.triton.plan import refusal


def planned_checks(device: str) -> list[Callable[[], list[Check]]]:
    """All cases on `device` in all dtypes, with each backend that can run them, with and without the entropy."""
    return [
        partial(check_case, case, dtype, device, entropy=entropy, backend=backend)
        for case, dtype, entropy in product(CHECK_CASES, DTYPES, (False, True))
        for backend, reason in plain_refusals(device, dtype_name(dtype)).items()
        if reason is None
    ]


def plain_refusals(device: str, dtype: str) -> dict[str, str | None]:
    """Why each backend can't serve a call without options on the current "cpu" or "cuda" device, or None."""
    return {"torch": None, "triton": refusal(device, None, getattr(torch, dtype))}


def as_arguments(case: Case, inputs: Inputs, dtype: torch.dtype, device: str) -> tuple[list[Any], dict[str, Any]]:
    """(hidden, weight, ids, bias), floats as leaves that need gradients, and the keyword arguments of the op."""
    keywords = dict(case.options)
    if inputs.temperature is not None:
        keywords["temperature"] = torch.from_numpy(inputs.temperature).to(device)
    return linear_arguments(inputs, inputs.ids, dtype, device), keywords


def check_case(
    case: Case,
    dtype: torch.dtype,
    device: str,
    *,
    entropy: bool = True,
    scratch_bytes: int | None = None,
    backend: str = "torch",
) -> list[Check]:
    """Run the op on `case`, forward and backward, and compare all that it returns with the oracle."""
    inputs = make_inputs(case)
    arguments, keywords = as_arguments(case, inputs, dtype, device)
    oracle = run_oracle(arguments, keywords, inputs, entropy=entropy)
    out = linear_log_probs(
        *arguments, **keywords, entropy=entropy, lse=True, top1=True, scratch_bytes=scratch_bytes, backend=backend
    )
    names = ("log_prob", "entropy", "lse", "top1")
    results = {name: x.detach().cpu().numpy() for name, x in zip(names, out, strict=True) if x is not None}
    results |= {name: as_array(x) for name, x in gradients(out, arguments, inputs).items()}
    plain = {} if dtype == torch.float32 else plain_errors(arguments, keywords, inputs, oracle, entropy=entropy)
    name = f"{backend} with entropy" if entropy else backend
    bounds = float32_bounds(case, oracle)
    return compare(case.name, dtype_name(dtype), name, results, oracle, bounds, plain, choice="top1")


def gradients(out: LogProbs, arguments: list[Any], inputs: Inputs) -> dict[str, Tensor]:
    """The gradients of hidden, weight and bias for the case's upstream gradients."""
    upstream = zip(out[:3], (inputs.grad_log_prob, inputs.grad_entropy, inputs.grad_lse), strict=True)
    pairs = [(x, torch.from_numpy(g).to(x)) for x, g in upstream if x is not None]
    named = {"grad_hidden": arguments[0], "grad_weight": arguments[1], "grad_bias": arguments[3]}
    leaves = {name: x for name, x in named.items() if x is not None}
    made = torch.autograd.grad([x for x, _ in pairs], list(leaves.values()), [g for _, g in pairs])
    return dict(zip(leaves, made, strict=True))


def run_oracle(
    arguments: list[Any], keywords: Mapping[str, Any], inputs: Inputs, *, entropy: bool = True
) -> reference.Result:
    """The oracle on exactly the numbers that the op was given."""
    return reference.linear_log_probs(
        *map(for_oracle, arguments),
        grad_log_prob=inputs.grad_log_prob,
        grad_entropy=inputs.grad_entropy if entropy else 0.0,
        grad_lse=inputs.grad_lse,
        **{name: for_oracle(value) for name, value in keywords.items()},
    )


def plain_errors(
    arguments: list[Any], keywords: Mapping[str, Any], inputs: Inputs, oracle: reference.Result, *, entropy: bool = True
) -> dict[str, float]:
    """The errors that the plain framework expression makes in the arguments' dtype."""
    leaves = detached(arguments)
    out = plain_linear_log_probs(*leaves, **keywords, entropy=entropy)
    made: dict[str, Any] = {name: x for name, x in out._asdict().items() if x is not None and name != "top1"}
    made |= gradients(out, leaves, inputs)
    return {name: relative_error(x, getattr(oracle, name)) for name, x in made.items()}


def plain_linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
    entropy: bool = True,
) -> LogProbs:
    """The same written with the framework's own functions in hidden's dtype, logits and all."""
    z = F.linear(hidden, weight, bias) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z / (temperature[..., None].to(z) if isinstance(temperature, Tensor) else temperature)
    several = ids if ids.ndim == hidden.ndim else ids[..., None]
    counted = several != ignore_index
    kept = counted.any(-1)
    log_p = F.log_softmax(z, -1)
    log_prob = log_p.gather(-1, several.masked_fill(~counted, 0)).masked_fill(~counted, 0).view(ids.shape)
    p = log_p.exp()
    entropies = -(p * torch.where(p > 0, log_p, 0)).sum(-1).masked_fill(~kept, 0)
    lse = torch.logsumexp(z, -1).masked_fill(~kept, 0)
    return LogProbs(log_prob, entropies if entropy else None, lse, z.argmax(-1).masked_fill(~kept, -1))
