"""all_gather_matmul and matmul_reduce_scatter for JAX, inside jax.shard_map: XLA's collectives and products.

The maths is in the package's docstring.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array as JaxArray
from jax import lax

from onchip.collectives.problem import GATHER, LAYOUTS, SCATTER, WeightLayout, check_shapes
from onchip.core.sizes import LOSS_DTYPE_BYTES
from onchip.frontend.jax_call import vary_alike, with_gradients
from onchip.frontend.jax_inputs import accumulator, check_kinds, dtype_of, require_arrays
from onchip.frontend.jax_types import Array
from onchip.frontend.options import require_bool, require_one_of
from onchip.kernels.jax_products import product, rounded_product


def all_gather_matmul(
    x: Array,  # [T/n, K]
    weight: Array,  # [N, K], or [K, N] with weight_layout="kn"
    axis_name: str,
    *,
    bias: Array | None = None,  # [N]
    weight_layout: WeightLayout = "nk",
    keep_gathered: bool = False,
    reduce_dtype: Any = None,
) -> jax.Array:
    r"""The tokens of all devices of an axis times this one's weight.

    Call it inside `jax.shard_map`, under `jax.jit`.  With x_r the x of device r on the axis, of n::

        out = concatenate([x_0, ..., x_{n-1}]) @ weight.T + bias

    Backward sums the gradient of x over the devices, as `matmul_reduce_scatter` does, and gathers x again for the
    weight's gradient.

    Args:
        x: [T/n, K] or [T/n, ..., K], this device's tokens: float32, bfloat16, float16 or float64.  The first dimension
            is gathered.
        weight: [N, K], or [K, N] with weight_layout="kn", this device's own, of x's dtype.
        axis_name: an axis of the mesh; blocks are concatenated in its order.
        bias: [N] of x's dtype.
        weight_layout: "nk" or "kn".
        keep_gathered: keep the gathered x until backward, instead of gathering it again.
        reduce_dtype: the dtype in which sums travel between devices: None or float32 (for float64 inputs float64), or
            x's dtype, which halves the bytes of 16-bit inputs and rounds each addition.

    Returns:
        [T, N] or [T, ..., N] of x's dtype, which varies over the axis.  Gradients have the dtypes of their inputs.
        Sums are in float32 and rounded once; so are sums over devices, unless `reduce_dtype` says otherwise.

    Raises:
        TypeError: an argument has the wrong type or dtype, or the call is differentiated in forward mode.
        ValueError: a shape or option is wrong, or there is no such axis here.
        NotImplementedError: the result is differentiated twice.

    Memory, with T the tokens of all devices: the gathered x, T * K numbers, and in backward as many in float32 for x's
    gradient.  x and the weight are kept for backward; with keep_gathered the gathered x is kept instead of x.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> from onchip.jax import all_gather_matmul
        >>> mesh = jax.make_mesh((1,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> of_device = lambda x, weight: all_gather_matmul(x, weight, "tp")
        >>> split = jax.shard_map(of_device, mesh=mesh, in_specs=(P("tp"), P("tp")), out_specs=P(None, "tp"))
        >>> jax.jit(split)(jnp.ones((6, 16)), jnp.ones((32, 16))).shape
        (6, 32)

    Source: Megatron-LM's sequence parallelism (arXiv:2205.05198).
    """
    require_bool(GATHER, "keep_gathered", keep_gathered)
    return _call(GATHER, x, weight, bias, axis_name, weight_layout, reduce_dtype, keep_gathered)


def matmul_reduce_scatter(
    x: Array,  # [T, K]
    weight: Array,  # [N, K], or [K, N] with weight_layout="kn"
    axis_name: str,
    *,
    bias: Array | None = None,  # [N]
    weight_layout: WeightLayout = "nk",
    reduce_dtype: Any = None,
) -> jax.Array:
    r"""The sum of the products of all devices of an axis, of which each device gets its own tokens.

    Call it inside `jax.shard_map`, under `jax.jit`.  With x_q and weight_q those of device q on the axis, on device r
    of n::

        out = sum over q of (x_q @ weight_q.T)[r * T/n : (r + 1) * T/n] + bias

    Backward gathers the gradient of out once, for the gradients of x and weight.

    Args:
        x: [T, K] or [T, ..., K], all tokens, with this device's features: float32, bfloat16, float16 or float64.  The
            first dimension is split, and T is a multiple of n.
        weight, axis_name, weight_layout, reduce_dtype: as in `all_gather_matmul`.
        bias: [N] of x's dtype, added once, to the sum.  If it is the same on all devices (not split over the axis), JAX
            sums its gradient over them, in float32.  With check_vma=False it does so only if shard_map itself is
            differentiated, and in the bias's dtype; a gradient that is taken inside comes from this device's tokens
            alone.

    Returns:
        [T/n, N] or [T/n, ..., N] of x's dtype.  The sum over devices is in float32 and rounded once, unless
        `reduce_dtype` says otherwise.  XLA's collective determines the order of the addends.

    Raises:
        TypeError, ValueError, NotImplementedError: as `all_gather_matmul`; ValueError also if T isn't a multiple of n.

    Memory: the product of all tokens in float32, T * N numbers; in backward the gathered gradient, T * N of x's dtype.
    x and the weight are kept for backward.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> from onchip.jax import matmul_reduce_scatter
        >>> mesh = jax.make_mesh((1,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> of_device = lambda x, weight: matmul_reduce_scatter(x, weight, "tp")
        >>> split = jax.shard_map(of_device, mesh=mesh, in_specs=(P(None, "tp"), P(None, "tp")), out_specs=P("tp"))
        >>> jax.jit(split)(jnp.ones((6, 16)), jnp.ones((32, 16))).shape
        (6, 32)

    Source: Megatron-LM's sequence parallelism (arXiv:2205.05198).
    """
    return _call(SCATTER, x, weight, bias, axis_name, weight_layout, reduce_dtype)


class _CollectiveStatic(NamedTuple):
    """What is known when tracing."""

    axis: str
    ranks: int
    layout: str
    sums: Any
    """The dtype in which sums over devices travel."""
    keep_gathered: bool


class _CollectiveLayer(NamedTuple):
    """The arrays of a call, their gradients, or which of these are needed."""

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
    reduce_dtype: Any,
    keep_gathered: bool = False,
) -> jax.Array:
    arrays = require_arrays(op, {"x": x, "weight": weight, "bias": bias}, optional=("bias",))
    check_kinds(op, arrays, integers=(), dtypes=LOSS_DTYPE_BYTES.keys())
    for name in ("weight", "bias"):
        if name in arrays and dtype_of(arrays[name]) != dtype_of(x):
            raise TypeError(f"{op}: x is {dtype_of(x)} but {name} is {dtype_of(arrays[name])}; cast one of them")
    require_one_of(op, "weight_layout", layout, LAYOUTS)
    ranks = _ranks(op, axis)
    sizes = check_shapes(op, {name: a.shape for name, a in arrays.items()}, ranks, layout)
    sums = _sums(op, reduce_dtype, arrays["x"].dtype)
    given = {name: jnp.asarray(a) for name, a in arrays.items()}
    if bias is not None:  # first, so that JAX sums its gradient over devices before it is rounded
        given["bias"] = given["bias"].astype(accumulator(given["x"].dtype))
    made = vary_alike(given, lax.axis_index(axis))
    layer = _CollectiveLayer(made["x"], made["weight"], made.get("bias"))
    if layer.x.size == 0:
        return _without_tokens(op, ranks, layer, sizes.n)
    of = _gathered if op == GATHER else _scattered
    out: jax.Array = of(_CollectiveStatic(axis, ranks, layout, sums, keep_gathered), layer, None)
    return out


def _without_tokens(op: str, ranks: int, layer: _CollectiveLayer, n: int) -> JaxArray:
    """The result, which has no elements, made of none of the arrays, nor are their gradients.

    XLA of JAX 0.11.2 crashes on a jax.shard_map that uses an array without elements and one with some.
    """
    x = layer.x
    first = x.shape[0] * ranks if op == GATHER else x.shape[0] // ranks
    made: JaxArray = vary_alike(jnp.zeros((first, *x.shape[1:-1], n), x.dtype), layer)
    return made


def _ranks(op: str, axis: Any) -> int:
    """How many devices the axis has."""
    if not isinstance(axis, str):
        raise TypeError(f"{op}: axis_name must be a str, one axis of the mesh; got {type(axis).__name__}")
    try:
        return int(lax.axis_size(axis))
    except NameError as error:
        raise ValueError(
            f"{op}: there is no axis {axis!r} here; call it inside jax.shard_map, over a mesh that has this axis"
        ) from error


def _dims(static: _CollectiveStatic) -> tuple[int, int]:
    """The dimensions N and K of the weight."""
    return (0, 1) if static.layout == "nk" else (1, 0)


def _sums(op: str, reduce_dtype: Any, dtype: Any) -> Any:
    """The dtype in which sums travel between devices."""
    exact = jnp.dtype(accumulator(dtype))
    made = exact if reduce_dtype is None else jnp.dtype(reduce_dtype)
    if made not in (exact, dtype):
        raise ValueError(f"{op}: reduce_dtype must be None, {exact} or x's dtype, {dtype}; got {made}")
    return made


def _rows(x: JaxArray) -> JaxArray:
    return x.reshape(-1, x.shape[-1])


def _gathered_rows(static: _CollectiveStatic, x: JaxArray) -> JaxArray:
    """All devices' rows of x."""
    made: JaxArray = lax.all_gather(_rows(x), static.axis, tiled=True)
    return made


def _summed_rows(static: _CollectiveStatic, total: JaxArray) -> JaxArray:
    """This device's rows of the sum of all devices' `total`."""
    made: JaxArray = lax.psum_scatter(total, static.axis, tiled=True)
    return made


def _addends(static: _CollectiveStatic, a: JaxArray, b: JaxArray, contract: tuple[int, int]) -> JaxArray:
    """A product in the dtype in which sums over devices travel."""
    return (rounded_product if static.sums == a.dtype else product)(a, b, contract)


def _weight_product(static: _CollectiveStatic, g: JaxArray, x: JaxArray) -> JaxArray:
    return rounded_product(g, x, (0, 0)) if static.layout == "nk" else rounded_product(x, g, (0, 0))


# --------------------------------------------------------------------------------------------------- all_gather_matmul


def _gather_forward(
    static: _CollectiveStatic, needs: _CollectiveLayer, layer: _CollectiveLayer, _: None
) -> tuple[Any, Any]:
    x, weight, bias = layer
    rows = _gathered_rows(static, x)
    contract = 1, _dims(static)[1]
    if bias is None:
        out = rounded_product(rows, weight, contract)
    else:
        out = product(rows, weight, contract)
        out = (out + bias.astype(out.dtype)[None]).astype(x.dtype)
    out = out.reshape(static.ranks * x.shape[0], *x.shape[1:-1], out.shape[1])
    if not any(needs):
        return out, None
    return out, (rows if static.keep_gathered and needs.weight else x, weight)


def _gather_backward(static: _CollectiveStatic, needs: _CollectiveLayer, saved: Any, grad_out: Any) -> _CollectiveLayer:
    x, weight = saved
    g, grad_x, grad_weight = _rows(grad_out), None, None
    if needs.x:
        grad_x = _summed_rows(static, _addends(static, g, weight, (1, _dims(static)[0])))
        shape = grad_out.shape[0] // static.ranks, *grad_out.shape[1:-1], grad_x.shape[1]
        grad_x = grad_x.reshape(shape)
    if needs.weight:
        rows = x if static.keep_gathered else _gathered_rows(static, x)
        grad_weight = _weight_product(static, g, rows)
    grad_bias = g.sum(0, dtype=accumulator(g.dtype)) if needs.bias else None
    return _CollectiveLayer(grad_x, grad_weight, grad_bias)


_gathered = with_gradients(GATHER, _gather_forward, _gather_backward)


# ------------------------------------------------------------------------------------------------ matmul_reduce_scatter


def _scatter_forward(
    static: _CollectiveStatic, needs: _CollectiveLayer, layer: _CollectiveLayer, _: None
) -> tuple[Any, Any]:
    x, weight, bias = layer
    total = _summed_rows(static, _addends(static, _rows(x), weight, (1, _dims(static)[1])))
    total = total if bias is None else total + bias.astype(total.dtype)[None]
    out = total.astype(x.dtype).reshape(x.shape[0] // static.ranks, *x.shape[1:-1], total.shape[1])
    return out, (x, weight) if any(needs) else None


def _scatter_backward(
    static: _CollectiveStatic, needs: _CollectiveLayer, saved: Any, grad_out: Any
) -> _CollectiveLayer:
    x, weight = saved
    grad_x = grad_weight = None
    if needs.x or needs.weight:
        g = _gathered_rows(static, grad_out)
        if needs.x:
            grad_x = rounded_product(g, weight, (1, _dims(static)[0])).reshape(x.shape)
        if needs.weight:
            grad_weight = _weight_product(static, g, _rows(x))
    grad_bias = _rows(grad_out).sum(0, dtype=accumulator(grad_out.dtype)) if needs.bias else None
    return _CollectiveLayer(grad_x, grad_weight, grad_bias)


_scattered = with_gradients(SCATTER, _scatter_forward, _scatter_backward)
