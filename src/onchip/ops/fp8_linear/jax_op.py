"""fp8_linear for JAX: the public function, and the choice of a backend."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from onchip.core.backends import choose_backend
from onchip.fp8 import jax_products
from onchip.fp8.numbers import OP, Options
from onchip.frontend.jax_call import with_gradients
from onchip.frontend.jax_inputs import check_kinds, platform, require_arrays
from onchip.frontend.options import require_one_of
from onchip.ops.fp8_linear import spec

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
        backend: "xla" (plain JAX, any device: products of dequantised numbers in float32), "mosaic_gpu" (NVIDIA GPUs
            of compute capability 9.0: products of FP8 numbers; grad_dtype="e5m2" needs JAX 0.11.2) or "auto": the
            latter where it can run.

    Returns:
        [..., N] of x's dtype.  Gradients have the dtypes of their inputs.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape or option, or a backend that can't serve the call.
        NotImplementedError: differentiated twice.

    Memory: what is kept for backward is x in FP8, up(K, 8) * up(M, 128) * (1 + 4 / 128) bytes, and the weight itself.
    The quantised weight is not kept from call to call.  "mosaic_gpu" holds the operands of a product in FP8, and a
    result of ragged sizes with its padding.  With "xla" forward and backward may hold operands in float32, and multiply
    them as such, on a GPU too: that saves memory, not time.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from onchip.jax import fp8_linear
        >>> x, weight = jnp.ones((16, 256)), jnp.ones((384, 256))
        >>> jax.jit(jax.grad(lambda w: fp8_linear(x, w).sum()))(weight).shape
        (384, 256)

    Source: DeepSeek-V3 (arXiv:2412.19437), section 3.3.
    """
    options = Options(grad_dtype, scale)
    require_one_of(OP, "weight_layout", weight_layout, LAYOUTS)
    check_kinds(OP, require_arrays(OP, {"x": x, "weight": weight, "bias": bias}, optional=("bias",)), integers=())
    chosen = choose_backend(OP, backend, refusals(platform(), options))
    if weight_layout == "kn" and weight.ndim != 2:
        raise ValueError(f"{OP}: weight must be [K, N] with weight_layout='kn'; got shape {list(weight.shape)}")
    shape = weight.shape if weight_layout == "nk" else weight.shape[::-1]
    spec.check_shapes(x.shape, shape, None if bias is None else bias.shape)
    layer = _Layer(*(None if a is None else jnp.asarray(a) for a in (x, weight, bias)))
    out: jax.Array = _linear(_Static(chosen, options, weight_layout), layer, None)
    return out


def refusals(platform: str, options: Options) -> dict[str, str | None]:
    """Why each backend, best first, can't serve a call, or None."""
    return {"mosaic_gpu": jax_products.mosaic_refusal(platform, options), "xla": None}


class _Static(NamedTuple):
    """What is known when tracing."""

    backend: str
    options: Options
    layout: str


class _Layer(NamedTuple):
    """The arrays of a call, their gradients, and which of those are needed."""

    x: Any
    weight: Any
    bias: Any


def _forward(static: _Static, needs: _Layer, layer: _Layer, _: None) -> tuple[Any, Any]:
    x = layer.x
    run = _each(static, partial(jax_products.forward, *static))
    out, kept = run(x.reshape(-1, x.shape[-1]), layer.weight, layer.bias)
    saved = (kept, layer.weight) if any(needs) else None
    return out.reshape(*x.shape[:-1], out.shape[1]), saved


def _backward(static: _Static, needs: _Layer, saved: Any, grad_out: Any) -> _Layer:
    g = grad_out.reshape(-1, grad_out.shape[-1])
    # Outputs have x's dtype.
    made = _each(static, partial(jax_products.backward, *static, g.dtype))(*saved, g)
    grads = (*made, g.astype(jnp.float32).sum(0) if needs.bias else None)
    return _Layer(*(grad if need else None for grad, need in zip(grads, needs, strict=True)))


def _each(static: _Static, run: Any) -> Any:
    """Under vmap the kernel serves one element after the other."""
    return jax.custom_batching.sequential_vmap(run) if static.backend == "mosaic_gpu" else run


_linear = with_gradients(OP, _forward, _backward)
