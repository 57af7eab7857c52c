"""What a benchmark compares: functions, each imported when it is needed, and how close results must be.

Imports no framework.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pkgutil import resolve_name
from typing import Any

import onchip
from onchip.bench.timing import Step

Refusal = Callable[[str, str], str | None]
"""`refusal(device, dtype)`: why something can't run here, or None."""
Function = Callable[..., Any]
Load = Callable[..., Function]
Steps = Callable[[Any, Function], Mapping[str, Step]]
"""`steps(problem, function)`: the steps by mode."""

NARROW = ("float16", "bfloat16")
IGNORED = -100
"""The ignore_index that all implementations have by default."""


def always(device: str, dtype: str) -> None:
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op: a function of this package or of another library."""

    name: str
    load: Load
    """Called for each problem: imports and returns the function."""
    unavailable: Refusal = always
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its settings, for the record."""
    package: str = "torch"
    """The distribution that it comes with."""
    steps: Steps | None = None
    """None to let the benchmark make them from the function."""
    record: Callable[[Any, str], dict[str, Any]] | None = None
    """The settings for a problem and a mode, where they depend on these."""
    error_bounds: Mapping[str, float] | None = None
    """Its own bounds, by the names of the results, if it is meant to be less exact than the others."""
    check: Callable[[Any, str, Sequence[Any]], Mapping[str, tuple[float, float]]] | None = None
    """Replaces the op's `check`, for steps that return something else."""

    def version(self) -> str:
        return onchip.__version__ if self.package == "onchip" else metadata.version(self.package).partition("+")[0]

    def config(self, problem: Any, mode: str) -> Mapping[str, Any]:
        return self.record(problem, mode) if self.record else self.options


def optional(
    name: str, package: str, load: Load, unavailable: Refusal, steps: Steps | None = None, **options: Any
) -> Implementation:
    """A function of `package`, loaded with `options`."""
    return Implementation(name, partial(load, **options), unavailable, options, package, steps)


def imported(path: str, **options: Any) -> Function:
    """A loader for the function at `path`, 'module:name', with these options."""
    return partial(resolve_name(path), **options)


def own(load: Load, backends: Sequence[str], suffix: str = "", **options: Any) -> list[Implementation]:
    """This package's function, loaded with `options` and a backend: 'auto', and each by name if there are several.

    A backend that can't run a problem says so when its steps are made or run.
    """
    names = ["auto", *(backends if len(backends) > 1 else ())]
    return [optional(f"onchip {b}{suffix}", "onchip", load, always, backend=b, **options) for b in names]


def plain_peers(framework: str, load: Callable[[bool], Function]) -> tuple[Implementation, ...]:
    """The framework's plain expression, with logits in float32 and with logits in the inputs' dtype."""
    if framework == "jax":
        return (
            Implementation("XLA, 16-bit logits", lambda: load(False), xla_only_narrow, package="jax"),
            Implementation("XLA, float32 logits", lambda: load(True), package="jax"),
        )
    return (
        Implementation("torch eager", lambda: load(False)),
        Implementation("torch eager, float32 logits", lambda: load(True), only_narrow),
        Implementation("torch.compile, float32 logits", lambda: compiled(load(True)), no_compiler),
    )


# -------------------------------------------------------------------------------------------------- why not


def _same_in_float32(other: str) -> Refusal:
    return lambda device, dtype: f"in float32 it is the same as {other}" if dtype == "float32" else None


only_narrow = _same_in_float32("torch eager")
xla_only_narrow = _same_in_float32("XLA, float32 logits")


def no_compiler(device: str, dtype: str) -> str | None:
    if device == "cuda":
        return None if importlib.util.find_spec("triton") else "it needs Triton, which is not installed"
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    return None if shutil.which(compiler) else f"it needs a C++ compiler, and there is no {compiler!r} on the PATH"


def gpu_only(package: str, dtypes: tuple[str, ...], install: str = "'onchip[peers]'") -> Refusal:
    def refusal(device: str, dtype: str) -> str | None:
        if device != "cuda":
            return "it runs on CUDA devices only"
        if dtype not in dtypes:
            return f"it takes {' and '.join(dtypes)}, not {dtype}"
        return needs(package, install)(device, dtype)

    return refusal


def needs(package: str, install: str = "'onchip[peers-jax]'") -> Refusal:
    """The package; `install` is what pip is asked for."""

    def refusal(device: str, dtype: str) -> str | None:
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            return f"{package} is not installed; pip install {install}"
        return None

    return refusal


def compiled(function: Function) -> Function:
    """`function`, compiled by torch.compile."""
    import torch

    # Each problem is compiled for its own shapes.  Without the reset the shapes of earlier problems would count towards
    # the limit on recompilations, past which a function silently runs eagerly.
    torch.compiler.reset()
    return torch.compile(function, dynamic=False, fullgraph=True)
