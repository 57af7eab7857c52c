"""fp8_linear for JAX: the public function, its derivative rule, and quantising and products in plain JAX.

Bit for bit the same numbers are quantised as by reference.py; the products are of dequantised numbers in float32.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onchip.core.backends import choose_backend
from onchip.ops._shared.jax_inputs import is_array
from onchip.ops._shared.spec import DTYPE_BYTES, require_one_of
from onchip.ops.fp8_linear import spec
from onchip.ops.fp8_linear.spec import BLOCK, FP8_MAX, LEAST_SCALE, OP, blocks, up

BACKENDS = ("xla",)
_FP8 = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
LAYOUTS = ("nk", "kn")


def fp8_linear(
    x: Any,  # [..., K]
    weight: Any,  # [N, K], or [K, N] with weight_layout="kn"
    bias: Any = None,  # [N]
    *,
    weight_layout: str = "nk",
    grad_dtype: str = "e4m3",
    scale: str = "float32",
    backend: str = "auto",
) -> jax.Array:
    r"""Linear layer in blockwise FP8, forward and backward: x @ weight.T + bias.

    With Q for dividing groups of numbers by amax / 448 and rounding them to E4M3, all three products are of FP8
    numbers, summed in float32::

        out         = Q(x) @ Q(weight).T + bias      # x in groups of 1x128 along K, weight of 128x128
        grad_x      = Q(grad_out) @ Q(weight)        # grad_out in groups of 1x128 along N
        grad_weight = Q(grad_out).T @ Q(x)           # both in groups of 128x1 along M
        grad_bias   = grad_out.sum over M

    Args:
        x: [..., K] float32, bfloat16 or float16.  The leading dimensions hold M rows.
        weight: [N, K], or [K, N] with weight_layout="kn" as Flax's kernels, of any of the three dtypes.
        bias: [N] of any of the three dtypes, added in float32.
        weight_layout: "nk" or "kn".
        grad_dtype: FP8 format of the output's gradient: "e4m3", or "e5m2" with more range and one bit less.
        scale: "float32", or "power_of_two": scales rounded up to the next power of two.
        backend: "xla" (plain JAX, any device: products of dequantised numbers in float32) or "auto".

    Returns:
        [..., N] of x's dtype.  Gradients have the dtypes of their inputs.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape or option.

    Memory: what is kept for backward is x in FP8, K * up(M, 128) * (1 + 4 / 128) bytes, and the weight itself.  The
    quantised weight is not kept from call to call.  In forward and backward XLA may hold operands in float32, and it
    multiplies them as such, on a GPU too: this saves memory, not time.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from onchip.jax import fp8_linear
        >>> x, weight = jnp.ones((16, 256)), jnp.ones((384, 256))
        >>> jax.jit(jax.grad(lambda w: fp8_linear(x, w).sum()))(weight).shape
        (384, 256)

    Source: DeepSeek-V3 (arXiv:2412.19437), section 3.3.
    """
    spec.Options(grad_dtype, scale)
    require_one_of(OP, "weight_layout", weight_layout, LAYOUTS)
    for name, array in (("x", x), ("weight", weight), ("bias", bias)):
        if array is None and name == "bias":
            continue
        if not is_array(array):
            raise TypeError(f"{OP}: {name} must be a jax.Array or numpy.ndarray; got {type(array).__name__}")
        if array.dtype.name not in DTYPE_BYTES:
            raise TypeError(f"{OP}: {name} must be float32, bfloat16 or float16; got {array.dtype}")
    choose_backend(OP, backend, dict.fromkeys(BACKENDS))
    if weight_layout == "kn":
        if weight.ndim != 2:
            raise ValueError(f"{OP}: weight must be [K, N] with weight_layout='kn'; got shape {list(weight.shape)}")
        weight = weight.T
    spec.check_shapes(x.shape, weight.shape, None if bias is None else bias.shape)
    out: jax.Array = _linear(_Static(grad_dtype, scale), x, weight, bias)
    return out


class _Static(NamedTuple):
    """What is known when tracing."""

    grad_dtype: str
    scale: str


class _Quantized(NamedTuple):
    """Rows of FP8 numbers and their scales."""

    data: jax.Array  # [R, C / 128, 128], 0 beyond C
    scales: jax.Array  # float32, of 1x128 [R, C / 128, 1], of 128x128 [R / 128, 1, C / 128, 1]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(static: _Static, x: Any, weight: Any, bias: Any) -> Any:
    return _forward(static, x, weight, bias)[0]


def _forward(static: _Static, x: Any, weight: Any, bias: Any) -> Any:
    n, k = weight.shape
    flat = x.reshape(-1, k)
    out = _product(_dequantize(_rows(flat, "e4m3", static.scale)), _weight(weight, static.scale)[:n])
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    kept = _rows(flat.T, "e4m3", static.scale)
    # Of x and bias only the shapes and dtypes are wanted: arrays of nothing that carry them.
    about = (jnp.zeros((0, *x.shape), x.dtype), None if bias is None else jnp.zeros(0, bias.dtype))
    return out.astype(x.dtype).reshape(*x.shape[:-1], n), (kept, weight, *about)


def _backward(static: _Static, residual: Any, grad_out: Any) -> Any:
    kept, weight, like_x, like_bias = residual
    n, k = weight.shape
    g = grad_out.reshape(-1, n)
    grad_x = _product(_dequantize(_rows(g, static.grad_dtype, static.scale)), _weight(weight, static.scale)[:, :k].T)
    turned = _dequantize(_rows(g.T, static.grad_dtype, static.scale))
    grad_weight = _product(turned, _dequantize(kept))
    grad_bias = None if like_bias is None else g.astype(jnp.float32).sum(0).astype(like_bias.dtype)
    return grad_x.astype(like_x.dtype).reshape(like_x.shape[1:]), grad_weight.astype(weight.dtype), grad_bias


_linear.defvjp(_forward, _backward)


def _product(a: Any, b: Any) -> Any:
    """A B^T in float32."""
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)


def _rows(x: Any, fmt: str, scale: str) -> _Quantized:
    """x [R, C] with 1x128 scales."""
    rows, columns = x.shape
    groups = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, up(columns) - columns))).reshape(rows, blocks(columns), BLOCK)
    scales = _to_scale(_largest(groups, 2), fmt, scale)
    return _Quantized((groups * (1 / scales)).astype(_FP8[fmt]), scales)


def _dequantize(q: _Quantized) -> Any:
    """The numbers in float32, [R, C] with the zeros that pad them."""
    rows, groups, width = q.data.shape
    return (q.data.astype(jnp.float32) * q.scales).reshape(rows, groups * width)


def _weight(w: Any, scale: str) -> Any:
    """w [N, K] in float32 after quantising with 128x128 scales, both sizes padded with zeros to whole blocks."""
    n, k = w.shape
    padded = jnp.pad(w.astype(jnp.float32), ((0, up(n) - n), (0, up(k) - k)))
    groups = padded.reshape(up(n) // BLOCK, BLOCK, up(k) // BLOCK, BLOCK)
    scales = _to_scale(_largest(groups, (1, 3)), "e4m3", scale)
    q = (groups * (1 / scales)).astype(_FP8["e4m3"])
    return (q.astype(jnp.float32) * scales).reshape(up(n), up(k))


def _largest(groups: Any, axes: int | tuple[int, ...]) -> Any:
    """The largest magnitude of each group; NaN wins, as it does among integers, where XLA's own maximum may lose it."""
    bits = lax.bitcast_convert_type(jnp.abs(groups), jnp.int32).max(axes, keepdims=True)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _to_scale(amax: Any, fmt: str, scale: str) -> Any:
    # By an array that XLA can't see to be one number: by a number, it would multiply with the rounded inverse.
    s = amax / jnp.where(amax == amax, jnp.float32(FP8_MAX[fmt]), jnp.float32(1))
    s = jnp.where(s < LEAST_SCALE, jnp.float32(LEAST_SCALE), s)
    if scale == "power_of_two":
        bits = (lax.bitcast_convert_type(s, jnp.int32) + 0x7FFFFF) & 0x7F800000
        s = jnp.where(jnp.isfinite(s), lax.bitcast_convert_type(bits, jnp.float32), s)
    return jnp.where(amax == 0, jnp.float32(1), s)
