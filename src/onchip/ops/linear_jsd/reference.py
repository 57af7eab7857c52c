"""The contract of linear_jsd and jsd in NumPy float64, with gradients: the oracle of every test."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onchip.oracle import reference
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
