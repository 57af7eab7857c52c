"""Calls of cuBLAS and cuBLASLt, by stand-ins that are as strict about layouts and addresses."""

import contextlib
import ctypes
import os
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fp8_common import assert_same, operands
from fp8_drawn import BY_BLOCK

from onchip.fp8 import cublas, torch_products
from onchip.fp8.numbers import blocks, up

ROWS, BLOCKS = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
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


@BY_BLOCK
def test_the_product_is_added(library, by_block):
    a, b = operands(70, 131, 150, by_block)
    total = torch.full((70, 131), 0.5)
    assert torch_products.scaled_mm_product(a, b, by_block, None, torch.bfloat16, total) is total
    assert library.multiplied == 1
    assert library.alive == {}
    assert_same(total - 0.5, torch_products.dequantized_product(a, b, by_block, None, torch.float32, None), 1e-5)


def test_the_address_of_a_slice_is_told(library):
    a, b = operands(70, 131, 150, False)
    for offset, alignment in ((0, 256), (16, 64), (4, 16), (1, 4)):
        flat = torch.zeros(70 * 131 + 128)
        skip = -flat.data_ptr() // 4 % 64 + offset  # elements past an address that is a multiple of 256
        assert cublas.added(a, b, False, flat[skip:][: 70 * 131].view(70, 131))
        assert library.out_alignment == alignment


@pytest.mark.parametrize(("status", "count"), [(15, 0), (0, 0)])
def test_what_cublas_has_no_kernel_for_is_left_alone(library, status, count):
    library.status, library.count = status, count
    total = torch.full((70, 131), 0.5)
    assert not cublas.added(*operands(70, 131, 150, False), False, total)
    assert (total == 0.5).all()
    assert library.alive == {}


def test_a_failure_is_an_error_and_leaves_nothing_behind(library):
    library.cublasLtMatmul = lambda *arguments: 13
    with pytest.raises(RuntimeError, match="cuBLAS failed with status 13"):
        cublas.added(*operands(70, 131, 150, False), False, torch.zeros(70, 131))
    assert library.alive == {}


def test_without_the_library_nothing_is_added(monkeypatch):
    def missing(name, mode):
        assert mode == os.RTLD_NOLOAD
        raise OSError(name)

    cublas._library.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not cublas.added(*operands(70, 131, 150, False), False, torch.zeros(70, 131))
    cublas._library.cache_clear()


# ------------------------------------------------------------------------------------------------ PyTorch's function


def strict_scaled_mm(a, b, scale_a, recipe_a, scale_b, recipe_b, *, bias, output_dtype):
    """A [M, K] by rows, B [K, N] by columns.  Scales outer dimension first; those of blocks padded to 4 along K."""
    (m, k), n = a.shape, b.shape[1]
    assert a.is_contiguous()
    assert b.T.is_contiguous()
    assert k % 16 == n % 16 == 0
    assert a.data_ptr() % 16 == b.data_ptr() % 16 == scale_a.data_ptr() % 16 == scale_b.data_ptr() % 16 == 0
    assert recipe_a == ROWS
    assert scale_a.shape == (m, blocks(k))
    assert scale_a.stride() == (1, m)
    assert scale_a.dtype == scale_b.dtype == torch.float32
    if recipe_b == BLOCKS:
        padded = up(blocks(k), 4)
        assert scale_b.shape == (padded, blocks(n))
        assert scale_b.stride() == (1, padded)
        of_b = scale_b[: blocks(k)].T.repeat_interleave(128, 0)[:n]
    else:
        assert recipe_b == ROWS
        assert scale_b.shape == (n, blocks(k))
        assert scale_b.stride() == (1, n)
        of_b = scale_b
    if bias is not None:
        assert output_dtype != torch.float32
        assert bias.dtype == output_dtype
        assert bias.shape == (n,)
        assert bias.is_contiguous()
        assert bias.data_ptr() % 16 == 0
    x, y = (t.float() * s.repeat_interleave(128, 1)[:, :k] for t, s in ((a, scale_a), (b.T, of_b)))
    out = x @ y.T
    return (out if bias is None else out + bias.float()).to(output_dtype)


@pytest.mark.parametrize(
    ("bias", "dtype"),
    [(None, torch.float32), (None, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16),
     (torch.bfloat16, torch.float32)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("size", [(256, 384, 640), (70, 131, 150), (1, 1, 1)], ids=str)
@BY_BLOCK
def test_layouts(by_block, size, bias, dtype, monkeypatch):
    m, n, _ = size
    monkeypatch.setattr(F, "scaled_mm", strict_scaled_mm)
    monkeypatch.setattr(cublas, "_library", lambda: None)
    a, b = operands(*size, by_block)
    added = None if bias is None else torch.randn(n).to(bias)
    made = torch_products.scaled_mm_product(a, b, by_block, added, dtype, None)
    right = torch_products.dequantized_product(a, b, by_block, added, dtype, None)
    assert made.is_contiguous()
    assert_same(made.float(), right.float(), 2e-6 if dtype == torch.float32 else 2**-8)
    total = torch.full((m, n), 0.5)
    assert torch_products.scaled_mm_product(a, b, by_block, None, torch.bfloat16, total) is total
    expected = torch_products.dequantized_product(a, b, by_block, None, torch.float32, None)
    assert_same(total - 0.5, expected, 1e-5)


@pytest.mark.parametrize(("start", "copied"), [(0, False), (8, False), (1, True)])
def test_a_bias_is_copied_where_cublas_cannot_read_it(start, copied, monkeypatch):
    given = []

    def scaled_mm(*operands, bias, **options):
        given.append(bias)
        return strict_scaled_mm(*operands, bias=bias, **options)

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    a, b = operands(64, 128, 256, True)
    bias = torch.randn(144, dtype=torch.bfloat16)[start:][:128]
    made = torch_products.scaled_mm_product(a, b, True, bias, torch.bfloat16, None)
    assert (given[0] is not bias) == copied
    assert_same(made.float(), torch_products.dequantized_product(a, b, True, bias, torch.bfloat16, None).float(), 2**-8)
