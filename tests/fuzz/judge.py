"""How far the results of any call may be from the oracle's.  Imports no framework.

The bounds are those of each op's checks.py, which are for sums of many random terms.  Single numbers need more, which
is here: a sum that nearly cancels is held to the size of its terms, and a rounding to its worst case.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from onchip.ops.attention import checks as attention_checks
from onchip.ops.cross_entropy import checks as ce_reference
from onchip.ops.fp8_linear import checks as fp8_checks
from onchip.ops.grouped_matmul import checks as grouped_checks
from onchip.ops.grouped_matmul import reference as grouped_reference
from onchip.ops.linear_jsd import checks as jsd_checks
from onchip.ops.linear_jsd import checks as jsd_reference
from onchip.ops.linear_log_probs import checks as llp_reference
from onchip.oracle.checks import DEVIATIONS, Check, float32_bounds, relative_error
from onchip.oracle.reference import Array, transform

EPS = float(np.finfo(np.float32).eps)
# The largest relative error of one rounding, and the smallest number beside 0; smaller float32 ones may count as 0.
UNIT = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}
LEAST = {"float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-24}
# A 16-bit gradient is rounded once, and so may be the exponential, its derivative and the product that it is made of.
ROUNDINGS = 4
# Root mean square of the relative error of a product of two E4M3 numbers, whose ulps are 1/8 to 1/16 of them.
FP8_PRODUCT = 2**0.5 * 2.0**-4 / 3**0.5 / 1.4
FP8_GRADIENT = 10 ** (-25 / 20)
"""What the tests of precision='fp8' ask of gradients, 25 dB: of probabilities that the logits' noise leaves alone."""

# Arrays of an op's inputs that get no gradient.
CONSTANTS = (
    "target", "ids", "token_weight", "class_weight", "temperature", "topk", "group_sizes", "rows", "scatter_rows",
)  # fmt: skip

Arrays = Mapping[str, Any]


class Wrong(AssertionError):
    """Comparisons that are out of bounds."""


def assert_right(checks: list[Check]) -> None:
    """Raise `Wrong`, which names what is out of bounds."""
    wrong = [f"{c.quantity}: error {c.error:.3g}, bound {c.bound:.3g}" for c in checks if not c.ok]
    if wrong:
        raise Wrong("; ".join(wrong))


def compare(
    case: Any,
    dtype: str,
    results: Arrays,
    oracle: Any,
    given: Arrays,
    options: Mapping[str, Any],
    *,
    tensor_cores: bool = False,
    fp8: bool = False,
) -> list[Check]:
    """Compare `results` with the oracle's fields of the same names.

    `given` and `options` are what the oracle had, with one dimension for all tokens and 0 for those that are ignored.
    """
    squares: Arrays = {}
    if "group_sizes" in given:
        limits, squares = grouped_checks.bounds(case, dtype), _grouped_squares(dtype, given, options)
        terms = {name: (float(np.sqrt(x.sum())), 0.0) for name, x in squares.items()}
        for name, index in (("grad_x", "rows"), ("out", "scatter_rows")):
            if index in given:  # addends may be the same, and their roundings then too
                most = np.bincount(given[index][: given["group_sizes"].sum()]).max(initial=0)
                limits[name] += EPS * float(most)
    elif "q" in given:
        limits, terms = _attention(case, dtype, oracle, given, options)
    elif "x" in given:
        limits, terms = _linear(case, dtype, given, tensor_cores=tensor_cores)
    else:
        limits, terms = _softmax(case, dtype, oracle, given, options)
    checks = []
    for name, out in results.items():
        ref = np.asarray(getattr(oracle, name))
        norm = float(np.linalg.norm(np.where(np.isfinite(ref), ref, 0)))
        size, least = terms.get(name, (0.0, 0.0))
        limit = limits.get(name, 0.0)
        if name.startswith("grad_") or name == "out":
            limit += ROUNDINGS * UNIT[dtype]
        if fp8:
            limit += _fp8_limit(case, name, ref, oracle)
        bound = limit * max(norm, size) + LEAST[dtype] * float(np.sqrt(ref.size)) + least
        if norm == 0 and not name.startswith("grad_"):
            bound = limit  # absolute
        error = relative_error(out, ref)
        if name in ("argmax", "correct", "top1"):
            error, bound = (0.0 if fp8 else _wrong_choices(out, ref, given, options)), 0.0
        elif _is_zero(case, name, norm, options):
            error, bound = float(np.abs(out).max(initial=0)), 0.0
        if name in squares and np.asarray(out, np.float64)[squares[name] == 0].any():  # NaN too
            error = math.inf  # of no terms: rows and groups that there is nothing for
        checks.append(Check(case.name, dtype, "", name, error, bound / norm if norm > 0 else bound))
    return checks


def named(out: Any, first: str) -> dict[str, Any]:
    """What an op returned by the names of the oracle's fields; `first` is the name of what it returns alone."""
    if isinstance(out, tuple):
        out = out._asdict() if hasattr(out, "_asdict") else {first: out[0], **out[1]._asdict()}
    return {name: x for name, x in (out if isinstance(out, dict) else {first: out}).items() if x is not None}


def scratch_budget(times: float | None, run: Callable[..., Any]) -> dict[str, int]:
    """The argument scratch_bytes, so many times the least that the op takes; None: no such argument.

    The least is what the refusals of less say: JAX's first one is of forward alone.
    """
    least = 1
    while times is not None:
        try:
            run(scratch_bytes=least)
        except ValueError as error:
            if f"scratch_bytes={least} is too small" not in str(error):
                raise
            least = max(least + 1, min(map(int, re.findall(r"(\d+) bytes", str(error)))))
        else:
            return {"scratch_bytes": math.ceil(times * least)}
    return {}


def _is_zero(case: Any, name: str, norm: float, options: Mapping[str, Any]) -> bool:
    """What must be exactly 0, though the oracle's own rounding may leave 1e-17 of it."""
    one_class: bool = getattr(case, "vocab", 0) == 1 and name != "lse" and not options.get("z_loss")
    all_ignored: bool = getattr(case, "ignored", 0) == 1.0
    equal: bool = getattr(case, "noise", None) == 0.0
    return norm < 1e-9 and (one_class or all_ignored or (equal and not options.get("hard_weight")))


def _fp8_limit(case: Any, name: str, ref: Array, oracle: Any) -> float:
    """What FP8 costs beside: the noise of logits of their usual size, of which a sum over tokens keeps less."""
    logit: float = FP8_PRODUCT * case.logit_std + 2.0**-8 * (1 + case.logit_std)  # stored in bfloat16
    if name.startswith("grad_"):
        return FP8_GRADIENT + logit
    reduced = name == "loss" and ref.ndim == 0
    of = oracle.log_prob[oracle.log_prob != 0] if reduced else ref
    rms = float(np.sqrt(np.mean(of**2))) if of.size else 0.0
    fewer: float = float(of.size) ** -0.5 if reduced and of.size else 1.0
    return DEVIATIONS * logit * fewer / (rms or 1.0)


# --------------------------------------------------------------------- limits of relative errors, and sizes of terms
# Sizes are norms: of what the terms of a sum add up to if their signs are random, and of an error whatever their size.

Limits = tuple[dict[str, float], dict[str, tuple[float, float]]]


def _linear(case: Any, dtype: str, given: Arrays, *, tensor_cores: bool) -> Limits:
    x, g, w, bias = given["x"], given["grad_out"], given["weight"], given.get("bias", 0.0)
    limits = fp8_checks.bounds(case, dtype, tensor_cores=tensor_cores)
    sizes = {"out": _norm(x, w.T) + float(np.linalg.norm(bias + np.zeros((case.m, case.n))))}
    sizes |= {"grad_x": _norm(g, w), "grad_weight": _norm(g.T, x), "grad_bias": float(np.linalg.norm(g))}
    return limits, {name: (size, 0.0) for name, size in sizes.items()}


def _attention(case: Any, dtype: str, oracle: Any, given: Arrays, options: Mapping[str, Any]) -> Limits:
    """A score's gradient is a difference: the terms are what it would be if they were added."""
    how = {"backend": "triton"}  # whose `out` has one rounding more
    limits = {name: limit for name, (_, limit) in attention_checks.limits(case, dtype, how, oracle, given).items()}
    q, k, v, grad_out = (np.moveaxis(given[name], 2, 1) for name in ("q", "k", "v", "grad_out"))  # [B, H, T, D]
    k, v = (np.repeat(x, case.heads // case.key_heads, 1) for x in (k, v))
    scale = options.get("scale", case.size**-0.5)
    z = scale * q @ k.mT
    if (cap := options.get("softcap")) is not None:  # 1 - tanh**2 has an ulp of 1
        steep = DEVIATIONS * EPS * float(np.cosh(min(np.abs(z).max(initial=0) / cap, 20.0))) ** 2
        limits = {name: limit + steep * name.startswith("grad_") for name, limit in limits.items()}
        z = cap * np.tanh(z / cap)
    lse = np.moveaxis(oracle.lse, 2, 1)[..., None]
    there = case.seen()[:, None] & np.isfinite(lse)
    p = np.exp(np.where(there, z - np.where(np.isfinite(lse), lse, 0), -np.inf))
    products = np.sqrt(grad_out**2 @ (v**2).mT)
    mean = np.sqrt((p**2 * products**2).sum(-1, keepdims=True))
    more = np.abs(np.moveaxis(given["grad_lse"], 2, 1)[..., None]) if "grad_lse" in given else 0.0
    slopes = p * (products + mean + more)
    sizes = {"out": _norm(p, v), "grad_q": scale * _norm(slopes, k), "grad_k": scale * _norm(slopes.mT, q)}
    sizes |= {"grad_v": _norm(p.mT, grad_out), "grad_sinks": float(np.linalg.norm(mean + more))}
    return limits, {name: (size, 0.0) for name, size in sizes.items()}


def _norm(a: Array, b: Array) -> float:
    return float(np.sqrt((a**2 @ b**2).sum()))


def _grouped_squares(dtype: str, given: Arrays, options: Mapping[str, Any]) -> dict[str, Array]:
    """Of each number of each result the sum of the squares of its terms; of one that has none exactly 0."""
    sizes, b = given["group_sizes"], given.get("bias")
    last = int(sizes.sum())
    tail = np.zeros(len(given.get("rows", given["x"])) - last)[:, None]
    least = (LEAST[dtype] / max(UNIT[dtype], EPS)) ** 2  # below it there are fewer digits
    of = partial(grouped_reference.grouped_matmul, group_sizes=sizes, rows=given.get("rows"))
    y = of(given["x"], given["weight"], bias=b).out[:last]
    squared = partial(of, given["x"] ** 2, given["weight"] ** 2, bias=None if b is None else b**2)
    y2 = squared().out[:last] + y**2 + least

    to = given["scatter_rows"][:last] if "scatter_rows" in given else np.arange(last)
    g2 = given["grad_out"][to] ** 2
    c2 = given["row_scale"][:last, None] ** 2 if "row_scale" in given else 1.0
    a2, d2 = y2, c2 * g2 + least
    if "activation" in options:
        # The slopes of silu are 1.1 and 0.5 at most.
        gate_up = options.get("gate_up", "concatenated")
        gate2, up2 = grouped_reference.split(y2, gate_up)
        a2 = 1.2 * up2 * gate2
        d2 = grouped_reference.join(d2 * 1.2 * up2 * (1 + gate2), d2 * 1.2 * gate2, gate_up)
    gradients = squared(grad_out=np.append(d2, tail + np.zeros(d2.shape[1]), 0))
    out = np.zeros(given["grad_out"].shape)
    np.add.at(out, to, c2 * a2)
    of_scale = np.append((g2 * a2).sum(1), tail)
    made = {"out": out, "grad_row_scale": of_scale}
    return made | {name: getattr(gradients, name) for name in ("grad_x", "grad_weight", "grad_bias")}


def _softmax(case: Any, dtype: str, oracle: Any, given: Arrays, options: Mapping[str, Any]) -> Limits:
    models = ("student_", "teacher_") if "student_" in "".join(given) else ("",)
    logits = {who: logits_of(given, who) for who in models if f"{who}hidden" in given or f"{who}logits" in given}
    # The largest logit that there is, where few products make one larger than those of a normal distribution.
    largest = max(float(np.abs(z[np.isfinite(z)]).max(initial=0)) for z in logits.values())
    case = replace(case, logit_std=max(case.logit_std, largest / float(np.sqrt(2 * np.log(case.vocab + 1)))))
    rounding, of_loss = {}, 0.0
    rest = {name: x for name, x in given.items() if name in _TOKENS or name.startswith("grad_")}
    if models != ("",):
        bounds = jsd_checks.bounds(case, dtype, oracle)
        limits = {f"grad_{who}{part}": bounds["gradient"] for who in models for part in _PARTS}
        limits["loss"] = bounds["loss"]
        of_logits = jsd_reference.jsd(logits["student_"], logits.get("teacher_"), **rest, **options)
        gradients = {who: getattr(of_logits, f"grad_{who}logits") for who in logits}
        rounding = _jsd_rounding(case, logits, given, options)
        of_loss = _jsd_distances(dtype, logits, rest, options)
    elif "ids" in given:
        limits = float32_bounds(case, oracle)
        products = given["hidden"] @ given["weight"].T
        made = llp_reference.linear_log_probs(products, np.eye(case.vocab), bias=given.get("bias"), **rest, **options)
        gradients = {"": made.grad_hidden}
    else:
        limits = float32_bounds(case, oracle)
        gradients = {"": ce_reference.cross_entropy(logits[""], **rest, **options).grad_logits}
    if (cap := options.get("softcap")) is not None:  # 1 - tanh**2 has an ulp of 1
        finite = np.abs(logits[""][np.isfinite(logits[""])]).max(initial=0) * options.get("logit_scale", 1.0)
        steep = DEVIATIONS * EPS * float(np.cosh(finite / cap)) ** 2
        limits = {name: limit + steep * name.startswith("grad_") for name, limit in limits.items()}
    terms = {"loss": (oracle.distance if getattr(case, "teacher", "") == "truncated" else 0.0, of_loss)}
    for who, dz in gradients.items():
        # In every logit's gradient: the smallest number of its dtype, float64's rounding, that of what it is made of.
        error = LEAST[dtype] + 1e-14 + DEVIATIONS * rounding.get(who, np.zeros_like(dz))
        terms[f"grad_{who}logits"] = 0.0, float(np.linalg.norm(error))
        if f"{who}hidden" in given:
            h, w = given[f"{who}hidden"], given[f"{who}weight"]
            terms[f"grad_{who}hidden"] = _norm(dz, w), _norm(error, w)
            terms[f"grad_{who}weight"] = _norm(dz.T, h), _norm(error.T, h)
            terms[f"grad_{who}bias"] = float(np.linalg.norm(dz)), float(np.linalg.norm(error))
    return limits, terms


def _jsd_rounding(case: Any, logits: Arrays, given: Arrays, options: Mapping[str, Any]) -> dict[str, Array]:
    """The error of each logit's gradient that is made of a logarithm minus its mean, or of a difference of
    probabilities: where both models are nearly certain it is all that remains."""
    if len(logits) == 1:
        return {}
    tau, size = options.get("temperature", 1.0), options.get("vocab", case.vocab)
    p = []
    for z in logits.values():
        shifted = np.exp((z[:, :size] - z[:, :size].max(1, keepdims=True)) / tau)
        p.append(shifted / shifted.sum(1, keepdims=True))
    largest = case.logit_std * float(np.sqrt(2 * np.log(case.vocab + 1)) + np.sqrt(case.hidden / 24))
    row = np.broadcast_to(np.abs(given["grad_loss"] * given.get("token_weight", 1.0)), case.tokens)
    if options.get("reduction", "mean") == "mean":
        counted = np.sum(given["target"] != options.get("ignore_index", -100)) if "target" in given else case.tokens
        row = row / (options.get("normalizer") or max(1, counted))
    row = row * EPS * (1 + largest) / tau * (tau**2 if options.get("temperature_squared") else 1)
    return {who: np.pad((p[0] + p[1]) * row[:, None], ((0, 0), (0, z.shape[1] - size))) for who, z in logits.items()}


def _jsd_distances(dtype: str, logits: Arrays, rest: Arrays, options: Mapping[str, Any]) -> float:
    """The error of the loss where logits are kept as distances to a tile's largest in float16: the Triton kernels'."""
    if dtype != "bfloat16":
        return 0.0
    upstream = {"grad_loss": np.ones_like(rest["grad_loss"])}
    unit = jsd_reference.jsd(logits["student_"], logits.get("teacher_"), **{**rest, **upstream}, **options)
    error = 0.0
    for who, z in logits.items():
        distance = np.where(np.isfinite(z), z.max(1, keepdims=True) - z, 0)
        error = error + 2.0**-12 * np.abs(getattr(unit, f"grad_{who}logits") * distance).sum(1)
    return float(np.linalg.norm(error) if options.get("reduction") == "none" else np.sum(error))


_PARTS = ("hidden", "weight", "bias", "logits")
_TOKENS = ("target", "ids", "token_weight", "class_weight", "temperature", "teacher_topk")


def logits_of(given: Arrays, who: str = "") -> Array:
    """[T, V] products with their bias, or the logits that were given."""
    if f"{who}logits" in given:
        return np.asarray(given[f"{who}logits"])
    return np.asarray(given[f"{who}hidden"] @ given[f"{who}weight"].T + given.get(f"{who}bias", 0.0))


def _wrong_choices(out: Any, ref: Any, given: Arrays, options: Mapping[str, Any]) -> float:
    """How many differ from the oracle's by more than what rounding of logits may make of a tie, or nearly one."""
    tau = np.broadcast_to(given.get("temperature", options.get("temperature", 1.0)), ref.size)
    z, _ = transform(logits_of(given), options.get("softcap"), options.get("logit_scale", 1.0), tau)
    made, right, rows = np.reshape(out, -1), np.reshape(ref, -1), np.arange(ref.size)
    tie = 16 * DEVIATIONS * EPS * (1 + np.abs(np.where(np.isfinite(z), z, 0)).max(1, initial=0))
    if right.dtype != bool:  # the index of the largest, -1 if ignored
        near = (made >= 0) & (right >= 0) & (z[rows, right] - z[rows, made] <= tie)
    else:
        label = np.clip(given["target"], 0, z.shape[1] - 1)
        others = np.where(np.arange(z.shape[1]) == label[:, None], -np.inf, z).max(1, initial=-np.inf)
        near = (given["target"] != options.get("ignore_index", -100)) & (np.abs(z[rows, label] - others) <= tie)
    return float(np.sum((made != right) & ~near))
