"""Loss and gradients of rows of logits in plain JAX.  The formulas are in the package's docstring."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from onchip.vocab.xla.loss import TokenLoss
from onchip.vocab.xla.tiles import Columns, Softmax, Wanted, logits_gradient

Array = jax.Array


@dataclass(frozen=True)
class Loss:
    """The options that the rows need."""

    beta: float
    temperature: float
    temperature_squared: bool
    hard_weight: float
    topk_kind: str
    topk_rest: str


def rows(loss: Loss, z: Array, teacher: tuple[Array, ...], label: Array) -> tuple[Array, Array, Array | None]:
    """The losses [n] and the gradients of the logits; what isn't used, XLA leaves out.

    z is [n, V] float32; `teacher` is [n, V] float32 logits, or [n, K] int32 indices and float32 values.
    """
    scaled = z / loss.temperature
    du = None
    if len(teacher) == 1:
        ls, lt = jax.nn.log_softmax(scaled), jax.nn.log_softmax(teacher[0] / loss.temperature)
        value, dz, du = divergence(ls, lt, loss.beta)
    else:
        value, dz = _topk(loss, scaled, *teacher)
    factor = (1 - loss.hard_weight) * (loss.temperature**2 if loss.temperature_squared else 1.0)
    value, dz = value * factor, dz * (factor / loss.temperature)
    if du is not None:
        du = du * (factor / loss.temperature)
    if loss.hard_weight > 0:
        ce, d_ce = cross_entropy(z, label)
        value, dz = value + loss.hard_weight * ce, dz + loss.hard_weight * d_ce
    return value, dz, du


def divergence(ls: Array, lt: Array, beta: float) -> tuple[Array, Array, Array]:
    """The divergence of each row of log-probabilities, and its gradients by the logits that they come from."""
    if beta == 1:
        value, dt, ds = divergence(lt, ls, 0.0)
        return value, ds, dt
    d = _difference(ls, lt)
    s, t = jnp.exp(ls), jnp.exp(lt)
    if beta == 0:
        e = jnp.expm1(-jnp.abs(d))
        # Each term is t d - t + s, by expm1 from the smaller of s and t: it neither overflows nor cancels but in d.
        term = jnp.where(t == 0, s, jnp.where(d < 0, s * (d * (1 + e) - e), t * (e + d)))
        by_t = jnp.where(t == 0, 0, t * d)
        # Not (t - s sum(t)): that would leave rounding errors for equal models.
        return jnp.maximum(term, 0).sum(1), s - t, by_t - t * by_t.sum(1, keepdims=True)
    by_s, by_t = _mixture_terms(d, s, t, beta)
    value = jnp.maximum(by_s + by_t, 0).sum(1)
    return value, by_s - s * by_s.sum(1, keepdims=True), by_t - t * by_t.sum(1, keepdims=True)


def _difference(ls: Array, lt: Array) -> Array:
    """log t - log s; 0 where both are 0."""
    return jnp.where((ls == -jnp.inf) & (lt == -jnp.inf), 0, lt - ls)


def _mixture_terms(d: Array, s: Array, t: Array, beta: float) -> tuple[Array, Array]:
    """(1 - beta) s log(s / m) and beta t log(t / m)."""
    low = jnp.log1p(jnp.where(d <= 0, beta, 1 - beta) * jnp.expm1(-jnp.abs(d)))
    by_s = jnp.where(s == 0, 0, (beta - 1) * s * (low + jnp.maximum(d, 0)))
    by_t = jnp.where(t == 0, 0, -beta * t * (low - jnp.minimum(d, 0)))
    return by_s, by_t


def cross_entropy(z: Array, label: Array) -> tuple[Array, Array]:
    """The cross-entropy of each row, and its gradient."""
    ids, whole, loss = label[:, None], Columns(0, z.shape[1]), TokenLoss()
    stats = Softmax.empty(ids, Wanted()).absorb(z, whole, ids).complete(ids, z.shape[1])
    gradient = loss.gradient(stats, jnp.ones(z.shape[0], jnp.float32), z.shape[1])
    return loss.value(stats), logits_gradient(z, None, stats, gradient, ids, whole)


def _topk(loss: Loss, z: Array, indices: Array, values: Array) -> tuple[Array, Array]:
    """The losses and the gradient of z, both over temperature, with a top-k teacher."""
    rows = jnp.arange(z.shape[0])[:, None]
    if loss.topk_kind == "logits":
        values = values / loss.temperature
    chosen = jnp.take_along_axis(z, indices, 1)
    if loss.topk_rest == "renormalised":
        value, ds, _ = divergence(jax.nn.log_softmax(chosen), jax.nn.log_softmax(values), loss.beta)
        return value, jnp.zeros_like(z).at[rows, indices].set(ds)
    if loss.topk_rest == "truncated":
        full = jax.nn.log_softmax(z)
        value, by_s = _sum_of_terms(jnp.take_along_axis(full, indices, 1), values, loss.beta)
        return value, (jnp.exp(full) * -by_s.sum(1, keepdims=True)).at[rows, indices].add(by_s)
    lse = jax.nn.logsumexp(z, 1, keepdims=True)
    outside = z.at[rows, indices].set(-jnp.inf)
    other = jax.nn.logsumexp(outside, 1, keepdims=True)
    # Of given log-probabilities: their sum may pass 1 by a rounding.
    given = jnp.minimum(jax.nn.logsumexp(values, 1, keepdims=True), 0)
    ls = jnp.concatenate([chosen - lse, other - lse], 1)
    lt = jnp.concatenate([values, jnp.log(-jnp.expm1(given))], 1)
    value, ds, _ = divergence(ls, lt, loss.beta)
    share = jnp.exp(outside - jnp.where(other == -jnp.inf, 0, other))
    return value, (share * ds[:, -1:]).at[rows, indices].set(ds[:, :-1])


def _sum_of_terms(ls: Array, lt: Array, beta: float) -> tuple[Any, Any]:
    """The sum of the divergence's terms where the probabilities don't sum to 1, and its derivative by log s."""
    d = _difference(ls, lt)
    s, t = jnp.exp(ls), jnp.exp(lt)
    if beta == 0:
        return jnp.where(t == 0, 0, t * d).sum(1), -t
    if beta == 1:
        by_s = jnp.where(s == 0, 0, -s * d)
        return by_s.sum(1), by_s + s
    by_s, by_t = _mixture_terms(d, s, t, beta)
    return jnp.maximum(by_s + by_t, 0).sum(1), by_s
