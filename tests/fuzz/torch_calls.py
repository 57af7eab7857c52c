"""Tensors of a random call in PyTorch, and its results."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fuzz.draw import Call
from fuzz.judge import CONSTANTS, named, scratch_budget
from onchip.oracle.torch import computed


def array(name: str, x: Any, dtype: str | None, call: Call) -> Tensor:
    """An input in a dtype (None: its own), on the device and with the strides of the call.

    Under autocast it is float32 that holds numbers of the dtype.
    """
    tensor = torch.as_tensor(x).to(call["device"])
    tensor = tensor if dtype is None else tensor.to(getattr(torch, dtype))
    if call["autocast"] and tensor.is_floating_point() and name != "grad_out":
        tensor = tensor.float()
    if name == "topk":
        return tensor
    if name.startswith("grad_"):
        return _laid_out(tensor, call["upstream_strides"])
    if name in CONSTANTS or name.endswith("bias"):
        return _laid_out(tensor, call["constant_strides"])
    return _laid_out(tensor, call["weight_strides" if name.endswith("weight") else "strides"])


def _laid_out(x: Tensor, strides: str) -> Tensor:
    """The same numbers with other strides, where there are dimensions for them.

    "sliced" has NaN between, "strided" is every other element, and "expanded" is the first element everywhere.
    """
    if x.ndim == 0 or strides == "plain":
        return x
    if strides == "expanded":
        return x[(slice(0, 1),) * x.ndim].expand(x.shape) if x.numel() else x
    if strides == "sliced":
        return torch.cat([x, torch.full_like(x, math.nan)], -1)[..., : x.shape[-1]]
    if strides == "transposed":
        return x.mT.contiguous().mT if x.ndim > 1 else x
    return torch.stack([x, x], -1)[..., 0]


def results(
    op: Callable[..., Any], given: Mapping[str, Any], options: Mapping[str, Any], call: Call, leaves: Sequence[str]
) -> dict[str, Tensor]:
    """What `op` returns and the gradients of the `leaves`, under the names of the oracle's fields.

    `call` says how many times the least budget there is of scratch, whether to go back through the graph again, which
    must give the same, and whether to differentiate a gradient, which must raise.
    """
    upstream = {name.removeprefix("grad_"): g for name, g in given.items() if name.startswith("grad_")}
    arrays = {n: x for n, x in given.items() if not n.startswith("grad_")}
    arrays |= {n: given[n].detach().requires_grad_() for n in leaves}
    if call.get("inplace_backward"):
        arrays["logits"] = computed(arrays["logits"])
    called, transposed = dict(arrays), "weight_layout" in options
    if transposed:
        called["weight"] = arrays["weight"].mT
    total = None
    if call.get("weight_grad_out"):
        total = torch.zeros_like(called["weight"], dtype=torch.float32).contiguous()
        options = {**options, "weight_grad_out": total}

    def run(**more: Any) -> Any:
        with torch.autocast(call["device"], torch.bfloat16, enabled=call["autocast"]):
            return op(**called, **options, **more)

    made = named(run(**scratch_budget(call.get("scratch"), run)), next(iter(upstream)))
    if not leaves:
        return made
    outputs, factors = zip(*((made[name], g) for name, g in upstream.items() if name in made), strict=True)
    inputs = [arrays[name] for name in leaves]

    def differentiate(**how: bool) -> dict[str, Any]:
        before = torch.zeros(()) if total is None else total.clone()
        grads = torch.autograd.grad(outputs, inputs, factors, allow_unused=True, **how)
        gradients: dict[str, Any] = dict(zip(leaves, grads, strict=True))
        if total is not None and "weight" in leaves:
            assert gradients["weight"] is None, "weight_grad_out is given, but weight has a gradient of its own"
            gradients["weight"] = (total - before).mT if transposed else total - before
        return gradients

    if call["twice"]:
        grads = torch.autograd.grad(outputs, inputs, factors, create_graph=True, allow_unused=True)
        _refuse_second_derivative([g.float().norm() for g in grads if g is not None], inputs)
        if total is not None:
            total.zero_()
    gradients = differentiate(retain_graph=call["again"])
    for name, x in differentiate().items() if call["again"] else ():
        same = torch.equal(x, gradients[name]) or (total is not None and name == "weight")
        assert same, f"a second backward gives another gradient of {name}"
    return made | {f"grad_{name}": x for name, x in gradients.items()}


def _refuse_second_derivative(norms: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """A backward of the backward must raise."""
    if not norms:  # all went to weight_grad_out
        return
    try:
        torch.autograd.grad(norms, inputs, allow_unused=True)
    except RuntimeError:
        return
    raise AssertionError("a backward of the backward gives something")
