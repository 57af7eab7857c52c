"""What the benchmarks of several ops in PyTorch share: how a peer is run, and the comparison with a reference."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onchip.ops._shared.bench_peers import Peer

Step = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Implementation:
    """A peer's function as the harness wants it; `make_steps` makes the steps of a problem with it."""

    peer: Peer
    make_steps: Callable[[Any, Peer], Mapping[str, Step]]

    @property
    def name(self) -> str:
        return self.peer.name

    def version(self) -> str:
        return self.peer.version()

    def unavailable(self, device: str, dtype: str) -> str | None:
        return self.peer.unavailable(device, dtype)

    def config(self, problem: Any, mode: str) -> dict[str, Any]:
        return self.peer.config

    def steps(self, problem: Any) -> Mapping[str, Step]:
        return self.make_steps(problem, self.peer)


# ---------------------------------------------------------------------------------------------------- correctness


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
    """In float32, by the random walk of rounding errors over sums of so many `lengths`.  In 16 bits, twice the errors
    of what the framework's plain expression returned; as a single number may be right by luck, of the first `forward`
    values at least a rounding."""
    eps = torch.finfo(dtype).eps
    if dtype == torch.float32:
        return {name: eps * n**0.5 for name, n in zip(values, lengths, strict=True)}
    errors = [relative_error(out, ref) for out, ref in zip(plain, values.values(), strict=True)]
    least = [eps / 2 if i < forward else 0.0 for i in range(len(errors))]
    return {name: 2 * max(e, low) for name, e, low in zip(values, errors, least, strict=True)}


def gradient_step(function: Callable[[], Any], leaves: Sequence[Tensor]) -> Step:
    """A step of 'forward+backward': what `function` returns (a loss), and the gradients of `leaves`."""

    def both() -> Sequence[Tensor]:
        value = function()
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    return both
