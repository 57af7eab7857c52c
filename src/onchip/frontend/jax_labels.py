"""The checks of labels, ids or soft ones, in JAX's cross-entropies."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from onchip.frontend import topk
from onchip.frontend.jax_inputs import check_arrays, is_array, unsplit
from onchip.frontend.jax_values import check_factors, checked_labels, log_probs_or_nan, plain_labels
from onchip.frontend.options import LossStats, shapes_of
from onchip.frontend.topk import TopK

# So that it can be an argument of a jitted function: its words are static.
jax.tree_util.register_pytree_with_keys(
    TopK,
    lambda x: (tuple((jax.tree_util.GetAttrKey(n), getattr(x, n)) for n in ("indices", "values")), (x.kind, x.rest)),
    lambda words, arrays: TopK._make((*arrays, *words)),
)


def _is_dense(target: Any, of: Any) -> bool:
    """Whether a target is probabilities of every entry: floating point, with as many dimensions as hidden or logits."""
    both = is_array(target) and is_array(of)
    return both and target.ndim == of.ndim and bool(jnp.issubdtype(target.dtype, jnp.floating))


def check_labels(op: str, given: Mapping[str, Any], name: str, of: str) -> bool:
    """Raise unless the arrays among the arguments of a public function are of the right kinds and shapes, but for
    class_weight, of which a device may have more than of the vocabulary.  Return whether labels are soft.

    `name` is that of the target, and `of` of what has the tokens: "hidden" or "logits".
    """
    target, soft = given[name], None
    if isinstance(target, TopK):
        topk.check_labels(op, name, target)
        soft = {f"{name}.indices": target.indices, f"{name}.values": target.values}
    elif _is_dense(target, given[of]):
        soft = {name: target}
    arrays = check_arrays(op, given, soft)
    shapes = shapes_of({x: array for x, array in arrays.items() if x != "class_weight"})
    topk.check_loss_shapes(op, name, shapes, of, soft=soft is not None, layout=given.get("weight_layout"))
    return soft is not None


def labels_of(op: str, given: Mapping[str, Any], name: str, vocab: int, options: Any, dtype: Any) -> tuple[Any, Any]:
    """Probabilities [..., K] of `dtype` and ids [..., K]; None and ids [...]; or probabilities [..., V] and None:
    constants to autodiff.

    Raise for values among the arguments of a public function that are wrong, where these can be read; `name` is that of
    the target.
    """
    target = given[name]
    if not isinstance(target, TopK) and jnp.issubdtype(target.dtype, jnp.integer):
        return None, checked_labels(op, given, name, vocab, options, target.ndim - 1 if options.shift else None)
    check_inputs = options.check_inputs
    check_factors(op, given, True, check_inputs=check_inputs)
    if not isinstance(target, TopK):
        return lax.stop_gradient(jnp.asarray(target)), None
    values = jnp.asarray(target.values)
    if target.kind == "log_probs":
        values = jnp.exp(log_probs_or_nan(op, name, target.values, check_inputs=check_inputs).astype(dtype))
    ids = plain_labels(op, f"{name}.indices", target.indices, vocab, None, check_inputs=check_inputs)
    return lax.stop_gradient(values.astype(dtype)), ids


def without_ends(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The arguments of a public function whose soft labels, by this name, are shifted: without each sequence's last
    hidden state, and without what is of the first position, which nothing predicts."""
    target, token_weight, temperature = given[name], given["token_weight"], given["temperature"]
    if isinstance(target, TopK):
        indices, values = (unsplit(x, -2)[..., 1:, :] for x in target[:2])
        target = target._replace(indices=indices, values=values)
    else:
        target = unsplit(target, -2)[..., 1:, :]
    token_weight = None if token_weight is None else unsplit(token_weight, -1)[..., 1:]
    temperature = unsplit(temperature, -1)[..., :-1] if is_array(temperature) and temperature.ndim else temperature
    made = {
        "hidden": unsplit(given["hidden"], -2)[..., :-1, :],
        "token_weight": token_weight,
        "temperature": temperature,
    }
    return {**given, name: target, **made}


def with_the_last(made: Any, number: int) -> Any:
    """What a function returns with so many positions more at the end of each sequence, which cost nothing."""

    def filled(x: Any, fill: int = 0) -> Any:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, number)], constant_values=fill) if x.ndim else x

    if not isinstance(made, tuple):
        return filled(made)
    loss, stats = made
    return filled(loss), LossStats(*map(filled, stats))._replace(argmax=filled(stats.argmax, -1))
