"""What the JAX front end checks at its door, from types, shapes and dtypes alone: it works on tracers."""

from typing import Any

import jax.numpy as jnp

from onchip.ops.linear_cross_entropy.jax_inputs import LAYOUTS, _shown, is_array
from onchip.ops.linear_cross_entropy.spec import DTYPE_BYTES
from onchip.ops.linear_log_probs import spec
from onchip.ops.linear_log_probs.spec import OP


def check_arrays(hidden: Any, weight: Any, ids: Any, bias: Any, temperature: Any, weight_layout: str) -> None:
    """Raise TypeError or ValueError for what doesn't fit together; `temperature` is None unless it is an array."""
    if weight_layout not in LAYOUTS:
        raise ValueError(
            f"{OP}: weight_layout must be one of {', '.join(map(repr, LAYOUTS))}; got {_shown(weight_layout)}"
        )
    named = {"hidden": hidden, "weight": weight, "ids": ids, "bias": bias, "temperature": temperature}
    for name, x in named.items():
        if not is_array(x) and not (x is None and name in ("bias", "temperature")):
            raise TypeError(f"{OP}: {name} must be a jax.Array or numpy.ndarray; got {type(x).__name__}")
    arrays = {name: x for name, x in named.items() if x is not None}
    spec.check_shapes(
        hidden.shape,
        weight.shape,
        ids.shape,
        None if bias is None else bias.shape,
        () if temperature is None else temperature.shape,
        weight_layout,
    )
    for name, x in arrays.items():
        if name == "ids":
            if not jnp.issubdtype(x.dtype, jnp.integer):
                raise TypeError(f"{OP}: ids must hold integers; got {x.dtype}")
        elif name == "temperature":
            check_real(name, x)
        elif x.dtype.name not in DTYPE_BYTES:
            raise TypeError(f"{OP}: {name} must be float32, bfloat16 or float16; got {x.dtype}")
    for name in ("weight", "bias"):
        if name in arrays and arrays[name].dtype != hidden.dtype:
            raise TypeError(f"{OP}: hidden is {hidden.dtype} but {name} is {arrays[name].dtype}; cast one of them")


def check_scalar(name: str, x: Any) -> None:
    """Raise unless the array `x` can stand for a number."""
    if x.ndim != 0:
        raise ValueError(f"{OP}: {name} must be a number or a 0-d array; got shape {list(x.shape)}")
    check_real(name, x)


def check_real(name: str, x: Any) -> None:
    """Raise unless `x` holds real numbers."""
    if x.dtype == bool or not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
        raise TypeError(f"{OP}: {name} must be real; got {x.dtype}")
