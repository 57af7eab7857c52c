"""Calls of cuBLAS and cuBLASLt, by stand-ins that are as strict about layouts and addresses."""

import contextlib
import ctypes
import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from fp8_common import assert_same, operands
from fp8_drawn import BY_BLOCK

from onchip.fp8 import cublas, torch_products
from onchip.fp8.numbers import blocks, up
from onchip.frontend import torch_builder
from onchip.frontend.torch_builder import Builder

ROWS, BLOCKS = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
DTYPES = {0: torch.float32, 2: torch.float16, 14: torch.bfloat16, 28: torch.float8_e4m3fn}


class Library:
    """Descriptions are numbers; the functions are those of cublasLt.h."""

    def __init__(self, status=0, count=1):
        self.status, self.count = status, count
        self.alive, self.last, self.out_alignment = {}, 0, None
        self.multiplied = 0
        for kind in ("MatmulDesc", "MatrixLayout", "MatmulPreference"):
            setattr(self, f"cublasLt{kind}Create", self.create)
            setattr(self, f"cublasLt{kind}Destroy", self.alive.pop)
            setattr(self, f"cublasLt{kind}SetAttribute", self.set_attribute)

    def cublasLtCreate(self, handle):
        ctypes.c_uint64.from_address(handle).value = 77
        return 0

    def create(self, description, *arguments):
        self.last += 1
        ctypes.c_uint64.from_address(description).value = self.last
        self.alive[self.last] = {"arguments": arguments}
        return 0

    def set_attribute(self, description, attribute, value, size):
        kind = {4: ctypes.c_int32, 8: ctypes.c_uint64}[size]
        self.alive[description][attribute] = kind.from_address(value).value
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, handle, operation, a, b, c, d, preference, wanted, found, count):
        assert handle == 77
        assert self.alive[operation]["arguments"] == (68, 0)
        assert self.alive[operation][17] % 16 == self.alive[operation][18] % 16 == 0
        assert wanted == 1
        assert min(self.alive[preference][i] for i in (5, 6)) >= 16
        self.out_alignment = self.alive[preference][7]
        cublas._Found.from_address(found).workspace = 4
        ctypes.c_int.from_address(count).value = self.count
        return self.status

    def matrix(self, address, layout):
        """What lies there, as [R, C] by rows; cuBLAS calls it [C, R] by columns."""
        dtype, columns, rows, stride = self.alive[layout]["arguments"]
        assert stride == columns
        return at(address, (rows, columns), DTYPES[dtype])

    def cublasLtMatmul(self, handle, operation, alpha, a, of_a, b, of_b, beta, c, of_c, d, of_d, *rest):
        _, workspace, workspace_bytes, stream = rest
        alpha, beta = (ctypes.c_float.from_address(x).value for x in (alpha, beta))
        assert (handle, alpha, stream, workspace_bytes) == (77, 1, self.stream, 4)
        assert workspace
        assert (c, of_c) == (d, of_d)
        told = self.alive[operation]
        assert told[3] == 1  # A is transposed, B isn't
        a, b = self.matrix(a, of_a), self.matrix(b, of_b)
        out = self.matrix(d, of_d)
        assert out.shape[0] % 4 == out.shape[1] * out.itemsize % 16 == 0
        scales = []
        for x, mode, address in ((a, told[31], told[17]), (b, told[32], told[18])):
            rows, groups = len(x), x.shape[1] // 128
            if mode == 5:
                s = at(address, (blocks(rows), up(groups, 4)), torch.float32)[:, :groups]
                scales.append(s.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1))
            else:
                assert mode == 4
                scales.append(at(address, (groups, rows), torch.float32).T.repeat_interleave(128, 1))
        made = ((a.float() * scales[0]) @ (b.float() * scales[1]).T).T  # [C, R] by columns is [R, C] by rows
        if told.get(7) is not None:
            assert told[7] == 4
            made += at(told[8], (1, made.shape[1]), out.dtype).float()
        out.copy_(made + out if beta else made)
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
    made.stream = 99
    monkeypatch.setattr(cublas, "_library", lambda: made)
    monkeypatch.setattr(cublas, "_stream", lambda device: made.stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    yield made
    cublas._layout.cache_clear()
    cublas._preference.cache_clear()
    assert made.alive == {}  # nothing is left behind


BY_PYTORCH = partial(torch_products.scaled_mm_product, direct=False)
SIZE = (72, 136, 150)


@BY_BLOCK
def test_the_product_is_added(library, by_block):
    a, b = operands(*SIZE, by_block)
    total = torch.full(SIZE[:2], 0.5)
    assert torch_products.scaled_mm_product(a, b, by_block, None, torch.bfloat16, total) is total
    assert library.multiplied == 1
    assert_same(total - 0.5, torch_products.dequantized_product(a, b, by_block, None, torch.float32, None), 1e-5)


@pytest.mark.parametrize(
    ("bias", "dtype"),
    [(None, torch.float32), (None, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16),
     (torch.float16, torch.float16), (torch.bfloat16, torch.float32)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("size", [(256, 384, 640), (4, 8, 150), (71, 131, 150), (1, 1, 1)], ids=str)
@BY_BLOCK
def test_the_product_is_stored(by_block, size, bias, dtype, library):
    a, b = operands(*size, by_block)
    added = None if bias is None else torch.randn(size[1]).to(bias)
    made = torch_products.scaled_mm_product(a, b, by_block, added, dtype, None)
    assert library.multiplied == 1
    assert made.is_contiguous()
    right = torch_products.dequantized_product(a, b, by_block, added, dtype, None)
    assert_same(made.float(), right.float(), 2e-6 if dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize(("bias", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_a_product_is_repeated_for_other_tensors(bias, dtype, library, monkeypatch):
    monkeypatch.setattr(torch_builder, "ALIGNED", 64)  # as the CPU's memory is

    def tensors():
        a, b = operands(*SIZE[:2], 384, False)
        rest = [torch.randn(SIZE[1]).to(dtype)] if bias else []
        return a, b, [*a, *b, *rest]

    def multiplied(a, b, *rest):
        return torch_products.scaled_mm_product(a, b, False, *(rest or [None]), dtype, None)

    a, b, given = tensors()
    with Builder(given) as told:
        made = multiplied(a, b, *given[4:])
    prepared = told.finish([made])
    assert not isinstance(prepared, str), prepared
    assert not prepared.operates
    library.stream = 0  # as a builder says on the CPU
    for _ in range(3):
        a, b, given = tensors()
        (made,) = prepared.run(given)
        right = torch_products.dequantized_product(a, b, False, *(given[4:] or [None]), dtype, None)
        assert_same(made.float(), right.float(), 2e-6 if dtype == torch.float32 else 2**-8)
    assert library.multiplied == 4


def test_the_address_of_a_slice_is_told(library):
    a, b = operands(*SIZE, False)
    rows, columns, _ = SIZE
    for offset, alignment in ((0, 256), (16, 64), (4, 16), (1, 4)):
        flat = torch.zeros(rows * columns + 128)
        skip = -flat.data_ptr() // 4 % 64 + offset  # elements past an address that is a multiple of 256
        out = flat[skip:][: rows * columns].view(rows, columns)
        assert cublas.multiplied(a, b, False, out, add=True)
        assert library.out_alignment == alignment


@pytest.mark.parametrize(("status", "count"), [(15, 0), (0, 0)])
def test_what_cublas_has_no_kernel_for_is_left_alone(library, status, count):
    library.status, library.count = status, count
    total = torch.full(SIZE[:2], 0.5)
    assert not cublas.multiplied(*operands(*SIZE, False), False, total, add=True)
    assert (total == 0.5).all()


@pytest.mark.parametrize("size", [(71, 136, 150), (72, 131, 150)], ids=str)
def test_ragged_sizes_are_left_alone(library, size):
    total = torch.full(size[:2], 0.5)
    assert not cublas.multiplied(*operands(*size, False), False, total, add=True)
    assert library.multiplied == 0


def test_scales_that_are_not_aligned_are_left_alone(library):
    a, b = operands(*SIZE, False)
    moved = torch.empty(a.scales.numel() + 1)[1:].view(a.scales.shape).copy_(a.scales)
    assert not cublas.multiplied(a._replace(scales=moved), b, False, torch.zeros(SIZE[:2]), add=True)


def test_a_failure_is_an_error_and_leaves_nothing_behind(library):
    library.cublasLtMatmul = lambda *arguments: 13
    with pytest.raises(RuntimeError, match="cuBLAS failed with status 13"):
        cublas.multiplied(*operands(*SIZE, False), False, torch.zeros(SIZE[:2]), add=True)


def test_after_a_failure_to_tell_addresses_all_are_told_again(library):
    a, b = operands(*SIZE, False)
    out, set_attribute = torch.zeros(SIZE[:2]), library.set_attribute
    product = cublas._Product(library, a, b, out, None, by_block=False, add=False)
    assert product.find(out)
    product.words[cublas._STREAM] = library.stream
    product.send()
    expected, scales = out.clone(), b.scales.clone()
    product.words[cublas._A_SCALES] = scales.mul_(2).data_ptr()
    product._operation._change = lambda at, attribute, *rest: (
        7 if attribute == 18 else set_attribute(at, attribute, *rest)
    )
    with pytest.raises(RuntimeError, match="cuBLAS failed with status 7"):
        product.send()
    product._operation._change = set_attribute
    product.words[cublas._A_SCALES] = b.scales.data_ptr()
    product.send()
    assert torch.equal(out, expected)


def test_without_the_library_nothing_is_added(monkeypatch):
    def missing(name, mode):
        assert mode == os.RTLD_NOLOAD
        raise OSError(name)

    cublas._library.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not cublas.multiplied(*operands(*SIZE, False), False, torch.zeros(SIZE[:2]), add=True)
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
@pytest.mark.parametrize("product", [torch_products.scaled_mm_product, BY_PYTORCH])
@BY_BLOCK
def test_layouts(by_block, product, size, bias, dtype, monkeypatch):
    m, n, _ = size
    monkeypatch.setattr(F, "scaled_mm", strict_scaled_mm)
    monkeypatch.setattr(cublas, "_library", lambda: None)
    a, b = operands(*size, by_block)
    added = None if bias is None else torch.randn(n).to(bias)
    made = product(a, b, by_block, added, dtype, None)
    right = torch_products.dequantized_product(a, b, by_block, added, dtype, None)
    assert made.is_contiguous()
    assert_same(made.float(), right.float(), 2e-6 if dtype == torch.float32 else 2**-8)
    total = torch.full((m, n), 0.5)
    assert product(a, b, by_block, None, torch.bfloat16, total) is total
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
    made = BY_PYTORCH(a, b, True, bias, torch.bfloat16, None)
    assert (given[0] is not bias) == copied
    assert_same(made.float(), torch_products.dequantized_product(a, b, True, bias, torch.bfloat16, None).float(), 2**-8)
