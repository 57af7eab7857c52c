"""The benchmark of collective_matmul: its inputs, its peers, and how results are checked.

In PyTorch it runs in the ranks of `--world`, in JAX on the devices of one process.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from onchip.bench.benchmark import relative_error
from onchip.bench.harness import BenchedOp, sizes_of
from onchip.bench.peers import NARROW, Implementation, gpu_only
from onchip.bench.timing import Step
from onchip.collectives.problem import GATHER, SCATTER
from onchip.ops.collective_matmul import cases
from onchip.oracle.checks import dtype_name, op_in, product_bound

RETURNED = ("out", "grad_x", "grad_weight")


@dataclass(frozen=True)
class CollectiveBenchProblem:
    """Inputs of one case, in the run's dtype and on its device: this rank's in PyTorch, whole ones in JAX."""

    case: cases.CollectiveBenchCase
    device: str
    ranks: int
    x: Any
    weight: Any
    grad_out: Any


@dataclass
class CollectiveBenchmark(BenchedOp):
    """The benchmark in one framework."""

    def plain_steps(self, problem: CollectiveBenchProblem, function: Callable[..., Any]) -> Mapping[str, Step]:
        """The steps of a differentiable function of the op's name, x and the weight."""
        leaves = problem.x, problem.weight
        steps: Mapping[str, Step] = self.fw.steps(partial(function, problem.case.op), leaves, 2, (problem.grad_out,))
        return steps

    def floor(self, problem: CollectiveBenchProblem, mode: str) -> Step:
        """One rank's products alone: nothing travels."""
        case, ranks = problem.case, problem.ranks
        n, k = (case.n // ranks, case.k) if case.op == GATHER else (case.n, case.k // ranks)
        normal, dtype = self.fw.drawer(problem.device), dtype_name(problem.x.dtype)
        step: Step = self.fw.products(mode, normal(case.tokens, k, dtype=dtype), normal(n, k, dtype=dtype))
        return step

    def reference(self, problem: CollectiveBenchProblem) -> dict[str, Any]:
        """Which rank's results they are, and the right ones in float64, with bounds."""
        right: dict[str, Any] = {}
        with self.fw.in_float64():
            x, weight, g = (self.fw.wide(a) for a in (problem.x, problem.weight, problem.grad_out))
            if problem.case.op == GATHER:
                right["gathered"] = x = _gathered(self.fw, x)
                right["out"], right["grad_x"] = x @ weight.T, _scattered(self.fw, g @ weight)
            else:
                right["gathered"] = g = _gathered(self.fw, g)
                right["out"], right["grad_x"] = _scattered(self.fw, x @ weight.T), g @ weight
            right["grad_weight"] = g.T @ x
        case = problem.case
        lengths = {"out": case.k, "grad_x": case.n, "grad_weight": case.tokens, "gathered": 1}
        dtype = dtype_name(problem.x.dtype)
        # Others round what each rank adds.
        bounded = {n: (x, product_bound(dtype, lengths[n], 1 + problem.ranks)) for n, x in right.items()}
        return {"op": case.op, **bounded}

    def check(self, reference: Mapping[str, Any], mode: str, returned: Sequence[Any]) -> dict[str, tuple[float, float]]:
        """The relative error of each result."""
        return self.errors(reference, dict(zip(RETURNED, returned, strict=False)))

    def errors(self, reference: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
        return {
            name: (relative_error(self.fw, made, reference[name][0]), reference[name][1])
            for name, made in named.items()
        }


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


def _make_torch(fw: Any, case: cases.CollectiveBenchCase, device: str, dtype: str) -> CollectiveBenchProblem:
    import torch.distributed as dist

    ranks, own = dist.get_world_size(), dist.get_rank()
    if odd := [name for name, size in sizes_of(case).items() if size % ranks]:
        raise ValueError(f"{', '.join(odd)} of {case.name} are not a multiple of {ranks} ranks")
    normal = fw.drawer(device)
    rows, n, k = case.tokens // ranks, case.n, case.k
    if case.op == GATHER:
        shapes = (rows, k), (n // ranks, k), (case.tokens, n // ranks)
    else:
        shapes = (case.tokens, k // ranks), (n, k // ranks), (rows, n)
    # Numbers that differ from rank to rank show whose rows are where.
    x, weight, g = (normal(*shape, std=std * (1 + own)) for shape, std in zip(shapes, (1, k**-0.5, 1), strict=True))
    return CollectiveBenchProblem(
        case, device, ranks, fw.leaf(x, dtype), fw.parameter(fw.constant(weight, dtype)), fw.constant(g, dtype)
    )  # fmt: skip


def _make_jax(fw: Any, case: cases.CollectiveBenchCase, device: str, dtype: str) -> CollectiveBenchProblem:
    from onchip.ops.collective_matmul.jax_checks import mesh, placed

    normal = fw.drawer(device)
    whole = normal(case.tokens, case.k), normal(case.n, case.k, case.k**-0.5), normal(case.tokens, case.n)
    x, weight, g = placed(case.op, *(fw.constant(a, dtype) for a in whole))
    return CollectiveBenchProblem(case, device, mesh().size, x, weight, g)


# -------------------------------------------------------------------------------------------------- implementations


def _ranks(problem: CollectiveBenchProblem, mode: str) -> dict[str, Any]:
    return {"ranks": problem.ranks}


def _torch_implementations(fw: Any) -> tuple[Implementation, ...]:
    made = partial(Implementation, record=_ranks)
    cuda, narrow = (gpu_only("torch", dtypes) for dtypes in (("float32", *NARROW), NARROW))
    own = partial(_torch_own, fw)
    return (
        made("onchip auto", partial(own, backend="auto"), package="onchip"),
        made("torch, one collective", _one_collective),
        made("onchip symmetric", partial(own, backend="symmetric"), narrow, package="onchip"),
        made("onchip symmetric, 16-bit sums", partial(own, narrow=True, backend="symmetric"), narrow, package="onchip"),
        made("onchip collective", partial(own, backend="collective"), cuda, package="onchip"),
        made("onchip ring", partial(own, backend="ring"), cuda, package="onchip"),
        *(
            made(
                f"onchip {backend}, fp8",
                partial(own, backend=backend, precision="fp8"),
                narrow,
                package="onchip",
                error_bounds=dict.fromkeys(RETURNED, 0.06),
            )
            for backend in ("symmetric", "ring")
        ),
        made("torch, symmetric memory", _symmetric_memory, cuda),
        made("the collective alone", lambda: _moved, steps=_collective_steps, check=_check_collective),
    )


def _jax_implementations(fw: Any) -> tuple[Implementation, ...]:
    made = partial(Implementation, record=_ranks)
    return (
        made("onchip auto", _jax_own, package="onchip"),
        made("XLA all_gather, psum_scatter", _jax_peer, package="jax"),
    )


def _torch_own(fw: Any, *, narrow: bool = False, **options: Any) -> Callable[..., Any]:
    def run(op: str, x: Any, weight: Any) -> Any:
        sums = {"reduce_dtype": x.dtype} if narrow else {}
        return op_in(fw, "collective_matmul", op)(x, weight, None, **options, **sums)

    return run


def _moved(op: str, x: Any) -> Any:
    """The op's collective: all ranks' rows, or this rank's rows of the sum of all ranks'."""
    import torch.distributed as dist

    from onchip.frontend.torch_refusals import all_gather, reduce_scatter

    ranks = dist.get_world_size()
    out = x.new_empty(len(x) * ranks if op == GATHER else len(x) // ranks, x.shape[1])
    (all_gather if op == GATHER else reduce_scatter)(out, x.contiguous())
    return out


def _one_collective() -> Callable[..., Any]:
    """One collective before the product, or after it; backward has the other one."""
    import torch
    import torch.nn.functional as F

    class Moved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, there: str, back: str) -> Any:
            ctx.back = back
            return _moved(there, x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return _moved(ctx.back, grads[0]), None, None

    def run(op: str, x: Any, weight: Any) -> Any:
        if op == GATHER:
            return F.linear(Moved.apply(x, GATHER, SCATTER), weight)
        return Moved.apply(F.linear(x, weight), SCATTER, GATHER)

    return run


def _symmetric_memory() -> Callable[..., Any]:
    """PyTorch's products that are fused with a collective through symmetric memory, each the other's backward."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory  # registers them

    fused: Any = torch.ops.symm_mem
    group = dist.distributed_c10d._get_default_group().group_name

    def gathered_times(x: Any, b: Any) -> tuple[Any, Any]:
        whole, (out,) = fused.fused_all_gather_matmul(x.contiguous(), [b], 0, group)
        return whole, out

    def times_scattered(x: Any, b: Any) -> Any:
        return fused.fused_matmul_reduce_scatter(x, b, "sum", 0, group)

    class GatheredTimes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            whole, out = gathered_times(x, weight.t())
            ctx.save_for_backward(whole, weight)
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            whole, weight = ctx.saved_tensors
            return times_scattered(grads[0], weight), grads[0].t() @ whole

    class Scattered(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(x, weight)
            return times_scattered(x, weight.t())

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            x, weight = ctx.saved_tensors
            whole, grad_x = gathered_times(grads[0], weight)
            return grad_x, whole.t() @ x

    return lambda op, x, weight: (GatheredTimes if op == GATHER else Scattered).apply(x, weight)


# What the collectives of an op return, in forward and then in backward.
_MOVED = {GATHER: ("gathered", "grad_x"), SCATTER: ("out", "gathered")}


def _collective_steps(problem: CollectiveBenchProblem, moved: Callable[..., Any]) -> Mapping[str, Step]:
    """The collective alone, in forward and in backward; its addends were computed before."""
    op, x, weight, g = (problem.case.op, *(a.detach() for a in (problem.x, problem.weight, problem.grad_out)))
    there, back = (x, g @ weight) if op == GATHER else (x @ weight.t(), g)
    other = SCATTER if op == GATHER else GATHER
    return {
        "forward": lambda: [moved(op, there)],
        "forward+backward": lambda: [moved(op, there), moved(other, back)],
    }


def _check_collective(reference: Mapping[str, Any], mode: str, returned: Sequence[Any]) -> Any:
    moved = _MOVED[reference["op"]]
    return WORLD.errors(reference, dict(zip(moved, returned, strict=False)))


def _jax_own() -> Callable[..., Any]:
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


WORLD = CollectiveBenchmark("torch", cases.SUITES, _torch_implementations, _make_torch)
JAX = CollectiveBenchmark("jax", cases.SUITES, _jax_implementations, _make_jax)
