"""What the JAX front end checks at its door, from types, shapes and dtypes alone: it works on tracers."""

from typing import Any

from onchip.frontend.jax_inputs import check_kinds, require_arrays
from onchip.ops.cross_entropy import spec
from onchip.ops.cross_entropy.spec import OP


def check_arrays(logits: Any, labels: Any, token_weight: Any, temperature: Any) -> None:
    """Raise TypeError or ValueError for what doesn't fit together; `temperature` is None unless it is an array."""
    named = {"logits": logits, "labels": labels, "token_weight": token_weight, "temperature": temperature}
    arrays = require_arrays(OP, named, optional=("token_weight", "temperature"))
    per_token = {
        name: x.shape for name, x in arrays.items() if name == "token_weight" or (name == "temperature" and x.ndim)
    }
    spec.check_shapes(logits.shape, labels.shape, per_token, target_name="labels")
    check_kinds(OP, arrays, integers=("labels",), constants=("token_weight", "temperature"))
