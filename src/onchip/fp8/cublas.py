"""Products of FP8 numbers by cuBLASLt, which stores them or adds them to a float32 matrix.

It is called through its C interface, in the library that PyTorch itself has loaded.  PyTorch's `F.scaled_mm` can't add,
and takes the host longer than a product that is described once and then sent again.  At M=N=K=8192 on an H200 a product
that is added takes 1.07 ms; the product alone takes 1.03 ms in bfloat16, and a product in float32 with an addition
after it takes 1.24 ms.

Names and numbers are those of cublasLt.h: https://docs.nvidia.com/cuda/cublas.
"""

import ctypes
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from onchip.fp8.torch_quantize import TorchQuantized
from onchip.frontend import torch_prepared as stated
from onchip.kernels.triton.packed import Changing

_COMPUTE_32F = 68  # cublasComputeType_t
_R_32F = 0  # cudaDataType, as these:
_TYPES = {torch.float32: _R_32F, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28}
_OP_T = 1  # cublasOperation_t
_BIAS = 4  # cublasLtEpilogue_t
_VEC128_32F, _BLK128X128_32F = 4, 5  # cublasLtMatmulMatrixScale_t
# cublasLtMatmulDescAttributes_t
_TRANSA, _EPILOGUE, _BIAS_POINTER = 3, 7, 8
_A_SCALE_POINTER, _B_SCALE_POINTER, _A_SCALE_MODE, _B_SCALE_MODE = 17, 18, 31, 32
# cublasLtMatmulPreferenceAttributes_t
_MAX_WORKSPACE, _MIN_ALIGNMENTS = 1, (5, 6, 7, 8)  # the last of A, B, C and D
_WORKSPACE = 1 << 20  # no product that was measured wanted more than 4 bytes
_ALIGNED = 16  # bytes, of which addresses of scales and of a bias, and the result's rows, are multiples
ROWS = 4  # of which the result's number of rows is a multiple, so that rows of `a`'s scales are aligned

_Address, _Int, _Size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_ARGUMENTS: dict[str, list[Any]] = {
    "cublasLtCreate": [_Address],
    "cublasLtMatmulDescCreate": [_Address, _Int, _Int],
    "cublasLtMatmulDescSetAttribute": [_Address, _Int, _Address, _Size],
    "cublasLtMatmulDescDestroy": [_Address],
    "cublasLtMatrixLayoutCreate": [_Address, _Int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64],
    "cublasLtMatrixLayoutDestroy": [_Address],
    "cublasLtMatmulPreferenceCreate": [_Address],
    "cublasLtMatmulPreferenceSetAttribute": [_Address, _Int, _Address, _Size],
    "cublasLtMatmulPreferenceDestroy": [_Address],
    "cublasLtMatmulAlgoGetHeuristic": [*[_Address] * 7, _Int, _Address, _Address],
    "cublasLtMatmul": [*[_Address] * 14, _Size, _Address],
}


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


def multiplied(
    a: TorchQuantized,  # [M, C], 1x128 scales
    b: TorchQuantized,  # [N, C]
    by_block: bool,  # b's scales are 128x128, else 1x128
    out: Tensor,  # [M, N], contiguous
    *,
    bias: Tensor | None = None,  # [N] of out's dtype
    add: bool = False,  # to `out`, which is float32 then
) -> bool:
    """Store A B^T + bias in `out`, or add it with one rounding of the sum; returns False, and does nothing, if cuBLAS
    can't for these tensors.
    """
    lt = _library()
    if lt is None or not takes(len(out), out.shape[1], out.dtype):
        return False
    if any(x is not None and x.data_ptr() % _ALIGNED for x in (a.scales, b.scales, bias)):
        return False
    with torch.cuda.device(out.device):
        product = _Product(lt, a, b, out, bias, by_block=by_block, add=add)
        if not product.find(out):
            return False
        product.words[_STREAM] = _stream(out.device.index)
        product.send()
    told = stated.builder()
    if told is not None:
        told.launch(product)
    return True


def takes(rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Whether cuBLAS has kernels for results of these sizes."""
    return rows % ROWS == columns * dtype.itemsize % _ALIGNED == 0


# Places among a product's words, the addresses first, as cuBLAS calls them.
_A, _A_SCALES, _B, _B_SCALES, _OF_BIAS, _OUT, _SPACE, _STREAM = range(8)
# Which of these are attributes of the operation.
_ATTRIBUTES = ((_A_SCALE_POINTER, _A_SCALES), (_B_SCALE_POINTER, _B_SCALES), (_BIAS_POINTER, _OF_BIAS))
_FACTORS = (ctypes.c_float * 2)(0, 1)
_ZERO, _ONE = ctypes.addressof(_FACTORS), ctypes.addressof(_FACTORS) + 4


class _Product:
    """A product that is described, as `Builder.launch` takes it.  One thread at a time writes its words and sends."""

    stream = _STREAM

    def __init__(
        self, lt: Any, a: TorchQuantized, b: TorchQuantized, out: Tensor, bias: Tensor | None, *, by_block: bool,
        add: bool,
    ) -> None:  # fmt: skip
        # cuBLAS's matrices are stored by columns: its [N, M] is our [M, N], so its A is our b.
        tensors = b.data, b.scales, a.data, a.scales, bias, out
        self.given = Changing([(x, i) for i, x in enumerate(tensors) if x is not None], [], [])
        self.words = (ctypes.c_uint64 * 8)(*[0 if x is None else x.data_ptr() for x in tensors])
        self.written: Any = None  # for the caller, as in `Packed`
        self._lt, self._handle, self._factor = lt, _handle(lt, out.device.index), _ONE if add else _ZERO
        operation = lt.cublasLtMatmulDescCreate, lt.cublasLtMatmulDescDestroy, lt.cublasLtMatmulDescSetAttribute
        self._operation = _Description(*operation, (_COMPUTE_32F, _R_32F))
        self._tell = self._operation.tell
        self._tell(_TRANSA, ctypes.c_int32(_OP_T))
        self._tell(_A_SCALE_MODE, ctypes.c_int32(_BLK128X128_32F if by_block else _VEC128_32F))
        self._tell(_B_SCALE_MODE, ctypes.c_int32(_VEC128_32F))
        if bias is not None:
            self._tell(_EPILOGUE, ctypes.c_int32(_BIAS))
        matrices = b.data, a.data, out
        self._layouts = [_layout(lt, x.dtype, *x.shape) for x in matrices]
        self._preference = _preference(lt, *[_alignment(x) for x in matrices])
        self._found, self._told = _Found(), list[int]()

    def _tell_addresses(self) -> None:
        """Tell the operation its addresses, where they changed."""
        told = self.words[_A_SCALES : _OF_BIAS + 1]
        if told != self._told:
            self._told = []
            for attribute, i in _ATTRIBUTES:
                if self.words[i]:
                    self._tell(attribute, ctypes.c_uint64(self.words[i]))
            self._told = told

    def find(self, out: Tensor) -> bool:
        """Look for a kernel, and allocate what it works on; False: cuBLAS has none."""
        self._tell_addresses()
        count, found, (a, b, c) = ctypes.c_int(), self._found, [x.at for x in self._layouts]
        failed = self._lt.cublasLtMatmulAlgoGetHeuristic(
            self._handle, self._operation.at, a, b, c, c, self._preference.at, 1, ctypes.addressof(found),
            ctypes.addressof(count),
        )  # fmt: skip
        if failed or not count.value:
            return False
        space = stated.empty(max(1, found.workspace), torch.uint8, out.device)
        self.words[_SPACE] = space.data_ptr()
        self.given.tensors.append((space, _SPACE))
        return True

    def send(self) -> None:
        """Launch with the words as written."""
        self._tell_addresses()
        a, _, b, _, _, out, space, stream = self.words
        (of_a, of_b, of_out), found = [x.at for x in self._layouts], self._found
        failed = self._lt.cublasLtMatmul(
            self._handle, self._operation.at, _ONE, a, of_a, b, of_b, self._factor, out, of_out, out, of_out,
            ctypes.addressof(found),  # starts with the algorithm
            space, found.workspace, stream,
        )  # fmt: skip
        _require(failed)


class _Description:
    """One of cuBLASLt's descriptions, which is given back with the last object that has it."""

    def __init__(self, create: Any, destroy: Any, change: Any, arguments: Sequence[int] = ()) -> None:
        found = ctypes.c_void_p()
        _require(create(ctypes.addressof(found), *arguments))
        self.at, self._destroy, self._change = found.value, destroy, change

    def tell(self, attribute: int, value: Any) -> None:
        """Set an attribute."""
        _require(self._change(self.at, attribute, ctypes.addressof(value), ctypes.sizeof(value)))

    def __del__(self) -> None:
        if hasattr(self, "at"):
            self._destroy(self.at)


@lru_cache(maxsize=1)
def _library() -> Any:
    """The cuBLASLt that PyTorch has loaded, found by its name on Linux, or None."""
    if not hasattr(os, "RTLD_NOLOAD"):
        return None
    try:
        lt = ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}", mode=os.RTLD_NOLOAD)
    except OSError:
        return None
    for name, arguments in _ARGUMENTS.items():
        getattr(lt, name).argtypes = arguments
    return lt


@lru_cache(maxsize=64)
def _handle(lt: Any, device: int) -> int:
    """cuBLASLt's handle for the current device, which all threads share and nobody gives back."""
    made = ctypes.c_void_p()
    _require(lt.cublasLtCreate(ctypes.addressof(made)))
    assert made.value is not None
    return made.value


@lru_cache(maxsize=512)
def _layout(lt: Any, dtype: torch.dtype, rows: int, columns: int) -> _Description:
    """How a matrix [rows, columns], with its rows one after the other, lies in memory: cuBLAS's [columns, rows]."""
    sizes = _TYPES[dtype], columns, rows, columns
    return _Description(lt.cublasLtMatrixLayoutCreate, lt.cublasLtMatrixLayoutDestroy, None, sizes)


@lru_cache(maxsize=64)
def _preference(lt: Any, a: int, b: int, out: int) -> _Description:
    """What a kernel may rely on, given the alignments of the matrices."""
    create, destroy = lt.cublasLtMatmulPreferenceCreate, lt.cublasLtMatmulPreferenceDestroy
    made = _Description(create, destroy, lt.cublasLtMatmulPreferenceSetAttribute)
    made.tell(_MAX_WORKSPACE, ctypes.c_size_t(_WORKSPACE))
    for attribute, alignment in zip(_MIN_ALIGNMENTS, (a, b, out, out), strict=True):
        made.tell(attribute, ctypes.c_uint32(alignment))
    return made


def _stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)


def _require(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLAS failed with status {status}")


def _alignment(x: Tensor) -> int:
    """Bytes that x's address is a multiple of: a power of two, and 256 at most."""
    return min(256, x.data_ptr() & -x.data_ptr())
