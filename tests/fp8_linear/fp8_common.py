"""What the tests of fp8_linear in PyTorch share."""

import torch

from onchip.fp8 import torch_quantize
from onchip.ops.fp8_linear import reference
from onchip.ops.fp8_linear.checks import CHECKER
from onchip.torch import fp8_linear


def small_problem(m=24, n=136, k=144, dtype=torch.float32, bias=False, seed=0, device="cpu"):
    """(x [2, M/2, K], weight [N, K], bias or None), leaves that need gradients."""
    g = torch.Generator().manual_seed(seed)

    def leaf(*shape):
        return torch.randn(*shape, generator=g).to(device=device, dtype=dtype).requires_grad_()

    return leaf(2, m // 2, k), leaf(n, k), leaf(n) if bias else None


def quantize(x, by_block, fmt="e4m3", scale="float32", by=torch_quantize, rows=True, columns=True):
    """x and x^T with 1x128 scales, or as a weight."""
    return by.quantize(x, fmt, scale, by_block=by_block, rows=rows, turned=columns)


def operands(m, n, k, by_block, fmt="e4m3", device="cpu"):
    """Those of a product.  B's rows differ in size: a scale of the wrong block can't pass for the right one."""
    g = torch.Generator(device).manual_seed(0)
    x, w = (torch.randn(size, k, device=device, generator=g) for size in (m, n))
    w *= torch.exp2(torch.randint(-8, 8, (n, 1), device=device, generator=g).float())
    return quantize(x, False, fmt, columns=False)[0], quantize(w, by_block, columns=False)[0]


def assert_right(case, dtype=torch.float32, device="cpu", **how):
    """The op on `case` is within its bounds of the oracle, for every quantity."""
    wrong = [c for c in CHECKER.check_case(case, dtype, device, **how) if not c.ok]
    assert not wrong, wrong


def oracle(x, weight, bias=None, grad_out=None, **options):
    """The oracle's result as float32 tensors."""
    arrays = [None if t is None else t.detach().float().cpu().numpy() for t in (x, weight, bias, grad_out)]
    made = reference.fp8_linear(*arrays[:3], grad_out=arrays[3], **options)
    return reference.Fp8LinearResult(*(torch.from_numpy(a).float() for a in made))


def assert_the_oracles(x, w, b=None, grad=None, layer=fp8_linear, dtype=None, **options):
    """Output, of x's dtype or `dtype`, and the gradients of those leaves that need one, of theirs."""
    out = layer(x, w, b, **options)
    assert out.dtype == (dtype or x.dtype)
    leaves = [t for t in (x, w, b) if t is not None and t.requires_grad]
    assert out.requires_grad == bool(leaves)
    g = torch.randn_like(out) if grad is None else grad(out)
    if leaves:
        out.backward(g)
    expected = oracle(x, w, b, g, **options)
    assert_same(out, expected.out, 2**-8 if out.dtype == torch.bfloat16 else 2e-6)
    for t, right in zip((x, w, b), expected[1:], strict=True):
        if t is None or not t.requires_grad:
            assert t is None or t.grad is None
        else:
            assert t.grad.dtype == t.dtype
            assert_same(t.grad, right, 2**-8 if t.dtype == torch.bfloat16 else 2e-6)


def assert_same(a, b, bound=2e-6):
    """Two float32 computations of one thing."""
    assert a.shape == b.shape
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    assert float((a - b).norm()) <= bound * max(float(b.norm()), 1e-30), (a, b)


def assert_equal(made, expected):
    assert all(torch.equal(p, q) for p, q in zip(made, expected, strict=True))


def assert_same_bits(made, expected):
    """Operands, or None, that are equal bit for bit; a NaN equals any NaN."""
    for p, q in zip(made, expected, strict=True):
        assert (p is None) == (q is None)
        for a, b in zip(p or (), q or (), strict=True):
            a, b = a.cpu(), b.cpu()
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            nan = a.float().isnan() & b.float().isnan()
            if a.element_size() == 1:
                a, b = a.view(torch.uint8), b.view(torch.uint8)
            assert ((a == b) | nan).all()
