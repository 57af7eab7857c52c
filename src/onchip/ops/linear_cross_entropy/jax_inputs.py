"""What the JAX front end checks at its door, from types, shapes and dtypes alone: it works on tracers."""

from typing import Any

from onchip.frontend.jax_inputs import check_kinds, check_layout, check_product_dtype, require_arrays
from onchip.ops.linear_cross_entropy import spec
from onchip.ops.linear_cross_entropy.spec import OP


def check_arrays(
    hidden: Any, weight: Any, labels: Any, bias: Any, token_weight: Any, temperature: Any, weight_layout: str
) -> None:
    """Raise TypeError or ValueError for what doesn't fit together; `temperature` is None unless it is an array."""
    check_layout(OP, weight_layout)
    named = {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias}
    named |= {"token_weight": token_weight, "temperature": temperature}
    arrays = require_arrays(OP, named, optional=("bias", "token_weight", "temperature"))
    per_token = {
        name: x.shape for name, x in arrays.items() if name == "token_weight" or (name == "temperature" and x.ndim)
    }
    spec.check_shapes(
        hidden.shape,
        weight.shape,
        labels.shape,
        None if bias is None else bias.shape,
        per_token,
        layout=weight_layout,
        target_name="labels",
    )
    check_kinds(OP, arrays, integers=("labels",), constants=("token_weight", "temperature"))
    check_product_dtype(OP, arrays)
