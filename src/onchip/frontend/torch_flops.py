"""What torch.utils.flop_counter counts for the operators: the multiplications and additions of their matrix products.

To import it takes 0.2 s, since it imports Triton, so it is told where somebody else has.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

_FORMULAS: dict[Any, Callable[..., int]] = {}


def register(operator: str, flops: Callable[..., int]) -> None:
    """Let counters call `flops` with the arguments of `onchip::<operator>`."""

    def formula(*args: Any, out_val: Any = None) -> int:
        return flops(*args)

    _FORMULAS[getattr(torch.ops.onchip, operator)] = formula
    tell_counters()


def tell_counters() -> None:
    """Give the formulas to counters that will be made, and to those that watch."""
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None or torch.compiler.is_compiling():
        return
    registries = [module.flop_registry]
    for i in range(torch._C._len_torch_dispatch_stack()):
        counter = getattr(torch._C._get_dispatch_stack_at(i), "counter", None)
        if isinstance(counter, module.FlopCounterMode):
            registries.append(counter.flop_registry)
    for registry in registries:
        for operator, formula in _FORMULAS.items():
            registry.setdefault(operator, formula)
