"""grouped_matmul for JAX: the public function, and the code around the products of its two backends.

The products are `layer`, `weight_product` and `sum_rows` of `onchip.groups.xla.products`, on any device, or of
`onchip.groups.mosaic.products`.  XLA does the gathers and the activation's gradient for both.  `by_torch` has PyTorch's
kernels do all of it.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array as JaxArray
from jax import lax

from onchip.core.backends import choose_backend
from onchip.core.sizes import LOSS_DTYPE_BYTES
from onchip.frontend.jax_inputs import accumulator, check_kinds, dtype_of, hopper_refusal, platform, require_arrays
from onchip.frontend.jax_mesh import BY_TOKEN, WHOLE, Role, Roles
from onchip.frontend.jax_spread import Between, by_tokens, with_gradients_on_mesh
from onchip.frontend.jax_types import Array
from onchip.frontend.jax_values import read
from onchip.frontend.options import require_bool
from onchip.groups.problem import (
    OP,
    GateUp,
    GroupedOptions,
    GroupedProblem,
    WeightLayout,
    check_one_of_two,
    check_shapes,
    check_values,
)
from onchip.groups.xla import groups, products, swiglu
from onchip.kernels.triton.jax_front import by_torch

Backend = Literal["auto", "mosaic_gpu", "triton", "xla"]
_SOURCE = Role(rows=True)
_INTEGERS = ("group_sizes", "group_offsets", "rows", "scatter_rows")


@by_torch("onchip.ops.grouped_matmul.torch_op:grouped_matmul", "x", "weight", "bias", "row_scale")
def grouped_matmul(
    x: Array,  # [T, K]; with rows [M, K]
    weight: Array,  # [G, N, K], or [G, K, N] with weight_layout="gkn"
    group_sizes: Array | None = None,  # [G]
    *,
    group_offsets: Array | None = None,  # [G], in place of group_sizes
    weight_layout: WeightLayout = "gnk",
    bias: Array | None = None,  # [G, N]
    row_scale: Array | None = None,  # [T]
    activation: Literal["swiglu"] | None = None,
    gate_up: GateUp = "concatenated",
    rows: Array | None = None,  # [T]
    scatter_rows: Array | None = None,  # [T]
    num_rows: int | None = None,
    backend: Backend = "auto",
    check_inputs: bool = False,
) -> jax.Array:
    r"""One linear layer for each group of rows, as for the experts of a mixture of experts.

    Rows are sorted by group, and group g has group_sizes[g] of them.  For row i of group g::

        y[i]   = weight[g] @ x[i] + bias[g]         # x[rows[i]] with rows
        a[i]   = y[i]                               # silu(gate) * up with activation="swiglu"
        out[i] = row_scale[i] * a[i]                # added to out[scatter_rows[i]] with scatter_rows

    Sums are in float32 (float64 for float64 inputs) and rounded once; rows that are added up, in the result with
    `scatter_rows` and in x's gradient with `rows`, are rounded before that too.  Rows past the last group's end belong
    to no group: whatever they hold, their results and gradients are exact zeros.

    Args:
        x: [T, K], or with `rows` [M, K], float32, bfloat16, float16 or float64 (backend "xla").
        weight: [G, N, K], or [G, K, N] with weight_layout="gkn", of x's dtype; read in place, without a copy.
        group_sizes: [G] int32 or int64: how many rows each group has, 0 or more, with a sum of at most T.  The values
            may be traced.
        group_offsets: [G] int32 or int64, instead of group_sizes: where each group ends, their cumulative sums.
        weight_layout: "gnk" or "gkn".
        bias: [G, N] of any of the dtypes, added in float32.
        row_scale: [T] of any of the dtypes, such as the router's weights; multiplied in float32.
        activation: None, or "swiglu" for silu(gate) * up, where y has N = 2 F columns, half gate and half up.
        gate_up: which columns: "concatenated" (gate first, then up), or "interleaved" (gate, up, gate, up, ...).
        rows: [T] int32 or int64: row i of the product reads x[rows[i]].  The gradient of a row of x that is read
            several times is the sum, in a fixed order.
        scatter_rows: [T] int32 or int64: row i is added to that row of the result, in float32 and in the order of i.
        num_rows: rows of the result with scatter_rows.
        backend: "mosaic_gpu" (NVIDIA GPUs of compute capability 9.0; bfloat16 and float16, K and N multiples of 64 and
            at least 128), "xla" (plain JAX, on any device), "triton" (PyTorch's kernels, for NVIDIA GPUs of compute
            capability 8.0 or later, with `onchip[jax-triton]`), or "auto": "mosaic_gpu" on Hopper, "triton" on other
            GPUs, if they can run the call, and otherwise "xla".
        check_inputs: check sizes and indices on a GPU too, which waits for the device.  On the CPU they are always
            checked, unless they are traced; then check_inputs=True raises.

    Returns:
        [T, N] of x's dtype ([T, F] with an activation), or with scatter_rows num_rows rows.  Gradients have the dtypes
        of their inputs.  Wrong sizes and indices that aren't checked make results NaN.  If a size is negative, or the
        sum up to it passes T, these are NaN: all rows from that group on, in the result and in the gradients of x and
        row_scale, and the gradients of these groups' weights and biases; earlier groups are right.  Arrays in which
        rows are added up, the result with scatter_rows and x's gradient with `rows`, are NaN as a whole.  An index out
        of range makes the whole result and all gradients NaN.

    Raises:
        TypeError: an argument has the wrong type or dtype, or the call is differentiated in forward mode.
        ValueError: a shape, option, size or index is wrong, or the backend can't run the call.
        NotImplementedError: the result is differentiated twice, or the call is under vmap: concatenate the elements'
            rows, as groups of one call, or use `jax.lax.map`.

    Memory: the arguments are kept for backward, and with an activation, or if row_scale needs a gradient, y, T * N
    numbers of x's dtype.  Forward also needs, in x's dtype, a copy of the rows that are read with `rows`, and T rows of
    the result with `scatter_rows`; backward needs the former again, and the gradient of y.  "mosaic_gpu" computes y in
    float32 first if gate and up are interleaved, the weight is "gkn" with an activation, or F is below 128 or no
    multiple of 64.  No array has G * T elements.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from onchip.jax import grouped_matmul
        >>> x, weight = jnp.ones((10, 16)), jnp.ones((3, 8, 16))
        >>> sizes = jnp.array([4, 0, 5])
        >>> out = jax.jit(grouped_matmul)(x, weight, sizes)
        >>> out.shape, float(out[8, 0]), float(out[9, 0])
        ((10, 8), 16.0, 0.0)

    Source: megablox, the grouped product of MegaBlocks (arXiv:2211.15841) on dense tiles.
    """
    options = GroupedOptions(weight_layout, activation, gate_up, num_rows)
    require_bool(OP, "check_inputs", check_inputs)
    which, given = check_one_of_two(group_sizes, group_offsets)
    named = {"x": x, "weight": weight, which: given, "bias": bias, "row_scale": row_scale, "rows": rows}
    named["scatter_rows"] = scatter_rows
    arrays = require_arrays(OP, named, optional=("bias", "row_scale", "rows", "scatter_rows"))
    _check_dtypes(arrays)
    p = check_shapes(options, {name: a.shape for name, a in arrays.items()})
    chosen = choose_backend(OP, backend, refusals(platform(), dtype_of(x).name, p.n, p.k), ("triton",))
    _check_values(p, which, arrays, check_inputs)

    made = {name: _as_jax(a) for name, a in arrays.items()}
    layer = _GroupedLayer(made["x"], made["weight"], made.get("bias"), made.get("row_scale"))
    where = _GroupedRows(made[which], made.get("rows"), made.get("scatter_rows"))
    # Of a product's rows, and not of those that they read or are added to, each device has its own.
    of_layer = _GroupedLayer(BY_TOKEN if rows is None else _SOURCE, WHOLE, bias if bias is None else WHOLE, None)
    of_layer = of_layer._replace(row_scale=None if row_scale is None else BY_TOKEN)
    roles = Roles(of_layer, _GroupedRows(WHOLE, BY_TOKEN, BY_TOKEN), BY_TOKEN if scatter_rows is None else _SOURCE, 1)
    out: jax.Array = by_tokens(_grouped, _GroupedStatic(chosen, options, p, which), roles, layer, where)
    return out


def _check_dtypes(arrays: dict[str, Any]) -> None:
    check_kinds(OP, arrays, integers=_INTEGERS, dtypes=LOSS_DTYPE_BYTES.keys())
    for name in _INTEGERS:
        if name in arrays and arrays[name].dtype.name not in ("int32", "int64"):
            raise TypeError(f"{OP}: {name} must be int32 or int64; got {arrays[name].dtype}")
    dtype, of_weight = dtype_of(arrays["x"]), dtype_of(arrays["weight"])
    if of_weight != dtype:
        raise TypeError(f"{OP}: x is {dtype} but weight is {of_weight}; cast one of them")


def _check_values(p: GroupedProblem, which: str, arrays: dict[str, Any], check_inputs: bool) -> None:
    names = [which, *(name for name in ("rows", "scatter_rows") if name in arrays)]
    values = {name: read(OP, name, arrays[name], check_inputs) for name in names}
    if all(x is not None for x in values.values()):
        check_values(p, which, values[which], values.get("rows"), values.get("scatter_rows"))


def _as_jax(a: Any) -> JaxArray:
    """As JAX's own array; of NumPy's 64-bit integers JAX would cut off the upper half, so they are kept in range."""
    if isinstance(a, np.ndarray) and a.dtype == np.int64:
        return jnp.asarray(a.clip(-1, 2**31 - 1).astype(np.int32))
    return jnp.asarray(a)


# ------------------------------------------------------------------------------------------------------------- backends


def refusals(platform: str, dtype: str, n: int, k: int) -> dict[str, str | None]:
    """Why each backend, best first, can't serve a call, or None."""
    return {"mosaic_gpu": mosaic_refusal(platform, dtype, n, k), "xla": None}


def mosaic_refusal(platform: str, dtype: str, n: int, k: int) -> str | None:
    """Why the kernels can't serve a call, or None."""
    if platform != "gpu":
        return f"it runs on NVIDIA GPUs, not on {platform!r}"
    if dtype not in ("bfloat16", "float16"):
        return f"it is for bfloat16 and float16, not {dtype}"
    if n % 64 or k % 64 or min(n, k) < 128:
        return f"K and N must be multiples of 64 and at least 128; got K={k}, N={n}"
    return hopper_refusal()


def _engine(backend: str) -> ModuleType:
    """The module of the products."""
    if backend == "mosaic_gpu":
        from onchip.groups.mosaic import products as mosaic_products  # Pallas takes a second to import

        return mosaic_products
    return products


# ----------------------------------------------------------------------------------------------------------- the layer


class _GroupedStatic(NamedTuple):
    """What is known when tracing."""

    backend: str
    options: GroupedOptions
    problem: GroupedProblem
    which: str
    mesh: Any = None  # an `OnMesh` of a call that is spread


class _GroupedLayer(NamedTuple):
    """The arrays that have gradients, those, and which of them are needed."""

    x: Any
    weight: Any
    bias: Any
    row_scale: Any


class _GroupedRows(NamedTuple):
    """Which rows are whose."""

    groups: Any  # sizes or offsets
    rows: Any
    scatter_rows: Any


class _GroupedSaved(NamedTuple):
    """What backward needs."""

    layer: _GroupedLayer
    at: _GroupedRows
    y: Any  # [T, N] of x's dtype, or None


def _on_device(
    static: _GroupedStatic, layer: _GroupedLayer, at: _GroupedRows
) -> tuple[_GroupedStatic, _GroupedLayer, _GroupedRows]:
    """The arguments of `_forward`, for a device's rows."""
    parts = 1 if static.mesh is None else static.mesh.spread.parts
    if parts == 1:
        return static, layer, at
    p = static.problem
    return static._replace(problem=p._replace(tokens=p.tokens // parts)), layer, at


def _forward(static: _GroupedStatic, needs: _GroupedLayer, layer: _GroupedLayer, at: _GroupedRows) -> tuple[Any, Any]:
    keeps = any(needs) if static.options.activation is not None else bool(needs.row_scale)

    def run(layer: _GroupedLayer, at: _GroupedRows) -> tuple[Any, Any]:
        ends, right = _limits(static, at)
        fill = _zero_or_nan(right)
        x = layer.x if at.rows is None else groups.take_rows(layer.x, at.rows)
        engine = _engine(static.backend)
        out, y = engine.layer(x, layer.weight, ends, fill, layer.bias, layer.row_scale, static.options, keeps)
        if at.scatter_rows is not None:
            out = engine.sum_rows(out, at.scatter_rows, ends, static.problem.out_rows) + fill[-1].astype(x.dtype)
        return out, y

    out, y = _unmapped(run)(layer, at)
    return out, _GroupedSaved(layer, at, y) if any(needs) else None


def _backward(static: _GroupedStatic, needs: _GroupedLayer, saved: _GroupedSaved, grad_out: Any) -> _GroupedLayer:
    def run(saved: _GroupedSaved, grad_out: Any) -> _GroupedLayer:
        (x, weight, _, row_scale), at, y = saved
        p, options, engine = static.problem, static.options, _engine(static.backend)
        total = accumulator(x.dtype)
        ends, right = _limits(static, at)
        fill = _zero_or_nan(right)
        # Rows without a group may hold anything in all of these.
        g = grad_out if at.scatter_rows is None else groups.take_rows(grad_out, at.scatter_rows)
        g = g.astype(total)
        wide: Any = None if y is None else y.astype(total)
        grad_x = grad_weight = grad_bias = grad_scale = None
        if needs.row_scale:
            grad_scale = (g * swiglu.activated(options, wide)).sum(1)
            grad_scale = jnp.where(groups.has_group(ends, p.tokens), grad_scale, fill[-1])
        if row_scale is not None:
            g = g * row_scale.astype(total)[:, None]
        d = g if options.activation is None else swiglu.gradient(options, wide, g)
        if needs.bias:
            grad_bias = groups.group_sums(d, ends) + fill[:, None]
        d = d.astype(x.dtype)
        if needs.x:
            turned = GroupedOptions(weight_layout="gkn" if options.weight_layout == "gnk" else "gnk")
            grad_x, _ = engine.layer(d, weight, ends, fill, None, None, turned, False)
            if at.rows is not None:
                grad_x = engine.sum_rows(grad_x, at.rows, ends, p.source_rows) + fill[-1].astype(x.dtype)
        if needs.weight:
            source = x if at.rows is None else groups.take_rows(x, at.rows)
            operands = (d, source) if options.weight_layout == "gnk" else (source, d)
            grad_weight = engine.weight_product(*operands, ends, fill)
        return _GroupedLayer(grad_x, grad_weight, grad_bias, grad_scale)

    made: _GroupedLayer = _unmapped(run)(saved, grad_out)
    return made


def _unmapped(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, but for vmap."""
    mapped = jax.custom_batching.custom_vmap(run)

    @mapped.def_vmap
    def refuse(size: int, *_: Any) -> Any:
        raise NotImplementedError(
            f"{OP}: vmap is not supported: its {size} elements would run one after the other; concatenate their rows, "
            "as groups of one call, or use jax.lax.map"
        )

    return mapped


def _limits(static: _GroupedStatic, at: _GroupedRows) -> tuple[JaxArray, JaxArray]:
    """Where the groups end, and whether each is right: groups that aren't are empty, so nothing is out of bounds.

    From the first wrong size on none is right, and where an index is wrong none at all.
    """
    p, axes = static.problem, () if static.mesh is None else static.mesh.spread.tokens
    of = groups.ends_of_sizes if static.which == "group_sizes" else groups.ends_of_offsets
    ends, right = of(at.groups, p.tokens * (static.mesh.spread.parts if axes else 1))
    if axes:
        # Of all rows, in the order of the devices, this one has some.
        ends = jnp.clip(ends - lax.axis_index(axes) * p.tokens, 0, p.tokens)
    for index, limit in ((at.rows, p.source_rows), (at.scatter_rows, p.out_rows)):
        if index is not None:
            inside = groups.in_range(index, ends, limit)
            right &= lax.pmin(inside.astype(jnp.int32), axes) > 0 if axes else inside
            ends = jnp.where(right[0], ends, 0)
    return ends, right


def _keep(static: _GroupedStatic, saved: _GroupedSaved, *_: Any) -> Any:
    # Gate and up of a kernel are [2, T, F]: two arrays by token, which XLA joins again without a copy.
    return tuple(saved.y) if saved.y is not None and saved.y.ndim == 3 else saved.y


def _resume(
    static: _GroupedStatic, needs: _GroupedLayer, kept: Any, layer: _GroupedLayer, at: _GroupedRows
) -> _GroupedSaved:
    return _GroupedSaved(layer, at, jnp.stack(kept) if isinstance(kept, tuple) else kept)


def _zero_or_nan(right: JaxArray) -> JaxArray:
    """[G] float32: NaN from the first wrong group on.  XLA makes running sums in the operation that makes the ends."""
    return groups.running_sums(jnp.where(right, jnp.float32(0), jnp.float32(jnp.nan)))


_grouped = with_gradients_on_mesh(OP, _forward, _backward, _on_device, Between(keep=_keep, resume=_resume))
