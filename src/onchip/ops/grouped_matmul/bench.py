"""The benchmark of grouped_matmul: its inputs, its peers, and what a result is checked by.

Modes are the product, the whole step and each of backward's two products alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from onchip.bench.harness import BenchedOp
from onchip.bench.peers import NARROW, Implementation, gpu_only, imported, optional, own
from onchip.bench.timing import Step
from onchip.ops.grouped_matmul import cases
from onchip.ops.grouped_matmul.checks import bounds
from onchip.oracle.checks import dtype_name, op_in

# What each mode returns.
RETURNED = {
    "forward": ("out",),
    "forward+backward": ("out", "grad_x", "grad_weight"),
    "dgrad": ("grad_x",),
    "wgrad": ("grad_weight",),
}


@dataclass(frozen=True)
class GroupedBenchProblem:
    """Inputs of one case, in the dtype and on the device of the run."""

    case: cases.GroupedCase
    x: Any  # [T, K]; in PyTorch a leaf that requires grad
    weight: Any  # [G, N, K]; in PyTorch a Parameter
    sizes: Any  # [G] int32
    grad_out: Any  # [T, N]

    @cached_property
    def turned(self) -> "GroupedBenchProblem":
        """With the weight as [G, K, N] in memory of its own; in JAX."""
        return replace(self, weight=self.weight.swapaxes(1, 2))


def _make(fw: Any, case: cases.GroupedCase, device: str, dtype: str) -> GroupedBenchProblem:
    """The inputs of `case`, drawn on the device."""
    assert case == cases.GroupedCase(case.name, case.sizes, case.n, case.k)
    import numpy as np

    normal = fw.drawer(device)
    weight = normal(case.groups * case.n, case.k, case.k**-0.5, dtype=dtype).reshape(case.groups, case.n, case.k)
    x = fw.leaf(normal(case.tokens, case.k, dtype=dtype), dtype)
    sizes = fw.ids(np.array(case.sizes, np.int32), device)
    return GroupedBenchProblem(case, x, fw.parameter(weight), sizes, normal(case.tokens, case.n, dtype=dtype))


@dataclass
class GroupedBenchmark(BenchedOp):
    """The benchmark in one framework."""

    def plain_steps(self, problem: GroupedBenchProblem, function: Callable[[Any, Any, Any], Any]) -> Mapping[str, Step]:
        """The steps of a differentiable function of x, the weight and the sizes."""
        arguments = (problem.x, problem.weight, problem.sizes)
        steps: dict[str, Step] = self.fw.steps(function, arguments, 2, (problem.grad_out,))
        alone = {
            mode: self.fw.gradient_alone(function, arguments, which, problem.grad_out)
            for which, mode in enumerate(("dgrad", "wgrad"))
        }
        return {**steps, **alone}

    def floor(self, problem: GroupedBenchProblem, mode: str) -> Step:
        """A dense product of as many operations by cuBLAS: of all rows by one group's weight."""
        x, weight, g = problem.x, problem.weight[0], problem.grad_out
        if mode == "dgrad":
            return self.fw.without_gradients(lambda g, w: [g @ w], g, weight)  # type: ignore[no-any-return]
        if mode == "wgrad":
            return self.fw.without_gradients(lambda g, x: [g.T @ x], g, x)  # type: ignore[no-any-return]
        step: Step = self.fw.products(mode, x, weight)
        return step

    def reference(self, problem: GroupedBenchProblem) -> GroupedBenchProblem:
        """The inputs: in float64 a group at a time fits in memory, all results don't."""
        return problem

    def check(
        self, reference: GroupedBenchProblem, mode: str, returned: Sequence[Any]
    ) -> dict[str, tuple[float, float]]:
        """The relative error of each result, against products of each group in float64; the gradient of a weight
        [G, K, N] is [G, K, N]."""
        limits = bounds(reference.case, dtype_name(reference.x.dtype))
        with self.fw.in_float64():
            return {
                name: (self._error(reference, name, result), limits[name])
                for name, result in zip(RETURNED[mode], returned, strict=True)
            }

    def _error(self, p: GroupedBenchProblem, name: str, result: Any) -> float:
        rows_of, matrix_of, error, norm, start = self.fw.wide_rows, self.fw.wide_matrix, 0.0, 0.0, 0
        for g, size in enumerate(p.case.sizes):
            x, grad = rows_of(p.x, start, size), rows_of(p.grad_out, start, size)
            weight = matrix_of(p.weight, g)
            a, b = {"out": (x, weight.T), "grad_x": (grad, weight), "grad_weight": (grad.T, x)}[name]
            right = a @ b
            made = matrix_of(result, g) if name == "grad_weight" else rows_of(result, start, size)
            start += size
            if name == "grad_weight" and made.shape != right.shape:
                made = made.T
            if made.shape != right.shape:
                raise ValueError(f"{name} has shape {list(made.shape)} where {list(right.shape)} is right")
            error += float(((made - right) ** 2).sum())
            norm += float((right**2).sum())
        return math.sqrt(error / norm)


# -------------------------------------------------------------------------------------------------- implementations


def _own(fw: Any) -> list[Implementation]:
    """'auto' alone: the backends without kernels are there to be right."""
    return own(partial(partial, op_in(fw, "grouped_matmul")), ())


def _jax_implementations(fw: Any) -> tuple[Implementation, ...]:
    on_gpu = gpu_only("tokamax", ("float32", *NARROW), "'onchip[peers-jax]'")
    backends = [
        optional(f"tokamax {backend}", "tokamax", _tokamax, on_gpu, _turned_steps, implementation=backend)
        for backend in ("mosaic", "triton")
    ]
    ragged_dot = Implementation("jax.lax.ragged_dot", _ragged_dot, package="jax", steps=_turned_steps)
    return (*_own(fw), ragged_dot, *backends)


def _turned_steps(problem: GroupedBenchProblem, function: Callable[..., Any]) -> Mapping[str, Step]:
    """Steps of a function of x, a weight [G, K, N] and the sizes."""
    return JAX.plain_steps(problem.turned, function)


def _ragged_dot() -> Callable[..., Any]:
    import jax

    return jax.lax.ragged_dot


def _tokamax(implementation: str) -> Callable[..., Any]:
    return imported("tokamax:ragged_dot", implementation=implementation)


def _torch_implementations(fw: Any) -> tuple[Implementation, ...]:
    load, unavailable = partial(imported, "quack.gemm_interface:gemm"), gpu_only("quack-kernels", NARROW)
    quack = partial(optional, package="quack-kernels", load=load, unavailable=unavailable, steps=_quack_steps)
    return (
        *_own(fw),
        _in_fp8(fw),
        optional("torch F.grouped_mm", "torch", _grouped_mm, gpu_only("torch", ("bfloat16",), "torch")),
        quack("quack", tuned=True),
        quack("quack, default config", tuned=False),
    )


# Of precision='fp8', an approximation: what fp8_linear is held to.
FP8_BOUND = 10 ** (-28 / 20)
_FP8 = {"precision": "fp8", "backend": "triton"}


def _in_fp8(fw: Any) -> Implementation:
    def unavailable(device: str, dtype: str) -> str | None:
        import torch

        from onchip.ops.grouped_matmul import torch_op

        return torch_op.refusals(torch.device(device), getattr(torch, dtype), fp8_sizes=(128, 128))["triton"]

    load = partial(partial, op_in(fw, "grouped_matmul"), **_FP8)
    bounds = dict.fromkeys(("out", "grad_x", "grad_weight"), FP8_BOUND)
    return Implementation("onchip fp8, approximate", load, unavailable, _FP8, "onchip", error_bounds=bounds)


def _grouped_mm() -> Callable[..., Any]:
    import torch

    def product(x: Any, weight: Any, sizes: Any) -> Any:
        offsets = sizes.cumsum(0, dtype=torch.int32)
        return torch.nn.functional.grouped_mm(x, weight.mT, offs=offsets)

    return product


def _quack_steps(problem: GroupedBenchProblem, gemm: Callable[..., Any]) -> Mapping[str, Step]:
    """Its products aren't differentiable: each is called by itself."""
    import torch

    x, weight, g = problem.x.detach(), problem.weight.detach(), problem.grad_out

    def starts() -> Any:
        return torch.nn.functional.pad(problem.sizes.cumsum(0, dtype=torch.int32), (1, 0))

    products: dict[str, Callable[[Any], Any]] = {
        "forward": lambda starts: gemm(x, weight.mT, cu_seqlens_m=starts),
        "dgrad": lambda starts: gemm(g, weight, cu_seqlens_m=starts),
        "wgrad": lambda starts: gemm(g.T, x, cu_seqlens_k=starts),
    }

    def step(*modes: str) -> Step:
        def run() -> list[Any]:
            first = starts()
            return [products[mode](first) for mode in modes]

        return run

    return {**{mode: step(mode) for mode in products}, "forward+backward": step(*products)}


TORCH, JAX = (
    GroupedBenchmark(framework, cases.SUITES, implementations, _make, MODES=tuple(RETURNED))
    for framework, implementations in (("torch", _torch_implementations), ("jax", _jax_implementations))
)
