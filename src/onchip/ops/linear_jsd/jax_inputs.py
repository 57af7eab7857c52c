"""What the JAX front end checks at its door, from types, shapes and dtypes alone: it works on tracers."""

from typing import Any

import jax.numpy as jnp

from onchip.ops.linear_cross_entropy.jax_inputs import LAYOUTS, is_array
from onchip.ops.linear_jsd import spec
from onchip.ops.linear_jsd.spec import DTYPE_BYTES, Options, Shapes

_OPTIONAL = (
    "student_bias",
    "teacher_hidden",
    "teacher_weight",
    "teacher_bias",
    "teacher_logits",
    "labels",
    "token_weight",
)


def check_arrays(
    op: str, options: Options, named: dict[str, Any], topk: Any, layout: str
) -> tuple[tuple[int, ...], int]:
    """Raise for what doesn't fit together; return the tokens' shape and the entries that count."""
    if layout not in LAYOUTS:
        shown = repr(layout) if isinstance(layout, str) else type(layout).__name__
        raise ValueError(f"{op}: weight_layout must be one of {', '.join(map(repr, LAYOUTS))}; got {shown}")
    for name, x in named.items():
        if not is_array(x) and not (x is None and name in _OPTIONAL):
            raise TypeError(f"{op}: {name} must be a jax.Array or numpy.ndarray; got {type(x).__name__}")
    if topk is not None:
        spec.check_topk(op, topk)
        for name in ("indices", "values"):
            x = getattr(topk, name)
            if not is_array(x):
                raise TypeError(
                    f"{op}: teacher_topk.{name} must be a jax.Array or numpy.ndarray; got {type(x).__name__}"
                )
        named = named | {"indices": topk.indices, "values": topk.values}
    arrays = {name: x for name, x in named.items() if x is not None}
    shapes = {
        # In the other layout a weight is checked as if transposed.
        "target" if name == "labels" else name: x.shape[::-1]
        if name.endswith("_weight") and layout == "hv" and x.ndim == 2 and name != "token_weight"
        else x.shape
        for name, x in arrays.items()
    }
    leading, size = Shapes(op, "labels", **shapes).check(options)
    for name, x in arrays.items():
        shown = f"teacher_topk.{name}" if name in ("indices", "values") else name
        if name in ("labels", "indices"):
            if not jnp.issubdtype(x.dtype, jnp.integer):
                raise TypeError(f"{op}: {shown} must hold integers; got {x.dtype}")
        elif name == "token_weight":
            if jnp.issubdtype(x.dtype, jnp.complexfloating):
                raise TypeError(f"{op}: {name} must be real; got {x.dtype}")
        elif x.dtype.name not in DTYPE_BYTES:
            raise TypeError(f"{op}: {shown} must be float32, bfloat16 or float16; got {x.dtype}")
    for who in ("student", "teacher"):
        for name in (f"{who}_weight", f"{who}_bias"):
            if name in arrays and arrays[name].dtype != arrays[f"{who}_hidden"].dtype:
                hidden = arrays[f"{who}_hidden"].dtype
                raise TypeError(f"{op}: {who}_hidden is {hidden} but {name} is {arrays[name].dtype}; cast one of them")
    return leading, size


def check_normalizer(op: str, normalizer: Any, reduction: str) -> None:
    """Raise unless `normalizer` is None, a number above 0, or a 0-d array, and the reduction uses it."""
    if normalizer is None:
        return
    if reduction != "mean":
        raise ValueError(f"{op}: normalizer is what reduction='mean' divides by; got reduction={reduction!r}")
    if not is_array(normalizer):
        spec.require_positive(op, "normalizer", normalizer)
    elif normalizer.ndim != 0:
        raise ValueError(f"{op}: normalizer must be a number or a 0-d array; got shape {list(normalizer.shape)}")
    elif not (jnp.issubdtype(normalizer.dtype, jnp.floating) or jnp.issubdtype(normalizer.dtype, jnp.integer)):
        raise TypeError(f"{op}: normalizer must be a real number; got {normalizer.dtype}")
