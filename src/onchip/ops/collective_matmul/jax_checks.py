"""Both functions on a whole problem, shared by all devices: what checks run in JAX."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from onchip.collectives.problem import GATHER, WeightLayout
from onchip.frontend.jax_inputs import platform
from onchip.ops.collective_matmul.cases import RANKS
from onchip.ops.collective_matmul.jax_op import all_gather_matmul, matmul_reduce_scatter


def session(device: str) -> AbstractContextManager[None]:
    """Nothing: one process has all devices."""
    return nullcontext()


def whole(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    *,
    op: str,
    backend: str,
    weight_layout: WeightLayout,
    keep_gathered: bool = False,
    check_vma: bool = True,
) -> jax.Array:
    """The result of all devices [T, ..., N], of all of x [T, ..., K], weight [N, K] and bias [N]."""
    assert backend == "xla"
    devices = jax.devices(platform())
    ranks = max(n for n in RANKS if n <= len(devices))
    columns = P(*[None] * (x.ndim - 1), "ranks")
    if op == GATHER:
        function: Any = partial(all_gather_matmul, keep_gathered=keep_gathered)
        of_x, of_weight, of_bias, of_out = P("ranks"), P("ranks"), P("ranks"), columns
    else:
        function = matmul_reduce_scatter
        of_x, of_weight, of_bias, of_out = columns, P(None, "ranks"), P(), P("ranks")

    def of_device(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        weight = weight if weight_layout == "nk" else weight.T
        made: jax.Array = function(x, weight, "ranks", bias=bias, weight_layout=weight_layout)
        return made

    mesh = Mesh(np.array(devices[:ranks]), ("ranks",))
    split = jax.shard_map(
        of_device, mesh=mesh, in_specs=(of_x, of_weight, of_bias), out_specs=of_out, check_vma=check_vma
    )
    return split(x, weight, bias)
