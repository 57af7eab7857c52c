"""Both functions over gloo: three processes, and groups of two and of one of them, run all checks in one go."""

import contextlib
import copy
import itertools
import os
import subprocess
import sys
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from onchip.bench.torch_steps import peak_extra_bytes
from onchip.collectives import torch_ring
from onchip.collectives.problem import GATHER, SCATTER, CollectiveSizes, cost
from onchip.ops.collective_matmul import torch_products
from onchip.ops.collective_matmul.cases import CHECK_CASES
from onchip.ops.collective_matmul.checks import CHECKER
from onchip.ops.collective_matmul.torch_checks import joined
from onchip.torch import ColumnParallelLinear, RowParallelLinear, all_gather_matmul, matmul_reduce_scatter
from sharded import spawn

OPS = {GATHER: all_gather_matmul, SCATTER: matmul_reduce_scatter}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
T, N, K = 12, 18, 24
FULL, FP8 = {}, {"precision": "fp8"}


def drawn(group, op, dtype=torch.float32, *, how=FULL, seed=0):
    """x, weight and bias of this rank, as leaves, the bias of SCATTER alike on all ranks, and an upstream gradient."""
    ranks, own = dist.get_world_size(group), dist.get_rank(group)
    g = torch.Generator().manual_seed(seed + own)
    tokens = 128 * ranks if how == FP8 else T
    rows = tokens // ranks if op == GATHER else tokens
    x, weight = (torch.randn(s, generator=g).to(dtype) for s in ((rows, K), (N, K)))
    up = torch.randn(tokens if op == GATHER else tokens // ranks, N, generator=g).to(dtype)
    bias = torch.randn(N, generator=torch.Generator().manual_seed(7)).to(dtype)
    return *(a.requires_grad_() for a in (x, weight, bias)), up


def each_way(how):
    """Both functions, and their options."""
    keeps = [(GATHER, {"keep_gathered": True})] if how == FULL else []
    return [(op, partial(OPS[op], **how, **more)) for op, more in [(GATHER, {}), *keeps, (SCATTER, {})]]


def oracle_in_every_dtype(group):
    hows = CHECKER.hows(torch_like())
    cases = [case for case in CHECK_CASES if case.name in ("one of each", "deep", "no tokens", "three dimensions")]
    for i, (case, how) in enumerate(itertools.product(cases, hows)):
        for dtype in (DTYPES[i % 4], DTYPES[(i + 1) % 4]):
            wrong = [c for c in CHECKER.check_case(case, dtype, group=group, **how) if not c.ok]
            assert not wrong, wrong


class torch_like:
    NAME = "torch"


def same_bits(group, how=FULL):
    """In every run and every backward; and SCATTER's bias gets the same gradient on every rank."""
    for op, function in each_way(how):
        x, weight, bias, up = drawn(group, op, how=how)
        first, again = (function(x, weight, group, bias=bias) for _ in range(2))
        assert torch.equal(first, again)
        grads = [torch.autograd.grad(first, (x, weight, bias), up, retain_graph=True) for _ in range(2)]
        grads.append(torch.autograd.grad(again, (x, weight, bias), up))
        for others in grads[1:]:
            assert all(map(torch.equal, grads[0], others))
        if op == SCATTER:
            every = [torch.empty_like(bias) for _ in range(dist.get_world_size(group))]
            dist.all_gather(every, grads[0][2], group)
            assert all(torch.equal(every[0], other) for other in every)


def some_gradients(group, how=FULL):
    """Each alone is the one of all together."""
    for op, function in each_way(how):
        *leaves, up = drawn(group, op, how=how)
        every = torch.autograd.grad(function(leaves[0], leaves[1], group, bias=leaves[2]), leaves, up)
        for i, right in enumerate(every):
            given = [a if i == j else a.detach() for j, a in enumerate(leaves)]
            for x, weight, bias in (given, leaves):
                out = function(x, weight, group, bias=bias)
                assert torch.equal(torch.autograd.grad(out, leaves[i], up)[0], right), (op, i)


def main_gradients(group, how=FULL):
    """Two micro-batches are added to memory of the caller's."""
    for (op, function), dtype in itertools.product(each_way(how), (torch.float32, torch.bfloat16)):
        main, total = torch.ones(N, K), torch.ones(N, K)
        for seed in (0, 5):
            x, weight, _, up = drawn(group, op, dtype, how=how, seed=seed)
            function(x, weight, group, weight_grad_out=main).backward(up)
            assert weight.grad is None
            wide = [a.detach().float().requires_grad_() for a in (x, weight)]
            total += torch.autograd.grad(function(*wide, group), wide[1], up.float())[0]
            assert x.grad.dtype == dtype
        torch.testing.assert_close(main, total)


def autocast(group):
    """Under autocast, what travels and is multiplied is of 16 bits; gradients have their inputs' dtypes."""
    for op, function in OPS.items():
        *leaves, up = drawn(group, op)
        with torch.autocast("cpu", torch.bfloat16):
            made = function(leaves[0], leaves[1], group, bias=leaves[2])
        narrow = [a.detach().bfloat16().requires_grad_() for a in leaves]
        right = function(narrow[0], narrow[1], group, bias=narrow[2])
        assert torch.equal(made, right)
        both = [torch.autograd.grad(out, given, up.bfloat16()) for out, given in ((made, leaves), (right, narrow))]
        for a, b in zip(*both, strict=True):
            assert a.dtype == torch.float32
            torch.testing.assert_close(a.bfloat16(), b)


def strides(group, how=FULL):
    """What isn't contiguous is the same."""
    for op, function in each_way(how):
        x, weight, bias, up = drawn(group, op, how=how)
        right = torch.autograd.grad(function(x, weight, group, bias=bias), (x, weight, bias), up)
        wide = torch.zeros(2 * len(x), 2 * K)
        wide[::2, ::2] = x.detach()
        sliced, turned = wide[::2, ::2].requires_grad_(), weight.detach().t().contiguous().t().requires_grad_()
        upstream = torch.stack([up, up], -1)[..., 0]
        made = torch.autograd.grad(function(sliced, turned, group, bias=bias), (sliced, turned, bias), upstream)
        for a, b in zip(made, right, strict=True):
            torch.testing.assert_close(a, b)
        out = function(x, weight, group)
        summed = torch.autograd.grad(out.sum(), (x, weight), retain_graph=True)
        for a, b in zip(summed, torch.autograd.grad(out, (x, weight), torch.ones_like(out)), strict=True):
            torch.testing.assert_close(a, b)


def second_derivatives_and_checkpoints(group, how=FULL):
    for op, function in each_way(how):
        x, weight, _, up = drawn(group, op, how=how)
        (grad,) = torch.autograd.grad(function(x, weight, group).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match=f"{op}: a backward of the backward is not supported"):
            grad.sum().backward()
        right = torch.autograd.grad(function(x, weight, group), (x, weight), up)
        out = checkpoint(partial(function, group=group), x, weight, use_reentrant=False)
        assert all(map(torch.equal, torch.autograd.grad(out, (x, weight), up), right))


@contextlib.contextmanager
def recorded():
    """What happens in the order in which it does, and the bytes that this rank sends."""
    events, sent = [], []

    def noted(name, function):
        def run(*args, **more):
            events.append(name)
            if name == "exchange":
                sent.append(args[1].nbytes)
            return function(*args, **more)

        return run

    with contextlib.ExitStack() as stack:
        for module, attribute, name in (
            (torch_ring, "_exchange", "exchange"),
            (torch_ring, "_wait", "wait"),
            (torch_products, "linear", "product"),
            (torch_products, "product", "product"),
        ):
            stack.enter_context(mock.patch.object(module, attribute, noted(name, getattr(module, attribute))))
        yield events, sent


def one_collective(group):
    """Backend "collective" is the ring but for the order of sums; these travel in the dtype that is asked for."""
    bounds = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float64: 1e-12}
    for (op, function), dtype in itertools.product(each_way(FULL), DTYPES):
        *leaves, up = drawn(group, op, dtype)
        for reduce_dtype in (None, dtype):
            right, made = (
                function(leaves[0], leaves[1], group, bias=leaves[2], backend=backend, reduce_dtype=reduce_dtype)
                for backend in ("ring", "collective")
            )
            both = [(out, *torch.autograd.grad(out, leaves, up)) for out in (right, made)]
            for a, b in zip(*both, strict=True):
                assert a.dtype == dtype
                assert (a - b).norm() <= bounds[dtype] * a.norm(), (op, dtype, reduce_dtype)


def each_exchange_is_under_a_product(group):
    """It begins before one, and is waited for after it; and no more is sent than the plan says."""
    ranks = dist.get_world_size(group)
    for (op, function), dtype in itertools.product(each_way(FULL), (torch.float32, torch.bfloat16)):
        keeps = "keep_gathered" in function.keywords
        x, weight, _, up = drawn(group, op, dtype)
        with recorded() as (events, sent):
            out = function(x, weight, group)
            forward = len(events)
            torch.autograd.grad(out, (x, weight), up)
        step = ["exchange", "product", "wait"]
        sums, blocks = ["product", *step * (ranks - 1)], [*step * (ranks - 1), "product"]
        assert events[:forward] == (blocks if op == GATHER else sums)
        if op == SCATTER:
            assert events[forward:] == [*["exchange", "product", "product", "wait"] * (ranks - 1), "product", "product"]
        else:
            assert events[forward:] == [*sums, *(["product"] if keeps and ranks > 1 else blocks)]
        sizes = CollectiveSizes(ranks, T // ranks, N, K)
        planned = cost(op, sizes, dtype.itemsize, gradients=True, weight_bytes=dtype.itemsize, keep_gathered=keeps)
        assert sum(sent) == planned.sent, (op, dtype, keeps)


def memory(group):
    """The peak of PyTorch's allocator is what the formulas say."""
    ranks = dist.get_world_size(group)
    own = dist.get_rank(group)
    if ranks < 3:
        return

    def measured(step):
        """On the first rank alone: the profiler takes a second."""
        return peak_extra_bytes(step, device="cpu") if own == 0 else len(step())

    n, k, tokens = 192, 256, 600
    small = 20_000  # what is compared between ranks, and gloo's own
    for op, function in each_way(FULL):
        keeps = "keep_gathered" in function.keywords
        x = torch.randn(tokens // ranks if op == GATHER else tokens, k, requires_grad=True)
        weight = torch.randn(n, k, requires_grad=True)
        sizes = CollectiveSizes(ranks, tokens // ranks, n, k)
        planned = cost(op, sizes, 4, gradients=True, weight_bytes=4, keep_gathered=keeps)
        graph = []

        def forward(function=function, x=x, weight=weight, graph=graph):
            graph[:] = [function(x, weight, group)]
            return graph

        peak = measured(forward)
        predicted = sum(planned.kept.values()) + sum(planned.forward.values())
        assert own > 0 or predicted - small <= peak <= predicted + small, (op, keeps, peak, predicted)
        upstream = torch.ones_like(graph[0])
        gradients = partial(torch.autograd.grad, graph[0], (x, weight), upstream, retain_graph=True)
        peak, predicted = measured(gradients), sum(planned.backward.values())
        # Those that are returned last come after the peak: what they take was part of it.
        returned = 4 * (x.numel() + weight.numel())
        assert own > 0 or predicted - returned - small <= peak <= predicted + small, (op, keeps, peak, predicted)


def differing_calls(group):
    """They raise on every rank, and the group works afterwards."""
    own, ranks = dist.get_rank(group), dist.get_world_size(group)
    if ranks == 1:
        return
    for op, function in OPS.items():
        x, weight, _, up = drawn(group, op)
        longer = torch.cat([x, x]) if own == 0 else x
        frozen = x.detach() if own == 0 else x
        narrow = [a.bfloat16() if own == 0 else a for a in (x, weight)]
        for call in (
            lambda f=function, x=longer, w=weight: f(x, w, group),
            lambda f=function, x=frozen, w=weight: f(x, w, group),
            lambda f=function, given=narrow: f(*given, group),
        ):
            with pytest.raises(ValueError, match=f"{op}: ranks of the group called it differently: rank . with {op}: "):
                call()
        out = function(x, weight, group)
        with pytest.raises(ValueError, match=r"with a backward of .*, gradients of (x|weight); rank"):
            torch.autograd.grad(out, x if own == 0 else weight, up)
        function(x, weight, group).backward(up)
    with pytest.raises(ValueError, match="a bias of checksum "):
        matmul_reduce_scatter(torch.randn(T, K), torch.randn(N, K), group, bias=torch.full((N,), float(own)))
    other = OPS[GATHER if own == 0 else SCATTER]
    with pytest.raises(ValueError, match=r"with all_gather_matmul: .* with matmul_red|with matmul_red.* with all_g"):
        other(torch.randn(T, K), torch.randn(N, K), group)
    matmul_reduce_scatter(torch.randn(T, K + own), torch.randn(N, K + own), group)  # its own features
    all_gather_matmul(torch.randn(T, K), torch.randn(N + own, K), group)


def uneven_tokens(group):
    ranks = dist.get_world_size(group)
    if ranks > 1:
        message = f"matmul_reduce_scatter: x has {ranks + 1} rows in its first dimension, which {ranks} ranks can't"
        with pytest.raises(ValueError, match=rf"{message} share evenly; pad it by {ranks - 1} row"):
            matmul_reduce_scatter(torch.randn(ranks + 1, K), torch.randn(N, K), group)


def modules(group):
    """An MLP of both layers is that of two linear layers, and so are its gradients and its state."""
    ranks, own = dist.get_world_size(group), dist.get_rank(group)
    torch.manual_seed(3)
    up, down = torch.nn.Linear(8, 24), torch.nn.Linear(24, 8)
    torch.manual_seed(3)
    column, row = ColumnParallelLinear(8, 24, group), RowParallelLinear(24, 8, group)
    x = torch.randn(12, 2, 8)
    right = down(up(x).relu())
    right.square().sum().backward()
    layers = [
        (column, row),
        (ColumnParallelLinear.from_linear(up, group, keep_gathered=True), RowParallelLinear.from_linear(down, group)),
    ]
    layers.append(copy.deepcopy(layers[1]))
    for column, row in layers:
        assert column.group is group
        mine = x.chunk(ranks)[own]
        out = row(column(mine).relu())
        torch.testing.assert_close(out, right.chunk(ranks)[own])
        out.square().sum().backward()
        for layer, linear, dims in ((column, up, (0, 0)), (row, down, (1, None))):
            assert list(layer.state_dict()) == list(linear.state_dict())
            for (name, p), q, dim in zip(layer.named_parameters(), linear.parameters(), dims, strict=True):
                for a, b in ((p.detach(), q), (p.grad, q.grad)):
                    whole = a if dim is None else joined(a, dim, group)
                    torch.testing.assert_close(whole, b, msg=lambda m, name=name: f"{name}: {m}")
    state = row.state_dict()
    row.reset_parameters()
    row.load_state_dict(state)
    main = RowParallelLinear(24, 8, group, bias=False, main_grad=True)
    main.weight.main_grad = torch.zeros_like(main.weight)
    main(torch.randn(12, 24 // ranks)).sum().backward()
    assert main.weight.grad is None
    assert main.weight.main_grad.any()
    assert repr(main) == f"RowParallelLinear(24, 8, ranks={ranks}, bias=False, main_grad=True)"
    if ranks > 1:
        for make in (lambda: ColumnParallelLinear(8, ranks + 1, group), lambda: RowParallelLinear(ranks + 1, 8, group)):
            with pytest.raises(ValueError, match=rf"features={ranks + 1} can't be shared evenly by the {ranks} ranks"):
                make()


def compiled(group, how=FULL):
    """With fullgraph, forward and backward."""
    for op, function in each_way(how):
        x, weight, bias, up = drawn(group, op, how=how)
        right = function(x, weight, group, bias=bias)
        made = torch.compile(function, backend="aot_eager", fullgraph=True)(x, weight, group, bias=bias)
        torch.testing.assert_close(made, right)
        both = (torch.autograd.grad(out, (x, weight, bias), up) for out in (made, right))
        for a, b in zip(*both, strict=True):
            torch.testing.assert_close(a, b)


def fully_sharded(group):
    """FSDP2 over two replicas of two ranks each: the gradients that one process has of all tokens."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "tp"))
    tp, own = mesh.get_group("tp"), dist.get_rank()
    torch.manual_seed(4)
    up, down, tokens = torch.nn.Linear(8, 24), torch.nn.Linear(24, 8), torch.randn(4, 6, 8)
    sum(down(up(x).relu()).square().sum() for x in tokens).backward()
    for keeps in (False, True):
        layers = (
            ColumnParallelLinear.from_linear(up, tp, keep_gathered=keeps),
            torch.nn.ReLU(),
            RowParallelLinear.from_linear(down, tp),
        )
        model = fully_shard(torch.nn.Sequential(*layers), mesh=mesh["replica"], reshard_after_forward=True)
        (2 * model(tokens[own]).square().sum()).backward()  # FSDP2 averages over two replicas
        for layer, linear, split in ((model[0], up, 0), (model[2], down, 1)):
            for p, whole in zip(layer.parameters(), linear.parameters(), strict=True):
                right = whole.grad.chunk(2, split)[own % 2] if whole.ndim > split else whole.grad
                torch.testing.assert_close(p.grad.full_tensor(), right, rtol=1e-4, atol=1e-4)


CHECKS = (
    oracle_in_every_dtype, same_bits, some_gradients, main_gradients, autocast,
    strides, second_derivatives_and_checkpoints, one_collective, each_exchange_is_under_a_product, memory,
    uneven_tokens, modules,
    differing_calls,
)  # fmt: skip
IN_FP8 = tuple(
    partial(check, how=FP8)
    for check in (same_bits, some_gradients, main_gradients, strides, second_derivatives_and_checkpoints)
)


GROUPS = []


def in_each_group(rank, ranks, check):
    """Of all processes; of three also of the last two, whose numbers there are others, and of the first."""
    if not GROUPS:
        GROUPS[:] = [None, *([dist.new_group([ranks - 2, ranks - 1]), dist.new_group([0])] if ranks == 3 else [])]
    for group in GROUPS:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            check(group)
        else:
            with pytest.raises(
                ValueError, match="all_gather_matmul: this process is not a rank of group; call it only on "
            ):
                all_gather_matmul(torch.randn(2, K), torch.randn(N, K), group)


def run(tmp_path, ranks, checks):
    spawn(tmp_path, ranks, {str(check): partial(in_each_group, check=check) for check in checks}, timeout=120)


def test_three_processes(tmp_path):
    run(tmp_path, 3, CHECKS + IN_FP8[:1])


@pytest.mark.slow
def test_four_processes_and_compiled(tmp_path):
    run(tmp_path, 4, [compiled, partial(compiled, how=FP8), fully_sharded, *CHECKS, *IN_FP8])


@pytest.mark.slow
def test_the_check_under_torchrun():
    """It takes the processes that there are."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = ["-m", "onchip", "check", "collective_matmul", "--framework", "torch", "--device", "cpu"]
    done = subprocess.run([*torchrun, *command], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("comparisons are within their bounds") == 2
