"""What the tests of linear_log_probs share."""

import torch

from onchip.ops.linear_log_probs.torch_checks import check_case
from shared import assert_same as assert_same
from shared import assert_within_bounds


def small_problem(ids=None, tokens=24, hidden=16, vocab=70, dtype=torch.float32, seed=0):
    """(hidden [2, T/2, H], weight [V, H], ids [2, T/2] or [2, T/2, K], bias [V]), leaves that need gradients."""
    g = torch.Generator().manual_seed(seed)

    def leaf(*shape):
        return torch.randn(*shape, generator=g).to(dtype).requires_grad_()

    shape = (2, tokens // 2) if ids is None else (2, tokens // 2, ids)
    return leaf(2, tokens // 2, hidden), leaf(vocab, hidden), torch.randint(vocab, shape, generator=g), leaf(vocab)


def assert_right(case, dtype=torch.float32, device="cpu", **how):
    """The op on `case` is within its bounds of the oracle, for every quantity."""
    assert_within_bounds(check_case(case, dtype, device, **how))
