"""Backends "symmetric" and "collective" on GPUs: kernels in one process, and everything between processes."""

import itertools
import time
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from all_cards import count, spawned
from onchip.collectives import torch_symmetric
from onchip.collectives import triton_launches as launches
from onchip.collectives.problem import GATHER, SCATTER
from onchip.kernels.torch_products import linear, product
from onchip.ops.collective_matmul.checks import oracle
from onchip.oracle.checks import product_bound
from onchip.torch import all_gather_matmul, matmul_reduce_scatter

pytestmark = pytest.mark.gpu

FUNCTIONS = {GATHER: all_gather_matmul, SCATTER: matmul_reduce_scatter}
OPS = {op: partial(function, backend="symmetric") for op, function in FUNCTIONS.items()}
# Rows of a block, N, K: ragged; rows that no descriptor can have; more than one piece; as many as there can be.
SIZES = (300, 136, 72), (130, 70, 90), (1152, 264, 64), (2176, 128, 256)


def close(made, right, length):
    """Within the bound; of few numbers, rounding what is right can be more than it allows."""
    error, of_rounding = ((a.double() - right).norm() / right.norm() for a in (made, right.to(made.dtype)))
    bound = product_bound(str(made.dtype).removeprefix("torch."), length, 1)
    assert error <= max(bound, 1.01 * of_rounding), (float(error), bound, float(of_rounding))


# ---------------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("length", [600, 900, 1200])
def test_products_with_few_elements_round_once(length):
    """Also where cuBLAS would add up parts of the sum apart, each rounded to 16 bits, as it does by default."""
    g = torch.Generator("cuda").manual_seed(0)
    apart = torch.randn(length, 136, 2, device="cuda", generator=g).bfloat16()[..., 0]
    b = torch.randn(length, 72, device="cuda", generator=g).bfloat16()
    right, out = apart.double().t() @ b.double(), b.new_empty(136, 72)
    for bias in (None, b[0]):
        linear(out, apart.t(), b, bias)
        close(out, right if bias is None else right + bias.double(), length)
    product(out, apart.t(), b)
    close(out, right, length)
    product(out, apart.t(), b, accumulate=True)
    close(out, right + right.bfloat16().double(), length)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tma", [True, False])
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_product_waits_for_its_rows(sizes, turned, tma, dtype):
    """Another stream writes blocks and flags, piece by piece, after the kernel has begun to wait."""
    rows, n, c = sizes
    ranks, rank = 3, 1
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(ranks, rows, c, device="cuda", generator=g).to(dtype)
    weight = torch.randn(n, c, device="cuda", generator=g).to(dtype).t()
    weight = weight if turned else weight.contiguous()
    bias = torch.randn(n, device="cuda", generator=g).to(dtype)
    right = (x.double() @ weight.double() + bias.double()).view(-1, n)

    def made(late):
        blocks, out = torch.full_like(x, float("nan")), x.new_full((ranks * rows, n), float("nan"))
        at, _ = meeting(rank, ranks, seconds=60)
        flags = at.flags()
        one = torch.ones_like(flags)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        product = launches.gated_product(at, x[rank], blocks, weight, bias, out, tma=tma)
        if late:
            product.run()
        cut = launches.cut(rows)
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)
            for sender in (0, 2):
                for piece in range(cut.pieces):
                    part = slice(piece * cut.rows, (piece + 1) * cut.rows)
                    blocks[sender, part].copy_(x[sender, part])
                    flags[sender, piece : piece + 1].copy_(one[0, :1])
        if not late:
            torch.cuda.current_stream().wait_stream(side)
            product.run()
        torch.cuda.current_stream().wait_stream(side)
        return out

    first = made(late=False)  # and compiled
    close(first, right, c)
    assert torch.equal(made(late=True), first)


@pytest.mark.parametrize("of_addends", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_product_waits_for_addends(sizes, turned, of_addends):
    """They are added in the order of the ranks behind this one, before this one's product."""
    rows, n, c = sizes
    ranks, rank = 3, 1
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(rows, c, device="cuda", generator=g).bfloat16()
    weight = torch.randn(n, c, device="cuda", generator=g).bfloat16().t()
    weight = weight if turned else weight.contiguous()
    bias = torch.randn(n, device="cuda", generator=g).bfloat16()
    arriving = torch.randn(ranks, rows, n, device="cuda", generator=g).to(of_addends)
    right = arriving[[2, 0]].double().sum(0) + x.double() @ weight.double() + bias.double()
    addends, out = torch.full_like(arriving, float("nan")), x.new_full((rows, n), float("nan"))
    at, host = meeting(rank, ranks)
    launches.adding_product(at, x, weight, bias, addends, out).run()  # of nothing: compiled, and NaN
    assert out.isnan().all()
    assert host.item() == 1
    at, host = meeting(rank, ranks, seconds=60)
    one, side = torch.ones(1, dtype=torch.int32, device="cuda"), torch.cuda.Stream()
    torch.cuda._sleep(1)  # loaded: to load a kernel, CUDA may wait for what runs
    side.wait_stream(torch.cuda.current_stream())
    launches.adding_product(at, x, weight, bias, addends, out).run()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000)
        for sender in (0, 2):
            addends[sender].copy_(arriving[sender])
            at.flags()[sender, :1].copy_(one)
    torch.cuda.synchronize()
    close(out, right, c)
    assert host.item() == 0


def meeting(rank, ranks, seconds=0.001):
    """As one rank sees it whose peers' heads are in this process too; and the word of its host."""
    ((at, host),) = meetings(ranks, seconds)[rank : rank + 1]
    return at, host


def meetings(ranks, seconds):
    heads = torch.zeros(ranks, launches.HEAD, dtype=torch.int32, device="cuda")
    made = []
    for rank, head in enumerate(heads):
        host = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        addresses = torch.tensor([*(head.data_ptr() for head in heads), host.data_ptr()], device="cuda")
        made.append((launches.Meeting(rank, ranks, head, addresses, int(seconds * 1e6)), host))
    return made


def test_ranks_meet_on_their_streams():
    """Three ranks of one process, thrice; then one is missing, and all are told."""
    ranks = 3
    for at, _ in meetings(ranks, 0.001):  # compiled and loaded for each rank, which waits in vain
        launches.meet(at, clear=True).run()
    torch.cuda.synchronize()
    every, streams = meetings(ranks, 60), [torch.cuda.Stream() for _ in range(ranks)]
    for _, ((at, _host), stream) in itertools.product(range(3), zip(every, streams, strict=True)):
        with torch.cuda.stream(stream):
            launches.meet(at, clear=True).run()
    torch.cuda.synchronize()
    assert [host.item() for _, host in every] == [0, 0, 0]
    for rank in (0, 2):
        with torch.cuda.stream(streams[rank]):
            launches.meet(every[rank][0]._replace(patience=10**5), clear=True).run()
    torch.cuda.synchronize()
    assert [at.head[launches.LOST].item() for at, _ in every] == [1, 1, 1]
    assert [every[rank][1].item() for rank in (0, 2)] == [1, 1]


# -------------------------------------------------------------------------------------------------------- all processes


def drawn(op, sizes, dtype=torch.bfloat16, seed=0, middle=()):
    """This rank's leaves x, weight and bias, its upstream gradient, and what is right: out and the three gradients."""
    rows, n, k = sizes
    ranks, own = dist.get_world_size(), dist.get_rank()
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=g).to(dtype).cuda()

    every = [
        (normal(rows if op == GATHER else ranks * rows, *middle, k), normal(n, k), normal(n),
         normal(ranks * rows if op == GATHER else rows, *middle, n))
        for _ in range(ranks)
    ]  # fmt: skip
    if op == SCATTER:
        every = [(x, w, every[0][2], up) for x, w, _, up in every]
    of_ranks = [[a.double().cpu().numpy() for a in part] for part in zip(*every, strict=True)]
    xs, weights, biases, ups = of_ranks
    if op == GATHER:
        right = oracle(*map(np.concatenate, (xs, weights, biases)), grad_out=np.concatenate(ups, -1))
        dims = -1, 0, 0, 0
    else:
        right = oracle(np.concatenate(xs, -1), np.concatenate(weights, 1), biases[0], grad_out=np.concatenate(ups))
        dims = 0, -1, 1
    of_rank = [np.split(a, ranks, dim)[own] for a, dim in zip(right, dims, strict=False)]
    right = [torch.from_numpy(np.ascontiguousarray(a)).cuda() for a in (*of_rank, *right[len(dims) :])]
    x, w, b, up = every[own]
    return [a.requires_grad_() for a in (x, w, b)], up, right


def compare(op, made, right, sizes):
    ranks, (rows, n, k) = dist.get_world_size(), sizes
    summed = ranks if op == SCATTER else 1
    lengths = summed * k, n * (ranks if op == GATHER else 1), ranks * rows, ranks * rows
    for a, b, length in zip(made, right, lengths, strict=True):
        close(a, b, length)


def ran(op, leaves, up, **options):
    x, weight, bias = leaves
    out = OPS[op](x, weight, None, bias=bias, **options)
    return out, *torch.autograd.grad(out, leaves, up)


def the_dense_product():
    for op in OPS:
        for i, sizes in enumerate(SIZES):
            leaves, up, right = drawn(op, sizes, (torch.bfloat16, torch.float16)[i % 2], seed=i)
            compare(op, ran(op, leaves, up), right, sizes)


def options():
    """Kept blocks, dimensions in the middle, float32 sums of the caller's, strides, autocast, few gradients."""
    sizes = rows, n, k = 300, 136, 72
    for op in OPS:
        leaves, up, right = drawn(op, sizes, middle=(2,))
        double = 2 * rows, n, k
        compare(op, ran(op, leaves, up), right, double)
        if op == GATHER:
            compare(op, ran(op, leaves, up, keep_gathered=True), right, double)
        leaves, up, right = drawn(op, sizes)
        total = torch.ones(n, k, device="cuda")
        for _ in range(2):
            OPS[op](*leaves[:2], None, weight_grad_out=total).backward(up)
        assert leaves[1].grad is None
        close(total - 1, 2 * right[2], dist.get_world_size() * rows)
        turned = [leaves[0], leaves[1].detach().t().contiguous().t().requires_grad_(), leaves[2]]
        compare(op, ran(op, turned, up), right, sizes)
        apart = torch.stack([leaves[0].detach()] * 2, -1)[..., 0].requires_grad_()
        compare(op, ran(op, [apart, *leaves[1:]], torch.stack([up, up], -1)[..., 0]), right, sizes)
        every = ran(op, leaves, up)
        for i in range(3):
            given = [a if i == j else a.detach() for j, a in enumerate(leaves)]
            out = OPS[op](given[0], given[1], None, bias=given[2])
            assert torch.equal(torch.autograd.grad(out, given[i], up)[0], every[1 + i])
        wide = [a.detach().float().requires_grad_() for a in leaves]
        with torch.autocast("cuda", torch.bfloat16):
            out = OPS[op](wide[0], wide[1], None, bias=wide[2])
        assert torch.equal(out, every[0])
        grads = torch.autograd.grad(out, wide, up)
        assert all(a.dtype == torch.float32 for a in grads)
        compare(op, [a.bfloat16() for a in (out, *grads)], right, sizes)
        checked = OPS[op](*leaves[:2], None, check_inputs=True)
        assert checked.shape == out.shape
    empty = [torch.empty(0, 8, device="cuda", dtype=torch.bfloat16), torch.ones(4, 8, device="cuda").bfloat16()]
    assert all(OPS[op](*empty, None).shape == (0, 4) for op in OPS)


def the_same_bits():
    for op in OPS:
        leaves, up, _ = drawn(op, SIZES[2])
        first = ran(op, leaves, up)
        for _ in range(3):
            assert all(map(torch.equal, ran(op, leaves, up), first))


def buffers_are_used_again():
    """Twenty calls of different sizes, forward and backward, and nobody waits in between."""
    calls = []
    for i in range(20):
        op, sizes = (GATHER, SCATTER)[i % 2], SIZES[(i // 2) % 3]
        calls.append((op, sizes, *drawn(op, sizes, seed=i)))
    torch.cuda.synchronize()
    made = [ran(op, leaves, up) for op, _, leaves, up, _ in calls]
    for (op, sizes, _, _, right), results in zip(calls, made, strict=True):
        compare(op, results, right, sizes)


def streams():
    """Calls by turns on two streams are those of one."""
    calls = [(GATHER, *drawn(GATHER, SIZES[0], seed=i)) for i in range(6)]
    torch.cuda.synchronize()
    pair, made = [torch.cuda.Stream(), torch.cuda.Stream()], []
    for i, (op, leaves, up, _) in enumerate(calls):
        with torch.cuda.stream(pair[i % 2]):
            made.append(ran(op, leaves, up))
    torch.cuda.synchronize()
    for (op, _, _, right), results in zip(calls, made, strict=True):
        compare(op, results, right, SIZES[0])


def graphs():
    """A replay has the values that there are now, and calls in between change nothing."""
    for op in OPS:
        leaves, up, _ = drawn(op, SIZES[2], seed=1)
        others = [drawn(op, SIZES[2], seed=seed) for seed in (2, 3, 4)]
        ran(op, leaves, up)  # which makes the buffers
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = ran(op, leaves, up)
        for given, of_up, right in others:
            with torch.no_grad():
                for a, b in zip((*leaves, up), (*given, of_up), strict=True):
                    a.copy_(b)
            graph.replay()
            compare(op, made, right, SIZES[2])
            first = [a.clone() for a in made]
            eager = ran(op, given, of_up)
            graph.replay()
            assert all(map(torch.equal, made, first))
            assert all(map(torch.equal, eager, first))
        torch.cuda.synchronize()


def compiled():
    for op in OPS:
        leaves, up, right = drawn(op, SIZES[0])
        function = torch.compile(OPS[op], backend="aot_eager", fullgraph=True)
        out = function(leaves[0], leaves[1], None, bias=leaves[2])
        compare(op, (out, *torch.autograd.grad(out, leaves, up)), right, SIZES[0])


def wrong_calls():
    """All ranks make each of them."""
    x, weight = (torch.ones(12, 16, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for op, function in OPS.items():
        say = f"{op}: backend 'symmetric' can't run this call: it "
        with pytest.raises(
            ValueError, match=say + "takes bfloat16 and float16, not float32; pass backend='collective'"
        ):
            function(x.float(), weight.float(), None)
        with pytest.raises(ValueError, match=say + "runs on CUDA tensors, not on 'cpu'"):
            function(x.cpu(), weight.cpu(), None)
    function = OPS[GATHER]
    before = function(x, weight, None)
    torch_symmetric.free_buffers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    say = "collective_matmul: backend 'symmetric' makes its buffers in the first call of a size, which a CUDA graph"
    with pytest.raises(ValueError, match=say), torch.cuda.graph(graph):
        function(x, weight, None)
    del graph
    assert torch.equal(function(x, weight, None), before)


def one_collective():
    """Backend "collective", and sums that travel in 16 bits on both."""
    for op, backend in itertools.product(OPS, ("collective", "symmetric")):
        leaves, up, right = drawn(op, SIZES[0], middle=(2,))
        sizes = 2 * SIZES[0][0], *SIZES[0][1:]
        for more in ({}, {"keep_gathered": True} if op == GATHER else {}):
            out = FUNCTIONS[op](*leaves[:2], None, bias=leaves[2], backend=backend, **more)
            compare(op, (out, *torch.autograd.grad(out, leaves, up)), right, sizes)
        out = FUNCTIONS[op](*leaves[:2], None, bias=leaves[2], backend=backend, reduce_dtype=torch.bfloat16)
        for a, b in zip((out, *torch.autograd.grad(out, leaves, up)), right, strict=True):
            assert (a.double() - b).norm() < 2**-7 * b.norm()


def what_auto_takes():
    """One collective and one product."""
    leaves, up, _ = drawn(GATHER, SIZES[0])
    x, weight, bias = leaves
    out = all_gather_matmul(x, weight, None, bias=bias)
    made = out, *torch.autograd.grad(out, leaves, up)
    out = all_gather_matmul(x, weight, None, bias=bias, backend="collective")
    assert all(map(torch.equal, made, (out, *torch.autograd.grad(out, leaves, up))))
    compiled = torch.compile(all_gather_matmul, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, weight, None, bias=bias), out)


def freed_and_made_again():
    """Twenty times, behind work that is still to be done: what clears new memory must not come after a peer's word."""
    leaves, up, right = drawn(GATHER, SIZES[0])
    busy = torch.randn(4096, 4096, device="cuda")
    for i in range(20):
        if i % dist.get_world_size() == dist.get_rank():
            for _ in range(20):
                busy @ busy
        compare(GATHER, ran(GATHER, leaves, up), right, SIZES[0])
        torch.cuda.synchronize()
        dist.barrier()
        torch_symmetric.free_buffers()


def groups_of_some_ranks():
    """Each has buffers of its own; a rank that is in none of them goes on with all."""
    world, own = dist.get_world_size(), dist.get_rank()
    for members in ([0, *range(2, world)], [world - 1, 0], list(range(world))):
        group = dist.new_group(sorted(set(members)))
        if own in members:
            ranks, at = dist.get_world_size(group), dist.get_rank(group)
            whole = torch.arange(ranks * 64 * 32, device="cuda").view(-1, 32).remainder(7).bfloat16()
            weight = torch.eye(32, device="cuda").bfloat16()
            out = all_gather_matmul(whole.chunk(ranks)[at], weight, group, backend="symmetric")
            assert torch.equal(out, whole)
            out = matmul_reduce_scatter(whole, weight, group, backend="symmetric")
            assert torch.equal(out, ranks * whole.chunk(ranks)[at])
        dist.barrier()


def a_rank_that_comes_late():
    """Behind the group's timeout results are NaN, and the next call raises; with new buffers all is well."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    x, weight = torch.ones(256, 64, device="cuda").bfloat16(), torch.ones(64, 64, device="cuda").bfloat16()
    calls = {GATHER: x, SCATTER: x.repeat(dist.get_world_size(), 1)}
    for op, given in calls.items():
        for of in (None, group):  # the first has time to compile
            assert not FUNCTIONS[op](given, weight, of, backend="symmetric").isnan().any()
            torch.cuda.synchronize()
            dist.barrier()
        torch.cuda.synchronize()
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(6)
        out = FUNCTIONS[op](given, weight, group, backend="symmetric")
        torch.cuda.synchronize()
        assert out.isnan().all()
        dist.barrier()
        with pytest.raises(RuntimeError, match="a rank of the group didn't come within 3 s, the group's timeout"):
            FUNCTIONS[op](given, weight, group, backend="symmetric")
        torch_symmetric.free_buffers(group)
        dist.barrier()


CHECKS = (
    the_dense_product, options, the_same_bits, buffers_are_used_again, streams, graphs, compiled, wrong_calls,
    one_collective, what_auto_takes, freed_and_made_again, groups_of_some_ranks, a_rank_that_comes_late,
)  # fmt: skip
OVER_NCCL = one_collective, what_auto_takes


def checks(ranks):
    """NCCL gives no two ranks one GPU."""
    return [check for check in CHECKS if count() >= ranks or check not in OVER_NCCL]


@pytest.mark.ranks
def test_two_processes(tmp_path):
    spawned(2, tmp_path / "meeting", checks(2))


@pytest.mark.ranks
@pytest.mark.slow
def test_three_processes(tmp_path):
    spawned(3, tmp_path / "meeting", checks(3))


@pytest.mark.ranks
def test_every_gpu_is_a_rank(tmp_path):
    if count() < 3:
        pytest.skip("two processes are tested in any case")
    spawned(count(), tmp_path / "meeting", checks(count()))
