"""The contract: the oracle in NumPy float64 with gradients, and named problems, with real models' sizes or awkward
numbers, on which tests, `onchip check` and `onchip bench` compare every backend with it.  No framework.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onchip.ops.linear_log_probs import LogProbs
from onchip.oracle import cases
from onchip.oracle.cases import MODELS, named_case, softmax_cases
from onchip.oracle.checks import Checker, adapter_of, kernel_refusals, op_in, plain_logits
from onchip.oracle.reference import Linear, Logits, blocks, transform, with_gradients


def linear_log_probs(
    hidden: npt.ArrayLike,  # [..., H]
    weight: npt.ArrayLike,  # [V, H]
    ids: npt.ArrayLike,  # [...] or [..., K]
    bias: npt.ArrayLike | None = None,  # [V]
    **options: Any,
) -> Any:
    """The fields of `LogProbs`, and grad_hidden, grad_weight and grad_bias; the options are those of
    `_log_probs`."""
    return _log_probs(Linear(hidden, weight, bias), np.shape(hidden)[:-1], ids, **options)


def log_probs(
    logits: npt.ArrayLike,  # [..., V]
    ids: npt.ArrayLike,  # [...] or [..., K]
    **options: Any,
) -> Any:
    """The fields of `LogProbs`, and grad_logits; the options are those of `_log_probs`."""
    return _log_probs(Logits(logits), np.shape(logits)[:-1], ids, **options)


def _log_probs(
    of: Linear | Logits,
    shape: tuple[int, ...],
    ids: npt.ArrayLike,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: npt.ArrayLike = 1.0,  # a number or [...]
    grad_log_prob: npt.ArrayLike = 1.0,  # upstream gradients: a number or [...] or [..., K]
    grad_entropy: npt.ArrayLike = 0.0,  # a number or [...]
    grad_lse: npt.ArrayLike = 0.0,  # a number or [...]
) -> Any:
    """The values, log_prob in the ids' shape and all others in the tokens', and the gradients of sum(grad_log_prob *
    log_prob) + sum(grad_entropy * entropy) + sum(grad_lse * lse).

    An ignored id has log_prob 0 and no gradient; a token whose ids are all ignored has top1 -1 and 0 in everything
    else, whatever its other inputs hold.  An id outside [0, V) that is not ignore_index has log_prob NaN, and its
    token's gradients are NaN, as on a GPU, where raising would have to wait for the device.
    """
    ids, vocab = np.asarray(ids), of.vocab
    n_tokens = int(np.prod(shape))
    y = ids.reshape(n_tokens, -1 if n_tokens else 1).astype(np.int64)
    tau, g_entropy, g_lse = (
        np.broadcast_to(np.asarray(x, np.float64), shape).reshape(-1) for x in (temperature, grad_entropy, grad_lse)
    )
    g_log_prob = np.broadcast_to(np.asarray(grad_log_prob, np.float64), ids.shape).reshape(y.shape)

    log_prob = np.zeros(y.shape)
    entropy, lse, mean_logits, log_sum_sq_probs = (np.zeros(n_tokens) for _ in range(4))
    top1 = np.full(n_tokens, -1)
    for r in blocks(np.flatnonzero((y != ignore_index).any(1)), vocab):
        counted = y[r] != ignore_index
        in_range = (y[r] >= 0) & (y[r] < vocab)
        column = np.where(in_range, y[r], 0)
        z, slope = transform(of.products(r), softcap, logit_scale, tau[r])

        shift = np.maximum(z.max(1), np.finfo(np.float64).min)
        e = np.exp(z - shift[:, None])
        p = e / e.sum(1)[:, None]
        # log1p of the others: a log-probability of -1e-12 keeps its digits.
        others = e.sum(1, where=np.arange(vocab) != z.argmax(1)[:, None])
        log_total = np.log1p(others)
        log_p = (z - shift[:, None]) - log_total[:, None]
        safe_log_p = np.where(p > 0, log_p, 0)
        lse[r] = shift + log_total
        top1[r] = z.argmax(1)
        entropy[r] = -(p * safe_log_p).sum(1)
        mean_logits[r] = z.mean(1)
        # In the same way.
        square = np.square(e).sum(1, where=np.arange(vocab) != z.argmax(1)[:, None])
        log_sum_sq_probs[r] = np.log1p(square) - 2 * log_total
        picked = np.take_along_axis(log_p, column, 1)
        log_prob[r] = np.where(counted, np.where(in_range, picked, np.nan), 0)

        g = np.where(counted, np.where(in_range, g_log_prob[r], np.nan), 0)
        dz = np.zeros_like(z)
        np.add.at(dz, (np.arange(len(r))[:, None], column), np.where(counted, g, 0))
        dz += p * (g_lse[r] - g.sum(1))[:, None] - g_entropy[r, None] * p * (safe_log_p + entropy[r, None])
        of.backward(r, dz * slope)
    by_token = (x.reshape(shape) for x in (entropy, lse, top1, mean_logits, log_sum_sq_probs))
    return with_gradients(LogProbs(log_prob.reshape(ids.shape), *by_token)._asdict(), of)


@dataclass(frozen=True)
class LogProbsCase(cases.Case):
    """One problem: its shape, what its numbers look like, and the options that it passes to the op.

    With hidden=0 it is a problem for log_probs: the logits are given.
    """

    ids: int = 0
    """K, ids per token; 0 for one, without a dimension of its own."""
    ignored_ids: float = 0.0
    """Fraction of the single ids that are ignore_index, besides those of ignored tokens."""


class LogProbsInputs(NamedTuple):
    """The arrays of one case, floats in float32; None where the case has no such array."""

    hidden: npt.NDArray[np.float32] | None  # [T, H]
    weight: npt.NDArray[np.float32] | None  # [V, H]
    ids: npt.NDArray[np.int64]  # [T] or [T, K]
    bias: npt.NDArray[np.float32] | None  # [V]
    temperature: npt.NDArray[np.float32] | None  # [T]
    grad_log_prob: npt.NDArray[np.float32]  # as ids
    grad_entropy: npt.NDArray[np.float32]  # [T]
    grad_lse: npt.NDArray[np.float32]  # [T]
    logits: npt.NDArray[np.float32] | None = None  # [T, V]


def make_inputs(case: LogProbsCase, seed: int = 0) -> LogProbsInputs:
    """Random inputs: those of linear_cross_entropy, whose target is the first id, and upstream gradients ~ N(0, 1).

    If tokens have several ids, every fourth one has its first id twice.
    """
    made = cases.make_inputs(case if case.hidden else replace(case, hidden=1), seed)
    rng = np.random.default_rng(seed + 1)
    ignore_index = case.options.get("ignore_index", -100)
    ids = made.target
    if case.ids:
        first = min(case.masked, case.vocab - 1)
        ids = rng.integers(first, case.vocab, size=(case.tokens, case.ids))
        ids[:, 0] = made.target
        ids[::4, case.ids - 1] = made.target[::4]
        ids[made.target == ignore_index] = ignore_index
        ids[rng.random(ids.shape) < case.ignored_ids] = ignore_index
    logits = None if case.hidden else _draw_logits(case, made.target, made.bias, rng)
    return LogProbsInputs(
        made.hidden if case.hidden else None,
        made.weight if case.hidden else None,
        ids.astype(np.int64),
        made.bias if case.hidden else None,
        made.temperature,
        rng.standard_normal(ids.shape, dtype=np.float32),
        rng.standard_normal(case.tokens, dtype=np.float32),
        rng.standard_normal(case.tokens, dtype=np.float32),
        logits,
    )


def _draw_logits(
    case: LogProbsCase, target: npt.NDArray[np.int64], bias: npt.NDArray[np.float32] | None, rng: np.random.Generator
) -> npt.NDArray[np.float32]:
    """[T, V] logits ~ N(0, logit_std), with the targets' raised as the case says, plus the bias, which may mask."""
    logits = rng.standard_normal((case.tokens, case.vocab), dtype=np.float32) * np.float32(case.logit_std)
    if case.target_prob is not None:
        logits[np.arange(case.tokens), target] = cases.target_logit(case)
    return logits if bias is None else logits + bias


_case = partial(named_case, LogProbsCase)


def _of_logits(name: str, tokens: int, hidden: int, vocab: int, **more: Any) -> LogProbsCase:
    return _case(f"{name}, logits", tokens, 0, vocab, **more)


_EVERYTHING: dict[str, Any] = {
    "ids": 3,
    "ignored": 0.3,
    "ignored_ids": 0.2,
    "token_temperature": True,
    "softcap": 15.0,
    "logit_scale": 0.5,
}
CHECK_CASES = (
    *softmax_cases(_case),
    _case("peaked among several", 127, 520, 2049, target_prob=0.999, ids=4),
    _case("two ids", 127, 64, 1000, ids=2),
    _case("top-32", 127, 64, 1000, ids=32, ignored_ids=0.2),
    _case("everything", 127, 64, 1000, bias=True, **_EVERYTHING),
    *softmax_cases(_of_logits),
    _of_logits("peaked among several", 127, 0, 2049, target_prob=0.999, ids=4),
    _of_logits("top-32", 127, 0, 1000, ids=32, ignored_ids=0.2),
    _of_logits("everything", 127, 0, 1000, **_EVERYTHING),
)
LLAMA = "llama3.1-8b"
# What `onchip bench` runs: a model's head, with entropy and without.
SUITES = {
    "cpu": (_case("cpu", 1024, 512, 16384), _case("cpu-entropy", 1024, 512, 16384, entropy=True)),
    "cuda": (_case(LLAMA, 8192, *MODELS[LLAMA]), _case(f"{LLAMA}-entropy", 8192, *MODELS[LLAMA], entropy=True)),
    "lengths": (_case(f"{LLAMA}-lengths", 8192, *MODELS[LLAMA]),),
    "others": tuple(_case(name, 8192, h, v) for name, (h, v) in MODELS.items() if name != LLAMA),
}


def plain_refusals(device: str, dtype: str, framework: str, given: Mapping[str, Any] = {}) -> dict[str, str | None]:
    """Why each backend can't serve a call, or None; cases without a hidden size are log_probs'."""
    of_logits = given.get("hidden", 1) == 0
    if framework == "jax":
        from onchip.vocab import jax_ways

        return (jax_ways.row_refusals_of if of_logits else jax_ways.refusals_of)(device, dtype, given)
    refusal = "onchip.kernels.triton.launch:device_refusal" if of_logits else "onchip.vocab.triton.setup:refusal"
    return kernel_refusals(refusal, device, dtype, framework, given)


def _call(
    fw: Any, how: Mapping[str, Any], hidden: Any, weight: Any, ids: Any, bias: Any, logits: Any, **keywords: Any
) -> dict[str, Any]:
    asked = ("entropy", "lse", "top1", "mean_logits", "log_sum_sq_probs")
    options = {**keywords, **dict.fromkeys(asked, True), **how}
    made: LogProbs[Any]
    if logits is not None:
        made = op_in(fw, "linear_log_probs", "log_probs")(logits, ids, **options)
    else:
        weight = weight.T if how.get("weight_layout") == "hv" else weight
        made = op_in(fw, "linear_log_probs")(hidden, weight, ids, bias, **options)
    return made._asdict()


def _plain(fw: Any, how: Mapping[str, Any], logits: Any = None, **given: Any) -> dict[str, Any]:
    entropy = how.get("entropy", True)
    if logits is None:
        return plain_linear_log_probs(**given, entropy=entropy)._asdict()
    options = {name: x for name, x in given.items() if x is not None}
    return plain_log_probs(logits, **options, entropy=entropy)._asdict()


def plain_linear_log_probs(hidden: Any, weight: Any, ids: Any, bias: Any = None, **options: Any) -> LogProbs[Any]:
    """The same written with the framework's own functions in hidden's dtype, logits and all."""
    return plain_log_probs(adapter_of(hidden).linear(hidden, weight, bias), ids, **options)


def plain_log_probs(
    logits: Any,
    ids: Any,
    *,
    ignore_index: int = -100,
    entropy: bool = True,
    **transform: Any,
) -> LogProbs[Any]:
    """log_probs, likewise written with the framework's own functions, in the logits' dtype."""
    fw = adapter_of(logits)
    xp = fw.xp
    z = plain_logits(logits, **transform)
    several = ids if ids.ndim == logits.ndim else ids[..., None]
    counted = several != ignore_index
    kept = counted.any(-1)
    log_p = fw.log_softmax(z, -1)
    picked = xp.where(counted, fw.take(log_p, xp.where(counted, several, 0)), 0)
    p = xp.exp(log_p)
    return LogProbs(
        picked.reshape(ids.shape),
        xp.where(kept, -(p * xp.where(p > 0, log_p, 0)).sum(-1), 0) if entropy else None,
        xp.where(kept, fw.logsumexp(z, -1), 0),
        xp.where(kept, z.argmax(-1), -1),
        xp.where(kept, z.mean(-1), 0),
        xp.where(kept, fw.logsumexp(2 * log_p, -1), 0),
    )


CHECKER = Checker(
    names=("hidden", "weight", "ids", "bias", "logits"),
    inputs=lambda case, dtype: make_inputs(case),
    oracle=lambda **given: (linear_log_probs if given.get("logits") is None else log_probs)(
        **{name: x for name, x in given.items() if x is not None}
    ),
    call=_call,
    cases=CHECK_CASES,
    hows=lambda fw: [{"entropy": x} for x in (False, True)],
    refusals=plain_refusals,
    plain=_plain,
    values=("log_prob", "entropy", "lse"),
)
