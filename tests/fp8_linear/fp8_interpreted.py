"""The Triton backend under Triton's interpreter, on the CPU: what test_interpreted.py starts.

Triton reads TRITON_INTERPRET when it is imported, so these checks need a process of their own.  Memory that nobody has
written is NaN, so a result that depends on it is NaN too.

    TRITON_INTERPRET=1 python fp8_interpreted.py NAME ...     prints a line of JSON for each check
"""

import sys
from functools import partial
from unittest import mock

import torch
from fp8_common import assert_right, assert_same, assert_same_bits, operands, oracle, quantize, small_problem
from fp8_drawn import awkward

from interpreter import main
from onchip.fp8 import torch_products, torch_quantize
from onchip.fp8.numbers import up
from onchip.fp8.torch_quantize import TorchQuantized
from onchip.fp8.triton_tiles import ProductConfig
from onchip.ops.fp8_linear.cases import Fp8LinearCase
from onchip.torch import fp8_linear, quantize_activation

QUANTIZERS = {
    "ragged": ((130, 300), "e4m3", "float32", torch.float32),
    "e5m2": ((130, 300), "e5m2", "power_of_two", torch.float32),
    "one number": ((1, 1), "e5m2", "float32", torch.float32),
    "pairs": ((130, 300), "e4m3", "float32", torch.float16),
    "numbers of whole blocks": ((256, 128), "e4m3", "float32", torch.float32),
    "pairs that begin anywhere": ((129, 257), "e4m3", "float32", torch.bfloat16),
    "pairs of whole blocks": ((128, 256), "e5m2", "power_of_two", torch.bfloat16),
}
PRODUCTS = {
    "128x128": ProductConfig(),
    "64x64": ProductConfig(rows=64, columns=64, group=1),
    "in parts": ProductConfig(rows=64, columns=128, parts=2),
}


def quantizing(name):
    """Bit for bit what PyTorch's own operations and casts make."""
    from onchip.fp8 import triton_launches

    shape, fmt, scale, dtype = QUANTIZERS[name]
    x = torch.from_numpy(awkward(*shape)).to(dtype)
    # In rows, in columns, in neither, and in rows whose first begins in the middle of a word of 32 bits.
    moved = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    layouts = x, x.T.contiguous().T, torch.stack([x, x], 2)[..., 0], moved
    for strided, both in zip(layouts, ((True, True), (True, False), (False, True), (True, True)), strict=True):
        for by_block in (False, True)[: 2 if fmt == "e4m3" else 1]:
            expected = quantize(x, by_block, fmt, scale, torch_quantize, *both)
            assert_same_bits(quantize(strided, by_block, fmt, scale, triton_launches, *both), expected)
        rows, columns = triton_launches.quantize(strided, fmt, scale, row_multiple=4)
        assert len(rows.data) == up(len(x), 4)
        cut = TorchQuantized(rows.data[: len(x)], rows.scales[:, : len(x)])
        assert_same_bits([cut, columns], quantize(strided, False, fmt, scale))


def product(name):
    """Each config, by descriptors and by pointers, stored and added, with both layouts of scales."""
    from onchip.fp8 import triton_launches

    m, n = 70, 330
    bias = torch.randn(n)
    for by_block, tma, add in ((True, True, False), (False, True, True), (True, False, True), (False, False, False)):
        a, b = operands(m, n, 150, by_block, "e5m2")
        # Rows of 330 numbers fit no descriptor, of 332 they do.
        into = torch.full((m, 332 if tma else n), 0.5)[:, :n]
        how = (by_block, None if add else bias, torch.float32, into.clone() if add else None)
        expected = torch_products.dequantized_product(a, b, *how)
        launch = triton_launches.product_launch(
            a, b, by_block, None if add else bias, into, add, PRODUCTS[name], 2, tma=tma
        )
        assert launch.arguments["TMA_OUT"] == tma
        launch.run()
        assert_same(into, expected)


def tall():
    """With more blocks below each other than the second axis of a grid may have, or what stands for so many."""
    from onchip.fp8 import triton_launches

    x = torch.from_numpy(awkward(300, 200))
    with mock.patch.object(triton_launches, "_MOST_BLOCKS", 2):
        for by_block in (False, True):
            assert_same_bits(quantize(x, by_block, by=triton_launches), quantize(x, by_block))


OPS = {
    "plain": Fp8LinearCase("plain", 130, 136, 140),
    "ragged": Fp8LinearCase("ragged", 70, 131, 129, bias=True, spread=4.0, zeros=0.1, snr_db=None,
                   options={"grad_dtype": "e5m2", "scale": "power_of_two"}),
}  # fmt: skip


def op(name):
    assert_right(OPS[name], torch.float16 if name == "plain" else torch.float32, backend="triton")


def shared_and_added():
    """A shared activation, a float32 main gradient over two micro-batches, and no rows."""
    x, w, _ = small_problem()
    total = torch.full(w.shape, 0.5)
    shared = quantize_activation(x, backend="triton")
    for _ in range(2):
        fp8_linear(shared, w, backend="triton", weight_grad_out=total).sum().backward()
    assert_same(total - 0.5, 2 * oracle(x, w).grad_weight, 1e-5)
    assert fp8_linear(x[:, :0], w, backend="triton", weight_grad_out=total).shape == (2, 0, 136)


def strided_bias():
    """Of every other number, and of one that is expanded."""
    x, w, _ = small_problem()
    for b in (torch.randn(272)[::2], torch.randn(1).expand(136)):
        assert_same(fp8_linear(x, w, b, backend="triton"), oracle(x, w, b).out)


CHECKS = {
    **{f"quantizing {name}": partial(quantizing, name) for name in QUANTIZERS},
    **{f"product {name}": partial(product, name) for name in PRODUCTS},
    **{f"op {name}": partial(op, name) for name in OPS},
    "tall": tall,
    "shared and added": shared_and_added,
    "strided bias": strided_bias,
}


if __name__ == "__main__":
    from fp8_linear import fp8_interpreter

    fp8_interpreter.mend()
    main(CHECKS, sys.argv[1:])
