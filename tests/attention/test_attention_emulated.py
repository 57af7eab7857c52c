"""The kernels in the 16-bit types that they are made for, without a GPU: tests/ptx emulates their PTX."""

import pytest
import torch

from emulated import emulating
from onchip.attention.problem import AttentionProblem
from onchip.attention.triton.problem import least_memory
from onchip.masks import Causal, Documents, Intervals, Window
from onchip.ops.attention.cases import KINDS, AttentionCase
from onchip.ops.attention.checks import CHECKER
from onchip.torch import attention

GLUON = ("attend", "query_gradient", "key_gradient")
FUSED = ("attend", "fused_gradient", "rounded_sums")
PAIRED = ("attend", "paired_fused_gradient", "rounded_sums")
WIDE = ("attend_wide", "query_gradient", "key_gradient")
WIDEST = ("attend_wide", "query_gradient", "paired_key_gradient")


def case_of(mask, size=64, **more):
    """Programs have several tiles, on a GPU of 4 multiprocessors."""
    given = {"queries": 300, "keys": 300, "heads": 2, "key_heads": 1, "value_size": size, **more}
    return AttentionCase(f"{mask}, {size}", mask, size=size, **given)


FEW = (
    case_of("causal documents", 40, value_size=64, batch=1, queries=200, keys=200, heads=3, sinks=True),
    # Which reaches beyond the keys.
    case_of("window of both sides", 128, batch=1, queries=200, keys=200, heads=3, sinks=True),
    case_of("causal documents", 192, value_size=128, batch=1, queries=200, keys=200),
    case_of("causal, last sees last", 72, value_size=104, batch=1, queries=70, keys=140),
)
MANY = (
    case_of("causal, last sees last", 256, batch=1, queries=70, keys=140),
    case_of("window in documents", 64, batch=1),
    *(case_of(mask) for mask in KINDS if mask != "blocked"),
    case_of("tree", 128, batch=1, sinks=True, options={"softcap": 5.0}),
    case_of("causal, last sees last", 16, queries=40, keys=290),
    case_of("causal", 24, queries=290, keys=33, value_size=128, heads=3, key_heads=3),
    case_of("causal", 8, queries=1, keys=1),
    case_of("full", 128, batch=1, queries=129, keys=257, heads=5, options={"scale": 0.2}),
    case_of("causal", 128, heads=3, sinks=True, options={"softcap": 5.0}),
    case_of("tree", 192, value_size=128, batch=1, sinks=True, options={"softcap": 5.0}),
    case_of("rows that see nothing", 160, value_size=128),
    case_of("window of both sides", 136, value_size=72, batch=1, queries=150, keys=300, sinks=True),
    case_of("causal, last sees last", 192, value_size=128, batch=1, queries=1, keys=130, heads=3, key_heads=3),
    case_of("tree", 256, batch=1, sinks=True, options={"softcap": 5.0}),
    case_of("rows that see nothing", 200, value_size=72),
    case_of("window of both sides", 64, value_size=136, batch=1, queries=150, keys=300, sinks=True),
    case_of("causal", 256, value_size=64, queries=1, keys=1, heads=3, key_heads=3),
    case_of("causal documents", 208, value_size=256, batch=1, heads=4, key_heads=2),
)


@pytest.mark.parametrize("case", [*FEW, *(pytest.param(x, marks=pytest.mark.slow) for x in MANY)], ids=str)
def test_every_case(case):
    number = [*FEW, *MANY].index(case)
    dtype, layout = (torch.bfloat16, torch.float16)[number % 2], ("bthd", "bhtd")[number // 2 % 2]
    with emulating(seed=3 + number):
        checks = CHECKER.check_case(case, dtype, backend="triton", layout=layout)
    assert all(check.ok for check in checks), checks


def drawn(queries, keys, size, heads=2):
    shapes = (queries, heads, size), (keys, 1, size), (keys, 1, 128 if size == 192 else size)
    return [torch.randn(1, *shape).to(torch.bfloat16).requires_grad_() for shape in shapes]


PACKED = Documents(torch.arange(300) // 130) & Causal()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "mask", "kernels"),
    [
        (64, PACKED, FUSED),
        (64, PACKED, GLUON),
        (128, Causal(), PAIRED),
        (128, PACKED, GLUON),
        (192, PACKED, WIDE),
        (256, PACKED, WIDEST),
    ],
)
def test_the_order_of_what_is_asynchronous_changes_nothing(size, mask, kernels):
    given = drawn(300, 300, size)
    bound = least_memory(AttentionProblem(1, 300, 300, 2, 1, size, size), backward=True, sinks=False)
    options = {"scratch_bytes": bound} if (size, kernels) == (64, GLUON) else {}
    with emulating(kernels) as done:
        out = attention(*given, mask, backend="triton", **options)
        torch.autograd.grad(out.sum(), given)
    assert {x.name for x in done} == set(kernels)
    for x in done:
        for seed in (1, 2, 3):
            assert all((a == b).all() for a, b in zip(x.again(seed=seed), x.after, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "kernel"), [(64, "fused_gradient"), (128, "paired_fused_gradient")])
def test_sums_need_the_order_of_their_tiles(size, kernel):
    """Programs that don't wait for their turn leave others."""
    given = drawn(300, 300, size)
    with emulating((kernel,)) as done:
        torch.autograd.grad(attention(*given, backend="triton").sum(), given)
    again = [done[0].again(lambda ptx: ptx.replace("@p bra again;", ""), seed) for seed in range(3)]
    assert any((a != b).any() for made in again for a, b in zip(made, done[0].after, strict=True))


@pytest.mark.parametrize("size", [64, *(pytest.param(x, marks=pytest.mark.slow) for x in (128, 192, 256))])
def test_nothing_is_seen(size):
    q, k, v = drawn(70, 140, size)
    k.data[:, 130:] = torch.nan  # in a tile that no query sees
    nothing = torch.full((70,), 7)
    mask = Causal(-100) if size == 128 else Intervals(nothing, nothing)
    with emulating():
        out, lse = attention(q, k, v, mask, return_lse=True, backend="triton")
        gradients = torch.autograd.grad(out.sum() + 0 * lse.nan_to_num(0, 0, 0).sum(), (q, k, v))
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert not any(x.any() for x in gradients)


@pytest.mark.parametrize(
    ("dynamic", "band"), [(False, False), (True, True), pytest.param(True, False, marks=pytest.mark.slow)]
)
def test_compiled(dynamic, band):
    """What a call hasn't is an empty tensor among a registered operator's results; the other call has sinks."""
    given, ids = [*drawn(70, 70, 64)], torch.arange(70) // 50
    given += [torch.randn(2, requires_grad=True)] if dynamic else []

    def call(q, k, v, *sinks_and_ids):
        *sinks, ids = sinks_and_ids
        how = {"sinks": sinks[0]} if sinks else {}
        mask = Window(20) if band else Documents(ids) & Causal()
        return attention(q * 1, k * 1, v * 1, mask, backend="triton", **how)

    with emulating():
        right = call(*given, ids)
        made = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)(*given, ids)
        assert torch.equal(made, right)
        for x, y in zip(*(torch.autograd.grad(x.float().square().sum(), given) for x in (made, right)), strict=True):
            assert torch.equal(x, y)
