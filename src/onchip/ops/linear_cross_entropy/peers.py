"""What other libraries offer for the same loss, for `onchip bench` alone.  Each is imported when it is asked for."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Loss = Callable[[Any, Any, Any], Any]
"""Mean cross-entropy of (hidden [T, H], weight [V, H], target [T])."""


@dataclass(frozen=True)
class Peer:
    """One function of another library."""

    name: str
    load: Callable[[], Loss]
    """The function, anew for each problem."""
    unavailable: Callable[[str, str], str | None]
    """Why it can't run on (device, dtype) here, or None."""
    config: dict[str, Any] = field(default_factory=dict)


def _always(device: str, dtype: str) -> None:
    return None


def _eager() -> Loss:
    import torch.nn.functional as F

    return lambda hidden, weight, target: F.cross_entropy(F.linear(hidden, weight), target)


def _eager_float32_logits() -> Loss:
    import torch.nn.functional as F

    return lambda hidden, weight, target: F.cross_entropy(F.linear(hidden, weight).float(), target)


def _only_narrow(device: str, dtype: str) -> str | None:
    return "in float32 it is the same as torch eager" if dtype == "float32" else None


def _compiled() -> Loss:
    import torch

    # Each problem is compiled for its own shapes.  Without the reset the shapes of earlier ones would count towards
    # the limit on recompilations, past which a function runs eagerly without a word.
    torch.compiler.reset()
    return torch.compile(_eager(), dynamic=False, fullgraph=True)


def _no_compiler(device: str, dtype: str) -> str | None:
    if device == "cuda":
        return None if importlib.util.find_spec("triton") else "it needs Triton, which is not installed"
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    return None if shutil.which(compiler) else f"it needs a C++ compiler, and there is no {compiler!r} on the PATH"


def _linear_cross_entropy() -> Loss:
    import torch.nn.functional as F

    return F.linear_cross_entropy


def _linear_cross_entropy_chunked() -> Loss:
    import torch
    import torch.nn.functional as F

    options = torch.nn.LinearCrossEntropyOptions()
    return lambda hidden, weight, target: F.linear_cross_entropy(hidden, weight, target, options=options)


def _older_torch(device: str, dtype: str) -> str | None:
    import torch

    if hasattr(torch.nn.functional, "linear_cross_entropy"):
        return None
    return f"torch.nn.functional.linear_cross_entropy came with torch 2.13; this is {torch.__version__}"


PEERS = (
    Peer("torch eager", _eager, _always),
    Peer("torch eager, float32 logits", _eager_float32_logits, _only_narrow),
    Peer("torch.compile", _compiled, _no_compiler),
    Peer("F.linear_cross_entropy", _linear_cross_entropy, _older_torch, {"options": None}),
    Peer(
        "F.linear_cross_entropy chunked",
        _linear_cross_entropy_chunked,
        _older_torch,
        {"options": "LinearCrossEntropyOptions()"},
    ),
)
