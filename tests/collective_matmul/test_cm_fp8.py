"""precision='fp8' over gloo: two and three processes against fp8_linear's oracle."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from all_cards import all_cards, count
from collective_matmul.test_cm_torch import OPS, recorded
from onchip.collectives.problem import GATHER, CollectiveSizes
from onchip.ops.collective_matmul.fp8_cost import fp8_cost
from onchip.ops.collective_matmul.torch_checks import whole
from onchip.ops.fp8_linear.cases import Fp8LinearCase
from onchip.ops.fp8_linear.checks import bounds
from onchip.ops.fp8_linear.reference import fp8_linear, snr_db
from onchip.torch import ColumnParallelLinear, RowParallelLinear, all_gather_matmul, matmul_reduce_scatter
from sharded import leaf, spawn

BLOCK = 128


def numbers(*shape, seed=0, spread=0.0):
    """Rows of different sizes."""
    g = torch.Generator().manual_seed(seed)
    made, sizes = torch.randn(shape, generator=g), torch.randn(shape[0], *[1] * (len(shape) - 1), generator=g)
    return made * torch.exp(spread * sizes)


def drawn(op, ranks, dtype=torch.float32):
    """x [T, 2, K], weight, bias and an upstream gradient, of all ranks; each has whole groups of 128."""
    t, n, k = 64 * ranks, BLOCK * ranks if op == GATHER else 72, 200 if op == GATHER else BLOCK * ranks
    weight, bias, up = numbers(n, k, seed=1) / k**0.5, numbers(n, seed=2), numbers(t, 2, n, seed=3)
    return [a.to(dtype) for a in (numbers(t, 2, k, spread=2.0), weight, bias, up)]


def the_dense_layers_oracle(rank, ranks, group=None, device="cpu", backend="ring"):
    """All three products, of all dtypes, as one rank with fp8_linear would have them."""
    for op in OPS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x, weight, bias, up = (leaf(a.to(device)) for a in drawn(op, ranks, dtype))
            out = whole(x, weight, bias, op=op, backend=backend, group=group, precision="fp8")
            assert out.dtype == dtype
            out.backward(up.detach())
            given = [a.detach().float().cpu().numpy() for a in (x, weight, bias, up)]
            right = fp8_linear(*given[:3], grad_out=given[3])
            limits = bounds(Fp8LinearCase("", len(x) * 2, *weight.shape), str(dtype)[6:], tensor_cores=device != "cpu")
            for (name, exact), made in zip(right._asdict().items(), (out, x.grad, weight.grad, bias.grad), strict=True):
                error = np.linalg.norm(made.detach().double().cpu().numpy() - exact) / np.linalg.norm(exact)
                assert error <= limits[name], (op, dtype, name, error, limits[name])
            unquantised = given[0] @ given[1].T + given[2]
            # One rank's K of 128 leaves the oracle itself 27 dB.
            snr = snr_db(out.detach().double().cpu().numpy(), unquantised)
            assert snr > snr_db(right.out, unquantised) - 0.1, (op, dtype, snr)


def over_nccl(rank, ranks):
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    for backend in ("ring", "symmetric"):
        the_dense_layers_oracle(rank, ranks, group, "cuda", backend)


@pytest.mark.gpu
@pytest.mark.ranks
def test_every_gpu_is_a_rank(tmp_path):
    with all_cards():
        spawn(tmp_path, count(), {"over_nccl": over_nccl}, timeout=300)


def each_rank_its_own_groups(rank, ranks):
    """Features that 128 doesn't divide: the sum of what fp8_linear makes of each rank's."""
    k = 40 + 30 * rank
    x, weight = numbers(BLOCK * ranks, k, seed=rank), numbers(24, k, seed=rank + 9)
    out = matmul_reduce_scatter(x, weight, None, precision="fp8")
    mine = torch.from_numpy(fp8_linear(x.numpy(), weight.numpy()).out)
    dist.all_reduce(mine)
    torch.testing.assert_close(out.double(), mine.chunk(ranks)[rank], rtol=1e-5, atol=1e-5)


def ranks_part(op, rank, ranks):
    x, weight, bias, up = drawn(op, ranks)
    if op == GATHER:
        return x.chunk(ranks)[rank], weight.chunk(ranks)[rank], bias.chunk(ranks)[rank], up.chunk(ranks, -1)[rank]
    own = [a.chunk(ranks, -1)[rank].contiguous() for a in (x, weight)]
    return *own, bias, up.chunk(ranks)[rank]


def what_travels(rank, ranks):
    """As many bytes as the plan says."""
    for op, function in OPS.items():
        x, weight, bias, up = ranks_part(op, rank, ranks)
        with recorded() as (_, sent):
            function(leaf(x), leaf(weight), None, bias=leaf(bias), precision="fp8").backward(up)
        with torch.autocast("cpu", torch.bfloat16):
            assert function(x, weight, None, precision="fp8").dtype == torch.bfloat16
        rows = x.shape[:-1].numel() // (1 if op == GATHER else ranks)
        planned = fp8_cost(op, CollectiveSizes(ranks, rows, *weight.shape), 4, gradients=True, weight_bytes=4)
        assert sum(sent) == planned.sent, op


def layers(rank, ranks):
    """The modules hand it on."""
    torch.manual_seed(0)
    first = ColumnParallelLinear(64, BLOCK * ranks, None, precision="fp8")
    second = RowParallelLinear(BLOCK * ranks, 64, None, precision="fp8")
    x = numbers(BLOCK, 64, seed=rank)
    expected = all_gather_matmul(x, first.weight, None, bias=first.bias, precision="fp8").relu()
    assert torch.equal(
        second(first(x).relu()), matmul_reduce_scatter(expected, second.weight, None, bias=second.bias, precision="fp8")
    )
    assert "precision='fp8'" in repr(first)


def refusals(rank, ranks):
    x, weight = torch.randn(BLOCK * ranks, 64), torch.randn(32, 64)
    for op, function in OPS.items():
        for given, more, kind, match in (
            ((x[: 2 * ranks], weight), {}, ValueError, r"128 tokens share a scale .* ranks has \d+; pad .* by 12"),
            ((x.double(), weight.double()), {}, TypeError, "precision='fp8' takes float32, .* float16; got float64"),
            ((x.bfloat16(), weight.bfloat16()), {"reduce_dtype": torch.bfloat16}, ValueError, "leave out reduce_dtype"),
            ((x, weight), {"backend": "collective"}, ValueError, "it has no precision='fp8'; pass backend='ring' or"),
            ((x, weight), {"backend": "symmetric"}, ValueError, "it runs on CUDA tensors, not on 'cpu'"),
            ((x, weight), {"precision": "e4m3"}, ValueError, "precision must be one of 'full', 'fp8'; got 'e4m3'"),
            ((x, weight), {"precision": "fp8" if rank else "full"}, ValueError, "called it differently: .*, fp8"),
        ):  # fmt: skip
            with pytest.raises(kind, match=f"{op}: .*{match}"):
                function(*given, None, **{"precision": "fp8"} | more)
    with pytest.raises(
        ValueError, match="precision='fp8' keeps x in FP8 and gathers it again; pass keep_gathered=False"
    ):
        all_gather_matmul(x, weight, None, keep_gathered=True, precision="fp8")


CHECKS = (the_dense_layers_oracle, each_rank_its_own_groups, what_travels, layers, refusals)


def test_two_ranks(tmp_path):
    spawn(tmp_path, 2, {check.__name__: check for check in CHECKS})


@pytest.mark.slow
def test_three_ranks(tmp_path):
    spawn(tmp_path, 3, {check.__name__: check for check in CHECKS})


def test_one_rank():
    """Any number of tokens: fp8_linear itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for op, function in OPS.items():
            x, weight, bias, up = (a[:77] if a.ndim == 3 else a for a in drawn(op, 1))
            x, weight, bias = leaf(x), leaf(weight), leaf(bias)
            out = function(x, weight, None, bias=bias, precision="fp8")
            out.backward(up)
            right = fp8_linear(*(a.detach().numpy() for a in (x, weight, bias)), grad_out=up.numpy())
            for made, exact in zip((out, x.grad, weight.grad, bias.grad), right, strict=True):
                torch.testing.assert_close(made.detach().double(), torch.from_numpy(exact), rtol=1e-4, atol=1e-4)
    finally:
        dist.destroy_process_group()
