"""Both functions on a whole problem, shared by all devices: what checks and benchmarks run in JAX."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from onchip.collectives.problem import GATHER, WeightLayout
from onchip.frontend.jax_inputs import platform
from onchip.ops.collective_matmul.cases import RANKS
from onchip.ops.collective_matmul.jax_op import all_gather_matmul, matmul_reduce_scatter

AXIS = "ranks"


def session(device: str) -> AbstractContextManager[None]:
    """Does nothing, since one process has all devices."""
    return nullcontext()


def mesh() -> Mesh:
    """The devices, as many as can share the cases."""
    devices = jax.devices(platform())
    return Mesh(np.array(devices[: max(n for n in RANKS if n <= len(devices))]), (AXIS,))


def layouts(op: str, dims: int) -> tuple[P, P, P, P]:
    """How x with this many dimensions, the weight, the bias and the result are split."""
    columns = P(*[None] * (dims - 1), AXIS)
    if op == GATHER:
        return P(AXIS), P(AXIS), P(AXIS), columns
    return columns, P(None, AXIS), P(), P(AXIS)


def placed(op: str, x: jax.Array, weight: jax.Array, out: jax.Array) -> list[jax.Array]:
    """The arrays as the devices share them."""
    of_x, of_weight, _, of_out = layouts(op, x.ndim)
    where = (NamedSharding(mesh(), spec) for spec in (of_x, of_weight, of_out))
    return [jax.device_put(a, sharding) for a, sharding in zip((x, weight, out), where, strict=True)]


def shared(
    function: Callable[..., Any], op: str, x: jax.Array, weight: jax.Array, bias: jax.Array | None, **options: Any
) -> jax.Array:
    """`function(x, weight, bias)` on each device's part of arrays; `options` are of jax.shard_map."""
    *specs, out_specs = layouts(op, x.ndim)
    split = jax.shard_map(function, mesh=mesh(), in_specs=tuple(specs), out_specs=out_specs, **options)
    made: jax.Array = split(x, weight, bias)
    return made


def whole(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    *,
    op: str,
    backend: str,
    weight_layout: WeightLayout = "nk",
    keep_gathered: bool = False,
    check_vma: bool = True,
) -> jax.Array:
    """All devices' result [T, ..., N] for the whole x [T, ..., K], weight [N, K] and bias [N]."""
    assert backend == "xla"

    def of_device(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        weight = weight if weight_layout == "nk" else weight.T
        if op == GATHER:
            return all_gather_matmul(
                x, weight, AXIS, bias=bias, weight_layout=weight_layout, keep_gathered=keep_gathered
            )
        return matmul_reduce_scatter(x, weight, AXIS, bias=bias, weight_layout=weight_layout)

    return shared(of_device, op, x, weight, bias, check_vma=check_vma)
