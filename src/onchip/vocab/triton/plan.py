"""What is known of a call on the Triton kernels before it runs: why they refuse it, its plan, its head."""

from dataclasses import replace
from typing import Any

import torch

from onchip.frontend.torch_inputs import DTYPES
from onchip.kernels.triton.launch import device_refusal
from onchip.vocab.memory import Problem
from onchip.vocab.torch.tiles import Head
from onchip.vocab.triton import memory as triton_spec
from onchip.vocab.triton import setup
from onchip.vocab.triton.memory import TritonPlan


def refusal(device: str, index: int | None, dtype: torch.dtype) -> str | None:
    """Why the kernels can't serve a call on this device with products in `dtype`, or None."""
    reason = device_refusal(device, index, dtype)
    if reason is None and dtype not in (torch.bfloat16, torch.float16):
        reason = f"its products are of bfloat16 or float16, not of {DTYPES[dtype]}"
    return reason


def plan(problem: Problem, strategy: str, budget: int | None, *, compiled: bool) -> TritonPlan:
    """The plan of a call, the same wherever an operator asks: for its fake too, where sizes may be symbols.

    What is `compiled` without a budget has a plan that needs no numbers; a budget makes numbers of the symbols, and a
    graph for each.
    """
    if compiled and budget is None:
        return triton_spec.plan_for_symbols(problem, strategy)
    problem = replace(problem, tokens=int(problem.tokens), ids=int(problem.ids), copied=int(problem.copied))
    return triton_spec.plan(problem, strategy, None if budget is None else int(budget))


def head_of(call: Any, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Head:
    """The linear layer of an op's call and what happens to its logits, as launches take them."""
    # The bias in the products' dtype first, as F.linear does under autocast.
    bias = None if call.bias is None else call.bias.to(call.dtype).float()
    softcap = None if call.options.softcap is None else float(call.options.softcap)
    weight = setup.product_weight(call.weight, call.dtype)
    return Head(weight, bias, float(label_smoothing), float(z_loss), softcap, float(call.options.logit_scale))
