"""Tensors of a random call in PyTorch, and its results."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onchip.fuzz.judge import CONSTANTS, least_scratch, named
from onchip.ops.linear_jsd.spec import TopK
from onchip.oracle.torch import as_array, computed


def arrays(
    made: Any,
    shape: Sequence[int],
    dtype: str,
    device: str,
    *,
    label_dtype: str = "int64",
    autocast: bool = False,
    frozen: Sequence[str] = (),
    strides: str = "plain",
    weight_strides: str = "plain",
    constant_strides: str = "plain",
    upstream_strides: str = "plain",
    inplace: bool = False,
) -> dict[str, Any]:
    """The arrays of `made`, the inputs of a case, with `shape` for their tokens, and upstream gradients among them.

    Under autocast they are float32 that hold numbers of `dtype`.  Strides are "plain", "sliced" (NaN lies between),
    "transposed", "strided" (every other element) or "expanded" (all the same element).
    """
    out: dict[str, Any] = {}
    for name, x in made._asdict().items():
        if x is None:
            continue
        if name == "topk":
            indices, values = (torch.from_numpy(part.reshape(*shape, part.shape[-1])) for part in x[:2])
            out["teacher_topk"] = TopK(indices.to(device), values.to(device), *x[2:])
            continue
        per_token = name == "token_weight" or not name.endswith(("weight", "bias"))
        x = np.reshape(x, (*shape, *np.shape(x)[1:])) if per_token and np.ndim(x) else x
        tensor = torch.as_tensor(x).to(device)
        if name in ("target", "ids"):
            tensor = tensor.to(getattr(torch, label_dtype))
        elif name not in ("token_weight", "temperature") and (not name.startswith("grad_") or name == "grad_out"):
            tensor = tensor.to(getattr(torch, dtype))
            tensor = tensor.float() if autocast and name != "grad_out" else tensor
        if name.startswith("grad_"):
            out[name] = laid_out(tensor, upstream_strides)
        elif name in CONSTANTS or name.endswith("bias"):
            out[name] = laid_out(tensor, constant_strides)
        else:
            out[name] = laid_out(tensor, weight_strides if name.endswith("weight") else strides)
        if not name.startswith("grad_") and name not in CONSTANTS:
            out[name] = out[name].detach().requires_grad_(name not in frozen)
    if inplace:
        out["logits"] = computed(out["logits"])
    return out


def laid_out(x: Tensor, strides: str) -> Tensor:
    """The same numbers with other strides, where there are dimensions for them; "expanded" repeats the first."""
    if x.ndim == 0 or strides == "plain":
        return x
    if strides == "expanded":
        return x[(slice(0, 1),) * x.ndim].expand(x.shape) if x.numel() else x
    if strides == "sliced":
        return torch.cat([x, torch.full_like(x, math.nan)], -1)[..., : x.shape[-1]]
    if strides == "transposed":
        return x.mT.contiguous().mT if x.ndim > 1 else x
    return torch.stack([x, x], -1)[..., 0]


def numbers(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same for the oracle: NumPy, floats as float64."""
    plain = {name: as_array(x) for name, x in given.items() if isinstance(x, Tensor)}
    if (topk := given.get("teacher_topk")) is not None:
        plain["teacher_topk"] = (as_array(topk.indices), as_array(topk.values), topk.kind, topk.rest)
    return plain


def results(
    call: Callable[..., Any],
    given: Mapping[str, Any],
    *,
    scratch: float | None = None,
    again: bool = False,
    twice: bool = False,
    weight_grad_out: Tensor | None = None,
) -> dict[str, Any]:
    """What `call` returns and the gradients of the tensors in `given`, under the names of the oracle's fields.

    `scratch` is so many times the least budget.  `again` goes back through the graph a second time, which must give the
    same; `twice` differentiates a gradient, which must raise.
    """
    more = {} if scratch is None else {"scratch_bytes": math.ceil(scratch * least_scratch(call))}
    upstream = {name.removeprefix("grad_"): g for name, g in given.items() if name.startswith("grad_")}
    made = named(call(**more), next(iter(upstream)))
    out = {name: as_array(x) for name, x in made.items()}
    leaves = {n: x for n, x in given.items() if isinstance(x, Tensor) and x.requires_grad}
    if not leaves:
        return out
    pairs = [(made[name], g) for name, g in upstream.items() if name in made]

    def differentiate(**how: bool) -> dict[str, Any]:
        before = torch.zeros(()) if weight_grad_out is None else weight_grad_out.clone()
        outputs, factors = zip(*pairs, strict=True)
        grads = torch.autograd.grad(outputs, list(leaves.values()), factors, allow_unused=True, **how)
        gradients: dict[str, Any] = dict(zip(leaves, grads, strict=True))
        if weight_grad_out is not None and "weight" in leaves:
            assert gradients["weight"] is None, "weight_grad_out is given, but weight has a gradient of its own"
            gradients["weight"] = weight_grad_out - before
        return gradients

    if twice:
        refuse_second_derivative(pairs, leaves)
        if weight_grad_out is not None:
            weight_grad_out.zero_()
    gradients = differentiate(retain_graph=again)
    out |= {f"grad_{name}": as_array(x) for name, x in gradients.items()}
    if again:
        for name, x in differentiate().items():
            same = torch.equal(x, gradients[name]) or (weight_grad_out is not None and name == "weight")
            assert same, f"a second backward gives another gradient of {name}"
    return out


def refuse_second_derivative(pairs: Sequence[tuple[Tensor, Tensor]], leaves: Mapping[str, Tensor]) -> None:
    """A backward of the backward must raise."""
    outputs, factors = zip(*pairs, strict=True)
    grads = torch.autograd.grad(outputs, list(leaves.values()), factors, create_graph=True, allow_unused=True)
    made = [g.float().norm() for g in grads if g is not None]
    if not made:  # all went to weight_grad_out
        return
    try:
        torch.autograd.grad(made, list(leaves.values()), allow_unused=True)
    except RuntimeError:
        return
    raise AssertionError("a backward of the backward gives something")
