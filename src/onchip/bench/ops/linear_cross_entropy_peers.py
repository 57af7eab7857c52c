"""What other libraries offer for the same loss, for `onchip bench` alone.  Each is imported when it is asked for."""

from collections.abc import Callable
from typing import Any

from onchip.bench.peers import NARROW, Peer, always, compiled, gpu_only, no_compiler, only_narrow, optional

Loss = Callable[[Any, Any, Any], Any]
"""Mean cross-entropy of (hidden [T, H], weight [V, H], target [T]) over the tokens whose target is not -100."""


def _eager() -> Loss:
    import torch.nn.functional as F

    return lambda hidden, weight, target: F.cross_entropy(F.linear(hidden, weight), target)


def _eager_float32_logits() -> Loss:
    import torch.nn.functional as F

    return lambda hidden, weight, target: F.cross_entropy(F.linear(hidden, weight).float(), target)


def _compiled() -> Loss:
    return compiled(_eager())


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
    if refusal := gpu_only("quack-kernels", ("bfloat16",))(device, dtype):
        return refusal
    import torch

    major, minor = torch.cuda.get_device_capability()
    return None if (major, minor) == (9, 0) else f"it is for compute capability 9.0; this device has {major}.{minor}"


PEERS = (
    Peer("torch eager", _eager, always),
    Peer("torch eager, float32 logits", _eager_float32_logits, only_narrow),
    Peer("torch.compile", _compiled, no_compiler),
    Peer("F.linear_cross_entropy", _linear_cross_entropy, _older_torch, {"options": None}),
    Peer(
        "F.linear_cross_entropy chunked",
        _linear_cross_entropy_chunked,
        _older_torch,
        {"options": "LinearCrossEntropyOptions()"},
    ),
    optional("liger", "liger-kernel", _liger, gpu_only("liger-kernel", ("float32", *NARROW)), accum_dtype=None),
    optional("liger, float32 sums", "liger-kernel", _liger, gpu_only("liger-kernel", NARROW), accum_dtype="float32"),
    optional(
        "cut-cross-entropy",
        "cut-cross-entropy",
        _cut_cross_entropy,
        gpu_only("cut-cross-entropy", NARROW),
        filter_eps="high",
    ),
    optional(
        "cut-cross-entropy, no filter",
        "cut-cross-entropy",
        _cut_cross_entropy,
        gpu_only("cut-cross-entropy", NARROW),
        filter_eps=None,
    ),
    optional(
        "quack base",
        "quack-kernels",
        _quack,
        gpu_only("quack-kernels", NARROW),
        chunk_size=1024,
        use_scaled_exp=False,
    ),
    optional("quack scaled-exp", "quack-kernels", _quack, _hopper_only, chunk_size=1024, use_scaled_exp=True),
)
