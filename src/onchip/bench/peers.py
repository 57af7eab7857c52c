"""What a benchmark compares with, functions that are imported when they are asked for, and how close results must be.

Imports no framework.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import onchip

Refusal = Callable[[str, str], str | None]
"""Why something can't run on (device, dtype) here, or None."""

Step = Callable[[], Sequence[Any]]
"""Run once; returns the arrays that it leaves behind (loss, gradients)."""

NARROW = ("float16", "bfloat16")
IGNORED = -100
"""The ignore_index that all implementations have by default."""


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


@dataclass(frozen=True)
class Implementation:
    """A peer's function as the harness wants it; `make_steps` makes the steps of a problem with it."""

    peer: Peer
    make_steps: Callable[[Any, Peer], Mapping[str, Step]]
    record: Callable[[Any, str], dict[str, Any]] | None = None
    """The settings for a problem and a mode, where they aren't those of the peer."""

    @property
    def name(self) -> str:
        return self.peer.name

    def version(self) -> str:
        return self.peer.version()

    def unavailable(self, device: str, dtype: str) -> str | None:
        return self.peer.unavailable(device, dtype)

    def config(self, problem: Any, mode: str) -> dict[str, Any]:
        return self.record(problem, mode) if self.record else self.peer.config

    def steps(self, problem: Any) -> Mapping[str, Step]:
        return self.make_steps(problem, self.peer)


def bounds(
    names: Sequence[str], lengths: Sequence[int], errors: Sequence[float] | None, eps: float, *, forward: int
) -> dict[str, float]:
    """How far each thing that a step returns may be from its reference, by name, `eps` being that of the dtype.

    In float32, by the random walk of rounding errors over sums of so many `lengths`.  In 16 bits, twice the `errors` of
    what the framework's plain expression returned; as a single number may be right by luck, of the first `forward`
    things at least a rounding.
    """
    if errors is None:
        return {name: eps * n**0.5 for name, n in zip(names, lengths, strict=True)}
    least = [eps / 2 if i < forward else 0.0 for i in range(len(errors))]
    return {name: 2 * max(e, low) for name, e, low in zip(names, errors, least, strict=True)}


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


def plain_peers(framework: str, load: Callable[[bool], Callable[..., Any]]) -> tuple[Peer, ...]:
    """The framework's plain expression, loaded with whether its logits are float32 or in the inputs' dtype."""
    if framework == "jax":
        return (
            optional("XLA, 16-bit logits", "jax", lambda: load(False), xla_only_narrow),
            optional("XLA, float32 logits", "jax", lambda: load(True), always),
        )
    return (
        Peer("torch eager", lambda: load(False), always),
        Peer("torch eager, float32 logits", lambda: load(True), only_narrow),
        Peer("torch.compile, float32 logits", lambda: compiled(load(True)), no_compiler),
    )


# -------------------------------------------------------------------------------------------------- why not


def always(device: str, dtype: str) -> None:
    return None


def only_narrow(device: str, dtype: str) -> str | None:
    return "in float32 it is the same as torch eager" if dtype == "float32" else None


def xla_only_narrow(device: str, dtype: str) -> str | None:
    return "in float32 it is the same as XLA, float32 logits" if dtype == "float32" else None


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


def needs(package: str) -> Refusal:
    return lambda device, dtype: not_installed(package, "peers-jax")


def not_installed(package: str, extra: str = "peers") -> str | None:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"{package} is not installed; pip install 'onchip[{extra}]'"
    return None


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` by torch.compile."""
    import torch

    # Each problem is compiled for its own shapes.  Without the reset the shapes of earlier ones would count towards
    # the limit on recompilations, past which a function runs eagerly without a word.
    torch.compiler.reset()
    return torch.compile(function, dynamic=False, fullgraph=True)
