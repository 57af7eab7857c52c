"""The benchmark of collective_matmul: its inputs, its peers, and what a result is checked by.

In PyTorch each process of `torchrun` is a rank, and one process is one of one; the first writes the results.  In JAX
one process has all devices.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from onchip.bench.harness import Op
from onchip.bench.peers import Implementation
from onchip.bench.timing import Step
from onchip.collectives.problem import GATHER
from onchip.ops.collective_matmul import cases
from onchip.oracle.checks import dtype_name, op_in, product_bound, relative_error

RETURNED = ("out", "grad_x", "grad_weight")


@dataclass(frozen=True)
class Problem:
    """Inputs of one case, in the dtype and on the device of the run: of this rank in PyTorch, whole ones in JAX."""

    case: cases.BenchCase
    device: str
    ranks: int
    x: Any
    weight: Any
    grad_out: Any


@dataclass
class Benchmark(Op):
    """The benchmark in one framework."""

    def plain_steps(self, problem: Problem, function: Callable[..., Any]) -> Mapping[str, Step]:
        """The steps of a differentiable function of the op's name, x and the weight."""
        leaves = problem.x, problem.weight
        steps: Mapping[str, Step] = self.fw.steps(partial(function, problem.case.op), leaves, 2, (problem.grad_out,))
        return steps

    def floor(self, problem: Problem, mode: str) -> Step:
        """One rank's products alone: nothing travels."""
        case, ranks = problem.case, problem.ranks
        n, k = (case.n // ranks, case.k) if case.op == GATHER else (case.n, case.k // ranks)
        normal, dtype = self.fw.drawer(problem.device), dtype_name(problem.x.dtype)
        step: Step = self.fw.products(mode, normal(case.tokens, k, dtype=dtype), normal(n, k, dtype=dtype))
        return step

    def reference(self, problem: Problem) -> dict[str, Any]:
        """What is right in float64."""
        right: dict[str, Any] = {}
        with self.fw.in_float64():
            x, weight, g = (self.fw.wide(a) for a in (problem.x, problem.weight, problem.grad_out))
            if problem.case.op == GATHER:
                x = _gathered(self.fw, x)
                right["out"], right["grad_x"] = x @ weight.T, _scattered(self.fw, g @ weight)
            else:
                g = _gathered(self.fw, g)
                right["out"], right["grad_x"] = _scattered(self.fw, x @ weight.T), g @ weight
            right["grad_weight"] = g.T @ x
        lengths = {"out": problem.case.k, "grad_x": problem.case.n, "grad_weight": problem.case.tokens}
        dtype = dtype_name(problem.x.dtype)
        # Others round what each rank adds.
        return {n: (x, product_bound(dtype, lengths[n], 1 + problem.ranks)) for n, x in right.items()}

    def check(self, reference: Mapping[str, Any], mode: str, returned: Sequence[Any]) -> dict[str, tuple[float, float]]:
        """The relative error of each result, the largest of all ranks: each must know what the others will run."""
        named = dict(zip(RETURNED, returned, strict=False))
        with self.fw.in_float64():
            return {
                name: (_largest(self.fw, relative_error(made, _as_array(reference[name][0]))), reference[name][1])
                for name, made in named.items()
            }


def _as_array(x: Any) -> Any:
    import numpy as np

    return np.asarray(x.cpu() if hasattr(x, "cpu") else x)


def _gathered(fw: Any, x: Any) -> Any:
    """All ranks' rows of x."""
    if fw.NAME == "jax":
        return x
    from onchip.ops.collective_matmul.torch_checks import joined

    return joined(x, 0, None)


def _scattered(fw: Any, x: Any) -> Any:
    """This rank's rows of the sum of all ranks' x."""
    if fw.NAME == "jax":
        return x
    import torch.distributed as dist

    dist.all_reduce(x)
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def _largest(fw: Any, error: float) -> float:
    if fw.NAME == "jax":
        return error
    import torch
    import torch.distributed as dist

    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return float(torch.tensor(errors).max())  # NaN if one is


def _make_torch(fw: Any, case: cases.BenchCase, device: str, dtype: str) -> Problem:
    import torch.distributed as dist

    ranks, own = dist.get_world_size(), dist.get_rank()
    normal = fw.drawer(device)
    rows, n, k = case.tokens // ranks, case.n, case.k
    if case.op == GATHER:
        shapes = (rows, k), (n // ranks, k), (case.tokens, n // ranks)
    else:
        shapes = (case.tokens, k // ranks), (n, k // ranks), (rows, n)
    # What differs from rank to rank shows whose is where.
    x, weight, g = (normal(*shape, std=std * (1 + own)) for shape, std in zip(shapes, (1, k**-0.5, 1), strict=True))
    return Problem(
        case, device, ranks, fw.leaf(x, dtype), fw.parameter(fw.constant(weight, dtype)), fw.constant(g, dtype)
    )  # fmt: skip


def _make_jax(fw: Any, case: cases.BenchCase, device: str, dtype: str) -> Problem:
    from onchip.ops.collective_matmul.jax_checks import mesh, placed

    normal = fw.drawer(device)
    whole = normal(case.tokens, case.k), normal(case.n, case.k, case.k**-0.5), normal(case.tokens, case.n)
    x, weight, g = placed(case.op, *(fw.constant(a, dtype) for a in whole))
    return Problem(case, device, mesh().size, x, weight, g)


@contextmanager
def _ranks(device: str) -> Iterator[bool]:
    import torch.distributed as dist

    from onchip.ops.collective_matmul.torch_checks import session

    with session(device):
        yield dist.get_rank() == 0


# -------------------------------------------------------------------------------------------------- implementations


def _implementations(fw: Any) -> tuple[Implementation, ...]:
    own, peer = (_torch_own, _torch_peer) if fw.NAME == "torch" else (_jax_own, _jax_peer)
    name = "torch, one collective" if fw.NAME == "torch" else "XLA all_gather, psum_scatter"

    def ranks(problem: Problem, mode: str) -> dict[str, Any]:
        return {"ranks": problem.ranks}

    return (
        Implementation("onchip auto", partial(own, fw), package="onchip", record=ranks),
        Implementation(name, peer, package=fw.NAME, record=ranks),
    )


def _torch_own(fw: Any) -> Callable[..., Any]:
    return lambda op, x, weight: op_in(fw, "collective_matmul", op)(x, weight, None)


def _torch_peer() -> Callable[..., Any]:
    """One collective before the product, or after it; backward has the other one."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    # Their names from PyTorch 2.13 on, and before.
    all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def gathered(x: Any) -> Any:
        out = x.new_empty(dist.get_world_size() * x.shape[0], x.shape[1])
        all_gather(out, x.contiguous())
        return out

    def scattered(x: Any) -> Any:
        out = x.new_empty(x.shape[0] // dist.get_world_size(), x.shape[1])
        reduce_scatter(out, x.contiguous())
        return out

    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return gathered(x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return scattered(grads[0])

    class Scattered(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return scattered(x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return gathered(grads[0])

    def run(op: str, x: Any, weight: Any) -> Any:
        return F.linear(Gathered.apply(x), weight) if op == GATHER else Scattered.apply(F.linear(x, weight))

    return run


def _jax_own(fw: Any) -> Callable[..., Any]:
    from onchip.ops.collective_matmul.jax_checks import whole

    return lambda op, x, weight: whole(x, weight, None, op=op, backend="xla")


def _jax_peer() -> Callable[..., Any]:
    from jax import lax

    from onchip.ops.collective_matmul.jax_checks import AXIS, shared

    def run(op: str, x: Any, weight: Any) -> Any:
        def of_device(x: Any, weight: Any, _: None) -> Any:
            if op == GATHER:
                return lax.all_gather(x, AXIS, tiled=True) @ weight.T
            return lax.psum_scatter(x @ weight.T, AXIS, tiled=True)

        return shared(of_device, op, x, weight, None)

    return run


TORCH = Benchmark("torch", cases.SUITES, _implementations, _make_torch, session=_ranks)
JAX = Benchmark("jax", cases.SUITES, _implementations, _make_jax)
