"""Floats in 20 and 24 bits compared with float32: how the weight's sum over chunks is kept."""

import torch
import triton
import triton.language as tl

from onchip.kernels.triton import maths as triton_maths
from onchip.kernels.triton.tiles import add_digits


@triton.jit
def through_bits(x, out, first_bits, PAIRED: tl.constexpr, ROUNDED: tl.constexpr, HALF: tl.constexpr):
    at = tl.program_id(0) * 2 * HALF + tl.arange(0, HALF)
    a, b = tl.load(x + at), tl.load(x + at + HALF)
    if PAIRED:
        first, second, digits = triton_maths.split_pair(a, b, triton_maths.HALF_A_PLACE if ROUNDED else None)
        a, b = triton_maths.join_pair(first, second, digits, ROUNDED)
        tl.store(first_bits + at, first)
        tl.store(first_bits + at + HALF, second)
    else:
        first, digits = triton_maths.split_float(a)
        second, more = triton_maths.split_float(b)
        a, b = triton_maths.join_float(first, digits), triton_maths.join_float(second, more)
    tl.store(out + at, a)
    tl.store(out + at + HALF, b)


def triton_bits(x, device, *, paired, rounded=False):
    """For `assert_rounds`."""
    given = torch.from_numpy(x).to(device)
    out, first_bits = torch.empty_like(given), torch.empty_like(given, dtype=torch.int16)
    through_bits[(len(x) // 1024,)](given, out, first_bits, PAIRED=paired, ROUNDED=rounded, HALF=512)
    if rounded:
        # As PyTorch does it; what the 20 bits make a half is rounded up.
        made, expected = first_bits.view(torch.bfloat16).float(), given.bfloat16().float()
        near = (made - given).abs() <= 1.15 * (expected - given).abs()
        assert (near | (made == expected) | (made.isnan() & expected.isnan())).all()
    return out.cpu().numpy()


@triton.jit
def add_tile(x, out, digits, row, rows, columns, ADD: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    value = tl.load(x + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :])
    add_digits(out, digits, columns, row, 0, rows, columns, value, None, None, R, C, 1, ADD, True)


def assert_digits_stay_inside(device):
    """Tiles of 128 rows, of which the second has 88 and the third none, leave what is beyond their matrices."""
    rows, columns, beyond = 216, 24, 64
    x = torch.randn(128, 32, device=device)
    out = torch.full((rows + beyond, columns), 77, dtype=torch.int16, device=device)
    digits = torch.full((128 + beyond, columns), 77, dtype=torch.uint8, device=device)
    for add in (False, True):
        for row in (0, 128, 256):
            add_tile[(1,)](x, out, digits, row, rows, columns, ADD=add, R=128, C=32)
    assert (out[rows:] == 77).all()
    assert (digits[128:] == 77).all()
    first = out[:rows].view(torch.bfloat16).float()
    torch.testing.assert_close(first, 2 * torch.cat([x, x])[:rows, :columns], rtol=2**-7, atol=0)
