"""What cuBLASLt is asked for, without it: a stand-in for the library that multiplies what it finds at addresses."""

import contextlib
import ctypes
import os
from types import SimpleNamespace

import pytest
import torch
from fp8_common import assert_same

from onchip.fp8 import cublas, torch_products, torch_quantize
from onchip.fp8.numbers import blocks, up

DTYPES = {0: torch.float32, 28: torch.float8_e4m3fn}


class Library:
    """Descriptions are numbers; the functions are those of cublasLt.h."""

    def __init__(self, status=0, count=1):
        self.status, self.count = status, count
        self.alive, self.last = {}, 0
        self.multiplied = 0

    def __getattr__(self, name):
        if name.endswith("Create"):
            return self.create
        if name.endswith("Destroy"):
            return lambda description: self.alive.pop(description.value)
        assert name.endswith("SetAttribute"), name
        return self.set_attribute

    def create(self, description, *arguments):
        self.last += 1
        description._obj.value = self.last
        self.alive[self.last] = {"arguments": [x.value for x in arguments]}
        return 0

    def set_attribute(self, description, attribute, value, size):
        assert size.value == ctypes.sizeof(value._obj)
        self.alive[description.value][attribute.value] = value._obj.value
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, handle, operation, a, b, c, d, preference, wanted, found, count):
        assert handle.value == 77
        assert self.alive[operation.value]["arguments"] == [68, 0]
        assert wanted.value == 1
        assert min(self.alive[preference.value][i] for i in (5, 6)) >= 16
        self.out_alignment = self.alive[preference.value][7]
        found._obj.workspace = 4
        count._obj.value = self.count
        return self.status

    def matrix(self, address, layout):
        """What lies there, as [R, C] by rows; cuBLAS calls it [C, R] by columns."""
        dtype, columns, rows, stride = self.alive[layout.value]["arguments"]
        assert stride == columns
        return at(address.value, (rows, columns), DTYPES[dtype])

    def cublasLtMatmul(self, handle, operation, alpha, a, of_a, b, of_b, beta, c, of_c, d, of_d, *rest):
        algorithm, workspace, workspace_bytes, stream = rest
        assert (alpha._obj.value, beta._obj.value, stream.value, workspace_bytes.value) == (1, 1, 99, 4)
        assert isinstance(algorithm._obj, cublas._Found)
        assert workspace.value
        assert (c.value, of_c.value) == (d.value, of_d.value)
        told = self.alive[operation.value]
        assert told[3] == 1  # A is transposed, B isn't
        a, b = self.matrix(a, of_a), self.matrix(b, of_b)
        out = self.matrix(d, of_d)
        scales = []
        for x, mode, address in ((a, told[31], told[17]), (b, told[32], told[18])):
            rows, groups = len(x), x.shape[1] // 128
            if mode == 5:
                s = at(address, (blocks(rows), up(groups, 4)), torch.float32)[:, :groups]
                scales.append(s.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1))
            else:
                assert mode == 4
                scales.append(at(address, (groups, rows), torch.float32).T.repeat_interleave(128, 1))
        out += ((a.float() * scales[0]) @ (b.float() * scales[1]).T).T  # [C, R] by columns is [R, C] by rows
        self.multiplied += 1
        return 0


def at(address, shape, dtype):
    """The tensor at an address."""
    count = shape[0] * shape[1] * dtype.itemsize
    memory = (ctypes.c_uint8 * count).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


@pytest.fixture
def library(monkeypatch):
    made = Library()
    monkeypatch.setattr(cublas, "_library", lambda: made)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 77)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=99))
    return made


def operands(by_block, m=70, n=131, k=150):
    x, w = torch.randn(m, k), torch.randn(n, k) * torch.exp2(torch.arange(n) % 7)[:, None]
    a, _ = torch_quantize.quantize_activation(x, "e4m3", "float32", rows=True, columns=False)
    if by_block:
        return a, torch_quantize.quantize_weight(w, "float32", rows=True, transposed=False)[0]
    return a, torch_quantize.quantize_activation(w, "e4m3", "float32", rows=True, columns=False)[0]


@pytest.mark.parametrize("by_block", [True, False], ids=["weight", "1x128"])
def test_the_product_is_added(library, by_block):
    a, b = operands(by_block)
    total = torch.full((70, 131), 0.5)
    assert torch_products.scaled_mm_product(a, b, by_block, None, torch.bfloat16, total) is total
    assert library.multiplied == 1
    assert library.alive == {}
    assert_same(total - 0.5, torch_products.dequantized_product(a, b, by_block, None, torch.float32, None), 1e-5)


def test_the_address_of_a_slice_is_told(library):
    a, b = operands(False)
    for offset, alignment in ((0, 256), (16, 64), (4, 16), (1, 4)):
        flat = torch.zeros(70 * 131 + 128)
        skip = -flat.data_ptr() // 4 % 64 + offset  # elements past an address that is a multiple of 256
        assert cublas.added(a, b, False, flat[skip:][: 70 * 131].view(70, 131))
        assert library.out_alignment == alignment


@pytest.mark.parametrize(("status", "count"), [(15, 0), (0, 0)])
def test_what_cublas_has_no_kernel_for_is_left_alone(library, status, count):
    library.status, library.count = status, count
    total = torch.full((70, 131), 0.5)
    assert not cublas.added(*operands(False), False, total)
    assert (total == 0.5).all()
    assert library.alive == {}


def test_a_failure_is_an_error_and_leaves_nothing_behind(library):
    library.cublasLtMatmul = lambda *arguments: 13
    with pytest.raises(RuntimeError, match="cuBLAS failed with status 13"):
        cublas.added(*operands(False), False, torch.zeros(70, 131))
    assert library.alive == {}


def test_without_the_library_nothing_is_added(monkeypatch):
    def missing(name, mode):
        assert mode == os.RTLD_NOLOAD
        raise OSError(name)

    cublas._library.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not cublas.added(*operands(False), False, torch.zeros(70, 131))
    cublas._library.cache_clear()
