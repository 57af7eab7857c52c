"""What the tests of fp8_linear share."""

import torch

from onchip.ops.fp8_linear import reference
from onchip.ops.fp8_linear.checks import check_case


def small_problem(m=24, n=136, k=144, dtype=torch.float32, bias=False, seed=0, device="cpu"):
    """(x [2, M/2, K], weight [N, K], bias or None), leaves that need gradients."""
    g = torch.Generator().manual_seed(seed)

    def leaf(*shape):
        return torch.randn(*shape, generator=g).to(device=device, dtype=dtype).requires_grad_()

    return leaf(2, m // 2, k), leaf(n, k), leaf(n) if bias else None


def assert_right(case, dtype=torch.float32, device="cpu", **how):
    """The op on `case` is within its bounds of the oracle, for every quantity."""
    wrong = [c for c in check_case(case, dtype, device, **how) if not c.ok]
    assert not wrong, wrong


def oracle(x, weight, bias=None, grad_out=None, **options):
    """The oracle's result as float32 tensors."""
    arrays = [None if t is None else t.detach().float().cpu().numpy() for t in (x, weight, bias, grad_out)]
    made = reference.fp8_linear(*arrays[:3], grad_out=arrays[3], **options)
    return reference.Result(*(torch.from_numpy(a).float() for a in made))


def assert_same(a, b, bound=2e-6):
    """Two float32 computations of one thing."""
    assert a.shape == b.shape
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    assert float((a - b).norm()) <= bound * max(float(b.norm()), 1e-30), (a, b)


def same_bits(a, b):
    """Equal bit for bit; a NaN equals any NaN."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    nan = a.float().isnan() & b.float().isnan()
    if a.element_size() == 1:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return bool(((a == b) | nan).all())
