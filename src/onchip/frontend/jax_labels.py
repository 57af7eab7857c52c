"""What JAX's cross-entropies check of soft labels."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from onchip.core.sizes import LOSS_DTYPE_BYTES
from onchip.frontend.jax_inputs import check_class_weight, check_kinds, is_array, plain_labels, require_arrays
from onchip.frontend.topk import TopK, check_labels


def is_soft(labels: Any, of: Any) -> bool:
    """Whether they are probabilities: a `TopK`, or floating point with as many dimensions as hidden or logits."""
    if isinstance(labels, TopK):
        return True
    both = is_array(labels) and is_array(of)
    return both and labels.ndim == of.ndim and bool(jnp.issubdtype(labels.dtype, jnp.floating))


def check_label_arrays(op: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays among the arguments of a public function, where all are of the right kind."""
    constants = ("token_weight", "class_weight", "temperature")
    names = ("hidden", "weight", "bias", "logits", *constants)
    named = {n: x for n, x in given.items() if n in names and (n != "temperature" or is_array(x))}
    labels = given["labels"]
    if isinstance(labels, TopK):
        check_labels(op, "labels", labels)
        named |= {"labels.indices": labels.indices, "labels.values": labels.values}
    else:
        named["labels"] = labels
    arrays = require_arrays(op, named, ("bias", *constants))
    check_kinds(
        op,
        arrays,
        integers=("labels.indices",),
        constants=constants,
        labels=("labels", "labels.values"),
        dtypes=LOSS_DTYPE_BYTES.keys(),
    )
    check_class_weight(op, arrays)
    return arrays


def parts_of(labels: Any, tokens: int, vocab: int, dtype: Any) -> tuple[Any, Any]:
    """Probabilities [T, K] of `dtype` and ids [T, K], or probabilities [T, V] and None; constants to autodiff."""
    if not isinstance(labels, TopK):
        return jnp.asarray(labels).reshape(tokens, vocab), None
    count = labels.indices.shape[-1]
    values = jnp.asarray(labels.values, dtype).reshape(tokens, count)
    probs = jnp.exp(values) if labels.kind == "log_probs" else values
    # No index is ignored: this one is out of range as well.
    return probs, plain_labels(labels.indices, vocab, -(2**63)).reshape(tokens, count)
