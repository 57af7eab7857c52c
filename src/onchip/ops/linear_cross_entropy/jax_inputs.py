"""What the JAX front end checks at its door, from types, shapes and dtypes alone: it works on tracers."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onchip.ops.linear_cross_entropy import spec
from onchip.ops.linear_cross_entropy.jax_call import IGNORED, OUT_OF_RANGE
from onchip.ops.linear_cross_entropy.spec import DTYPE_BYTES, OP

LAYOUTS = ("vh", "hv")


def is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray))


def check_arrays(
    hidden: Any, weight: Any, labels: Any, bias: Any, token_weight: Any, temperature: Any, weight_layout: str
) -> None:
    """Raise TypeError or ValueError for what doesn't fit together; `temperature` is None unless it is an array."""
    if weight_layout not in LAYOUTS:
        raise ValueError(
            f"{OP}: weight_layout must be one of {', '.join(map(repr, LAYOUTS))}; got {_shown(weight_layout)}"
        )
    named = {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias}
    named |= {"token_weight": token_weight, "temperature": temperature}
    for name, x in named.items():
        if not is_array(x) and not (x is None and name not in ("hidden", "weight", "labels")):
            raise TypeError(f"{OP}: {name} must be a jax.Array or numpy.ndarray; got {type(x).__name__}")
    arrays = {name: x for name, x in named.items() if x is not None}
    per_token = {
        name: x.shape for name, x in arrays.items() if name == "token_weight" or (name == "temperature" and x.ndim)
    }
    _check_shapes(
        hidden.shape, weight.shape, labels.shape, None if bias is None else bias.shape, per_token, weight_layout
    )
    for name, x in arrays.items():
        if name == "labels":
            if not jnp.issubdtype(x.dtype, jnp.integer):
                raise TypeError(f"{OP}: labels must hold integers; got {x.dtype}")
        elif name in ("token_weight", "temperature"):
            if jnp.issubdtype(x.dtype, jnp.complexfloating):
                raise TypeError(f"{OP}: {name} must be real; got {x.dtype}")
        elif x.dtype.name not in DTYPE_BYTES:
            raise TypeError(f"{OP}: {name} must be float32, bfloat16 or float16; got {x.dtype}")
    for name in ("weight", "bias"):
        if name in arrays and arrays[name].dtype != hidden.dtype:
            raise TypeError(f"{OP}: hidden is {hidden.dtype} but {name} is {arrays[name].dtype}; cast one of them")


def _shown(x: Any) -> str:
    return repr(x) if isinstance(x, str) else type(x).__name__


def _check_shapes(
    hidden: tuple[int, ...],
    weight: tuple[int, ...],
    labels: tuple[int, ...],
    bias: tuple[int, ...] | None,
    per_token: Mapping[str, tuple[int, ...]],
    layout: str,
) -> None:
    must = "weight must be [V, H]" if layout == "vh" else "weight must be [H, V] with weight_layout='hv'"
    if len(weight) != 2 or min(weight) < 1:
        raise ValueError(f"{OP}: {must}, V, H >= 1; got shape {list(weight)}")
    if len(hidden) < 1:
        raise ValueError(f"{OP}: hidden must be [..., H]; got a 0-d array")
    vocab, size = weight if layout == "vh" else weight[::-1]
    if hidden[-1] != size:
        remedy = f"; or pass weight_layout={'hv' if layout == 'vh' else 'vh'!r}" if hidden[-1] == vocab else ""
        raise ValueError(f"{OP}: hidden has H={hidden[-1]} but weight has H={size}; {must}{remedy}")
    if labels != hidden[:-1]:
        raise ValueError(
            f"{OP}: labels has shape {list(labels)} but hidden has shape {list(hidden)}; "
            f"labels must have hidden's leading dimensions, {list(hidden[:-1])}"
        )
    if bias is not None and bias != (vocab,):
        raise ValueError(f"{OP}: bias has shape {list(bias)} but weight has V={vocab}; bias must be [V]")
    for name, shape in per_token.items():
        if shape != labels:
            raise ValueError(f"{OP}: {name} has shape {list(shape)}; it must have labels' shape, {list(labels)}")


def check_normalizer(normalizer: Any, reduction: str) -> None:
    """Raise unless `normalizer` is None, a number above 0, or a 0-d array, and the reduction uses it."""
    if normalizer is None:
        return
    if reduction != "mean":
        raise ValueError(f"{OP}: normalizer is what reduction='mean' divides by; got reduction={reduction!r}")
    if is_array(normalizer):
        check_scalar("normalizer", normalizer)
    else:
        spec.require_positive("normalizer", normalizer)


def check_scalar(name: str, x: Any) -> None:
    """Raise unless the array `x` can stand for a number."""
    if x.ndim != 0:
        raise ValueError(f"{OP}: {name} must be a number or a 0-d array; got shape {list(x.shape)}")
    if x.dtype == bool or not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
        raise TypeError(f"{OP}: {name} must be a real number; got {x.dtype}")


def as_constant(x: Any) -> jax.Array | None:
    """A number, or the flattened array of one number per token, as float32 that gets no gradient."""
    if x is None:
        return None
    values: jax.Array = jax.lax.stop_gradient(jnp.asarray(x).astype(jnp.float32))
    return values.reshape(-1) if values.ndim else values


def plain_labels(labels: Any, vocab: int, ignore_index: int) -> jax.Array:
    """[...] int32 labels: in [0, V), IGNORED or OUT_OF_RANGE, whatever integers came in."""
    # NumPy's 64-bit integers are compared in NumPy: as a jax.Array they could lose their upper half first.
    xp: Any = np if isinstance(labels, np.ndarray) else jnp
    limits = np.iinfo(labels.dtype)
    # A number that the labels' dtype can't hold equals none of them; comparing would wrap it or raise.
    ignored = labels == xp.asarray(ignore_index, labels.dtype) if limits.min <= ignore_index <= limits.max else False
    wrong = labels < xp.asarray(0, labels.dtype)
    if vocab <= limits.max:
        wrong |= labels >= xp.asarray(vocab, labels.dtype)
    index = xp.where(wrong, OUT_OF_RANGE, labels.astype(np.int32))
    return jnp.asarray(xp.where(ignored, IGNORED, index), jnp.int32)
