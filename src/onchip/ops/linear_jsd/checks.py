"""The contract: the oracle in NumPy float64 with gradients, and named problems, with real models' sizes or awkward
numbers, on which tests, `onchip check` and `onchip bench` compare every backend with it.  No framework.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onchip.frontend.topk import TopK
from onchip.ops.linear_jsd import OP, JsdOptions
from onchip.oracle import cases, reference
from onchip.oracle.cases import draw_factors, ignore_some, named_case
from onchip.oracle.checks import DEVIATIONS, Checker, adapter_of, kernel_refusals, op_in, plain_reduction
from onchip.oracle.reference import Array, Linear


class JsdResult(NamedTuple):
    """Loss and gradients.  Gradients of arguments that weren't given are None, except for a bias."""

    loss: Array
    grad_student_hidden: Array | None = None
    grad_student_weight: Array | None = None
    grad_student_bias: Array | None = None
    grad_student_logits: Array | None = None
    grad_teacher_hidden: Array | None = None
    grad_teacher_weight: Array | None = None
    grad_teacher_bias: Array | None = None
    grad_teacher_logits: Array | None = None
    distance: float = 0.0
    """Root mean square of log t - log s, each entry weighted by its probability: the scale for rounding errors."""


class _JsdRows(NamedTuple):
    loss: Array  # [n]
    student: Array  # [n, V] gradient of the student's logits
    teacher: Array  # [n, K] gradient of the teacher's, if these are logits
    squares: Array  # [n] sum of (s + t) / 2 * (log t - log s)**2


def linear_jsd(
    student_hidden: npt.ArrayLike,  # [..., Hs]
    student_weight: npt.ArrayLike,  # [V, Hs]
    teacher_hidden: npt.ArrayLike | None = None,  # [..., Ht]
    teacher_weight: npt.ArrayLike | None = None,  # [V, Ht]
    *,
    student_bias: npt.ArrayLike | None = None,  # [V]
    teacher_bias: npt.ArrayLike | None = None,  # [V]
    teacher_logits: npt.ArrayLike | None = None,  # [..., V]
    **options: Any,
) -> JsdResult:
    """Loss and the gradients of sum(grad_loss * loss), all in float64; the options are those of `jsd`."""
    ignored = np.zeros(np.shape(student_hidden)[:-1], bool)
    if options.get("target") is not None:
        ignored = np.asarray(options["target"]) == options.get("ignore_index", -100)
    layers = {
        who: Linear(np.where(ignored[..., None], 0, hidden), weight, bias)  # 0 * NaN is NaN
        for who, hidden, weight, bias in (
            ("student", student_hidden, student_weight, student_bias),
            ("teacher", teacher_hidden, teacher_weight, teacher_bias),
        )
        if hidden is not None and weight is not None
    }
    logits = {who: x.products(slice(None)).reshape(*ignored.shape, x.vocab) for who, x in layers.items()}
    made = jsd(logits["student"], logits.get("teacher", teacher_logits), **options)._asdict()
    for who, layer in layers.items():
        layer.backward(slice(None), made.pop(f"grad_{who}_logits").reshape(-1, layer.vocab))
        made |= {f"grad_{who}_{part}": getattr(layer, f"grad_{part}") for part in ("hidden", "weight", "bias")}
    return JsdResult(**made)


def jsd(
    student_logits: npt.ArrayLike,  # [..., V]
    teacher_logits: npt.ArrayLike | None = None,  # [..., V']
    *,
    teacher_topk: Any = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    temperature_squared: bool = False,
    target: npt.ArrayLike | None = None,  # [...]
    ignore_index: int = -100,
    token_weight: npt.ArrayLike | None = None,  # [...]
    reduction: str = "mean",
    normalizer: float | None = None,
    hard_weight: float = 0.0,
    vocab: int | None = None,
    grad_loss: npt.ArrayLike = 1.0,  # upstream gradient: a number, or [...] for reduction="none"
) -> JsdResult:
    """Loss and the gradients of the logits.

    Ignored tokens have 0 everywhere, whatever their other inputs hold.  A target outside [0, V) that is not
    ignore_index gives NaN.  Logits from index `vocab` on are in neither distribution.
    """
    z_all = np.asarray(student_logits, np.float64)
    shape, width = z_all.shape[:-1], z_all.shape[-1]
    n_tokens = int(np.prod(shape))
    size = width if vocab is None else vocab
    z = z_all.reshape(n_tokens, width)[:, :size]
    labels = np.zeros(n_tokens, np.int64) if target is None else np.asarray(target).reshape(-1).astype(np.int64)
    kept = np.ones(n_tokens, bool) if target is None else labels != ignore_index
    bad = kept & ((labels < 0) | (labels >= size))
    labels = np.where(kept & ~bad, labels, 0)
    tw = np.ones(n_tokens) if token_weight is None else np.asarray(token_weight, np.float64).reshape(-1)
    tw = np.where(bad, np.nan, tw)
    denominator = 1.0
    if reduction == "mean" and kept.any():
        denominator = float(kept.sum() if normalizer is None else normalizer)
    upstream = np.broadcast_to(np.asarray(grad_loss, np.float64), shape if reduction == "none" else ()).reshape(-1)
    row = np.broadcast_to(upstream / denominator, (n_tokens,)) * tw

    r = np.flatnonzero(kept)
    # Of a teacher with all logits the top-k is all of them.
    every = np.broadcast_to(np.arange(size), (n_tokens, size))
    indices, values, kind, rest = teacher_topk or (every, teacher_logits, "logits", "renormalised")
    values = np.asarray(values, np.float64)
    columns = values.shape[-1]
    indices = np.asarray(indices)
    indices = indices.reshape(n_tokens, indices.shape[-1])[r]
    u = values.reshape(n_tokens, columns)[r, : indices.shape[1]]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        rows = _soft(z[r] / temperature, indices, u, kind, rest, beta, temperature)
        factor = (1 - hard_weight) * (temperature**2 if temperature_squared else 1)
        loss_r, dz_r = factor * rows.loss, factor / temperature * rows.student
        if hard_weight > 0:
            d_ce = np.zeros_like(z[r])
            hard = reference.cross_entropy(
                z[r].__getitem__, d_ce.__setitem__, size, labels[r], ignore_index=-1, reduction="none"
            )
            loss_r, dz_r = loss_r + hard_weight * hard.loss, dz_r + hard_weight * d_ce
    token_loss, dz = np.zeros(n_tokens), np.zeros((n_tokens, width))
    token_loss[r] = loss_r * tw[r]
    dz[r, :size] = dz_r * row[r, None]
    du: Array | None = None
    if teacher_topk is None:
        du = np.zeros((n_tokens, columns))
        du[r, :size] = factor / temperature * rows.teacher * row[r, None]
        du = du.reshape(values.shape)
    loss = token_loss.reshape(shape) if reduction == "none" else token_loss.sum() / denominator
    distance = float(np.sqrt(rows.squares.mean())) if r.size else 0.0
    return JsdResult(
        np.asarray(loss), grad_student_logits=dz.reshape(z_all.shape), grad_teacher_logits=du, distance=distance
    )


def _log_softmax(z: Array) -> Array:
    shift = z - z.max(1, keepdims=True)
    return np.asarray(shift - np.log(np.exp(shift).sum(1, keepdims=True)))


def _soft(z: Array, indices: Any, values: Array, kind: str, rest: str, beta: float, temperature: float) -> _JsdRows:
    """The divergence of each row from logits over temperature, and its gradients by these and the teacher's values."""
    inside, i = np.zeros(z.shape, bool), np.arange(len(z))[:, None]
    inside[i, indices] = True
    lt = values / temperature if kind == "logits" else values
    if rest == "renormalised":  # both given that the next token is one of the K
        z, lt = np.where(inside, z, -np.inf), _log_softmax(lt)
    full = _log_softmax(z)
    ls = full[i, indices]
    if rest == "tail":  # one more outcome: any other token
        other = np.log(np.where(inside, 0, np.exp(full)).sum(1, keepdims=True))
        ls = np.concatenate([ls, other], 1)
        lt = np.concatenate([lt, np.log(np.maximum(0, 1 - np.exp(lt).sum(1, keepdims=True)))], 1)
    loss, by_s, by_t = _divergence(ls, lt, beta)
    dz = -np.exp(full) * by_s.sum(1, keepdims=True)
    dz[i, indices] += by_s[:, : indices.shape[1]]
    if rest == "tail":
        dz += np.where(inside | np.isneginf(other), 0, np.exp(full - other)) * by_s[:, -1:]
    d = lt - ls
    squares = np.where(np.isfinite(d), (np.exp(ls) + np.exp(lt)) / 2 * d**2, 0).sum(1)
    return _JsdRows(loss, dz, by_t - np.exp(lt) * by_t.sum(1, keepdims=True), squares)


def _divergence(ls: Array, lt: Array, beta: float) -> tuple[Array, Array, Array]:
    """The divergence of each row, and its derivatives by log s and log t, entries taken as independent."""
    s, t = np.exp(ls), np.exp(lt)
    if beta == 0:
        kl = np.where(t > 0, t * (lt - ls), 0)
        return kl.sum(1), -t, kl + t
    if beta == 1:
        kl = np.where(s > 0, s * (ls - lt), 0)
        return kl.sum(1), kl + s, -s
    lm = np.logaddexp(np.log1p(-beta) + ls, np.log(beta) + lt)
    from_s = np.where(s > 0, (1 - beta) * s * (ls - lm), 0)
    from_t = np.where(t > 0, beta * t * (lt - lm), 0)
    return (from_s + from_t).sum(1), from_s, from_t


Float = npt.NDArray[np.float32]


@dataclass(frozen=True)
class JsdCase(cases.Case):
    """One problem.  `vocab` is the number of entries that both models have; the options on logits are the student's.

    With `masked` entries, that many first ones have a bias of -inf in both models, and as many after them only in the
    student.
    """

    teacher_hidden: int = 0
    """The teacher's hidden size; 0: as the student's."""
    student: str = "hidden"
    """"hidden" for `linear_jsd`, "logits" for `jsd`."""
    teacher: str = "hidden"
    """"hidden", "logits", or a top-k of 8 with this rest: "tail", "truncated" or "renormalised"."""
    noise: float | None = None
    """How far the teacher's hidden states are off, if it is the student itself; None: it is a model of its own."""
    padding: tuple[int, int] = (0, 0)
    """Entries behind `vocab` in the student and in the teacher."""

    def __post_init__(self) -> None:
        if any(self.padding):
            object.__setattr__(self, "options", {**self.options, "vocab": self.vocab})


class JsdInputs(NamedTuple):
    """The arrays of one case; None where the case has no such array."""

    student_hidden: Float | None
    student_weight: Float | None
    student_bias: Float | None
    student_logits: Float | None
    teacher_hidden: Float | None
    teacher_weight: Float | None
    teacher_bias: Float | None
    teacher_logits: Float | None
    topk: tuple[npt.NDArray[np.int64], Float, str, str] | None
    target: npt.NDArray[np.int64] | None
    token_weight: Float | None
    grad_loss: Float


def make_inputs(case: JsdCase, seed: int = 0) -> JsdInputs:
    """Random inputs of `case`: hidden ~ N(0, 1), weight ~ N(0, logit_std / sqrt(H)), the rest as the case says."""
    rng = np.random.default_rng(seed)
    tokens, vocab = case.tokens, case.vocab

    def normal(*shape: int) -> Float:
        return rng.standard_normal(shape, dtype=np.float32)

    def head(size: int, padding: int) -> tuple[Float, Float]:
        return normal(tokens, size), normal(vocab + padding, size) * np.float32(case.logit_std / size**0.5)

    h, w = head(case.hidden, case.padding[0])
    x, v = head(case.teacher_hidden or case.hidden, case.padding[1])
    if case.noise is not None:
        x, v = h + normal(*h.shape) * np.float32(case.noise), w
    b = c = None
    if case.bias or case.masked or case.logit_offset:
        b = normal(len(w)) * np.float32(case.bias) + np.float32(case.logit_offset)
        c = normal(len(v)) * np.float32(case.bias)
        b[: 2 * case.masked] = -np.inf
        c[: case.masked] = -np.inf
    z = h @ w.T + (0 if b is None else b)
    u = x @ v.T + (0 if c is None else c)
    topk = None
    if case.teacher not in ("hidden", "logits"):
        u64 = u[:, :vocab].astype(np.float64) / case.options.get("temperature", 1.0)
        log_p = u64 - np.log(np.exp(u64 - u64.max(1, keepdims=True)).sum(1, keepdims=True)) - u64.max(1, keepdims=True)
        indices = np.argsort(-log_p, 1, kind="stable")[:, :8].astype(np.int64)
        topk = (indices, np.take_along_axis(log_p, indices, 1).astype(np.float32), "log_probs", case.teacher)
    target = None
    if case.ignored or "hard_weight" in case.options:
        target = rng.integers(2 * case.masked, vocab, size=tokens)
        ignore_some(case, target, rng)
    token_weight, _, grad_loss = draw_factors(case, rng)
    dense = case.teacher == case.student == "hidden"
    student: Any = (h, w, b, None) if case.student == "hidden" else (None, None, None, z)
    teacher: Any = (x, v, c, None) if dense else (None, None, None, u if topk is None else None)
    return JsdInputs(*student, *teacher, topk, target, token_weight, grad_loss)  # type: ignore[call-arg]


_case = partial(named_case, JsdCase)
_EVERYTHING = {"teacher_hidden": 40, "bias": True, "padding": (8, 24), "ignored": 0.3, "token_weight": True}
_EVERYTHING |= {"beta": 0.3, "temperature": 1.5, "temperature_squared": True, "hard_weight": 0.2, "normalizer": 50}
# `onchip check`: small enough for two CPU cores, awkward on purpose.  Small logits show padding mistakes that large
# ones hide; ragged sizes show masking mistakes; close models show cancellation.
CHECK_CASES = (
    _case("aligned", 64, 64, 512),
    _case("ragged", 61, 31, 1025, teacher_hidden=40),
    *(_case(f"beta {b}", 61, 31, 500, beta=b) for b in (0.0, 0.1, 0.9, 1.0)),
    _case("small logits", 61, 31, 1025, logit_std=0.02),
    *(_case(f"large logits, beta {b}", 61, 260, 500, logit_std=30.0, beta=b) for b in (0.0, 1.0)),
    _case("large logits, near models", 61, 260, 500, logit_std=30.0, noise=0.05),
    _case("offset 1e4", 61, 31, 500, logit_offset=1e4),
    *(_case(f"close models, beta {b}", 61, 40, 500, noise=0.01, beta=b) for b in (0.0, 0.5, 1.0)),
    _case("equal models", 61, 40, 500, noise=0.0),
    _case("gpt-2 vocab", 9, 31, 50257),
    _case("one class", 61, 31, 1),
    _case("sum", 61, 40, 500, reduction="sum"),
    _case("per token", 61, 40, 500, reduction="none"),
    _case("half ignored", 61, 40, 500, ignored=0.5),
    _case("all ignored", 61, 40, 500, ignored=1.0),
    _case("token weights", 61, 40, 500, token_weight=True),
    _case("bias", 61, 40, 500, bias=True),
    _case("masked vocab", 61, 40, 500, masked=150),
    _case("temperature", 61, 40, 500, temperature=2.0, temperature_squared=True),
    _case("hard labels", 61, 40, 500, temperature=2.0, hard_weight=0.3),
    _case("padded vocab", 61, 40, 500, padding=(24, 88)),
    _case("teacher's logits", 61, 40, 500, teacher="logits"),
    *(_case(f"top-k, {x}", 61, 40, 500, teacher=x, logit_std=3.0) for x in ("tail", "truncated", "renormalised")),
    *(_case(f"logits, beta {b}", 61, 31, 500, student="logits", teacher="logits", beta=b) for b in (0.0, 0.3, 1.0)),
    _case("everything", 61, 40, 500, **_EVERYTHING),
)
# What `onchip bench` runs: llama3.1-8b's head as both models, then models with hidden sizes of their own, named student
# and teacher.
SUITES = {
    "cpu": tuple(_case(f"cpu-beta-{b}", 512, 256, 8192, beta=b) for b in (0.5, 0.0, 1.0)),
    "cuda": (
        *(_case(f"llama3.1-8b-beta-{b}", 4096, 4096, 128256, beta=b) for b in (0.5, 0.0, 1.0)),
        _case("llama3.2-1b-llama3.1-8b", 4096, 2048, 128256, teacher_hidden=4096),
    ),
    "lengths": (_case("llama3.1-8b-lengths", 8192, 4096, 128256, beta=0.5),),
    "others": (
        _case("qwen3-0.6b-qwen3-8b", 4096, 1024, 151936, teacher_hidden=4096),
        _case("qwen3-8b-qwen3-32b", 4096, 4096, 151936, teacher_hidden=5120),
        _case("gemma3-1b-gemma3-4b", 4096, 1152, 262144, teacher_hidden=2560),
    ),
}


# Half the distance between neighbouring numbers, relative to them.
_ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12}

# Numbers smaller than these are this far apart, whatever their size.
_SMALLEST = {"float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24}


def limits(
    case: JsdCase, dtype: str, how: Mapping[str, Any], oracle: JsdResult, given: Mapping[str, Any]
) -> dict[str, tuple[Any, float]]:
    """The oracle's loss and gradients, and the limits of the relative errors."""
    of = bounds(case, dtype, oracle)
    made = {}
    for name, right in oracle._asdict().items():
        if right is None or name == "distance":
            continue
        limit, norm = of["loss" if name == "loss" else "gradient"], float(np.linalg.norm(right))
        if name != "loss" and norm > 0:
            limit += _SMALLEST[dtype] / 2 * float(np.sqrt(right.size)) / norm
        # For equal models everything must be exactly 0; the oracle's arithmetic gives 1e-17.
        made[name] = right, 0.0 if case.noise == 0 else limit
    return made


def bounds(case: JsdCase, dtype: str, oracle: JsdResult) -> dict[str, float]:
    """Limits of the relative errors, from float32's precision and the lengths of the sums.

    A logit is a sum of H products: its error is a random walk of H steps (H / 24 in units of variance) plus one
    rounding at its size.  The loss and its gradient are made of log t - log s, of root mean square `distance`, which
    has the error of two logits: the closer the models, the fewer of its digits are known.
    """
    eps = float(np.finfo(np.float32).eps)
    tau = float(case.options.get("temperature", 1.0))
    largest = abs(case.logit_offset) + case.logit_std * float(np.sqrt(2 * np.log(case.vocab + 1)))
    if case.student == "logits":
        logit = eps * (1 + largest) / tau
    else:
        logit = eps * (1 + largest + case.logit_std * float(np.sqrt(case.hidden / 24))) / tau
    logit *= 1 + (2 / oracle.distance if oracle.distance > 0 else 0)
    sums = eps * float(np.sqrt((case.tokens + case.vocab) / 24))
    loss = DEVIATIONS * (eps + logit)
    return {"loss": loss, "gradient": DEVIATIONS * (logit + sums) + (_ROUNDING[dtype] if dtype != "float32" else 0)}


plain_refusals = partial(kernel_refusals, "onchip.vocab.triton.setup:refusal")


def _keywords(inputs: JsdInputs) -> dict[str, Any]:
    topk = dict(zip(TopK._fields, inputs.topk or (), strict=False))
    return {"target": inputs.target, "token_weight": inputs.token_weight, **topk}


def _arguments(given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The op that is called, and its arguments, where a top-k teacher is one argument."""
    made = {name: x for name, x in given.items() if x is not None and name not in TopK._fields}
    if "indices" in given:
        made["teacher_topk"] = TopK(*(given[name] for name in TopK._fields))
    return "jsd" if "student_logits" in made else "linear_jsd", made


def _oracle(**given: Any) -> JsdResult:
    name, arguments = _arguments(given)
    return (jsd if name == "jsd" else linear_jsd)(**arguments)


def _constant_teacher(how: Mapping[str, Any], student_hidden: Any, teacher_logits: Any) -> bool:
    """The kernels give no gradient to logits that are a linear student's teacher."""
    return how["backend"] in ("triton", "mosaic_gpu") and student_hidden is not None and teacher_logits is not None


def _call(fw: Any, how: Mapping[str, Any], **given: Any) -> dict[str, Any]:
    name, arguments = _arguments(given)
    for weight in {"student_weight", "teacher_weight"} & set(arguments):
        if how.get("weight_layout") == "hv":
            arguments[weight] = arguments[weight].T
    constant = _constant_teacher(how, given["student_hidden"], given["teacher_logits"])
    teacher_grad = "teacher_topk" not in arguments and not constant
    return {"loss": op_in(fw, "linear_jsd", name)(**arguments, **how, teacher_grad=teacher_grad)}


def _plain(
    fw: Any,
    how: Mapping[str, Any],
    *,
    target: Any = None,
    token_weight: Any = None,
    normalizer: float | None = None,
    **given: Any,
) -> dict[str, Any]:
    xp, options = fw.xp, JsdOptions.of(OP, given)
    tau, hard = options.temperature, options.hard_weight

    def logits(model: str) -> Any:
        z = given[f"{model}_logits"]
        if z is None:
            z = fw.linear(*(given[f"{model}_{x}"] for x in ("hidden", "weight", "bias")))
        return z[..., : options.vocab]

    z = logits("student")
    ls = fw.log_softmax(z / tau, -1)
    if "indices" not in given:
        lt = fw.log_softmax(logits("teacher") / tau, -1)
    else:
        ls, lt = fw.take(ls, given["indices"]), fw.like(given["values"], z)
        if given["rest"] == "renormalised":
            ls, lt = fw.log_softmax(ls, -1), fw.log_softmax(lt, -1)
        elif given["rest"] == "tail":
            ls, lt = (xp.concatenate([x, xp.log1p(-xp.exp(x).sum(-1)[..., None])], -1) for x in (ls, lt))
    # For entries that both models exclude, a difference would be NaN.
    least = float(xp.finfo(z.dtype).min) / 2
    loss = options.soft_factor * plain_divergence(ls.clip(min=least), lt.clip(min=least), options.beta)
    kept = (z[..., 0] == z[..., 0]) if target is None else target != options.ignore_index
    if hard > 0:
        own = xp.where(kept, target, 0)[..., None]
        loss = loss - hard * fw.take(fw.log_softmax(z, -1), own)[..., 0]
    if token_weight is not None:
        loss = loss * fw.like(token_weight, z)
    return {"loss": plain_reduction(loss, kept, options.reduction, normalizer)}


def plain_divergence(ls: Any, lt: Any, beta: float) -> Any:
    """The divergence of each row of log-probabilities, the student's and the teacher's."""
    xp = adapter_of(ls).xp
    if beta == 0:
        return (xp.exp(lt) * (lt - ls)).sum(-1)
    if beta == 1:
        return (xp.exp(ls) * (ls - lt)).sum(-1)
    lm = xp.logaddexp(ls + math.log(1 - beta), lt + math.log(beta))
    return (1 - beta) * (xp.exp(ls) * (ls - lm)).sum(-1) + beta * (xp.exp(lt) * (lt - lm)).sum(-1)


CHECKER = Checker(
    names=JsdInputs._fields[:8],
    inputs=lambda case, dtype: make_inputs(case),
    oracle=_oracle,
    call=_call,
    cases=CHECK_CASES,
    refusals=lambda device, dtype, framework, given: {"auto": None},
    plain=_plain,
    keywords=_keywords,
    defaults={"torch": {"backend": "auto"}, "jax": {"backend": "auto"}},
    constant=lambda name, inputs, how: (
        name.startswith("teacher") and _constant_teacher(how, inputs.student_hidden, inputs.teacher_logits)
    ),
    limits=limits,
)
