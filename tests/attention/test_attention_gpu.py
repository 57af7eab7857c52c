"""attention on a GPU, by the framework's own products."""

import pytest
import torch

from onchip.masks import Blocks, Causal, Documents, Window
from onchip.ops.attention.cases import CHECK_CASES
from onchip.ops.attention.checks import CHECKER
from onchip.torch import attention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CHECK_CASES, ids=str)
def test_every_case(case):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        checks = CHECKER.check_case(case, dtype, "cuda")
        assert all(check.ok for check in checks), checks


def test_nothing_waits_for_the_device():
    q, k, v = (torch.randn(2, 300, h, 32, device="cuda", requires_grad=True) for h in (4, 2, 2))
    ids = torch.arange(300, device="cuda") // 70

    def step():
        mask = Documents(ids) & Causal() & Blocks(ids % 3) & Window(50, None)
        out = attention(q, k, v, mask.lower(2, 300, 300, q))
        return torch.autograd.grad(out.sum(), (q, k, v))

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(x, y) for x, y in zip(made, step(), strict=True))
    with pytest.raises(ValueError, match="in two places"):
        attention(q, k, v, Documents(ids % 2), check_inputs=True)
