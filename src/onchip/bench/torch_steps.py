"""What the benchmarks of several ops in PyTorch share: steps, and the comparison with a reference."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onchip.bench.peers import bounds

Step = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Reference:
    """What a step should return in 'forward+backward', by name, and how far from it each may be."""

    values: Mapping[str, Tensor]
    bounds: Mapping[str, float]
    forward: int = 1
    """So many of them are what 'forward' returns."""

    def check(self, mode: str, returned: Sequence[Tensor]) -> dict[str, tuple[float, float]]:
        """Relative error and bound of each thing that a step returned."""
        names = list(self.values)[: self.forward if mode == "forward" else None]
        pairs = zip(names, returned, strict=True)
        return {name: (relative_error(out, self.values[name]), self.bounds[name]) for name, out in pairs}


def relative_error(out: Tensor, ref: Tensor) -> float:
    """||out - ref|| / ||ref||, in float64 and a few rows at a time."""
    if out.shape != ref.shape:
        raise ValueError(f"a result has shape {list(out.shape)} where {list(ref.shape)} is right")
    blocks = zip(torch.atleast_1d(out).split(4096), torch.atleast_1d(ref).split(4096), strict=True)
    error = norm = 0.0
    for o, r in blocks:
        error += float((o.double() - r).square().sum())
        norm += float(r.double().square().sum())
    return math.sqrt(error / norm)


def bounds_of(
    values: Mapping[str, Tensor], plain: Sequence[Tensor], dtype: torch.dtype, lengths: Sequence[int], *, forward: int
) -> dict[str, float]:
    """As `bench_peers.bounds`; `plain` is what the plain expression returned, and isn't looked at in float32."""
    errors = None
    if dtype != torch.float32:
        errors = [relative_error(out, ref) for out, ref in zip(plain, values.values(), strict=True)]
    return bounds(list(values), lengths, errors, torch.finfo(dtype).eps, forward=forward)


def gradient_step(function: Callable[[], Any], leaves: Sequence[Tensor]) -> Step:
    """A step of 'forward+backward': what `function` returns (a loss), and the gradients of `leaves`."""

    def both() -> Sequence[Tensor]:
        value = function()
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    return both
