"""What the JAX front end checks at its door, from types, shapes and dtypes alone: it works on tracers."""

from typing import Any

from onchip.frontend.jax_inputs import check_kinds, check_layout, check_product_dtype, require_arrays
from onchip.ops.linear_log_probs import spec
from onchip.ops.linear_log_probs.spec import OP


def check_arrays(hidden: Any, weight: Any, ids: Any, bias: Any, temperature: Any, weight_layout: str) -> None:
    """Raise TypeError or ValueError for what doesn't fit together; `temperature` is None unless it is an array."""
    check_layout(OP, weight_layout)
    named = {"hidden": hidden, "weight": weight, "ids": ids, "bias": bias, "temperature": temperature}
    arrays = require_arrays(OP, named, optional=("bias", "temperature"))
    spec.check_shapes(
        hidden.shape,
        weight.shape,
        ids.shape,
        None if bias is None else bias.shape,
        () if temperature is None else temperature.shape,
        weight_layout,
    )
    check_kinds(OP, arrays, integers=("ids",), constants=("temperature",))
    check_product_dtype(OP, arrays)
