"""Compare the PyTorch ops with the float64 oracle: what `onchip check` and the tests run."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.frontend.torch_inputs import dtype_name
from onchip.ops.linear_jsd import checks, reference, triton_op
from onchip.ops.linear_jsd.cases import CHECK_CASES, Case, Inputs, make_inputs
from onchip.ops.linear_jsd.checks import compare
from onchip.ops.linear_jsd.spec import TopK
from onchip.ops.linear_jsd.torch_op import jsd, linear_jsd
from onchip.oracle.checks import Check
from onchip.oracle.torch_checks import DTYPES, as_array, for_oracle, relative_error


def planned_checks(device: str) -> list[Callable[[], list[Check]]]:
    """All cases on `device` in all dtypes, one by one."""
    return [partial(check_case, case, dtype, device) for case, dtype in product(CHECK_CASES, DTYPES)]


def plain_refusals(device: str, dtype: str) -> dict[str, str | None]:
    """Why each backend can't serve a call without options on the current "cpu" or "cuda" device, or None."""
    return {"torch": None, "triton": triton_op.refusal_of(device, None, [getattr(torch, dtype)])}


def as_arguments(inputs: Inputs, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """All arrays of `inputs` as tensors under their names; the first eight are leaves in `dtype`."""
    out: dict[str, Any] = {}
    for name, x in zip(inputs._fields, inputs, strict=True):
        if x is None:
            out[name] = None
        elif name == "topk":
            out[name] = TopK(torch.from_numpy(x[0]).to(device), torch.from_numpy(x[1]).to(device), x[2], x[3])
        else:
            # NumPy's 0-d results are scalars
            tensor = torch.as_tensor(x).to(device)
            out[name] = tensor.to(dtype).requires_grad_() if name.startswith(("student", "teacher")) else tensor
    return out


def call(arguments: Mapping[str, Any], **options: Any) -> Tensor:
    """The op on `arguments`, as `as_arguments` gives them."""
    a = arguments
    more = {"teacher_topk": a["topk"], "target": a["target"], "token_weight": a["token_weight"], **options}
    if a["student_logits"] is not None:
        return jsd(a["student_logits"], a["teacher_logits"], **more)
    pairs: Any = (a["student_hidden"], a["student_weight"], a["teacher_hidden"], a["teacher_weight"])
    biases: dict[str, Any] = {"student_bias": a["student_bias"], "teacher_bias": a["teacher_bias"]}
    return linear_jsd(*pairs, teacher_logits=a["teacher_logits"], **biases, **more)  # type: ignore[misc]


def check_case(
    case: Case, dtype: torch.dtype, device: str, *, scratch_bytes: int | None = None, backend: str = "auto"
) -> list[Check]:
    """Run the op on `case`, forward and backward, and compare all that it returns with the oracle."""
    inputs = make_inputs(case)
    arguments = as_arguments(inputs, dtype, device)
    oracle = run_oracle(arguments, case.options)
    # Where the teacher is given by logits, those of linear_jsd get no gradient from the kernels.
    teacher = inputs.topk is None and not (
        backend == "triton" and case.student == "hidden" and inputs.teacher_logits is not None
    )
    options = dict(case.options) | {"teacher_grad": teacher, "scratch_bytes": scratch_bytes, "backend": backend}
    results = _results(call(arguments, **options), arguments, teacher=teacher)
    plain = {}
    if dtype != torch.float32:
        made = _results(plain_jsd(arguments, **case.options), arguments, teacher=teacher)
        plain = {name: relative_error(x, getattr(oracle, name)) for name, x in made.items()}
    arrays = {name: as_array(x) for name, x in results.items()}
    return compare(case, dtype_name(dtype), "torch" if backend == "auto" else backend, arrays, oracle, plain)


def _results(loss: Tensor, arguments: Mapping[str, Any], *, teacher: bool) -> dict[str, Tensor]:
    leaves = {
        f"grad_{name}": x
        for name, x in arguments.items()
        if isinstance(x, Tensor) and x.requires_grad and (teacher or name.startswith("student"))
    }
    grads = torch.autograd.grad(loss, list(leaves.values()), arguments["grad_loss"].to(loss.dtype))
    return {"loss": loss, **dict(zip(leaves, grads, strict=True))}


def run_oracle(arguments: Mapping[str, Any], options: Mapping[str, Any]) -> reference.Result:
    """The oracle on exactly the numbers that the op was given."""
    arrays = {name: for_oracle(x) for name, x in arguments.items()}
    if (topk := arrays["topk"]) is not None:
        arrays["topk"] = (as_array(topk.indices), as_array(topk.values), topk.kind, topk.rest)
    return checks.oracle_of(Inputs(**arrays), options)


def plain_jsd(
    arguments: Mapping[str, Any],
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    temperature_squared: bool = False,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: float | None = None,
    hard_weight: float = 0.0,
    vocab: int | None = None,
) -> Tensor:
    """The same loss written with the framework's own functions in the arguments' dtype, logits and all."""
    a = arguments
    z = (
        F.linear(*(a[f"student_{x}"] for x in ("hidden", "weight", "bias")))
        if a["student_logits"] is None
        else a["student_logits"]
    )
    z = z[..., :vocab]
    ls = F.log_softmax(z / temperature, -1)
    if a["topk"] is not None:
        indices, values, _, rest = a["topk"]
        lt = values.to(z)
        ls = ls.gather(-1, indices)
        if rest == "renormalised":
            ls, lt = F.log_softmax(ls, -1), F.log_softmax(lt, -1)
        elif rest == "tail":
            ls, lt = (torch.cat([x, torch.log1p(-x.exp().sum(-1, keepdim=True))], -1) for x in (ls, lt))
    else:
        u = (
            F.linear(*(a[f"teacher_{x}"] for x in ("hidden", "weight", "bias")))
            if a["teacher_logits"] is None
            else a["teacher_logits"]
        )
        lt = F.log_softmax(u[..., :vocab] / temperature, -1)
    # Of entries that both models exclude, a difference would be NaN.
    ls, lt = (x.clamp(min=torch.finfo(x.dtype).min / 2) for x in (ls, lt))
    if beta == 0:
        loss = (lt.exp() * (lt - ls)).sum(-1)
    elif beta == 1:
        loss = (ls.exp() * (ls - lt)).sum(-1)
    else:
        lm = torch.logaddexp(ls + math.log(1 - beta), lt + math.log(beta))
        loss = (1 - beta) * (ls.exp() * (ls - lm)).sum(-1) + beta * (lt.exp() * (lt - lm)).sum(-1)
    if temperature_squared:
        loss = loss * temperature**2
    target = a["target"]
    kept = torch.ones(loss.shape, dtype=torch.bool, device=z.device) if target is None else target != ignore_index
    if hard_weight > 0:
        ce = F.cross_entropy(z.flatten(0, -2), target.flatten(), ignore_index=ignore_index, reduction="none")
        loss = hard_weight * ce.view(loss.shape) + (1 - hard_weight) * loss
    if a["token_weight"] is not None:
        loss = loss * a["token_weight"].to(z)
    loss = torch.where(kept, loss, 0)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (kept.sum().clamp(min=1) if normalizer is None else normalizer)
