"""What other libraries offer for the same loss, for `onchip bench` alone.  Each is imported when it is asked for."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

Loss = Callable[[Any, Any, Any], Any]
"""Mean cross-entropy of (hidden [T, H], weight [V, H], target [T]) over the tokens whose target is not -100."""
Refusal = Callable[[str, str], str | None]
"""Why something can't run on (device, dtype) here, or None."""


@dataclass(frozen=True)
class Peer:
    """One function of another library."""

    name: str
    load: Callable[[], Loss]
    """The function, anew for each problem."""
    unavailable: Refusal
    config: dict[str, Any] = field(default_factory=dict)
    package: str = "torch"
    """The distribution that it comes with."""

    def version(self) -> str:
        return metadata.version(self.package).partition("+")[0]


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


def _gpu_only(package: str, dtypes: tuple[str, ...]) -> Refusal:
    def refusal(device: str, dtype: str) -> str | None:
        if device != "cuda":
            return "it runs on CUDA devices only"
        if dtype not in dtypes:
            return f"it takes {' and '.join(dtypes)}, not {dtype}"
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            return f"{package} is not installed; pip install 'onchip[peers]'"
        return None

    return refusal


def _liger(accum_dtype: str | None) -> Loss:
    import torch
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(accum_dtype=getattr(torch, accum_dtype) if accum_dtype else None)
    return lambda hidden, weight, target: loss(weight, hidden, target)


def _cut_cross_entropy(filter_eps: str | None) -> Loss:
    from cut_cross_entropy import linear_cross_entropy

    return lambda hidden, weight, target: linear_cross_entropy(hidden, weight, target, filter_eps=filter_eps)


def _quack(chunk_size: int, use_scaled_exp: bool) -> Loss:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda hidden, weight, target: chunked_linear_cross_entropy(
        hidden, weight, target, chunk_size=chunk_size, use_scaled_exp=use_scaled_exp
    )


def _hopper_only(device: str, dtype: str) -> str | None:
    if refusal := _gpu_only("quack-kernels", ("bfloat16",))(device, dtype):
        return refusal
    import torch

    major, minor = torch.cuda.get_device_capability()
    return None if (major, minor) == (9, 0) else f"it is for compute capability 9.0; this device has {major}.{minor}"


def _optional(name: str, package: str, load: Callable[..., Loss], unavailable: Refusal, **config: Any) -> Peer:
    """What comes with `package`, loaded with `config`."""
    return Peer(name, lambda: load(**config), unavailable, config, package)


_NARROW = ("float16", "bfloat16")
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
    _optional("liger", "liger-kernel", _liger, _gpu_only("liger-kernel", ("float32", *_NARROW)), accum_dtype=None),
    _optional("liger, float32 sums", "liger-kernel", _liger, _gpu_only("liger-kernel", _NARROW), accum_dtype="float32"),
    _optional(
        "cut-cross-entropy",
        "cut-cross-entropy",
        _cut_cross_entropy,
        _gpu_only("cut-cross-entropy", _NARROW),
        filter_eps="high",
    ),
    _optional(
        "cut-cross-entropy, no filter",
        "cut-cross-entropy",
        _cut_cross_entropy,
        _gpu_only("cut-cross-entropy", _NARROW),
        filter_eps=None,
    ),
    _optional(
        "quack base",
        "quack-kernels",
        _quack,
        _gpu_only("quack-kernels", _NARROW),
        chunk_size=1024,
        use_scaled_exp=False,
    ),
    _optional("quack scaled-exp", "quack-kernels", _quack, _hopper_only, chunk_size=1024, use_scaled_exp=True),
)
