"""What a framework measures with: the modules `measure` (PyTorch) and `measure_jax`, by the framework's name."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol, cast

from onchip.bench.timing import Step, Timing

MODULES = {"torch": "onchip.bench.measure", "jax": "onchip.bench.measure_jax"}


class Measuring(Protocol):
    """What each of the modules has at its top level.  A device is "cpu" or "cuda"."""

    PACKAGES: Sequence[str]
    """Distributions whose versions are recorded."""
    time_interleaved: Callable[..., dict[str, Timing]]
    """`timing.time_interleaved` with the framework's own clock."""

    def peak_extra_bytes(self, step: Step, *, device: str) -> int:
        """Peak memory of a step above what lived before it and above the arrays that it returns."""

    def compile_seconds(self, step: Step) -> float | None:
        """How long a step took to compile; None where it was not, or where that is not known."""

    def release(self, device: str) -> None:
        """Free what steps have left behind."""

    def threads(self) -> int | None:
        """Threads of the framework on the CPU, where it has a number for that."""

    def gpu(self) -> Mapping[str, Any]:
        """Name of the CUDA device that steps run on ("gpu"), CUDA's version ("cuda"), "gpu_bytes" if known."""


def measuring(framework: str) -> Measuring:
    """The module of "torch" or "jax", loaded with its framework."""
    return cast(Measuring, import_module(MODULES[framework]))
