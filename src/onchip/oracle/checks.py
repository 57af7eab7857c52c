"""Compares an op with its oracle in either framework, and says how far from it results may be.

Imports a framework only to run a check in it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import product
from pkgutil import resolve_name
from typing import Any

import numpy as np
import numpy.typing as npt

from onchip.oracle.reference import loss_of_lse

# Rounding errors are assumed to add up like a random walk; this many standard deviations of it are allowed.
DEVIATIONS = 4


@dataclass(frozen=True)
class Check:
    """One comparison with the oracle.  The error of `quantity` is ||out - ref|| / ||ref||, and `bound` its limit."""

    case: str
    dtype: str
    implementation: str
    quantity: str
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound  # False for NaN


def relative_error(out: Any, ref: npt.NDArray[Any]) -> float:
    """||out - ref|| / ||ref||, or ||out|| if ref is 0.  Infinities must be the same in both, and count as 0."""
    if not isinstance(out, np.ndarray | np.generic):
        out = adapter_of(out).as_array(out)
    if out.shape != ref.shape:
        raise AssertionError(f"shape {out.shape} where {ref.shape} is right")
    got = out.astype(np.float64)
    same_infinity = np.isinf(ref) & (got == ref)
    norm = float(np.linalg.norm(np.where(same_infinity, 0, ref)))
    error = float(np.linalg.norm(np.where(same_infinity, 0, got - np.where(same_infinity, 0, ref))))
    return error / norm if norm > 0 else error


UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-11, "float64": 2.0**-53}


def product_bound(dtype: str, length: int, roundings: int) -> float:
    """Limit of the relative error of sums of `length` products, in float32 (in float64 for float64), that are rounded
    `roundings` times to `dtype`.

    Partial sums grow as they go, so the walk's variance is half of what it would be with all sums at full size, where
    each step adds a twelfth of a squared ulp.
    """
    unit = UNIT_ROUNDOFF[dtype]
    step = DEVIATIONS * 2 * (unit if dtype == "float64" else UNIT_ROUNDOFF["float32"])
    return step * (1 + float(np.sqrt(length / 24))) + unit * roundings


_DIGITS = {"float32": 24, "bfloat16": 8, "float16": 11, "float64": 53}


def rounding_error(right: npt.NDArray[Any], dtype: str) -> float:
    """The relative error of a right result after rounding to `dtype`; the norm makes it larger for few numbers than for
    many.
    """
    fraction, exponent = np.frexp(np.asarray(right, np.float64))
    rounded = np.ldexp(np.round(np.ldexp(fraction, _DIGITS[dtype])), exponent - _DIGITS[dtype])
    return relative_error(rounded, right)


def float32_bounds(case: Any, oracle: Any) -> dict[str, float]:
    """Limits of the relative errors of the oracle's fields in float32, from its precision and the lengths of the sums.

    A logit has one rounding at its size.  If it is a sum of H products, it also has the error of a random walk of H
    steps (H / 24 in units of variance, since partial sums grow as they go).  Exponentials turn these into a relative
    error of probabilities.
    """
    eps = float(np.finfo(np.float32).eps)
    hidden = getattr(case, "hidden", 0)  # 0: the logits are given
    scale = float(case.options.get("logit_scale", 1.0)) / float(case.options.get("temperature", 0.5))
    spread = float(case.logit_std) * scale
    largest = abs(float(case.logit_offset)) * scale + spread * float(np.sqrt(2 * np.log(case.vocab + 1)))
    if case.target_prob is not None:
        largest = max(largest, float(np.abs(oracle.lse).max(initial=0)))
    logit = eps * (1 + largest + spread * float(np.sqrt(hidden / 24)))
    sums = eps * float(np.sqrt((case.tokens + case.vocab) / 24))

    def bound(name: str) -> float:
        if name.startswith("grad_"):
            return DEVIATIONS * (logit + sums)
        # d entropy / d logit is up to about log V times a probability.
        error = logit * float(1 + np.log(case.vocab)) if name == "entropy" else logit
        ref = getattr(oracle, name)
        rms = float(np.sqrt(np.mean(np.square(ref[np.isfinite(ref)])))) if np.isfinite(ref).any() else 0.0
        return DEVIATIONS * (eps + error / rms if rms > 0 else error)

    return {name: bound(name) for name in oracle._fields if name not in _CHOICES}


_CHOICES = ("argmax", "correct", "top1")
"""The fields that depend on which logit is the largest."""


def _softmax_limits(
    case: Any, dtype: str, how: Mapping[str, Any], oracle: Any, given: Mapping[str, Any]
) -> dict[str, tuple[Any, float]]:
    limits = float32_bounds(case, oracle)
    # A tie, or nearly one, may come out either way; a wrong index elsewhere may not.
    limits |= {name: 0.02 if getattr(oracle, name).size > 50 else 0.0 for name in _CHOICES if name in oracle._fields}
    return {name: (getattr(oracle, name), limit) for name, limit in limits.items()}


# ------------------------------------------------------------------------------------------------------- the comparison


def adapter(framework: str) -> Any:
    """`onchip.oracle.torch` or `onchip.oracle.jax`, which have the same names."""
    return import_module(f"onchip.oracle.{framework}")


def adapter_of(x: Any) -> Any:
    """The adapter of an array or a dtype, which is PyTorch's own type or JAX's name."""
    return adapter("torch" if type(x).__module__.partition(".")[0] == "torch" else "jax")


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def op_in(fw: Any, op: str, name: str = "") -> Any:
    """`name` in the module of `op` in an adapter's framework; by default, the op itself."""
    return getattr(import_module(f"onchip.ops.{op}.{fw.NAME}_op"), name or op)


def kernel_refusals(
    refusal: str, device: str, dtype: str, framework: str, given: Mapping[str, Any] = {}
) -> dict[str, str | None]:
    """Why each backend can't serve a call on the current "cpu" or "cuda" device, or None.

    `refusal`, "module:name", is the function that says so for the Triton kernels.  `given` has sizes and options by
    name; it may hold others too, and what is missing has its plain value.
    """
    if framework == "jax":
        return {"xla": None}
    import torch

    return {"plain": None, "triton": resolve_name(refusal)(device, None, getattr(torch, dtype))}


@dataclass(frozen=True)
class Checker:
    """Compares one op with its oracle, whose results are named tuples.

    `fw` stands for a framework's adapter, and `how` for the arguments of a check in addition to the case's options,
    such as the backend.
    """

    names: Sequence[str]
    """Inputs that are arguments of the op, in their order.  Floats get the check's dtype, and a gradient."""
    inputs: Callable[[Any, str], Any]
    """The inputs of a case in a dtype: a named tuple of NumPy arrays, with `grad_<value>` for each of the `values`."""
    oracle: Callable[..., Any]
    """`oracle(**arguments, **keywords, **upstream gradients)`."""
    call: Callable[..., Mapping[str, Any]]
    """`call(fw, how, **arguments, **keywords)` returns values under the names of the oracle's fields."""
    cases: Sequence[Any]
    refusals: Callable[..., Mapping[str, str | None]]
    """`refusals(device, dtype's name, framework, given)`: as `kernel_refusals`, for a case and a `how`."""
    hows: Callable[[Any], Sequence[Mapping[str, Any]]] = lambda fw: [{}]
    """`hows(fw)`: the variants in which each case is checked in each dtype, without the backends."""
    plain: Callable[..., Mapping[str, Any]] | None = None
    """As `call`, by the framework's own functions in the dtype of the arguments."""
    values: Sequence[str] = ("loss",)
    """The values that have an upstream gradient."""
    keywords: Callable[[Any], Mapping[str, Any]] = lambda inputs: {
        name: getattr(inputs, name)
        for name in ("token_weight", "class_weight", "temperature")
        if name in inputs._fields
    }
    """Keyword arguments, made from the inputs; None is left out."""
    defaults: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: {"torch": {"backend": "plain"}, "jax": {"backend": "xla"}}
    )
    """Defaults of `how`, by framework."""
    constant: Callable[[str, Any, Mapping[str, Any]], bool] = lambda name, inputs, how: False
    """Whether an argument gets no gradient."""
    limits: Callable[..., Mapping[str, tuple[Any, float]]] = _softmax_limits
    """`limits(case, dtype, how, oracle, arguments)`: what each result should be, and its limit; 0 means exactly equal.
    A quantity of several words is another comparison of the result that its first word names."""
    session: Callable[[str, str], AbstractContextManager[None]] = lambda device, framework: nullcontext()
    """`session(device, framework)`: the context in which checks run."""

    def planned_checks(self, device: str, framework: str) -> list[Callable[[], list[Check]]]:
        """All of the op's checks on "cpu" or "cuda", one by one."""
        fw = adapter(framework)
        return [
            partial(self.check_case, case, dtype, device, backend=backend, **how)
            for case, how, dtype in product(self.cases, self.hows(fw), fw.DTYPES)
            for backend, reason in self.refusals(
                device, dtype_name(dtype), framework, {**vars(case), **case.options, **how}
            ).items()
            if reason is None
        ]

    def as_arguments(self, case: Any, inputs: Any, dtype: Any, device: str = "cpu") -> tuple[list[Any], dict[str, Any]]:
        """The arguments in their order and the keyword arguments, the case's options among them."""
        fw = adapter_of(dtype)

        def put(x: Any) -> Any:
            if x is None or x.dtype != np.float32:
                return x if x is None else fw.constant(x, device)
            return fw.leaf(x, dtype, device, case.vocab if getattr(case, "sliced", 0) else None)

        more = {name: x for name, x in self.keywords(inputs).items() if x is not None}
        more = {name: fw.constant(x, device) if isinstance(x, np.ndarray) else x for name, x in more.items()}
        return [put(getattr(inputs, name)) for name in self.names], {**case.options, **more}

    def run_oracle(self, arguments: Sequence[Any], keywords: Mapping[str, Any], inputs: Any, **how: Any) -> Any:
        """The oracle on exactly the numbers that the op was given."""
        (fw,) = {adapter_of(x) for x in arguments if x is not None}
        named = dict(zip(self.names, arguments, strict=True)) | dict(keywords)
        given = {name: fw.as_array(x) if fw.is_array(x) else x for name, x in named.items()}
        upstream = {f"grad_{name}": g for name, g in self._upstream(inputs, how).items()}
        return self.oracle(**(upstream | given))

    def check_case(self, case: Any, dtype: Any, device: str = "cpu", **how: Any) -> list[Check]:
        """Run the op on `case`, forward and backward, and compare all that it returns with the oracle."""
        fw = adapter_of(dtype)
        how = {**self.defaults[fw.NAME], **how}
        name = dtype_name(dtype)
        inputs = self.inputs(case, name)
        upstream = self._upstream(inputs, how)
        # The plain expression runs there too, so that all see the same rounded numbers.
        with fw.default_device(device):
            arguments, keywords = self.as_arguments(case, inputs, dtype, device)
            oracle = self.run_oracle(arguments, keywords, inputs, **how)
            named = dict(zip(self.names, arguments, strict=True))
            # Rounded already where it is an argument: XLA may leave out a rounding that is compiled with its use.
            upstream = {n: named.get(f"grad_{n}", x) for n, x in upstream.items()}
            leaves = [
                n
                for n, x in named.items()
                if x is not None and getattr(inputs, n).dtype == np.float32 and not self.constant(n, inputs, how)
            ]
            results = fw.differentiate(partial(self.call, fw, how), named, keywords, upstream, leaves)
            plain = {}
            if self.plain is not None and name != "float32":
                plain = fw.differentiate(partial(self.plain, fw, how), named, keywords, upstream, leaves)
        given = {n: fw.as_array(x) for n, x in named.items() if x is not None}
        limits = self.limits(case, name, how, oracle, given)
        # The backend first.  What is on is told by its name, what is off by nothing.
        label = " ".join(option if x is True else str(x) for option, x in how.items() if x is not False)
        return [
            Check(case.name, name, label, quantity, *_compared(quantity, results, plain, *limits[quantity]))
            for quantity in [*results, *(quantity for quantity in limits if " " in quantity)]
        ]

    def _upstream(self, inputs: Any, how: Mapping[str, Any]) -> dict[str, Any]:
        """The upstream gradients of the values that `how` doesn't switch off."""
        return {name: getattr(inputs, f"grad_{name}") for name in self.values if how.get(name, True)}


def _compared(
    quantity: str, results: Mapping[str, Any], plain: Mapping[str, Any], right: Any, limit: float
) -> tuple[float, float]:
    """Error and bound: at least twice the error that the plain expression makes in a 16-bit dtype."""
    out = results[quantity.partition(" ")[0]]
    if quantity in _CHOICES:
        return float(np.mean(out != right)) if right.size else 0.0, limit
    if limit == 0:
        return float(np.abs(out).max(initial=0)), limit
    if quantity in plain and np.isfinite(error := relative_error(plain[quantity], right)):
        limit = max(limit, 2 * error)
    return relative_error(out, right), limit


def plain_cross_entropy(
    logits: Any,
    target: Any,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: float | None = None,
    token_weight: Any = None,
    class_weight: Any = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: Any = 1.0,
    **of_lse: float,
) -> Any:
    """The loss of cross_entropy written with the framework's own functions in the dtype of the logits; `of_lse`: what
    `loss_of_lse` takes.
    """
    fw = adapter_of(logits)
    z = plain_logits(logits, softcap=softcap, logit_scale=logit_scale, temperature=temperature)
    kept = target != ignore_index
    log_p = fw.log_softmax(z, -1)
    label = fw.xp.where(kept, target, 0)
    loss = -(1 - label_smoothing) * fw.take(log_p, label[..., None])[..., 0]
    if class_weight is not None:
        class_weight = fw.like(class_weight, z)
        loss = loss * class_weight[label]
        if reduction == "mean" and normalizer is None:
            normalizer = fw.xp.where(kept, class_weight[label], 0).sum()
        log_p = log_p * class_weight.reshape(*[1] * (z.ndim - 1), -1)
    if any(of_lse.values()):
        loss = loss + loss_of_lse(fw.logsumexp(z, -1), **of_lse)
    if label_smoothing > 0:
        loss = loss - label_smoothing * log_p.mean(-1)
    if token_weight is not None:
        loss = loss * fw.like(token_weight, z)
    return plain_reduction(loss, kept, reduction, normalizer)


def plain_logits(z: Any, *, softcap: float | None = None, logit_scale: float = 1.0, temperature: Any = 1.0) -> Any:
    """Softcapped, and divided by a temperature that is a number or an array with one for each token."""
    fw = adapter_of(z)
    z = z * logit_scale
    if softcap is not None:
        z = softcap * fw.xp.tanh(z / softcap)
    return z / (fw.like(temperature[..., None], z) if fw.is_array(temperature) else temperature)


def plain_reduction(loss: Any, kept: Any, reduction: str, normalizer: float | None) -> Any:
    """The reduced loss of the tokens that are `kept`."""
    loss = adapter_of(loss).xp.where(kept, loss, 0)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (kept.sum().clip(min=1) if normalizer is None else normalizer)
