"""What is handed to cuBLAS, without cuBLAS: a stand-in that is as strict about layouts as PyTorch's operator."""

import pytest
import torch
import torch.nn.functional as F
from fp8_common import assert_same

from onchip.fp8 import cublas, torch_products, torch_quantize
from onchip.fp8.numbers import blocks, up

ROWS, BLOCKS = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128


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
    x, y = (t.float() * s.repeat_interleave(128, 1)[:, :k] for t, s in ((a, scale_a), (b.T, of_b)))
    out = x @ y.T
    return (out if bias is None else out + bias.float()).to(output_dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(256, 384, 640), (70, 131, 150), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("by_block", [True, False], ids=["weight", "1x128"])
def test_layouts(by_block, size, bias, dtype, monkeypatch):
    m, n, k = size
    monkeypatch.setattr(F, "scaled_mm", strict_scaled_mm)
    monkeypatch.setattr(cublas, "_library", lambda: None)  # what it adds itself: test_fp8_cublas.py
    x, w = torch.randn(m, k), torch.randn(n, k) * torch.exp2(torch.arange(n) % 7)[:, None]
    a, _ = torch_quantize.quantize_activation(x, "e4m3", "float32", rows=True, columns=False)
    if by_block:
        b, _ = torch_quantize.quantize_weight(w, "float32", rows=True, transposed=False)
    else:
        _, b = torch_quantize.quantize_activation(w.T.contiguous(), "e4m3", "float32", rows=False, columns=True)
    added = None if bias is None else torch.randn(n).to(bias)
    made = torch_products.scaled_mm_product(a, b, by_block, added, dtype, None)
    right = torch_products.dequantized_product(a, b, by_block, added, dtype, None)
    assert made.is_contiguous()
    assert_same(made.float(), right.float(), 2e-6 if dtype == torch.float32 else 2**-8)
    total = torch.full((m, n), 0.5)
    assert torch_products.scaled_mm_product(a, b, by_block, None, torch.bfloat16, total) is total
    assert_same(total - 0.5, torch_products.dequantized_product(a, b, by_block, None, torch.float32, None), 1e-5)
