"""What it takes to call Triton's kernels: a device that can run them, and the launch.  Imports no Triton by itself."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from onchip.core.configs import device_slug

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Launch:
    """One kernel launch, to be run or to be compiled ahead of time."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    """By the parameters' names; given more, it keeps those that the kernel takes."""
    warps: int = 4
    stages: int = 1
    registers: int | None = None
    """The most that a thread may have; None leaves it to the compiler."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", {name: self.arguments[name] for name in self.kernel.arg_names})

    @property
    def options(self) -> dict[str, Any]:
        """How it is compiled."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments, **self.options)


def constant_to_compiler(function: _Function) -> _Function:
    """What torch.compiler.assume_constant_result does, which would import the compiler just to say so."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_to_compiler  # it asks the system
def device_refusal(device: str, index: int | None, dtype: torch.dtype) -> str | None:
    """Why no Triton kernel can serve a call on this device with tensors of `dtype`, or None."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if _interpreted():
        return "Triton's interpreter computes bfloat16 wrongly" if dtype == torch.bfloat16 else None
    if device != "cuda":
        return f"it runs on CUDA tensors, not on {device!r}"
    if torch.version.hip is not None:
        return "it is written for NVIDIA GPUs"
    major, minor = torch.cuda.get_device_capability(index)
    return None if major >= 8 else f"it needs compute capability 8.0 or later; this is {major}.{minor}"


@lru_cache(maxsize=1)
def _interpreted() -> bool:
    import triton  # type: ignore[import-untyped]

    return bool(triton.knobs.runtime.interpret)


class Device(NamedTuple):
    """What a launch depends on."""

    slug: str  # its name in stored configs
    capability: int  # 90 is 9.0
    programs: int  # multiprocessors
    shared: int  # bytes of shared memory that a block may use


def describe(device: torch.device) -> Device:
    """A GPU; what runs on the CPU, under the interpreter, is launched as on a small Hopper."""
    return _describe(device.index) if device.type == "cuda" else Device("", 90, 4, 232448)


@lru_cache(maxsize=64)
def _describe(index: int | None) -> Device:
    p = torch.cuda.get_device_properties(index)
    shared: int = p.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Device(device_slug(p.name), 10 * p.major + p.minor, p.multi_processor_count, shared)


def device_of(x: Tensor) -> Any:
    """Triton launches on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
