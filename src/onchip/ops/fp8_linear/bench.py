"""The benchmark of fp8_linear: its inputs, its peers, and what a result is checked by.

Modes are the layer's and, in PyTorch, each of its three products alone, of operands that were quantised beforehand.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onchip.bench.benchmark import chunks, relative_error
from onchip.bench.harness import BenchedOp
from onchip.bench.peers import Implementation, always, gpu_only, imported, optional, own
from onchip.bench.timing import Step
from onchip.fp8 import numbers
from onchip.ops.fp8_linear import cases
from onchip.ops.fp8_linear.checks import plain_refusals
from onchip.oracle.checks import op_in

Layer = Callable[[Any, Any], Any]
"""x [M, K] and weight [N, K] to [M, N]."""
# What each mode of the layer returns.
LAYER = {"forward": ("out",), "forward+backward": ("out", "grad_x", "grad_weight")}
RETURNED = {
    **LAYER,
    "forward product": ("out",),
    "dgrad product": ("grad_x",),
    "wgrad product": ("grad_weight",),
}
PRODUCTS = tuple(RETURNED)[2:]
LINEAR = "torch nn.Linear"
SCALED_MM = "F.scaled_mm alone, operands quantised beforehand"
QUANTIZED_BEFORE = "onchip auto, weight quantised before"
UNQUANTISED = "XLA, unquantised product"
# The noise that FP8 may add, as a relative error: 28 dB below the signal.
BOUND = 10 ** (-28 / 20)
# Rows of each result that are checked, in all of their columns; half of them are the last ones, which in a result of
# more than 2**31 elements lie past that.
_CHECKED_ROWS = 128


@dataclass(frozen=True)
class Fp8LinearBenchProblem:
    """Inputs of one case, in the dtype and on the device of the run."""

    x: Any  # [M, K]; in PyTorch a leaf that requires grad
    weight: Any  # [N, K]; in PyTorch a Parameter
    grad_out: Any  # [M, N]

    @cached_property
    def operands(self) -> dict[str, tuple[Any, Any, bool]]:
        """What each product in PyTorch multiplies, and whether the second one's scales are 128x128.

        All quantisers make the same bits; a kernel takes less time.
        """
        from onchip.fp8.torch_operands import quantizer
        from onchip.fp8.torch_products import triton_refusal

        quantize = quantizer("triton" if triton_refusal(self.x.device) is None else "dequantize")
        x, x_turned = quantize(self.x.detach(), "e4m3", "float32")
        g, g_turned = quantize(self.grad_out, "e4m3", "float32")
        w, w_turned = quantize(self.weight.detach(), "e4m3", "float32", by_block=True)
        made = ((x, w, True), (g, w_turned, True), (g_turned, x_turned, False))
        return dict(zip(PRODUCTS, made, strict=True))


def _make(fw: Any, case: cases.Fp8LinearCase, device: str, dtype: str) -> Fp8LinearBenchProblem:
    """The inputs of `case`, drawn on the device."""
    assert case == cases.Fp8LinearCase(case.name, case.m, case.n, case.k)
    normal = fw.drawer(device)
    weight = fw.parameter(normal(case.n, case.k, case.k**-0.5, dtype=dtype))
    x = fw.leaf(normal(case.m, case.k, dtype=dtype), dtype)
    return Fp8LinearBenchProblem(x, weight, normal(case.m, case.n, dtype=dtype))


class Sample(NamedTuple):
    """Some rows of a result, by a product of the unquantised numbers in float64."""

    shape: tuple[int, int]  # of the whole result
    rows: npt.NDArray[np.int64]
    values: Any


@dataclass
class Fp8LinearBenchmark(BenchedOp):
    """The benchmark in one framework."""

    def plain_steps(self, problem: Fp8LinearBenchProblem, layer: Layer) -> Mapping[str, Step]:
        steps: Mapping[str, Step] = self.fw.steps(layer, (problem.x, problem.weight), 2, (problem.grad_out,))
        return steps

    def floor(self, problem: Fp8LinearBenchProblem, mode: str) -> Step | None:
        """The products of the unquantised numbers by the framework: one, or for the whole step three.

        Of the modes that time a product there is none: `F.scaled_mm` beside them does the same work.
        """
        made: Step | None = self.fw.products(mode, problem.x, problem.weight) if mode in LAYER else None
        return made

    def reference(self, problem: Fp8LinearBenchProblem) -> dict[str, Sample]:
        """Random rows and the last ones: all of them in float64 would take longer than what is timed."""
        wide, x, weight, grad_out = self.fw.wide, problem.x, problem.weight, problem.grad_out
        rng, half, samples = np.random.default_rng(0), _CHECKED_ROWS // 2, {}
        for name, a, b in (("out", x, weight.T), ("grad_x", grad_out, weight), ("grad_weight", grad_out.T, x)):
            rows = np.union1d(rng.integers(len(a), size=half), np.arange(max(0, len(a) - half), len(a)))
            with self.fw.in_float64():
                some = a[rows]
                values = sum(wide(some[:, part]) @ wide(b[part]) for part in chunks(*b.shape))
            samples[name] = Sample((len(a), b.shape[1]), rows, values)
        return samples

    def check(
        self, reference: Mapping[str, Sample], mode: str, returned: Sequence[Any]
    ) -> dict[str, tuple[float, float]]:
        """Relative error of these rows, and its bound; NaN if a number anywhere in the result is NaN or infinite."""
        errors = {}
        for name, result in zip(RETURNED[mode], returned, strict=True):
            right, error = reference[name], math.nan
            if tuple(result.shape) != right.shape:
                raise ValueError(f"{name} has shape {list(result.shape)} where {list(right.shape)} is right")
            if all(bool(self.fw.xp.isfinite(result[rows]).all()) for rows in chunks(*result.shape)):
                error = relative_error(self.fw, result[right.rows], right.values)
            errors[name] = (error, BOUND)
        return errors


# -------------------------------------------------------------------------------------------------- implementations


def _jax_implementations(fw: Any) -> tuple[Implementation, ...]:
    op = op_in(fw, "fp8_linear")

    def named(backend: str) -> Implementation:
        def refusal(device: str, dtype: str) -> str | None:
            return plain_refusals(device, dtype, "jax")[backend]

        return optional(f"onchip {backend}", "onchip", partial(partial, op), refusal, backend=backend)

    plain = optional(UNQUANTISED, "jax", lambda: lambda x, weight: x @ weight.T, always)
    return (named("mosaic_gpu"), named("xla"), plain)  # 'auto' is one of the two


def _torch_implementations(fw: Any) -> tuple[Implementation, ...]:
    made = own(partial(partial, op_in(fw, "fp8_linear")), op_in(fw, "fp8_linear", "BACKENDS"))
    made = [replace(impl, record=partial(_chosen, impl)) for impl in made]
    linear = partial(imported, "torch.nn.functional:linear")
    scaled_mm = partial(imported, "onchip.fp8.torch_products:scaled_mm_product", direct=False)
    refusals = {"onchip dequantize": _only_cpu}
    return (
        *(replace(x, unavailable=refusals.get(x.name, always), steps=partial(_own_steps, x)) for x in made),
        replace(made[0], name=QUANTIZED_BEFORE, unavailable=_only_cuda, steps=_quantized_before_steps),
        Implementation(LINEAR, linear),
        optional("torchao blockwise", "torchao", _torchao, gpu_only("torchao", ("bfloat16",), "torchao")),
        Implementation(SCALED_MM, scaled_mm, _no_scaled_mm, {"quantising": "not timed"}, steps=_product_steps),
    )


def _chosen(impl: Implementation, problem: Fp8LinearBenchProblem, mode: str = "") -> dict[str, str]:
    """The backend that 'auto' takes."""
    from onchip.ops.fp8_linear import torch_op

    return {"backend": torch_op._choose(numbers.OP, impl.options["backend"], problem.x)}


def _own_steps(impl: Implementation, problem: Fp8LinearBenchProblem, layer: Layer) -> Mapping[str, Step]:
    from onchip.fp8.torch_products import product_of

    product = product_of(_chosen(impl, problem)["backend"])
    return {**TORCH.plain_steps(problem, layer), **_product_steps(problem, product)}


def _quantized_before_steps(problem: Fp8LinearBenchProblem, layer: Layer) -> Mapping[str, Step]:
    """Those of a later micro-batch between two changes of the weight."""
    from onchip.ops.fp8_linear.torch_op import quantize_weight

    weight = quantize_weight(problem.weight)
    return TORCH.plain_steps(problem, lambda x, _: layer(x, weight))


def _product_steps(problem: Fp8LinearBenchProblem, product: Callable[..., Any]) -> Mapping[str, Step]:
    def step(*operands: Any) -> Step:
        return lambda: [product(*operands, None, problem.x.dtype, None)]

    return {mode: step(*operands) for mode, operands in problem.operands.items()}


def _torchao() -> Layer:
    import torch
    from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinear

    def layer(x: Any, weight: Any) -> Any:
        if (elements := x.shape[0] * weight.shape[0]) >= 2**31:
            # Past that they would write to addresses that aren't theirs, and nothing could run on the device after.
            raise ValueError(f"its kernels count elements in 32 bits, and the output has {elements}")
        plain = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        # Its layer takes over a Parameter as it is; in forward the weight comes detached.
        plain.weight = torch.nn.Parameter(weight) if type(weight) is torch.Tensor else weight
        return Float8BlockwiseLinear.from_float(plain)(x)

    return layer


def _only_cpu(device: str, dtype: str) -> str | None:
    return "its float32 products are there to be right; it is timed on the CPU" if device == "cuda" else None


def _only_cuda(device: str, dtype: str) -> str | None:
    return None if device == "cuda" else "on the CPU each call checks the copies, by quantising the weight again"


def _no_scaled_mm(device: str, dtype: str) -> str | None:
    import torch

    from onchip.fp8.torch_products import scaled_mm_refusal

    return scaled_mm_refusal(torch.device(device))


TORCH = Fp8LinearBenchmark("torch", cases.SUITES, _torch_implementations, _make, MODES=tuple(RETURNED))
JAX = Fp8LinearBenchmark("jax", cases.SUITES, _jax_implementations, _make)
