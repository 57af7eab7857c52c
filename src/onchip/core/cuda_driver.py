"""The functions of CUDA's driver that prepared launches call, without Triton and PyTorch.

The names are those of cuda.h: https://docs.nvidia.com/cuda/cuda-driver-api.
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: this thread has none yet

Function = Callable[..., int]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *[(name, ctypes.c_uint) for name in ("x", "y", "z", "block_x", "block_y", "block_z", "shared")],
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("number", ctypes.c_uint),
    )


class Driver(NamedTuple):
    """Functions that return the number of an error, or 0 if there was none."""

    launch: Function  # cuLaunchKernelEx
    encode: Function  # cuTensorMapEncodeTiled
    parameter: Function  # cuFuncGetParamInfo
    fill: Function  # cuMemsetD8Async
    retain: Function  # cuDevicePrimaryCtxRetain
    use: Function  # cuCtxSetCurrent
    version: int  # 13010 is 13.1

    def checked(self, what: str, device: int, function: Function, *args: Any) -> None:
        """Call a function and raise if it fails; it is called again if this thread hadn't used the device before."""
        failed = function(*args)
        if failed == _INVALID_CONTEXT:
            context = ctypes.c_void_p()
            failed = self.retain(ctypes.addressof(context), device) or self.use(context.value) or function(*args)
        if failed:
            raise RuntimeError(f"{what}: CUDA's driver refused the call with error {failed}")


@lru_cache(maxsize=1)
def driver() -> Driver | None:
    """CUDA's driver; None where there is none, or one older than CUDA 12.4."""
    pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    kinds: dict[str, list[Any]] = {
        "cuLaunchKernelEx": [pointer] * 4,
        "cuTensorMapEncodeTiled": [pointer, number, number, *[pointer] * 5, *[number] * 4],
        "cuFuncGetParamInfo": [pointer, size, pointer, pointer],
        "cuMemsetD8Async": [pointer, ctypes.c_ubyte, size, pointer],
        "cuDevicePrimaryCtxRetain": [pointer, number],
        "cuCtxSetCurrent": [pointer],
        "cuDriverGetVersion": [pointer],
    }
    try:
        library = ctypes.CDLL("libcuda.so.1")
        *functions, asks = [ctypes.CFUNCTYPE(number, *given)((name, library)) for name, given in kinds.items()]
    except (OSError, AttributeError):
        return None
    launch, encode, parameter, fill, retain, use = functions
    version = number()
    failed = asks(ctypes.addressof(version))
    return None if failed else Driver(launch, encode, parameter, fill, retain, use, version.value)
