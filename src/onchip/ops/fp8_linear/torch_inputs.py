"""What the public functions check at their door, without reading a value of a tensor."""

from typing import Any

import torch
from torch import Tensor

from onchip.fp8 import numbers
from onchip.frontend.torch_inputs import DTYPES, dtype_name, require_tensors


def check_tensors(op: str, **named: Any) -> None:
    """Raise for what can be seen of the tensors; a bias may be None.  All are where the first one is."""
    first = next(iter(named))
    device = None
    for name, t in require_tensors(op, named, optional=("bias",)).items():
        if t.dtype not in DTYPES:
            raise TypeError(f"{op}: {name} must be float32, bfloat16 or float16; got {dtype_name(t.dtype)}")
        device = device or t.device
        if t.device != device:
            raise ValueError(f"{op}: {name} is on {t.device} but {first} is on {device}; move it there")


def result_dtype(x: Tensor) -> torch.dtype:
    """x's dtype, or autocast's."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        if dtype not in DTYPES:
            raise TypeError(f"{numbers.OP}: autocast to {dtype_name(dtype)} is not supported")
        return dtype
    return x.dtype
