"""Which calls of fp8_linear the Triton kernels serve."""

import torch

from onchip.kernels.triton.launch import constant_to_compiler, device_refusal


@constant_to_compiler  # it asks the system
def refusal(device: str, index: int | None) -> str | None:
    """Why the kernels can't serve a call on this device, or None."""
    reason = device_refusal(device, index, torch.float32)
    if reason is not None or device != "cuda":  # on the CPU it is Triton's interpreter that refuses nothing
        return reason
    major, minor = torch.cuda.get_device_capability(index)
    return None if (major, minor) >= (8, 9) else f"FP8 needs compute capability 8.9 or later; this is {major}.{minor}"
