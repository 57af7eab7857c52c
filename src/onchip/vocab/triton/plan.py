"""The plan of a call on the Triton kernels, as its registered operators take it."""

from dataclasses import fields, replace
from typing import Any

import torch

from onchip.frontend.torch_inputs import DTYPES
from onchip.kernels.triton.launch import constant_to_compiler, device_refusal
from onchip.vocab.memory import Problem
from onchip.vocab.triton import memory as triton_spec
from onchip.vocab.triton.memory import TritonConfig


def refusal(device: str, index: int | None, dtype: torch.dtype) -> str | None:
    """Why the kernels can't serve a call on this device with products in `dtype`, or None."""
    reason = device_refusal(device, index, dtype)
    if reason is None and dtype not in (torch.bfloat16, torch.float16):
        reason = f"its products are of bfloat16 or float16, not of {DTYPES[dtype]}"
    return reason


def plan(problem: Problem, strategy: str, budget: int | None) -> tuple[Any, ...]:
    """The plan as the operators take it.

    Inside torch.compile sizes may be symbols: a budget makes numbers of them, and a graph for each.
    """
    if torch.compiler.is_compiling() and budget is None:
        return numbers(triton_spec.plan_for_symbols(problem, strategy))
    problem = replace(problem, tokens=int(problem.tokens), ids=int(problem.ids), copied=int(problem.copied))
    found: tuple[Any, ...] = _plan(strategy, budget, *[getattr(problem, name) for name in _FIELDS])
    return found


_FIELDS = tuple(field.name for field in fields(Problem))


@constant_to_compiler  # or the search for a plan would be traced
def _plan(strategy: str, budget: int | None, *of_problem: Any) -> tuple[Any, ...]:
    return numbers(triton_spec.plan(Problem(*of_problem), strategy, budget))


def numbers(c: TritonConfig) -> tuple[Any, ...]:
    """A plan as operators take it."""
    return c.token_chunk, c.vocab_chunk, c.weight_chunk, c.stashed, c.overflow, c.halves
