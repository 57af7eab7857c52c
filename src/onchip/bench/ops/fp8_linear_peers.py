"""Functions for the same layer, of this package and others, for `onchip bench`; others are imported when asked for."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from onchip.bench.peers import Peer, always, gpu_only, not_installed, optional, own
from onchip.ops.fp8_linear.torch_op import BACKENDS, fp8_linear

Layer = Callable[[Any, Any], Any]
"""x [M, K] and weight [N, K] to [M, N]."""
# Of a peer whose `config` has this: it is a product of operands that were quantised beforehand, and no layer.
PRODUCT_ALONE = "quantising"
LINEAR = "torch nn.Linear"
SCALED_MM = "F.scaled_mm alone, operands quantised beforehand"


def _own(backend: str) -> Layer:
    return lambda x, weight: fp8_linear(x, weight, backend=backend)


def _linear() -> Layer:
    import torch.nn.functional as F

    return F.linear


def _scaled_mm() -> Callable[..., Any]:
    from onchip.fp8.torch_products import scaled_mm_product

    return scaled_mm_product


def _torchao() -> Layer:
    import torch
    from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinear

    def layer(x: Any, weight: Any) -> Any:
        if (elements := x.shape[0] * weight.shape[0]) >= 2**31:
            # Past that they would write to addresses that aren't theirs, and nothing could run on the device after.
            raise ValueError(f"its kernels count elements in 32 bits, and the output has {elements}")
        plain = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        plain.weight = weight  # a Parameter, which its layer takes over as it is
        return Float8BlockwiseLinear.from_float(plain)(x)

    return layer


def _only_cpu(device: str, dtype: str) -> str | None:
    return "its float32 products are there to be right; it is timed on the CPU" if device == "cuda" else None


def _only_cuda(device: str, dtype: str) -> str | None:
    return None if device == "cuda" else "on the CPU each call checks the copies, by quantising the weight again"


def _no_scaled_mm(device: str, dtype: str) -> str | None:
    import torch

    from onchip.fp8.torch_products import scaled_mm_refusal

    return scaled_mm_refusal(torch.device(device))


def _no_torchao(device: str, dtype: str) -> str | None:
    if reason := gpu_only("torch", ("bfloat16",))(device, dtype):
        return reason
    return None if not_installed("torchao") is None else "torchao is not installed; pip install torchao"


OWN = tuple(
    replace(peer, unavailable=_only_cpu) if peer.name == "onchip dequantize" else peer for peer in own(_own, BACKENDS)
)
QUANTIZED_BEFORE = replace(OWN[0], name=f"{OWN[0].name}, weight quantised before", unavailable=_only_cuda)
PEERS = (
    Peer(LINEAR, _linear, always),
    optional("torchao blockwise", "torchao", _torchao, _no_torchao),
    Peer(SCALED_MM, _scaled_mm, _no_scaled_mm, {PRODUCT_ALONE: "not timed"}),
)
