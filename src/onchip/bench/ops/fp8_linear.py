"""What `onchip bench` needs to know of this op: the names that `onchip.bench.harness.Op` lists, and no more.

Modes are the layer's, and each of its three products alone, of operands that were quantised beforehand.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.bench.ops import fp8_linear_sizes as bench_spec
from onchip.bench.ops.fp8_linear_peers import LINEAR, OWN, PEERS, PRODUCT_ALONE, QUANTIZED_BEFORE, SCALED_MM, Layer
from onchip.bench.ops.fp8_linear_sizes import BOUND
from onchip.bench.peers import Implementation, Peer
from onchip.bench.torch_steps import Step, relative_error
from onchip.core.sizes import DTYPE_BYTES
from onchip.fp8 import numbers
from onchip.fp8 import triton_refusal as triton_op
from onchip.fp8.torch_quantize import Quantized
from onchip.ops.fp8_linear import cases, torch_op
from onchip.ops.fp8_linear.torch_op import quantize_weight

CASES = cases.BENCH_CASES
DEFAULT_CASES = cases.DEFAULT_BENCH_CASES
SUITES = cases.SUITES
DTYPES = tuple(DTYPE_BYTES)
# What each mode returns.
RETURNED = {
    **bench_spec.LAYER,
    "forward product": ("out",),
    "dgrad product": ("grad_x",),
    "wgrad product": ("grad_weight",),
}
MODES = tuple(RETURNED)
PRODUCTS = MODES[2:]


class Operands(NamedTuple):
    """A, B and whether B's scales are 128x128."""

    a: Quantized
    b: Quantized
    by_block: bool


@dataclass(frozen=True)
class Problem:
    """Inputs of one case, in the dtype and on the device of the run."""

    x: Tensor  # [M, K], a leaf that requires grad
    weight: torch.nn.Parameter  # [N, K]
    grad_out: Tensor  # [M, N]

    @cached_property
    def operands(self) -> dict[str, Operands]:
        """What each product multiplies.  All quantisers make the same bits; a kernel makes them in less time."""
        kernels = triton_op.refusal(self.x.device.type, self.x.device.index) is None
        backend = torch_op._backend("triton" if kernels else "dequantize")
        x, x_turned = backend.quantize_activation(self.x.detach(), "e4m3", "float32", rows=True, columns=True)
        g, g_turned = backend.quantize_activation(self.grad_out, "e4m3", "float32", rows=True, columns=True)
        w, w_turned = backend.quantize_weight(self.weight.detach(), "float32", rows=True, transposed=True)
        made = (Operands(x, w, True), Operands(g, w_turned, True), Operands(g_turned, x_turned, False))
        return dict(zip(PRODUCTS, made, strict=True))


def needed_bytes(case: cases.Case, dtype: str) -> int:
    """Device memory of a case: inputs, results, and in FP8 the operands of the products and those of a step."""
    # One implementation's copies of the weight are made before its steps.
    again = numbers.weight_bytes(numbers.Problem(case.m, case.n, case.k, dtype))
    return bench_spec.plain_bytes(case, dtype) + 2 * bench_spec.quantized_bytes(case, dtype) + again


def make_problem(case: cases.Case, device: str, dtype: str) -> Problem:
    """The inputs of `case`, drawn on the device and in the dtype of the run at once."""
    assert case == cases.Case(case.name, case.m, case.n, case.k)
    bench_spec.require_memory(needed_bytes(case, dtype), _device_bytes(device))
    rng = torch.Generator(device).manual_seed(0)

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=rng, device=device, dtype=getattr(torch, dtype))

    weight = torch.nn.Parameter(normal(case.n, case.k).mul_(case.k**-0.5))
    return Problem(normal(case.m, case.k).requires_grad_(), weight, normal(case.m, case.n))


def _device_bytes(device: str) -> int | None:
    """Memory that this process can have of the device; of the CPU nobody asks."""
    if device != "cuda":
        return None
    free: int = torch.cuda.mem_get_info()[0]
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


# -------------------------------------------------------------------------------------------------- implementations


def _layer_steps(problem: Problem, layer: Layer) -> dict[str, Step]:
    x, weight = problem.x, problem.weight

    def forward() -> Sequence[Tensor]:
        with torch.no_grad():
            return [layer(x, weight)]

    def both() -> Sequence[Tensor]:
        out = layer(x, weight)
        return [out.detach(), *torch.autograd.grad(out, [x, weight], problem.grad_out)]

    return {"forward": forward, "forward+backward": both}


def _product_steps(problem: Problem, product: Callable[..., Tensor]) -> dict[str, Step]:
    dtype = problem.x.dtype
    return {
        mode: lambda o=operands: [product(o.a, o.b, o.by_block, None, dtype, None)]  # type: ignore[misc]
        for mode, operands in problem.operands.items()
    }


def _peer_steps(problem: Problem, peer: Peer) -> dict[str, Step]:
    if PRODUCT_ALONE in peer.config:
        return _product_steps(problem, peer.load())
    return _layer_steps(problem, peer.load())


def _own_steps(problem: Problem, peer: Peer) -> dict[str, Step]:
    product = torch_op._backend(_chosen(problem, peer)).product
    return {**_layer_steps(problem, peer.load()), **_product_steps(problem, product)}


def _quantized_before_steps(problem: Problem, peer: Peer) -> dict[str, Step]:
    """Of a later micro-batch between two changes of the weight."""
    layer = peer.load()
    weight = quantize_weight(problem.weight)
    return _layer_steps(problem, lambda x, _: layer(x, weight))


def _chosen(problem: Problem, peer: Peer) -> str:
    return torch_op._choose(numbers.OP, peer.config["backend"], problem.x)


class Own(Implementation):
    """This package's op by one backend; its record says which one that 'auto' took."""

    def config(self, problem: Problem, mode: str) -> dict[str, Any]:
        return {"backend": _chosen(problem, self.peer)}


IMPLEMENTATIONS = (
    *(Own(peer, _own_steps) for peer in OWN),
    Own(QUANTIZED_BEFORE, _quantized_before_steps),
    *(Implementation(peer, _peer_steps) for peer in PEERS),
)


def floor(problem: Problem, mode: str) -> Step | None:
    """The products of the unquantised numbers by the framework: one, or for the whole step three.

    Of the modes that time a product there is none: `F.scaled_mm` beside them does the same work.
    """
    x, weight, grad_out = problem.x.detach(), problem.weight.detach(), problem.grad_out
    if mode == "forward":
        return lambda: [torch.mm(x, weight.T)]
    if mode == "forward+backward":
        return lambda: [torch.mm(x, weight.T), torch.mm(grad_out, weight), torch.mm(grad_out.T, x)]
    return None


# ------------------------------------------------------------------------------------------------------ correctness


@dataclass(frozen=True)
class Rows:
    """Some rows of each of a step's results, by float32 products of the unquantised numbers."""

    shapes: Mapping[str, tuple[int, int]]
    where: Mapping[str, Tensor]
    values: Mapping[str, Tensor]

    def check(self, mode: str, returned: Sequence[Tensor]) -> dict[str, tuple[float, float]]:
        """Relative error of these rows, and its bound; NaN if a number anywhere in the result is NaN or infinite."""
        errors = {}
        for name, result in zip(RETURNED[mode], returned, strict=True):
            if tuple(result.shape) != self.shapes[name]:
                raise ValueError(f"{name} has shape {list(result.shape)} where {list(self.shapes[name])} is right")
            finite = bool(result.sum(dtype=torch.float32).isfinite())
            error = relative_error(result[self.where[name]], self.values[name]) if finite else math.nan
            errors[name] = (error, BOUND)
        return errors


def reference(problem: Problem) -> Rows:
    """Random rows and the last ones: a float64 copy of everything would take longer than what is timed."""
    x, weight, grad_out = problem.x.detach(), problem.weight.detach(), problem.grad_out
    (m, k), n = x.shape, len(weight)
    shapes = bench_spec.shapes(m, n, k)
    where = {name: torch.from_numpy(rows).to(x.device) for name, rows in bench_spec.checked_rows(shapes).items()}
    chunks = bench_spec.chunks(n, k)
    with _no_tf32():
        values = {
            "out": torch.cat([x[where["out"]].float() @ weight[rows].float().T for rows in chunks], 1),
            "grad_x": _sum_of_products(grad_out[where["grad_x"]], weight),
            "grad_weight": _sum_of_products(grad_out[:, where["grad_weight"]].T, x),
        }
    return Rows(shapes, where, values)


check = Rows.check


def _sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32, a chunk of b's rows at a time."""
    out = torch.zeros(len(a), b.shape[1], dtype=torch.float32, device=b.device)
    for rows in bench_spec.chunks(*b.shape):
        out.addmm_(a[:, rows].float(), b[rows].float())
    return out


@contextmanager
def _no_tf32() -> Iterator[None]:
    """Whatever a peer that was imported before has set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# ---------------------------------------------------------------------------------------------------------- summary

_BASELINES = {mode: SCALED_MM if mode in PRODUCTS else LINEAR for mode in MODES}


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How much faster each implementation is than `nn.Linear`, and each product than `F.scaled_mm`."""
    return bench_spec.summary(rows, CASES, _BASELINES)
