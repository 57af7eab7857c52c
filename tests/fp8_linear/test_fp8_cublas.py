"""What PyTorch's blockwise product is asked for, without it: a stand-in that is as strict about layouts and addresses.

test_fp8_gpu.py has the products that cuBLASLt adds up.
"""

import ctypes
import os

import pytest
import torch
import torch.nn.functional as F
from fp8_common import BY_BLOCK, assert_same, operands

from onchip.fp8 import cublas, torch_products
from onchip.fp8.numbers import blocks, up

ROWS, BLOCKS = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128


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
