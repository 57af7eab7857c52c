"""What `onchip bench --framework jax` needs to know of this op: the names that `onchip.bench.harness.Op` lists.

A step has no cache: it quantises the weight anew, as after an optimizer's step.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array, lax

from onchip.bench import jax_steps as jax_bench
from onchip.bench.jax_steps import Step, relative_error
from onchip.bench.ops import fp8_linear_sizes as bench_spec
from onchip.bench.ops.fp8_linear_jax_peers import OWN, PEERS, PRODUCT
from onchip.bench.peers import Implementation, Peer
from onchip.core.sizes import DTYPE_BYTES
from onchip.ops.fp8_linear import cases
from onchip.oracle.jax import platform_of

CASES = cases.BENCH_CASES
DEFAULT_CASES = cases.DEFAULT_BENCH_CASES
SUITES = cases.SUITES
DTYPES = tuple(DTYPE_BYTES)
MODES = tuple(bench_spec.LAYER)

# Rows that are drawn at a time: random bits of a whole matrix would take eight times its bytes in bfloat16.
_DRAWN_ROWS = 1024


@dataclass(frozen=True)
class Problem:
    """Inputs of one case, in the dtype and on the device of the run."""

    x: Array  # [M, K]
    weight: Array  # [N, K]
    grad_out: Array  # [M, N]


def needed_bytes(case: cases.Case, dtype: str) -> int:
    """Device memory of a case: inputs, results, and what a step quantises.  'xla' takes more."""
    return bench_spec.plain_bytes(case, dtype) + bench_spec.quantized_bytes(case, dtype)


def make_problem(case: cases.Case, device: str, dtype: str) -> Problem:
    """The inputs of `case`, drawn on the device."""
    assert case == cases.Case(case.name, case.m, case.n, case.k)
    bench_spec.require_memory(needed_bytes(case, dtype), _device_bytes(device))
    return Problem(*jax_bench.drawn_on(device, partial(_draw, case, dtype)))


def _device_bytes(device: str) -> int | None:
    """Memory that this process can have of the device; None where JAX doesn't say."""
    stats = jax.devices(platform_of(device))[0].memory_stats() or {}
    return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None


def _draw(case: cases.Case, dtype: str) -> tuple[Array, ...]:
    sizes = ((case.m, case.k, 1.0), (case.n, case.k, case.k**-0.5), (case.m, case.n, 1.0))
    keys = jax.random.split(jax.random.key(0), len(sizes))
    return tuple(_normal(key, *size, dtype) for key, size in zip(keys, sizes, strict=True))


def _normal(key: Array, rows: int, columns: int, std: float, dtype: str) -> Array:
    """[rows, columns] ~ N(0, std), of float32 numbers: bfloat16 ones are drawn from 128 values."""
    at_a_time = math.gcd(rows, _DRAWN_ROWS)
    keys = jax.random.split(key, rows // at_a_time)
    drawn: Array = lax.map(lambda key: (std * jax.random.normal(key, (at_a_time, columns))).astype(dtype), keys)
    return drawn.reshape(rows, columns)


# -------------------------------------------------------------------------------------------------- implementations


def _steps(problem: Problem, peer: Peer) -> dict[str, Step]:
    layer = peer.load()

    def forward(x: Array, weight: Array) -> list[Array]:
        return [layer(x, weight)]

    def both(x: Array, weight: Array, grad_out: Array) -> list[Array]:
        out, pullback = jax.vjp(layer, x, weight)
        return [out, *pullback(grad_out)]

    operands = (problem.x, problem.weight)
    return {"forward": Step(forward, operands), "forward+backward": Step(both, (*operands, problem.grad_out))}


IMPLEMENTATIONS = tuple(Implementation(peer, _steps) for peer in (*OWN, *PEERS))


def floor(problem: Problem, mode: str) -> Callable[[], Sequence[Array]]:
    """The products of the unquantised numbers: one, or for the whole step three."""
    return jax_bench.products(mode, problem.x, problem.weight)


# ------------------------------------------------------------------------------------------------------ correctness


@dataclass(frozen=True)
class Rows:
    """Some rows of each of a step's results, by float32 products of the unquantised numbers."""

    shapes: Mapping[str, tuple[int, int]]
    where: Mapping[str, npt.NDArray[np.int64]]
    values: Mapping[str, Array]

    def check(self, mode: str, returned: Sequence[Array]) -> dict[str, tuple[float, float]]:
        """Relative error of these rows, and its bound; NaN if a number anywhere in the result is NaN or infinite."""
        errors = {}
        for name, result in zip(bench_spec.LAYER[mode], returned, strict=True):
            if result.shape != self.shapes[name]:
                raise ValueError(f"{name} has shape {list(result.shape)} where {list(self.shapes[name])} is right")
            error = relative_error(result[self.where[name]], self.values[name]) if _finite(result) else math.nan
            errors[name] = (error, bench_spec.BOUND)
        return errors


check = Rows.check


@jax.jit
def _finite(result: Array) -> Array:
    return jnp.isfinite(result).all()


def reference(problem: Problem) -> Rows:
    """Random rows and the last ones: a float64 copy of everything would take longer than what is timed."""
    x, weight, grad_out = problem.x, problem.weight, problem.grad_out
    (m, k), n = x.shape, len(weight)
    shapes = bench_spec.shapes(m, n, k)
    where = bench_spec.checked_rows(shapes)
    some = x[where["out"]]
    values = {
        "out": jnp.concatenate([_product(some, weight[rows].T) for rows in bench_spec.chunks(n, k)], 1),
        "grad_x": _sum_of_products(grad_out[where["grad_x"]], weight),
        "grad_weight": _sum_of_products(grad_out[:, where["grad_weight"]].T, x),
    }
    return Rows(shapes, where, values)


def _sum_of_products(a: Array, b: Array) -> Array:
    """a @ b in float32, a chunk of b's rows at a time."""
    start = jnp.zeros((len(a), b.shape[1]), jnp.float32, device=b.device)
    return sum((_product(a[:, rows], b[rows]) for rows in bench_spec.chunks(*b.shape)), start)


@jax.jit
def _product(a: Array, b: Array) -> Array:
    return jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32), precision=lax.Precision.HIGHEST)


# ---------------------------------------------------------------------------------------------------------- summary


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How much faster each implementation is than the layer in the inputs' dtype."""
    return bench_spec.summary(rows, CASES, dict.fromkeys(MODES, PRODUCT))
