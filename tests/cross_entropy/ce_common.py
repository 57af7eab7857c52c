"""What the tests of cross_entropy share."""

import torch
import torch.nn.functional as F

from onchip.ops.cross_entropy.checks import check_case
from onchip.oracle.torch import computed as computed
from shared import assert_same as assert_same
from shared import assert_within_bounds


def small_problem(tokens=24, vocab=70, dtype=torch.float32, seed=0):
    """(logits [2, T/2, V], a leaf that needs a gradient; target [2, T/2])."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, tokens // 2, vocab, generator=g).to(dtype).requires_grad_()
    return logits, torch.randint(vocab, (2, tokens // 2), generator=g)


def plain(logits, target, **options):
    return F.cross_entropy(logits.float().flatten(0, -2), target.flatten(), **options)


def assert_right(case, dtype=torch.float32, device="cpu", **how):
    """The op on `case` is within its bounds of the oracle, for every quantity."""
    assert_within_bounds(check_case(case, dtype, device, **how))


def gradient(loss, x, grad=None):
    return torch.autograd.grad(loss, x, grad_outputs=grad)[0]
