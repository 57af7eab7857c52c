"""Loss and gradients of rows of logits by the package's formulas, once for PyTorch and JAX.

`Arrays` holds the functions that differ between the frameworks.  PyTorch runs this step by step, so arrays that aren't
needed any more are deleted to free memory; XLA doesn't compute unused arrays.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from onchip.frontend.topk import TopK
from onchip.ops.linear_jsd import JsdOptions

Array = Any


class Arrays(NamedTuple):
    """The functions that the formulas need from a framework; all except `xp` work on the rows of matrices."""

    xp: Any
    """The module of functions that have the same names in both frameworks."""
    log_softmax: Callable[[Array], Array]
    logsumexp: Callable[[Array], Array]
    """[n, 1]."""
    take: Callable[[Array, Array], Array]
    """`take(x, indices)`: the entries of each row."""
    put: Callable[[Array, Array, Any], Array]
    """`put(x, indices, values)`: a copy of x with these entries."""
    sum: Callable[[Array], Array] = lambda x: x.sum(1)
    labelled: Callable[[Array, Array], tuple[Array, Array, Array]] | None = None
    """`labelled(x, indices)`, for one index of each row: the log-softmax, its entry there, and the sum of the softmax's
    others, [n, 1]; None where other functions make these."""
    of_few: "Arrays | None" = None
    """If devices have parts of each row: the same for rows of K numbers, which all devices have."""


class DivergenceGradients(NamedTuple):
    """Each row's loss, and the gradients by both models' logits; None if not wanted."""

    value: Array  # [n]
    student: Array | None
    teacher: Array | None


def rows(
    of: Arrays,
    options: JsdOptions,
    z: Array,  # [n, V] float32: the student's logits
    teacher: Array | TopK[Array],  # [n, V] float32 logits, or a TopK of [n, K] indices and float32 values
    label: Array,  # [n], in [0, V)
    want: tuple[bool, bool] = (True, True),
) -> DivergenceGradients:
    """The losses, and the gradients by both models' logits that are wanted."""
    tau, factor = options.temperature, options.soft_factor
    if isinstance(teacher, TopK):
        value, gradient = _topk(of, options, z if tau == 1 else z / tau, teacher)
        made = DivergenceGradients(value, gradient() if want[0] else None, None)
    else:

        def log_probs(x: Array) -> Array:
            return of.log_softmax(x if tau == 1 else x / tau)

        made = divergence(of, log_probs(z), log_probs(teacher), options.beta, want)  # no names keep these alive
    value = made.value * factor
    dz, du = (None if g is None else g * (factor / tau) for g in made[1:])
    if options.hard_weight > 0:
        del made
        ce, d_ce = _cross_entropy(of, z, label)
        value = value + options.hard_weight * ce
        dz = None if dz is None else dz + options.hard_weight * d_ce
    return DivergenceGradients(value, dz, du)


def _cross_entropy(of: Arrays, z: Array, label: Array) -> tuple[Array, Array]:
    """The cross-entropy of each row, and its gradient."""
    xp, ids = of.xp, label[:, None]
    if of.labelled is None:
        full = of.log_softmax(z)
        own, p = of.take(full, ids), of.put(xp.exp(full), ids, 0)
        del full
        others = of.sum(p)[:, None]
    else:
        full, own, others = of.labelled(z, ids)
        p = xp.exp(full)
    # Where the label leads, the sum of the others has more digits of both.
    own = xp.where(others < 0.5, xp.log1p(-others.clip(max=0.5)), own)
    return -own[:, 0], of.put(p, ids, -others)


def divergence(
    of: Arrays, ls: Array, lt: Array, beta: float, want: tuple[bool, bool] = (True, True)
) -> DivergenceGradients:
    """The divergence of each row of log-probabilities, and its gradients by the logits that they come from."""
    if beta == 1:
        value, dt, ds = divergence(of, lt, ls, 0.0, want[::-1])
        return DivergenceGradients(value, ds, dt)
    xp = of.xp
    d, s, t = _difference(xp, ls, lt), xp.exp(ls), xp.exp(lt)
    del ls, lt
    if beta > 0:
        by_s, by_t = _mixture_terms(xp, d, s, t, beta)
        del d
        value = of.sum((by_s + by_t).clip(min=0))
        ds, dt = (
            (_centred(of, by_s, s) if want[0] else None),
            (_centred(of, by_t, t) if want[1] else None),
        )
        return DivergenceGradients(value, ds, dt)
    e = xp.expm1(-abs(d))
    # Each term is t d - t + s, by expm1 from the smaller of s and t: it doesn't overflow, and cancels only in d.
    term = xp.where(d < 0, s * (d * (1 + e) - e), t * (e + d))
    del e
    value = of.sum(xp.where(t == 0, s, term).clip(min=0))  # 0 log 0 = 0
    del term
    # Not (t - s sum(t)): that would leave rounding errors for equal models.
    ds = s - t if want[0] else None
    return DivergenceGradients(value, ds, _centred(of, xp.where(t == 0, 0, t * d), t) if want[1] else None)


def _difference(xp: Any, ls: Array, lt: Array) -> Array:
    """log t - log s; 0 where both are 0."""
    return xp.where((ls == -math.inf) & (lt == -math.inf), 0, lt - ls)


def _centred(of: Arrays, by_log_p: Array, p: Array) -> Array:
    """The derivative with respect to logits, from that with respect to log-probabilities."""
    return by_log_p - p * of.sum(by_log_p)[:, None]


def _mixture_terms(xp: Any, d: Array, s: Array, t: Array, beta: float) -> tuple[Array, Array]:
    """(1 - beta) s log(s / m) and beta t log(t / m)."""
    e = xp.expm1(-abs(d))
    low = xp.log1p(xp.where(d <= 0, beta * e, (1 - beta) * e))  # PyTorch would make float32 from two numbers
    del e
    by_s = xp.where(s == 0, 0, (beta - 1) * s * (low + d.clip(min=0)))
    by_t = xp.where(t == 0, 0, -beta * t * (low - d.clip(max=0)))
    return by_s, by_t


def _topk(of: Arrays, options: JsdOptions, z: Array, teacher: TopK[Array]) -> tuple[Array, Callable[[], Array]]:
    """The losses with a top-k teacher, and a function that makes z's gradient; z is over temperature."""
    xp, ids, rest = of.xp, teacher.indices, None
    full = z if teacher.rest == "renormalised" else of.log_softmax(z)
    if teacher.rest == "tail":
        # From log-probabilities, since the difference of two log-sum-exps of logits has the error of both.
        outside = of.put(full, ids, -math.inf)
        rest = of.logsumexp(outside)
    value, at_ids, factor = topk_gradient(of.of_few or of, options, teacher, of.take(full, ids), rest)

    def gradient() -> Array:
        if teacher.rest == "renormalised":
            return of.put(xp.zeros_like(z), ids, at_ids)
        p = xp.exp(full if rest is None else outside - xp.where(rest == -math.inf, 0, rest))
        return of.put(p * factor[:, None], ids, at_ids)

    return value, gradient


def _topk_terms(
    of: Arrays, options: JsdOptions, teacher: TopK[Array], ls: Array, rest: Array | None
) -> tuple[Array, Array]:
    """The losses with a top-k teacher, given the student's log-probabilities of the K entries, [n, K], and with a tail
    that of all others together, [n, 1].

    Also their derivatives: by the logits that these come from, with a tail [n, K + 1]; truncated, by log-probabilities.
    """
    xp, beta, values = of.xp, options.beta, teacher.values
    if teacher.kind == "logits":
        values = values / options.temperature
    if teacher.rest == "truncated":
        return _sum_of_terms(xp, ls, values, beta)
    if teacher.rest == "renormalised":
        ls, lt = of.log_softmax(ls), of.log_softmax(values)
    else:
        # The probabilities that the caller gives may add up to more than 1 by a rounding.
        given = of.logsumexp(values).clip(max=0)
        ls, lt = xp.concatenate([ls, rest], 1), xp.concatenate([values, xp.log(-xp.expm1(given))], 1)
    value, ds, _ = divergence(of, ls, lt, beta)
    return value, ds


def topk_gradient(
    of: Arrays, options: JsdOptions, teacher: TopK[Array], ls: Array, rest: Array | None
) -> tuple[Array, Array, Array]:
    """The losses with a top-k teacher, given the student's log-probabilities of the K entries, [n, K], and with a tail
    that of all others together, [n, 1].  Also the gradients by logits at the K entries, [n, K], and a factor [n] of
    those at all others: of their probabilities or, with a tail, of their shares of the others' probability.
    """
    value, at_ids = _topk_terms(of, options, teacher, ls, rest)
    factor = of.xp.zeros_like(value)
    if teacher.rest == "tail":
        factor, at_ids = at_ids[:, -1], at_ids[:, :-1]
    elif teacher.rest == "truncated":
        factor = -at_ids.sum(1)
        at_ids = of.xp.exp(ls) * factor[:, None] + at_ids
    return value, at_ids, factor


def _sum_of_terms(xp: Any, ls: Array, lt: Array, beta: float) -> tuple[Array, Array]:
    """The sum of the divergence's terms where the probabilities don't sum to 1, and its derivative by log s."""
    d, s, t = _difference(xp, ls, lt), xp.exp(ls), xp.exp(lt)
    if beta == 0:
        return xp.where(t == 0, 0, t * d).sum(1), -t
    if beta == 1:
        by_s = xp.where(s == 0, 0, -s * d)
        return by_s.sum(1), by_s + s
    by_s, by_t = _mixture_terms(xp, d, s, t, beta)
    return (by_s + by_t).clip(min=0).sum(1), by_s


# ---------------------------------------------------------------------------------------------- what kernels compute

NEAR = 0.75
"""|log2(t / s)| counts as near 0 below this: there a term of the loss would be a difference of larger ones, so a series
replaces it."""


@lru_cache(maxsize=64)
def nearly_equal(beta: float) -> list[float]:
    """Coefficients c of a term of the loss where both models' probabilities, p and q, are nearly equal.

    With x = log2(q / p), |x| < NEAR, the term is log(2) p x^2 (c[0] + c[1] x + ...), with an error of at most 1e-6.  p
    is the student's and q the teacher's, except for beta 0, where p is the teacher's.
    """

    def ratio(x: Any) -> Any:
        d = x * math.log(2)
        if beta in (0, 1):
            term = np.expm1(d) - d
        else:
            log_p = -np.log1p(beta * np.expm1(d))  # over the mixture
            term = (1 - beta) * log_p + beta * np.exp(d) * (log_p + d)
        return term / (math.log(2) * x**2)

    # Of an odd degree: the nodes keep away from 0.
    fit = np.polynomial.Chebyshev.interpolate(ratio, 5, domain=[-NEAR, NEAR])
    # As many digits as float32 has: the last ones of a float64 depend on the CPU, and they are constants of kernels.
    return [float(f"{c:.8g}") for c in fit.convert(kind=np.polynomial.Polynomial).coef]
