"""What the benchmarks of several ops share: peers of other libraries, and the comparison with a reference."""

import importlib.util
import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

import onchip

Step = Callable[[], Sequence[Tensor]]
Refusal = Callable[[str, str], str | None]
"""Why something can't run on (device, dtype) here, or None."""

NARROW = ("float16", "bfloat16")


@dataclass(frozen=True)
class Peer:
    """One function, of another library or of this one."""

    name: str
    load: Callable[[], Callable[..., Any]]
    """The function, anew for each problem; what it imports, it imports then."""
    unavailable: Refusal
    config: dict[str, Any] = field(default_factory=dict)
    package: str = "torch"
    """The distribution that it comes with."""

    def version(self) -> str:
        return onchip.__version__ if self.package == "onchip" else metadata.version(self.package).partition("+")[0]


def optional(
    name: str, package: str, load: Callable[..., Callable[..., Any]], unavailable: Refusal, **config: Any
) -> Peer:
    """What comes with `package`, loaded with `config`."""
    return Peer(name, lambda: load(**config), unavailable, config, package)


def own(
    load: Callable[..., Callable[..., Any]], backends: Sequence[str], suffix: str = "", **config: Any
) -> list[Peer]:
    """This package's function, loaded with `config` and a backend: 'auto', and each one by name if there are several.

    A backend that can't run a problem says so when its steps are made or run.
    """
    names = ["auto", *(backends if len(backends) > 1 else ())]
    return [optional(f"onchip {b}{suffix}", "onchip", load, always, backend=b, **config) for b in names]


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


# -------------------------------------------------------------------------------------------------- why not


def always(device: str, dtype: str) -> None:
    return None


def only_narrow(device: str, dtype: str) -> str | None:
    return "in float32 it is the same as torch eager" if dtype == "float32" else None


def no_compiler(device: str, dtype: str) -> str | None:
    if device == "cuda":
        return None if importlib.util.find_spec("triton") else "it needs Triton, which is not installed"
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    return None if shutil.which(compiler) else f"it needs a C++ compiler, and there is no {compiler!r} on the PATH"


def gpu_only(package: str, dtypes: tuple[str, ...]) -> Refusal:
    def refusal(device: str, dtype: str) -> str | None:
        if device != "cuda":
            return "it runs on CUDA devices only"
        if dtype not in dtypes:
            return f"it takes {' and '.join(dtypes)}, not {dtype}"
        return not_installed(package)

    return refusal


def not_installed(package: str) -> str | None:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"{package} is not installed; pip install 'onchip[peers]'"
    return None


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` by torch.compile."""
    # Each problem is compiled for its own shapes.  Without the reset the shapes of earlier ones would count towards
    # the limit on recompilations, past which a function runs eagerly without a word.
    torch.compiler.reset()
    return torch.compile(function, dynamic=False, fullgraph=True)


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
