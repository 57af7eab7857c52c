"""What torch.utils.flop_counter counts for the operators: the multiplications and additions of their matrix products.

Importing the counter takes 0.2 s, since it imports Triton; so it learns the formulas only once something else has
imported it.
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
    if torch.compiler.is_compiling() or (kind := _kind_of_counter()) is None:
        return
    of_all = sys.modules["torch.utils.flop_counter"].flop_registry
    for registry in (of_all, *(counter.flop_registry for counter in _counters(kind))):
        for operator, formula in _FORMULAS.items():
            registry.setdefault(operator, formula)


def are_counted() -> bool:
    """Whether a counter watches."""
    kind = _kind_of_counter()
    return kind is not None and bool(_counters(kind))


def _kind_of_counter() -> Any:
    """The class of counters, if its module has been imported, which another thread may be doing now."""
    return getattr(sys.modules.get("torch.utils.flop_counter"), "FlopCounterMode", None)


def _counters(kind: Any) -> list[Any]:
    modes = [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]
    counters = [getattr(mode, "counter", None) for mode in modes]
    return [counter for counter in counters if isinstance(counter, kind)]
