"""attention on a GPU, by the kernels and by the framework's own products."""

import subprocess
import sys
from unittest import mock

import pytest
import torch
from attention_kernel_cases import KERNEL_CASES, STOPS
from torch.utils.checkpoint import checkpoint

from all_cards import environment
from onchip.attention.problem import AttentionProblem
from onchip.attention.triton import op
from onchip.attention.triton.problem import least_memory, memory_parts
from onchip.bench.torch_steps import peak_extra_bytes
from onchip.frontend import torch_prepared
from onchip.kernels.triton.launch import describe, has_gluon
from onchip.masks import Blocked, Blocks, Causal, Documents, Full, Intervals, Tree, Window
from onchip.ops.attention import torch_op
from onchip.ops.attention.cases import CHECK_CASES
from onchip.ops.attention.checks import CHECKER
from onchip.torch import attention
from shared import assert_within_bounds, capture

pytestmark = pytest.mark.gpu


@pytest.fixture
def hopper():
    if not has_gluon(describe(torch.device("cuda", 0)).capability):
        pytest.skip("the kernels are written for Hopper")


def drawn(batch=2, queries=300, keys=None, heads=4, key_heads=2, size=64, values=None, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    of_keys = batch, keys or queries, key_heads
    shapes = (batch, queries, heads, size), (*of_keys, size), (*of_keys, values or size)
    return [torch.randn(x, device="cuda", generator=generator).to(dtype).requires_grad_() for x in shapes]


CAUSAL = Causal()


def step(q, k, v, mask=CAUSAL, seed=1, **options):
    """out, lse, and the gradients of both with something upstream."""
    generator = torch.Generator("cuda").manual_seed(seed)
    out, lse = attention(q, k, v, mask, return_lse=True, **options)
    upstream = torch.randn(out.shape, device="cuda", generator=generator).bfloat16().to(out.dtype)
    of_lse = torch.randn(lse.shape, device="cuda", generator=generator)
    leaves = [x for x in (q, k, v, options.get("sinks")) if x is not None and x.requires_grad]
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (upstream, of_lse))]


def assert_same(made, expected):
    assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))


@pytest.mark.parametrize("case", CHECK_CASES, ids=str)
def test_every_case(case):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_within_bounds(CHECKER.check_case(case, dtype, "cuda", backend="plain"))


def ways():
    """Each case in one dtype, so that a dtype meets all else that kernels are compiled for; slow, in the other."""
    for number, case in enumerate(KERNEL_CASES):
        largest = max(case.size, case.value_size)
        odd = (case.mask in STOPS) + ("softcap" in case.options) + sum(largest > x for x in (64, 128, 192))
        dtypes = (torch.bfloat16, torch.float16)[:: -1 if odd % 2 else 1]
        for dtype, mark in zip(dtypes, ((), pytest.mark.slow), strict=True):
            yield pytest.param(case, dtype, ("bthd", "bhtd")[number % 2], marks=mark)


@pytest.mark.parametrize(("case", "dtype", "layout"), list(ways()), ids=str)
def test_every_case_by_kernels(case, dtype, layout, hopper):
    assert_within_bounds(CHECKER.check_case(case, dtype, "cuda", layout=layout, backend="triton"))


@pytest.mark.parametrize(("size", "values"), [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_the_same_bits(mask, size, values, hopper):
    q, k, v = drawn(2, 2000, heads=6, key_heads=2, size=size, values=values)
    ids = torch.arange(2000, device="cuda") // 333
    what = Causal() if mask == "causal" else Documents(ids) & Causal()
    sinks = torch.randn(6, device="cuda", requires_grad=True)
    first = step(q, k, v, what, sinks=sinks)
    for _ in range(50):
        assert_same(step(q, k, v, what, sinks=sinks), first)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("size", "values"), [(40, 64), (72, 72), (136, 72), (200, 136)])
def test_what_nobody_writes_is_seen(size, values, whole, hopper, monkeypatch):
    """Results, gradients and their sums begin as NaN, and none is left."""
    monkeypatch.setattr(torch_op, "is_whole", lambda mask: whole)
    q, k, v = drawn(2, 333, 517, size=size, values=values)
    sinks = torch.randn(4, device="cuda", requires_grad=True)
    fills = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        start = torch.arange(333, device="cuda") % 200
        made = step(q, k, v, Intervals(start, start + torch.arange(333, device="cuda") % 5), sinks=sinks)
    finally:
        torch.use_deterministic_algorithms(fills)
    assert not any(x.isnan().any() for x in made)


@pytest.mark.parametrize(("size", "values"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_rows_that_see_nothing(size, values, hopper):
    q, k, v = drawn(1, 400, size=size, values=values)
    nothing = torch.zeros(400, dtype=torch.int32, device="cuda")
    out, lse, *gradients = step(q, k, v, Causal(-500) if size == 128 else Intervals(nothing, nothing))
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert not any(x.any() for x in gradients)


def test_a_packed_batch_equals_its_documents(hopper):
    lengths = 1, 127, 128, 129, 500, 3, 256
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).cuda()
    q, k, v = drawn(1, len(ids), size=128)
    out = attention(q, k, v, Documents(ids) & Causal(), backend="triton")
    first = 0
    for length in lengths:
        part = slice(first, first + length)
        alone = attention(q[:, part], k[:, part], v[:, part], backend="triton")
        torch.testing.assert_close(out[:, part], alone, atol=2e-2, rtol=2e-2)
        first += length


def test_strides(hopper):
    """As they lie, or copied: of one projection's columns, turned, out of step with 16 bytes, expanded."""
    plain = drawn(2, 300, size=64)
    expected = step(*plain)
    packed = torch.cat([x.detach().flatten(2) for x in plain], 2)
    q, k, v = (x.unflatten(2, (-1, 64)).requires_grad_() for x in packed.split([256, 128, 128], 2))
    assert_same(step(q, k, v), expected)
    turned = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in plain]
    made = step(*turned, layout="bhtd", backend="triton")
    torch.testing.assert_close(made[0].transpose(1, 2), expected[0], atol=0, rtol=0)
    odd = [torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view(x.shape) for x in plain]
    for x, y in zip(odd, plain, strict=True):
        x.data.copy_(y.detach())
    assert_same(step(*(x.requires_grad_() for x in odd)), expected)
    one = plain[1].detach()[:, :, :1].expand(-1, -1, 2, -1).requires_grad_()
    assert_same(step(plain[0], one, plain[2])[:2], step(plain[0], one.contiguous(), plain[2])[:2])
    out = attention(*plain)
    out.sum().backward()  # an upstream gradient that is expanded


def least(q, k, v, sinks=False):
    """Bytes in which one kernel for all gradients doesn't fit."""
    (batch, queries, heads, size), (_, keys, key_heads, values) = q.shape, v.shape
    p = AttentionProblem(batch, queries, keys, heads, key_heads, size, values)
    return least_memory(p, backward=True, sinks=sinks)


@pytest.mark.parametrize(
    ("mask", "size", "heads", "key_heads", "options"),
    [
        ("causal", 64, 6, 2, {"softcap": 10.0}),
        ("documents", 64, 8, 1, {}),
        ("window", 40, 3, 3, {}),
        ("full", 8, 3, 1, {"scale": 0.5}),
        ("own ranges", 64, 4, 2, {"layout": "bhtd", "softcap": 20.0}),
        ("own ranges", 24, 8, 8, {"layout": "bhtd"}),
        ("causal", 128, 6, 2, {"softcap": 10.0}),
        ("causal", 72, 8, 1, {"layout": "bhtd"}),
        ("full", 104, 3, 3, {"scale": 0.2}),
        ("documents", 128, 8, 1, {}),
        ("window", 128, 4, 2, {}),
        ("own ranges", 128, 4, 2, {"layout": "bhtd", "softcap": 20.0}),
    ],
)
def test_one_kernel_for_all_gradients_or_two(mask, size, heads, key_heads, options, hopper, monkeypatch):
    """A bound of memory decides; both are as near to what float64 gives.  Whether a mask is whole, which decides with
    larger heads, is for the time that they take: that kernel is right for any ranges.
    """
    monkeypatch.setattr(torch_op, "is_whole", lambda mask: True)
    tokens, at = 1111, torch.arange(1111, device="cuda")
    q, k, v = drawn(2, tokens, heads=heads, key_heads=key_heads, size=size)
    if options.get("layout") == "bhtd":
        q, k, v = (x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v))
    turned = [x.transpose(1, 2) for x in (q, k, v)] if "layout" in options else [q, k, v]
    start, end = torch.stack([at * 0, at - 100]), torch.stack([at + 1, at + 30])
    end[0, 500:800], start[1, -40:] = 0, 2000  # whole tiles of queries see nothing
    lengths = torch.tensor([300, 1, 200, 64, 546])
    what = {
        "causal": Causal(), "window": Window(200, 0), "full": Full(), "own ranges": Intervals(start, end),
        "documents": Documents(torch.repeat_interleave(torch.arange(5), lengths).cuda()) & Causal(),
    }[mask]  # fmt: skip
    sinks = torch.randn(heads, device="cuda", requires_grad=True)
    bound = least(*turned, sinks=True)
    torch_prepared.forget()
    with mock.patch.object(op, "_in_one_walk", wraps=op._in_one_walk) as one:
        two = step(q, k, v, what, sinks=sinks, backend="triton", scratch_bytes=bound, **options)
        assert not one.called
        made = step(q, k, v, what, sinks=sinks, backend="triton", **options)
        assert one.called
    assert_same(made[:2], two[:2])
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, sinks)]
    right = step(*exact[:3], what, sinks=exact[3], backend="plain", **options)
    for a, b, c in zip(made, two, right, strict=True):
        of_one, of_two = (((x.double() - c).norm() / c.norm()).item() for x in (a, b))
        assert of_one < 6e-3
        assert of_one < 1.2 * of_two + 1e-4


def test_where_two_kernels_make_gradients(hopper):
    """With a `stop`, or if not all gradients are wanted; with larger heads if the mask isn't full or causal."""
    at = torch.arange(300, device="cuda")
    others = Window(50), Documents(at // 70) & Causal(), Intervals(at * 0, at + 1)
    torch_prepared.forget()
    for size in (64, 128):
        q, k, v = drawn(1, 300, size=size)
        with mock.patch.object(op, "_in_one_walk", side_effect=AssertionError):
            for mask in (Tree(torch.full_like(at, 300)), *(others if size > 64 else ())):
                step(q, k, v, mask)
            for wanted in ((q,), (k, v), (q, k), (v,)):
                step(*(x if any(x is y for y in wanted) else x.detach() for x in (q, k, v)))
        with mock.patch.object(op, "_in_one_walk", wraps=op._in_one_walk) as one:
            for mask in (Full() & Causal(), Causal().lower(1, 300, 300, q), *(others if size == 64 else ())):
                one.reset_mock()
                torch_prepared.forget()  # else what an equal call does is repeated
                step(q, k, v, mask)
                assert one.called


@pytest.mark.parametrize(("fused", "size"), [(True, 64), (False, 64), (True, 128), (True, 96)])
def test_memory(fused, size, hopper):
    given = drawn(1, 8192, heads=8, key_heads=2, size=size)
    mask, upstream = Causal().lower(1, 8192, 8192, given[0]), torch.ones_like(given[0])
    options = {} if fused else {"scratch_bytes": least(*given)}
    p = AttentionProblem(1, 8192, 8192, 8, 2, size, size)
    formula = sum(memory_parts(p, 1, backward=True, sinks=False, fused=fused).values())

    def run():
        out = attention(*given, mask, backend="triton", **options)
        return [out.detach(), *torch.autograd.grad(out, given, upstream)]

    for _ in range(3):
        run()
    peak = peak_extra_bytes(run, device="cuda")
    assert formula / 2 <= peak <= formula + (1 << 20), (peak, formula)


@pytest.mark.parametrize("size", [64, 128])
def test_the_same_bits_on_several_busy_streams(size, hopper):
    """Programs of several calls are on the GPU together, none of them all at once."""
    given = [drawn(2, 3000, heads=16, key_heads=4, size=size, seed=seed) for seed in range(3)]
    packed = Documents(torch.arange(3000, device="cuda") // 1234) & Causal()
    mask = (packed if size == 64 else CAUSAL).lower(2, 3000, 3000, given[0][0])
    expected = [step(*x, mask) for x in given]
    torch.cuda.synchronize()
    streams, other, busy = [torch.cuda.Stream() for _ in given], torch.randn(4096, 4096).cuda(), torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(busy):
            other @ other
        made = []
        for x, stream in zip(given, streams, strict=True):
            with torch.cuda.stream(stream):
                made.append(step(*x, mask))
        torch.cuda.synchronize()
        for a, b in zip(made, expected, strict=True):
            assert_same(a, b)


def test_autocast_and_checkpoint(hopper):
    q, k, v = (x.detach().float().requires_grad_() for x in drawn())
    with torch.autocast("cuda", torch.bfloat16):
        out = attention(q, k, v, backend="triton")
    assert out.dtype == torch.bfloat16
    expected = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert all(x.dtype == torch.float32 for x in expected)
    with torch.autocast("cuda", torch.bfloat16):
        again = checkpoint(attention, q, k, v, use_reentrant=False)
    assert_same(torch.autograd.grad(again.float().square().sum(), (q, k, v)), expected)


@pytest.mark.parametrize("band", [False, True])
def test_compiled(band, hopper):
    given = drawn(2, 320)

    def call(q, k, v, ids):
        mask = Window(100) if band else Documents(ids) & Causal()
        return attention(q * 1, k * 1, v * 1, mask, backend="triton")

    ids = torch.arange(320, device="cuda") // 77
    expected = call(*given, ids)
    right = torch.autograd.grad(expected.float().square().sum(), given)
    compiled = torch.compile(call, fullgraph=True)
    out = compiled(*given, ids)
    assert torch.equal(out, expected)
    assert_same(torch.autograd.grad(out.float().square().sum(), given), right)


@pytest.mark.parametrize("size", [64, 128])
def test_captured(size, hopper):
    q, k, v = drawn(2, 300, size=size)
    packed = Documents(torch.arange(300, device="cuda") // 70) & Causal()
    mask = packed.lower(2, 300, 300, q) if size == 64 else CAUSAL

    def run():
        out = attention(q, k, v, mask, backend="triton")
        return out.detach(), *torch.autograd.grad(out.float().square().sum(), (q, k, v))

    expected = run()
    graph, made = capture(run)
    for _ in range(3):
        for x in made:
            x.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert_same(made, expected)


@pytest.mark.parametrize(("size", "values"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_tiles_are_dealt_out_anew_in_each_call(size, values, hopper):
    """A call has a counter of its own, which is 0 again in a replay; there are more tiles than multiprocessors."""
    q, k, v = (x.detach() for x in drawn(2, 2000, heads=16, key_heads=4, size=size, values=values))
    mask = Window(70).lower(2, 2000, 2000, q)

    def run():
        return attention(q, k, v, mask, return_lse=True, backend="triton")

    expected = run()
    graph, replayed = capture(run)
    for _ in range(3):
        for x in replayed:
            x.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert_same(replayed, expected)
    streams, made = [torch.cuda.Stream() for _ in range(2)], []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                made.append(run())
    torch.cuda.synchronize()
    for x in made:
        assert_same(x, expected)


@pytest.mark.parametrize(("size", "values"), [(64, 64), (128, 128), (192, 128)])
@pytest.mark.parametrize("mask", ["window", "short documents", "apart"])
def test_groups_of_a_tile_see_other_keys(mask, size, values, hopper):
    """Each multiplies by the blocks that it sees, and by one at least."""
    q, k, v = drawn(2, 1500, heads=4, key_heads=2, size=size, values=values)
    at = torch.arange(1500, device="cuda")
    # Of one group at one end, of the next at another.
    far = torch.where(at // 64 % 2 == 0, at, 1499 - at).clamp(0, 1400)
    what = {"window": Window(20), "short documents": Documents(at // 30) & Causal(), "apart": Intervals(far, far + 50)}
    sinks = torch.randn(4, device="cuda")
    out, lse = attention(q, k, v, what[mask], sinks=sinks, return_lse=True, backend="triton")
    exact = [x.detach().double() for x in (q, k, v, sinks)]
    right, right_lse = attention(*exact[:3], what[mask], sinks=exact[3], return_lse=True, backend="plain")
    assert (out.double() - right).norm() / right.norm() < 6e-3
    assert (lse.double() - right_lse).abs().max() < 1e-4


def test_nothing_waits_for_the_device():
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = drawn(2, 300, size=32, dtype=dtype)
        ids = torch.arange(300, device="cuda") // 70

        def step_of(q=q, k=k, v=v, ids=ids):
            mask = Documents(ids) & Causal() & Blocks(ids % 3) & Window(50, None)
            out = attention(q, k, v, mask.lower(2, 300, 300, q))
            return torch.autograd.grad(out.sum(), (q, k, v))

        step_of()
        torch.cuda.set_sync_debug_mode("error")
        try:
            made = step_of()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_same(made, step_of())
        with pytest.raises(ValueError, match="in two places"):
            attention(q, k, v, Documents(ids % 2), check_inputs=True)


def test_what_kernels_refuse(hopper):
    q, k, v = drawn(1, 64)
    for given, options, message in (
        ((q, k, v), {"mask": Blocked(torch.ones(4, 4, dtype=torch.bool, device="cuda"), 16)}, "Blocked"),
        ((q, k, v), {"scale": -1.0}, "negate q"),
        (drawn(1, 64, size=20), {}, "multiples of 8"),
        (drawn(1, 64, size=264), {}, "head sizes are multiples of 8 up to 256, not 264"),
        (drawn(1, 64, size=64, values=512), {}, "value sizes are multiples of 8 up to 256, not 512"),
        (drawn(1, 64, dtype=torch.float32), {}, "bfloat16 and float16"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(*given, backend="triton", **options)
        assert attention(*given, **options).shape == (*given[0].shape[:3], given[2].shape[3])
    assert attention(q, k, v, Full()).shape == q.shape


_SHARING = """
import torch
from onchip.masks import Causal
from onchip.torch import attention

for size in (64, 128):
    g = torch.Generator("cuda").manual_seed(0)
    made = [torch.randn(1, 16384, h, size, device="cuda", generator=g).bfloat16().requires_grad_() for h in (32, 8, 8)]
    upstream = torch.randn(1, 16384, 32, size, device="cuda", generator=g).bfloat16()
    found = set()
    for _ in range(30):
        grads = torch.autograd.grad(attention(*made, Causal()), made, upstream)
        found.add(tuple(float(x.double().sum()) for x in grads))
    assert len(found) == 1, (size, found)
"""


def test_a_gpu_that_several_processes_share(hopper):
    """Each has the same bits in every run."""
    command = [sys.executable, "-c", _SHARING]
    started = [subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) for _ in range(6)]
    said = [process.communicate()[1] for process in started]
    assert not any(process.returncode for process in started), "\n".join(said)


@pytest.mark.parametrize("backend", ["triton", "plain"])
def test_strided_sinks(backend):
    """Kernels read them one after the other, in forward and for their gradient."""
    given = drawn()
    whole = torch.randn(4, 2, device="cuda").mul(3).requires_grad_()
    made = step(*given, backend=backend, sinks=whole[:, 0].detach().contiguous().requires_grad_())
    strided = step(*given, backend=backend, sinks=whole.detach()[:, 0].requires_grad_())
    assert_same(strided, made)
