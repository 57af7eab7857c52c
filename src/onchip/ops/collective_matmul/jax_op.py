"""all_gather_matmul and matmul_reduce_scatter for JAX, inside jax.shard_map.

The ring is `onchip.collectives.jax_ring`; the maths is in the package's docstring.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array as JaxArray
from jax import lax

from onchip.collectives.jax_ring import blocks, reduced
from onchip.collectives.problem import GATHER, LAYOUTS, SCATTER, WeightLayout, check_shapes
from onchip.core.sizes import LOSS_DTYPE_BYTES
from onchip.frontend.jax_call import vary_alike, with_gradients
from onchip.frontend.jax_inputs import accumulator, check_kinds, dtype_of, require_arrays
from onchip.frontend.jax_types import Array
from onchip.frontend.options import require_bool, require_one_of
from onchip.kernels.jax_products import product


def all_gather_matmul(
    x: Array,  # [T/n, K]
    weight: Array,  # [N, K], or [K, N] with weight_layout="kn"
    axis_name: str,
    *,
    bias: Array | None = None,  # [N]
    weight_layout: WeightLayout = "nk",
    keep_gathered: bool = False,
) -> jax.Array:
    r"""The tokens of all devices of an axis times this one's weight, each block multiplied while the next one arrives.

    Call it inside `jax.shard_map`, under `jax.jit`.  With x_r the x of device r on the axis, of n::

        out = concatenate([x_0, ..., x_{n-1}]) @ weight.T + bias

    Backward sends the gradient of x's blocks around the ring, and gathers x again for the weight's gradient.

    Args:
        x: [T/n, K], this device's tokens: float32, bfloat16, float16, or float64.  Of [T/n, ..., K] the first dimension
            is the one that is gathered.
        weight: [N, K], or [K, N] with weight_layout="kn", this device's own, of x's dtype.
        axis_name: an axis of the mesh, in whose order blocks are concatenated.
        bias: [N] of x's dtype.
        weight_layout: "nk" or "kn".
        keep_gathered: keep the gathered x until backward, in place of gathering it again.

    Returns:
        [T, N], or [T, ..., N], of x's dtype, which varies over the axis.  Gradients have the dtypes of their inputs.
        Sums are in float32 and rounded once, those over devices too: the partial sums travel in float32.

    Raises:
        TypeError: an argument of the wrong type or dtype; forward-mode differentiation.
        ValueError: a wrong shape or option, or no such axis here.
        NotImplementedError: differentiated twice.

    Memory: what XLA keeps of the n pieces, at least a block of x that is multiplied and one that arrives.  Kept for
    backward are x and the weight, with keep_gathered the gathered x.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> from onchip.jax import all_gather_matmul
        >>> mesh = jax.make_mesh((1,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> of_device = lambda x, weight: all_gather_matmul(x, weight, "tp")
        >>> split = jax.shard_map(of_device, mesh=mesh, in_specs=(P("tp"), P("tp")), out_specs=P(None, "tp"))
        >>> jax.jit(split)(jnp.ones((6, 16)), jnp.ones((32, 16))).shape
        (6, 32)

    Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition" (ASPLOS 2023).
    """
    require_bool(GATHER, "keep_gathered", keep_gathered)
    return _call(GATHER, x, weight, bias, axis_name, weight_layout, keep_gathered)


def matmul_reduce_scatter(
    x: Array,  # [T, K]
    weight: Array,  # [N, K], or [K, N] with weight_layout="kn"
    axis_name: str,
    *,
    bias: Array | None = None,  # [N]
    weight_layout: WeightLayout = "nk",
) -> jax.Array:
    r"""The products of all devices of an axis summed up, each getting its tokens: sums travel while one multiplies.

    Call it inside `jax.shard_map`, under `jax.jit`.  With x_q and weight_q those of device q on the axis, on device r
    of n::

        out = sum over q of (x_q @ weight_q.T)[r * T/n : (r + 1) * T/n] + bias

    Backward gathers the gradient of out once, for the gradients of x and weight.

    Args:
        x: [T, K], all tokens, with this device's features: float32, bfloat16, float16, or float64.  T is a multiple of
            n.  Of [T, ..., K] the first dimension is the one that is split.
        weight, axis_name, weight_layout: as of `all_gather_matmul`.
        bias: [N] of x's dtype, added once, to the sum.  If it is the same on all devices (not split over the axis), JAX
            sums up its gradient over them, as it does for any such array.  With check_vma=False it does so where
            shard_map is differentiated; a gradient that is taken inside is of this device's tokens.

    Returns:
        [T/n, N], or [T/n, ..., N], of x's dtype.  The sum over devices is in float32 and rounded once: the partial sums
        travel in float32.  The addends of device r's tokens are added in the order r + 1, r + 2, ..., r, so the same
        inputs give the same bits.

    Raises:
        TypeError, ValueError, NotImplementedError: as `all_gather_matmul`; ValueError also for a T that isn't a
            multiple of n.

    Memory: what XLA keeps of the n pieces, at least three float32 blocks of T/n * N numbers.  Kept for backward are x
    and the weight.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> from onchip.jax import matmul_reduce_scatter
        >>> mesh = jax.make_mesh((1,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> of_device = lambda x, weight: matmul_reduce_scatter(x, weight, "tp")
        >>> split = jax.shard_map(of_device, mesh=mesh, in_specs=(P(None, "tp"), P(None, "tp")), out_specs=P("tp"))
        >>> jax.jit(split)(jnp.ones((6, 16)), jnp.ones((32, 16))).shape
        (6, 32)

    Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition" (ASPLOS 2023).
    """
    return _call(SCATTER, x, weight, bias, axis_name, weight_layout)


class _CollectiveStatic(NamedTuple):
    """What is known when tracing."""

    axis: str
    ranks: int
    layout: str
    keep_gathered: bool


class _CollectiveLayer(NamedTuple):
    """The arrays of a call, their gradients, and which of those are needed."""

    x: Any
    weight: Any
    bias: Any


def _call(
    op: str,
    x: Array,
    weight: Array,
    bias: Array | None,
    axis: str,
    layout: str,
    keep_gathered: bool = False,
) -> jax.Array:
    arrays = require_arrays(op, {"x": x, "weight": weight, "bias": bias}, optional=("bias",))
    check_kinds(op, arrays, integers=(), dtypes=LOSS_DTYPE_BYTES.keys())
    for name in ("weight", "bias"):
        if name in arrays and dtype_of(arrays[name]) != dtype_of(x):
            raise TypeError(f"{op}: x is {dtype_of(x)} but {name} is {dtype_of(arrays[name])}; cast one of them")
    require_one_of(op, "weight_layout", layout, LAYOUTS)
    ranks = _ranks(op, axis)
    check_shapes(op, {name: a.shape for name, a in arrays.items()}, ranks, layout)
    made = vary_alike({name: jnp.asarray(a) for name, a in arrays.items()}, lax.axis_index(axis))
    layer = _CollectiveLayer(made["x"], made["weight"], made.get("bias"))
    of = _gathered if op == GATHER else _scattered
    out: jax.Array = of(_CollectiveStatic(axis, ranks, layout, keep_gathered), layer, None)
    return out


def _ranks(op: str, axis: Any) -> int:
    """How many devices the axis has."""
    if not isinstance(axis, str):
        raise TypeError(f"{op}: axis_name must be a str, one axis of the mesh; got {type(axis).__name__}")
    try:
        return int(lax.axis_size(axis))
    except NameError as error:
        raise ValueError(
            f"{op}: there is no axis {axis!r} here; call it inside jax.shard_map, over a mesh that has the axis"
        ) from error


def _dims(static: _CollectiveStatic) -> tuple[int, int]:
    """The dimensions N and K of the weight."""
    return (0, 1) if static.layout == "nk" else (1, 0)


def _rows(x: JaxArray) -> JaxArray:
    return x.reshape(-1, x.shape[-1])


def _block(x: JaxArray, index: Any, ranks: int) -> JaxArray:
    """The rows of [T, ..., C] that are of one device."""
    size = x.shape[0] // ranks
    return _rows(lax.dynamic_slice_in_dim(x, index * size, size))


def _joined(static: _CollectiveStatic, parts: list[tuple[JaxArray, JaxArray]], shape: tuple[int, ...]) -> JaxArray:
    """One array of this shape of a block of rows from each device, in their order."""
    first = parts[0][1]
    out: JaxArray = vary_alike(jnp.empty((static.ranks, *first.shape), first.dtype), first)
    for index, part in parts:
        out = lax.dynamic_update_index_in_dim(out, part, index, 0)
    return out.reshape(shape)


def _weight_product(static: _CollectiveStatic, g: JaxArray, x: JaxArray) -> JaxArray:
    return product(g, x, (0, 0)) if static.layout == "nk" else product(x, g, (0, 0))


# --------------------------------------------------------------------------------------------------- all_gather_matmul


def _gather_forward(
    static: _CollectiveStatic, needs: _CollectiveLayer, layer: _CollectiveLayer, _: None
) -> tuple[Any, Any]:
    x, weight, bias = layer
    ring = list(blocks(x, static.axis, static.ranks))
    outs = []
    for index, block in ring:
        out = product(_rows(block), weight, (1, _dims(static)[1]))
        outs.append((index, (out if bias is None else out + bias.astype(out.dtype)[None]).astype(x.dtype)))
    columns = weight.shape[_dims(static)[0]]
    out = _joined(static, outs, (static.ranks * x.shape[0], *x.shape[1:-1], columns))
    if not any(needs):
        return out, None
    keeps = static.keep_gathered and needs.weight
    kept = _joined(static, ring, (static.ranks * x.shape[0], *x.shape[1:])) if keeps else x
    return out, (kept, weight)


def _gather_backward(static: _CollectiveStatic, needs: _CollectiveLayer, saved: Any, grad_out: Any) -> _CollectiveLayer:
    x, weight = saved
    ranks = static.ranks

    def addend(index: Any) -> JaxArray:
        return product(_block(grad_out, index, ranks), weight, (1, _dims(static)[0]))

    grad_x = reduced(addend, static.axis, ranks) if needs.x else None
    grad_weight = None
    if needs.weight and static.keep_gathered:
        grad_weight = _weight_product(static, _rows(grad_out), _rows(x))
    elif needs.weight:
        addends = [
            _weight_product(static, _block(grad_out, index, ranks), _rows(block))
            for index, block in blocks(x, static.axis, ranks)
        ]
        grad_weight = sum(addends[1:], addends[0])
    grad_bias = _rows(grad_out).sum(0, dtype=accumulator(grad_out.dtype)) if needs.bias else None
    return _CollectiveLayer(grad_x, grad_weight, grad_bias)


_gathered = with_gradients(GATHER, _gather_forward, _gather_backward)


# ------------------------------------------------------------------------------------------------ matmul_reduce_scatter


def _scatter_forward(
    static: _CollectiveStatic, needs: _CollectiveLayer, layer: _CollectiveLayer, _: None
) -> tuple[Any, Any]:
    x, weight, bias = layer
    ranks = static.ranks

    def addend(index: Any) -> JaxArray:
        return product(_block(x, index, ranks), weight, (1, _dims(static)[1]))

    total = reduced(addend, static.axis, ranks)
    total = total if bias is None else total + bias.astype(total.dtype)[None]
    out = total.astype(x.dtype).reshape(x.shape[0] // ranks, *x.shape[1:-1], total.shape[1])
    return out, (x, weight) if any(needs) else None


def _scatter_backward(
    static: _CollectiveStatic, needs: _CollectiveLayer, saved: Any, grad_out: Any
) -> _CollectiveLayer:
    x, weight = saved
    parts, addends = [], []
    for index, block in blocks(_rows(grad_out), static.axis, static.ranks):
        if needs.x:
            parts.append((index, product(block, weight, (1, _dims(static)[0])).astype(x.dtype)))
        if needs.weight:
            addends.append(_weight_product(static, block, _block(x, index, static.ranks)))
    grad_x = _joined(static, parts, x.shape) if needs.x else None
    grad_weight = sum(addends[1:], addends[0]) if needs.weight else None
    grad_bias = _rows(grad_out).sum(0, dtype=accumulator(grad_out.dtype)) if needs.bias else None
    return _CollectiveLayer(grad_x, grad_weight, grad_bias)


_scattered = with_gradients(SCATTER, _scatter_forward, _scatter_backward)
