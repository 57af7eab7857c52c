"""What the tests of linear_log_probs share."""

import torch

from onchip.ops.linear_log_probs.checks import check_case
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


def gradients(out, arguments, inputs):
    """The gradients of hidden, weight and bias for the case's upstream gradients, by the oracle's names."""
    upstream = zip(out[:3], (inputs.grad_log_prob, inputs.grad_entropy, inputs.grad_lse), strict=True)
    pairs = [(x, torch.from_numpy(g).to(x)) for x, g in upstream if x is not None]
    named = {"grad_hidden": arguments[0], "grad_weight": arguments[1], "grad_bias": arguments[3]}
    leaves = {name: x for name, x in named.items() if x is not None}
    made = torch.autograd.grad([x for x, _ in pairs], list(leaves.values()), [g for _, g in pairs])
    return dict(zip(leaves, made, strict=True))
