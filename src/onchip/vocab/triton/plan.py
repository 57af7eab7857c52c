"""The plan of a call on the Triton kernels."""

from dataclasses import replace

import torch

from onchip.frontend.torch_inputs import DTYPES
from onchip.kernels.triton.launch import device_refusal
from onchip.vocab.memory import Problem
from onchip.vocab.triton import memory as triton_spec
from onchip.vocab.triton.memory import TritonConfig


def refusal(device: str, index: int | None, dtype: torch.dtype) -> str | None:
    """Why the kernels can't serve a call on this device with products in `dtype`, or None."""
    reason = device_refusal(device, index, dtype)
    if reason is None and dtype not in (torch.bfloat16, torch.float16):
        reason = f"its products are of bfloat16 or float16, not of {DTYPES[dtype]}"
    return reason


def plan(problem: Problem, strategy: str, budget: int | None, *, compiled: bool) -> TritonConfig:
    """The plan of a call, the same wherever an operator asks: for its fake too, where sizes may be symbols.

    What is `compiled` without a budget has a plan that needs no numbers; a budget makes numbers of the symbols, and a
    graph for each.
    """
    if compiled and budget is None:
        return triton_spec.plan_for_symbols(problem, strategy)
    problem = replace(problem, tokens=int(problem.tokens), copied=int(problem.copied))
    return triton_spec.plan(problem, strategy, None if budget is None else int(budget))
