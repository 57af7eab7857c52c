"""What the JAX front end checks at its door, from types, shapes and dtypes alone: it works on tracers."""

from typing import Any

import jax.numpy as jnp

from onchip.ops.cross_entropy import spec
from onchip.ops.cross_entropy.spec import OP
from onchip.ops.linear_cross_entropy.jax_inputs import is_array
from onchip.ops.linear_cross_entropy.spec import DTYPE_BYTES


def check_arrays(logits: Any, labels: Any, token_weight: Any, temperature: Any) -> None:
    """Raise TypeError or ValueError for what doesn't fit together; `temperature` is None unless it is an array."""
    named = {"logits": logits, "labels": labels, "token_weight": token_weight, "temperature": temperature}
    for name, x in named.items():
        if not is_array(x) and not (x is None and name not in ("logits", "labels")):
            raise TypeError(f"{OP}: {name} must be a jax.Array or numpy.ndarray; got {type(x).__name__}")
    arrays = {name: x for name, x in named.items() if x is not None}
    per_token = {
        name: x.shape for name, x in arrays.items() if name == "token_weight" or (name == "temperature" and x.ndim)
    }
    spec.check_shapes(logits.shape, labels.shape, per_token, target_name="labels")
    for name, x in arrays.items():
        if name == "labels":
            if not jnp.issubdtype(x.dtype, jnp.integer):
                raise TypeError(f"{OP}: labels must hold integers; got {x.dtype}")
        elif name in ("token_weight", "temperature"):
            if jnp.issubdtype(x.dtype, jnp.complexfloating):
                raise TypeError(f"{OP}: {name} must be real; got {x.dtype}")
        elif x.dtype.name not in DTYPE_BYTES:
            raise TypeError(f"{OP}: {name} must be float32, bfloat16 or float16; got {x.dtype}")


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
