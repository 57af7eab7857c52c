"""What JAX's public functions check first, from types, shapes and dtypes alone, so that it works on tracers."""

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from onchip.core.sizes import DTYPE_BYTES, LOSS_DTYPE_BYTES
from onchip.frontend.jax_values import read
from onchip.frontend.options import LossOptions, one_target, require_positive, scratch_in_bytes

LAYOUTS = ("vh", "hv")
# Options of these values change nothing.
_ARRAYS = (
    "hidden",
    "weight",
    "logits",
    "target",
    "labels",
    "ids",
    "bias",
    "token_weight",
    "class_weight",
    "temperature",
)
_NEUTRAL = {field.name: field.default for field in fields(LossOptions) if field.type in (float, float | None)}


def is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray))


def platform() -> str:
    """The platform that a computation traced now will run on."""
    device: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    name = jax.default_backend() if device is None else device if isinstance(device, str) else device.platform
    return {"cuda": "gpu", "rocm": "gpu"}.get(name, name)


def hopper_refusal() -> str | None:
    """Why kernels for Hopper can't run on JAX's default GPU, or None."""
    capability = getattr(jax.devices()[0], "compute_capability", "none")
    return None if str(capability) == "9.0" else f"it is for compute capability 9.0 (Hopper); this is {capability}"


def check_layout(op: str, layout: Any) -> None:
    """Raise unless `layout` is one of the two."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        shown = repr(layout) if isinstance(layout, str) else type(layout).__name__
        raise ValueError(f"{op}: weight_layout must be one of {', '.join(map(repr, LAYOUTS))}; got {shown}")


def require_arrays(op: str, named: Mapping[str, Any], optional: Collection[str]) -> dict[str, Any]:
    """Raise unless all are arrays (or None where `optional`); return those."""
    for name, x in named.items():
        if not is_array(x) and not (x is None and name in optional):
            found = type(x).__name__ + _remedy(name, x)
            raise TypeError(f"{op}: {name} must be a jax.Array or numpy.ndarray; got {found}")
        if is_array(x) and x.dtype == object:
            raise TypeError(f"{op}: {name} holds Python objects; pass numbers, as by {name}.astype(...)")
    return {name: x for name, x in named.items() if x is not None}


def _remedy(name: str, x: Any) -> str:
    """What to pass for `x`, which is no array of JAX's or NumPy's."""
    if hasattr(x, "__jax_array__"):  # such as a Param of Flax
        return f"; pass {name}[...]"
    if hasattr(x, "__dlpack__"):
        return f"; pass jax.numpy.from_dlpack({name})"
    return f"; pass jax.numpy.asarray({name})" if isinstance(x, (list, tuple)) else ""


def dtype_of(x: Any) -> Any:
    """The dtype that JAX gives it: outside of its 64-bit mode NumPy's float64 becomes float32."""
    if isinstance(x, np.ndarray) and x.dtype == np.float64:
        return jax.dtypes.canonicalize_dtype(x.dtype)
    return x.dtype


def accumulator(dtype: Any) -> np.dtype[Any]:
    """What sums over numbers of `dtype` are kept in, and losses: float64 for float64, float32 for all others."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def check_kinds(
    op: str,
    arrays: Mapping[str, Any],
    *,
    integers: Collection[str],
    constants: Collection[str] = (),
    labels: Collection[str] = (),
    dtypes: Collection[str] = DTYPE_BYTES.keys(),
) -> None:
    """Raise unless `integers` hold integers, `constants` real numbers, and all others one of the float `dtypes`.

    Where one of these is float64, so is the first, and all others are but `labels`.
    """
    first, dtype = next((name, dtype_of(x)) for name, x in arrays.items())
    for name, x in arrays.items():
        if name in integers:
            if not jnp.issubdtype(x.dtype, jnp.integer):
                raise TypeError(f"{op}: {name} must hold integers; got {x.dtype}")
        elif name in constants:
            if jnp.issubdtype(x.dtype, jnp.complexfloating) or (name == "temperature" and x.dtype == bool):
                raise TypeError(f"{op}: {name} must be real; got {x.dtype}")
        elif dtype_of(x).name not in dtypes:
            *most, last = dtypes
            raise TypeError(f"{op}: {name} must be {', '.join(most)} or {last}; got {x.dtype}")
        elif dtype_of(x) != dtype and (dtype_of(x) == np.float64 or (dtype == np.float64 and name not in labels)):
            raise TypeError(f"{op}: {first} is {dtype} but {name} is {dtype_of(x)}; cast one of them")
        elif dtype_of(x) != jax.dtypes.canonicalize_dtype(dtype_of(x)):
            raise TypeError(f"{op}: {name} is float64 but JAX's 64-bit mode is off; turn jax_enable_x64 on, or cast it")


def check_product_dtype(op: str, arrays: Mapping[str, Any], whose: str = "") -> None:
    """Raise unless one of hidden and weight has the other's dtype or float32, and bias that of one of them; `whose`
    comes before their names."""
    if f"{whose}hidden" not in arrays:
        return
    hidden, weight = (dtype_of(arrays[f"{whose}{name}"]) for name in ("hidden", "weight"))
    both, bias = {hidden, weight}, f"{whose}bias"
    if len(both) > 1 and np.dtype(np.float32) not in both:
        raise TypeError(
            f"{op}: {whose}hidden is {hidden} but {whose}weight is {weight}, and neither dtype holds the other's "
            "numbers; cast one of them"
        )
    if bias in arrays and dtype_of(arrays[bias]) not in both:
        raise TypeError(f"{op}: {whose}hidden is {hidden} but {bias} is {dtype_of(arrays[bias])}; cast one of them")


def in_product_dtype(hidden: Any, weight: Any) -> tuple[jax.Array, jax.Array]:
    """Both in the dtype of their product: of the one with fewer digits, as the other has float32."""
    hidden, weight = jnp.asarray(hidden), jnp.asarray(weight)
    dtype = hidden.dtype if weight.dtype == jnp.float32 else weight.dtype
    return hidden.astype(dtype), weight.astype(dtype)


def options_of(op: str, kind: Any, given: Mapping[str, Any], logits: int) -> Any:
    """The options among the arguments of a public function with so many logits, but for the numbers that may be
    arrays."""
    names = [field.name for field in fields(kind) if field.name in given and field.name not in _NEUTRAL]
    scratch_bytes = scratch_in_bytes(op, given["scratch_bytes"], logits)
    return kind(**{name: given[name] for name in names} | {"scratch_bytes": scratch_bytes})


def take_target(op: str, given: dict[str, Any], *, needed: bool = True) -> tuple[str, Any]:
    """What `one_target` finds among the arguments of a public function; the other name is taken out of them."""
    name, target = one_target(op, given["target"], given["labels"], needed=needed)
    del given["labels" if name == "target" else "target"]
    return name, target


def check_arrays(op: str, given: Mapping[str, Any], soft: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Raise for arguments of a vocabulary's loss that are no arrays, or whose dtypes are wrong or don't fit together.

    Return the arrays.  A temperature may also be a number.  `soft` are labels by their names, in place of targets.
    """
    named = {name: x for name, x in given.items() if name in _ARRAYS and (name != "temperature" or is_array(x))}
    integers: tuple[str, ...] = ("target", "labels", "ids")
    if soft is not None:
        named = {name: x for name, x in named.items() if name not in integers} | dict(soft)
        integers = tuple(name for name in soft if name.endswith(".indices"))
    constants = ("token_weight", "class_weight", "temperature")
    arrays = require_arrays(op, named, ("bias", *constants))
    dtypes = LOSS_DTYPE_BYTES.keys()
    check_kinds(op, arrays, integers=integers, constants=constants, labels=soft or (), dtypes=dtypes)
    check_product_dtype(op, arrays)
    check_class_weight(op, arrays)
    return arrays


def check_class_weight(op: str, arrays: Mapping[str, Any]) -> None:
    """Raise TypeError unless class_weight, if there is one, is float32 or of the dtype of weight or logits."""
    if "class_weight" in arrays:
        of = "weight" if "weight" in arrays else "logits"
        dtype, other = dtype_of(arrays["class_weight"]), dtype_of(arrays[of])
        if dtype not in (jnp.float32, other):
            which = "" if other == jnp.float32 else f" or {other}, as {of}"
            raise TypeError(f"{op}: class_weight must be float32{which}; got {dtype}")


def check_normalizer(op: str, normalizer: Any, reduction: str) -> None:
    """Raise unless `normalizer` is None, a number above 0, or a 0-d array, and the reduction uses it."""
    if normalizer is None:
        return
    if reduction != "mean":
        raise ValueError(f"{op}: normalizer is what reduction='mean' divides by; got reduction={reduction!r}")
    if is_array(normalizer) or isinstance(normalizer, np.generic):  # what NumPy's `sum` gives
        check_scalar(op, "normalizer", normalizer)
    else:
        require_positive(op, "normalizer", normalizer)


def check_scalar(op: str, name: str, x: Any) -> None:
    """Raise unless the array `x` can stand for a number."""
    if x.ndim != 0:
        raise ValueError(f"{op}: {name} must be a number or a 0-d array; got shape {list(x.shape)}")
    if x.dtype == bool or not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
        raise TypeError(f"{op}: {name} must be a real number; got {x.dtype}")


def checked_numbers(op: str, options: Any, given: Mapping[str, Any], dtype: Any) -> dict[str, jax.Array | None]:
    """The numbers among the arguments, of `dtype` without a gradient; None for one that changes nothing.

    Raise for one that is wrong: those whose values are known are checked as fields of `options`, and an array must be
    0-d; a temperature may be one per token.
    """
    numbers = {name: x for name, x in given.items() if name in _NEUTRAL}
    known = {}
    for name, x in numbers.items():
        if not is_array(x):
            known[name] = x
        elif not (name == "temperature" and x.ndim):
            check_scalar(op, name, x)
            value = read(op, name, x, options.check_inputs)
            known |= {} if value is None else {name: value.item()}
    replace(options, **known)
    return {
        name: None if not is_array(x) and x == _NEUTRAL[name] else as_constant(x, dtype) for name, x in numbers.items()
    }


def as_constant(x: Any, dtype: Any) -> jax.Array | None:
    """A number, or the flattened array of one number per token, of `dtype`, that gets no gradient."""
    if x is None:
        return None
    # Not by way of a jax.Array of its own dtype: 2**31 tokens don't fit its integers.
    plain = x if isinstance(x, jax.Array) else np.asarray(x, dtype)
    values: jax.Array = jax.lax.stop_gradient(jnp.asarray(plain, dtype))
    return values.reshape(-1) if values.ndim else values


def per_token_constant(x: Any, dtype: Any) -> jax.Array | None:
    """As `as_constant`, [T] of what has one number per token: also where T is 1 by having no leading dimensions."""
    values = as_constant(x, dtype)
    return None if values is None else values.reshape(-1)


def token_temperature(numbers: Mapping[str, Any], temperature: Any, dtype: Any) -> tuple[dict[str, Any], Any]:
    """The numbers, and the temperature [...] where each token has one, of `dtype` and without a gradient; it is None
    among the numbers then."""
    if not is_array(temperature) or temperature.ndim == 0:
        return dict(numbers), None
    return {**numbers, "temperature": None}, jax.lax.stop_gradient(jnp.asarray(temperature, dtype))


def following(x: jax.Array, last: int, axis: int = -1) -> jax.Array:
    """What `x` has at the next position of a sequence, along `axis`, and `last` at its end."""
    x, size = unsplit(x, axis), x.shape[axis]
    if size == 0:
        return x
    end = jnp.full_like(lax.slice_in_dim(x, 0, 1, axis=axis), last)
    return jnp.concatenate([lax.slice_in_dim(x, 1, size, axis=axis), end], axis)


def unsplit(x: Any, dimension: int) -> Any:
    """`x`, whole along a dimension: where its type says that devices have parts, these are gathered."""
    sharding: Any = jax.typeof(x).sharding
    entries = list(sharding.spec)
    if entries[dimension] is None:
        return x
    entries[dimension] = None
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*entries)))
