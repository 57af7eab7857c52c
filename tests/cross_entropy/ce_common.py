"""What the tests of cross_entropy share."""

import torch
import torch.nn.functional as F

from onchip.ops.cross_entropy.torch_checks import Computed, check_case


def small_problem(tokens=24, vocab=70, dtype=torch.float32, seed=0):
    """(logits [2, T/2, V], a leaf that needs a gradient; target [2, T/2])."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, tokens // 2, vocab, generator=g).to(dtype).requires_grad_()
    return logits, torch.randint(vocab, (2, tokens // 2), generator=g)


def computed(x):
    """`x` as a layer's output: not a leaf, in x's layout."""
    return Computed.apply(x)


def plain(logits, target, **options):
    return F.cross_entropy(logits.float().flatten(0, -2), target.flatten(), **options)


def assert_right(case, dtype=torch.float32, device="cpu", **how):
    """The op on `case` is within its bounds of the oracle, for every quantity."""
    wrong = [c for c in check_case(case, dtype, device, **how) if not c.ok]
    assert not wrong, wrong


def gradient(loss, x, grad=None):
    return torch.autograd.grad(loss, x, grad_outputs=grad)[0]


def assert_same(a, b, scale=1.0):
    """Two float32 computations of one thing: ||a - b|| is a few roundings of ||b||, times `scale` for larger terms.

    Infinities must agree.
    """
    assert a.shape == b.shape
    a, b = a.detach().double(), b.detach().double()
    assert (a.isinf() == b.isinf()).all()
    a, b = a.masked_fill(a.isinf(), 0), b.masked_fill(b.isinf(), 0)
    eps = torch.finfo(torch.float32).eps
    assert float((a - b).norm()) <= 32 * eps * scale * max(1.0, float(b.norm())), (a, b)
