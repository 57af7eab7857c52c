"""What the tests of linear_log_probs share."""

import torch

from onchip.ops.linear_log_probs.torch_checks import check_case


def small_problem(ids=None, tokens=24, hidden=16, vocab=70, dtype=torch.float32, seed=0):
    """(hidden [2, T/2, H], weight [V, H], ids [2, T/2] or [2, T/2, K], bias [V]), leaves that need gradients."""
    g = torch.Generator().manual_seed(seed)

    def leaf(*shape):
        return torch.randn(*shape, generator=g).to(dtype).requires_grad_()

    shape = (2, tokens // 2) if ids is None else (2, tokens // 2, ids)
    return leaf(2, tokens // 2, hidden), leaf(vocab, hidden), torch.randint(vocab, shape, generator=g), leaf(vocab)


def assert_right(case, dtype=torch.float32, device="cpu", **how):
    """The op on `case` is within its bounds of the oracle, for every quantity."""
    wrong = [c for c in check_case(case, dtype, device, **how) if not c.ok]
    assert not wrong, wrong


def assert_same(a, b, scale=1.0):
    """Two float32 computations of one thing: ||a - b|| is a few roundings of ||b||, times `scale` for larger terms."""
    assert a.shape == b.shape
    a, b = a.detach().double(), b.detach().double()
    assert (a.isinf() == b.isinf()).all()
    a, b = a.masked_fill(a.isinf(), 0), b.masked_fill(b.isinf(), 0)
    eps = torch.finfo(torch.float32).eps
    assert float((a - b).norm()) <= 32 * eps * scale * max(1.0, float(b.norm())), (a, b)
