"""What JAX's public functions check of arrays' values, outside jit.

Values on a CPU, and in NumPy's arrays, are always read; others only if the caller asks for it, since that waits for the
device.  While tracing no value is known, and wrong ones make NaN.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onchip.frontend.jax_call import IGNORED, OUT_OF_RANGE
from onchip.frontend.options import raise_for_label
from onchip.frontend.topk import most_log_prob, raise_for_log_prob


def read(op: str, name: str, x: Any, check_inputs: bool) -> np.ndarray[Any, Any] | None:
    """The values of the array `x`, an argument of this name, if they are to be checked; raise where the caller asked
    for it and there are none."""
    if isinstance(x, np.ndarray):
        return x
    traced = isinstance(x, jax.core.Tracer)
    if check_inputs and (traced or not x.is_fully_addressable):
        why = "which has none while it is traced" if traced else "which are spread over processes"
        remedy = "call it outside of jit" if traced else "check what each process has"
        raise ValueError(
            f"{op}: check_inputs=True reads the values of {name}, {why}; {remedy}, or leave out check_inputs: wrong "
            "values then make NaN"
        )
    if traced or not x.is_fully_addressable:
        return None
    on_cpu = all(device.platform == "cpu" for device in x.devices())
    return np.asarray(x) if check_inputs or on_cpu else None


def plain_labels(
    op: str,
    name: str,
    labels: Any,
    vocab: int,
    ignore_index: int | None,
    *,
    check_inputs: bool,
    unused: int | None = None,
    kept: Any = True,
) -> jax.Array:
    """[...] int32 labels: in [0, V), IGNORED or OUT_OF_RANGE, whatever integers came in; raise for one out of range
    that can be read.

    name: of the argument.  unused: the dimension along which the first label isn't used, where they will be shifted.
    kept: as in `kept_tokens`, of labels [..., K].
    """
    values = read(op, name, labels, check_inputs)
    if values is not None and kept is not None:
        wrong = (_plain(np, values, vocab, ignore_index) == OUT_OF_RANGE) & _each(kept)
        if unused is not None:
            wrong[(slice(None),) * unused + (slice(0, 1),)] = False
        if wrong.any():
            where = _first(wrong)
            raise_for_label(op, name, where, int(values[where]), vocab, ignore_index, int(wrong.sum()), wrong.size)
    # NumPy's 64-bit integers are compared in NumPy: as a jax.Array they could lose their upper half first.
    return jnp.asarray(_plain(np if isinstance(labels, np.ndarray) else jnp, labels, vocab, ignore_index), jnp.int32)


def _plain(xp: Any, labels: Any, vocab: int, ignore_index: int | None) -> Any:
    """The same, in NumPy or JAX."""
    limits = jnp.iinfo(labels.dtype)  # np.iinfo doesn't know int4
    # A number that the labels' dtype can't hold equals none of them; comparing would wrap it or raise.
    known = ignore_index is not None and limits.min <= ignore_index <= limits.max
    ignored = labels == xp.asarray(ignore_index, labels.dtype) if known else False
    wrong = labels < xp.asarray(0, labels.dtype)
    if vocab <= limits.max:
        wrong |= labels >= xp.asarray(vocab, labels.dtype)
    return xp.where(ignored, IGNORED, xp.where(wrong, OUT_OF_RANGE, labels.astype(np.int32)))


def checked_labels(
    op: str, given: Mapping[str, Any], name: str, vocab: int, options: Any, sequence: int | None = None
) -> jax.Array:
    """`plain_labels` of a public function's argument `name`; raise for values among its arguments that are wrong, where
    these can be read.  `sequence` is the dimension along which labels will be shifted."""
    check_inputs = options.check_inputs
    plain = plain_labels(op, name, given[name], vocab, options.ignore_index, check_inputs=check_inputs, unused=sequence)
    kept = kept_tokens(op, plain, check_inputs=check_inputs)
    if sequence is not None and kept is not None:
        kept = np.roll(kept, -1, sequence)
        kept[(slice(None),) * sequence + (slice(-1, None),)] = False
    check_factors(op, given, kept, check_inputs=check_inputs)
    return plain


def kept_tokens(op: str, plain: jax.Array | None, *, check_inputs: bool) -> Any:
    """[...] bool: which tokens, or ids, count, of their labels by `plain_labels`; True for all, where there are none,
    and None where they can't be read."""
    if plain is None:
        return True
    values = read(op, "target", plain, check_inputs)
    return None if values is None else values != IGNORED


def check_distinct(op: str, name: str, indices: Any, *, check_inputs: bool, kept: Any = True) -> None:
    """Raise for indices [..., K] of which a token has one twice, where they can be read; `kept` as in `kept_tokens`."""
    values = read(op, name, indices, check_inputs)
    if values is not None and kept is not None:
        ordered = np.sort(values, -1)
        same = (ordered[..., 1:] == ordered[..., :-1]).any(-1) & kept
        if same.any():
            raise ValueError(f"{op}: {name} must be distinct within a token; {int(same.sum())} are not")


def check_factors(op: str, given: Mapping[str, Any], kept: Any, *, check_inputs: bool) -> None:
    """Raise for a normalizer, weights of classes or temperatures of tokens, among the arguments of a public function,
    that are wrong, where they can be read; `kept` as in `kept_tokens`, where ignored tokens may have any temperature,
    and without others the normalizer may be any."""
    some = kept is not None and (kept is True or kept.any())
    counts: dict[str, Any] = {"normalizer": some, "class_weight": True, "temperature": True if kept is None else kept}
    for name, counted in counts.items():
        x = given.get(name)
        if not isinstance(x, (jax.Array, np.ndarray)) or (name == "temperature" and (x.ndim == 0 or kept is None)):
            continue
        values = read(op, name, x, check_inputs)
        if values is None:
            continue
        each = values.astype(np.float64)
        if name == "temperature" and counted is not True and counted.ndim > each.ndim:
            counted = counted.any(-1)
        wrong = ~((each >= 0 if name == "class_weight" else each > 0) & (each < np.inf)) & counted
        if wrong.any():
            least = "0 or more" if name == "class_weight" else "above 0"
            whose = " for every token" if name == "temperature" else ""
            raise ValueError(f"{op}: {name} must be finite and {least}{whose}; got {each[wrong][0]}")


def log_probs_or_nan(op: str, name: str, values: Any, *, check_inputs: bool, kept: Any = True) -> jax.Array:
    """Log-probabilities [..., K] as they are, of a `TopK` called `name`, and NaN for what can't be one; raise for
    one that can be read.  `kept` as in `kept_tokens`."""
    eps = float(jnp.finfo(values.dtype).eps)
    most = most_log_prob(eps)
    known = read(op, f"{name}.values", values, check_inputs)
    if known is not None and kept is not None:
        wrong = (known > most) & _each(kept)
        if wrong.any():
            where = _first(wrong)
            raise_for_log_prob(op, name, where, float(known[where]), eps)
    made: jax.Array = _nan_above(jnp.asarray(values), most)
    return made


@partial(jax.jit, static_argnums=1)  # jax_debug_nans looks at what is computed outside of a jit
def _nan_above(values: jax.Array, most: float) -> jax.Array:
    return jnp.where(values > most, jnp.nan, values)


def _each(kept: Any) -> Any:
    """With a dimension for what a token has several of."""
    return kept if kept is True else kept[..., None]


def _first(wrong: np.ndarray[Any, Any]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(wrong)[0])
