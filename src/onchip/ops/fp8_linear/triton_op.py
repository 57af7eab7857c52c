"""Which calls of fp8_linear the Triton kernels serve."""

from importlib.util import find_spec

import torch

from onchip.ops.linear_cross_entropy.triton_op import constant_to_compiler, interpreted


@constant_to_compiler  # it asks the system
def refusal(device: str, index: int | None) -> str | None:
    """Why the kernels can't serve a call on this device, or None."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if interpreted():
        return None
    if device != "cuda":
        return f"it runs on CUDA tensors, not on {device!r}"
    if torch.version.hip is not None:
        return "it is written for NVIDIA GPUs"
    major, minor = torch.cuda.get_device_capability(index)
    return None if (major, minor) >= (8, 9) else f"FP8 needs compute capability 8.9 or later; this is {major}.{minor}"
