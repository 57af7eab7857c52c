"""fp8_linear for JAX: products of dequantised numbers by XLA, on any device, or of FP8 numbers by the Mosaic kernel.

All three products are A B^T of matrices whose rows run along the sum, so backward multiplies transposed copies.  Zeros
pad sizes to whole groups along the sum and to the kernel's multiples elsewhere; a result's padding is cut off.
"""

import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from onchip.core.backends import choose_backend
from onchip.fp8.jax_quantize import JaxQuantized, dequantize, operand
from onchip.fp8.numbers import OP, Fp8Options, GradDtype, Scale
from onchip.frontend.jax_inputs import check_kinds, hopper_refusal, platform, require_arrays
from onchip.frontend.jax_mesh import BY_TOKEN, Role, Roles
from onchip.frontend.jax_spread import by_tokens, with_gradients_on_mesh
from onchip.frontend.jax_types import Array
from onchip.frontend.options import require_one_of
from onchip.ops.fp8_linear import check_shapes

WeightLayout = Literal["nk", "kn"]
LAYOUTS = get_args(WeightLayout)
Backend = Literal["auto", "mosaic_gpu", "xla"]


def fp8_linear(
    x: Array,  # [..., K]
    weight: Array,  # [N, K], or [K, N] with weight_layout="kn"
    bias: Array | None = None,  # [N]
    *,
    weight_layout: WeightLayout = "nk",
    grad_dtype: GradDtype = "e4m3",
    scale: Scale = "float32",
    backend: Backend = "auto",
) -> jax.Array:
    r"""Linear layer in blockwise FP8, forward and backward: x @ weight.T + bias.

    Q divides each group of numbers by its scale, amax / 448, and rounds to E4M3.  All three products multiply FP8
    numbers and sum in float32::

        out         = Q(x) @ Q(weight).T + bias      # x in groups of 1x128 along K, weight of 128x128
        grad_x      = Q(grad_out) @ Q(weight)        # grad_out in groups of 1x128 along N
        grad_weight = Q(grad_out).T @ Q(x)           # both in groups of 128x1 along M
        grad_bias   = grad_out.sum over M

    Args:
        x: [..., K] float32, bfloat16 or float16.  The leading dimensions hold M rows.
        weight: [N, K], or [K, N] with weight_layout="kn" like Flax's kernels, of any of the three dtypes.
        bias: [N] of any of the three dtypes, added in float32.
        weight_layout: "nk" or "kn".
        grad_dtype: FP8 format of the output's gradient: "e4m3", or "e5m2" with more range and one bit less.
        scale: "float32", or "power_of_two": scales rounded up to the next power of two, so that scaling is exact.
        backend: "mosaic_gpu" (products of FP8 numbers, on NVIDIA GPUs of compute capability 9.0; grad_dtype="e5m2"
            needs JAX 0.11.2), "xla" (plain JAX, on any device: products of dequantised numbers in float32) or "auto":
            the first of these that can run the call.

    Returns:
        [..., N] of x's dtype.  Gradients have the dtypes of their inputs.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape or option is wrong, or the backend can't run the call.
        NotImplementedError: the result is differentiated twice.

    Memory: x in FP8, up(K, 8) * up(M, 128) * (1 + 4 / 128) bytes, and the weight itself are kept for backward; up(n, m)
    rounds n up to a multiple of m.  The quantised weight is not kept from call to call.  "mosaic_gpu" holds the
    operands of a product in FP8, and pads results whose sizes are no multiples of the kernel's.  "xla" may hold
    operands in float32 and multiplies them in float32, on a GPU too: it saves memory between forward and backward, but
    no time.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from onchip.jax import fp8_linear
        >>> x, weight = jnp.ones((16, 256)), jnp.ones((384, 256))
        >>> jax.jit(jax.grad(lambda w: fp8_linear(x, w).sum()))(weight).shape
        (384, 256)

    Source: DeepSeek-V3 (arXiv:2412.19437), section 3.3.
    """
    options = Fp8Options(grad_dtype, scale)
    require_one_of(OP, "weight_layout", weight_layout, LAYOUTS)
    check_kinds(OP, require_arrays(OP, {"x": x, "weight": weight, "bias": bias}, optional=("bias",)), integers=())
    chosen = choose_backend(OP, backend, refusals(platform(), options))
    if weight_layout == "kn" and weight.ndim != 2:
        raise ValueError(f"{OP}: weight must be [K, N] with weight_layout='kn'; got shape {list(weight.shape)}")
    shape = weight.shape if weight_layout == "nk" else weight.shape[::-1]
    check_shapes(x.shape, shape, None if bias is None else bias.shape)
    layer = _Fp8LinearLayer(*(None if a is None else jnp.asarray(a) for a in (x, weight, bias)))
    of_bias = None if bias is None else Role(vocab=0)
    of_layer = _Fp8LinearLayer(BY_TOKEN, Role(vocab=0 if weight_layout == "nk" else 1), of_bias)
    roles = Roles(of_layer, None, Role(True, x.ndim - 1))
    static = _Fp8LinearStatic(chosen, options, weight_layout)
    # XLA would gather a sequence that is split, to make rows of it.
    out: jax.Array = by_tokens(_linear, static, roles, layer, None, plain=chosen == "xla" and x.ndim < 3)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def refusals(platform: str, options: Fp8Options) -> dict[str, str | None]:
    """Why each backend, best first, can't serve a call, or None."""
    return {"mosaic_gpu": mosaic_refusal(platform, options), "xla": None}


# The first version of JAX whose products may be of one operand in E4M3 and another in E5M2, as far as it was tried.
_MIXED = (0, 11, 2)


def mosaic_refusal(platform: str, options: Fp8Options) -> str | None:
    """Why the kernel can't serve a call, or None."""
    if platform != "gpu":
        return f"it runs on NVIDIA GPUs, not on {platform!r}"
    if options.grad_dtype != "e4m3" and jax.__version_info__ < _MIXED:
        return f"grad_dtype={options.grad_dtype!r} needs JAX 0.11.2 or later; this is {jax.__version__}"
    return hopper_refusal()


class _Fp8LinearStatic(NamedTuple):
    """What is known when tracing."""

    backend: str
    options: Fp8Options
    layout: str
    mesh: Any = None


class _Fp8LinearLayer(NamedTuple):
    """The arrays of a call, their gradients, and which of those are needed."""

    x: Any
    weight: Any
    bias: Any


def _on_device(
    static: _Fp8LinearStatic, layer: _Fp8LinearLayer, _: None
) -> tuple[_Fp8LinearStatic, _Fp8LinearLayer, None]:
    """The arguments of `_forward`, made from x [..., K]."""
    rows = math.prod(layer.x.shape[:-1])
    return static, layer._replace(x=layer.x.reshape(rows, layer.x.shape[-1])), None


def _forward(static: _Fp8LinearStatic, needs: _Fp8LinearLayer, layer: _Fp8LinearLayer, _: None) -> tuple[Any, Any]:
    backend, options, layout, _ = static
    n = layer.weight.shape[0 if layout == "nk" else 1]

    def run(x: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
        w = operand(weight, "e4m3", options.scale, turned=layout == "kn", by_block=True)
        wide = None if bias is None else bias.astype(jnp.float32)
        out = _product(backend, operand(x, "e4m3", options.scale), w, wide, by_block=True, dtype=x.dtype)
        return out[: len(x), :n], operand(x, "e4m3", options.scale, turned=True)

    out, kept = _each(static, run)(*layer)
    return out, (kept, layer.weight) if any(needs) else None


def _backward(static: _Fp8LinearStatic, needs: _Fp8LinearLayer, saved: Any, g: Any) -> _Fp8LinearLayer:
    backend, options, layout, _ = static
    fmt, scale = options.grad_dtype, options.scale
    columns_over = None if static.mesh is None else static.mesh.spread.vocab

    def run(x: Any, weight: Any, g: Any) -> tuple[Any, Any]:
        w = operand(weight, "e4m3", scale, turned=layout == "nk", by_block=True)
        partial = g.dtype if columns_over is None else jnp.float32  # outputs have x's dtype
        grad_x = _product(backend, operand(g, fmt, scale), w, by_block=True, dtype=partial)
        a, b = operand(g, fmt, scale, turned=True), x
        if layout == "kn":
            a, b = b, a
        grad_w = _product(backend, a, b, by_block=False, dtype=weight.dtype)
        rows, columns = weight.shape
        return grad_x[: len(g), : columns if layout == "nk" else rows], grad_w[:rows, :columns]

    grad_x, grad_w = _each(static, run)(*saved, g)
    if columns_over is not None and needs.x:
        grad_x = lax.psum(grad_x, columns_over).astype(g.dtype)
    grads = grad_x, grad_w, g.astype(jnp.float32).sum(0) if needs.bias else None
    return _Fp8LinearLayer(*(grad if need else None for grad, need in zip(grads, needs, strict=True)))


def _product(backend: str, a: JaxQuantized, b: JaxQuantized, bias: Any = None, *, by_block: bool, dtype: Any) -> Any:
    """A B^T + bias with the padding of both, each element rounded once; by_block: b has scales of 128x128."""
    if backend == "mosaic_gpu":
        from onchip.fp8.mosaic_kernels import scaled_product  # Pallas takes a second to import

        return scaled_product(a, b, bias, by_block=by_block, dtype=dtype)
    left, right = dequantize(a, by_block=False), dequantize(b, by_block=by_block)
    out = lax.dot_general(left, right, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
    return (out if bias is None else out + jnp.pad(bias, (0, len(right) - len(bias)))[None]).astype(dtype)


def _each(static: _Fp8LinearStatic, run: Any) -> Any:
    """Under vmap the kernel serves one element after the other."""
    return jax.custom_batching.sequential_vmap(run) if static.backend == "mosaic_gpu" else run


_linear = with_gradients_on_mesh(OP, _forward, _backward, _on_device)
