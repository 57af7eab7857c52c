"""What JAX's cross-entropies check of soft labels."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from onchip.core.sizes import LOSS_DTYPE_BYTES
from onchip.frontend.jax_inputs import check_class_weight, check_kinds, is_array, require_arrays
from onchip.frontend.jax_values import check_factors, log_probs_or_nan, plain_labels
from onchip.frontend.topk import TopK, check_labels


def is_soft(target: Any, of: Any) -> bool:
    """Whether the target is probabilities: a `TopK`, or floating point with as many dimensions as hidden or logits."""
    if isinstance(target, TopK):
        return True
    both = is_array(target) and is_array(of)
    return both and target.ndim == of.ndim and bool(jnp.issubdtype(target.dtype, jnp.floating))


def check_label_arrays(op: str, given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The arrays among the arguments of a public function, `name` being its target, where all are of the right kind."""
    constants = ("token_weight", "class_weight", "temperature")
    names = ("hidden", "weight", "bias", "logits", *constants)
    named = {n: x for n, x in given.items() if n in names and (n != "temperature" or is_array(x))}
    target = given[name]
    if isinstance(target, TopK):
        check_labels(op, name, target)
        named |= {f"{name}.indices": target.indices, f"{name}.values": target.values}
    else:
        named[name] = target
    arrays = require_arrays(op, named, ("bias", *constants))
    check_kinds(
        op,
        arrays,
        integers=(f"{name}.indices",),
        constants=constants,
        labels=(name, f"{name}.values"),
        dtypes=LOSS_DTYPE_BYTES.keys(),
    )
    check_class_weight(op, arrays)
    return arrays


def parts_of(
    op: str, given: Mapping[str, Any], name: str, target: Any, tokens: int, vocab: int, dtype: Any
) -> tuple[Any, Any]:
    """Probabilities [T, K] of `dtype` and ids [T, K], or probabilities [T, V] and None; constants to autodiff.

    Raise for values among the arguments of a public function that are wrong, where these can be read; `target` is the
    argument `name`, which may have been cut.
    """
    check_inputs = given["check_inputs"]
    check_factors(op, given, True, check_inputs=check_inputs)
    if not isinstance(target, TopK):
        return jnp.asarray(target).reshape(tokens, vocab), None
    count = target.indices.shape[-1]
    values = jnp.asarray(target.values)
    if target.kind == "log_probs":
        values = jnp.exp(log_probs_or_nan(op, name, target.values, check_inputs=check_inputs).astype(dtype))
    ids = plain_labels(op, f"{name}.indices", target.indices, vocab, None, check_inputs=check_inputs)
    return values.astype(dtype).reshape(tokens, count), ids.reshape(tokens, count)
