"""The contract of linear_jsd and jsd in NumPy float64, with gradients: the oracle of every test."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onchip.oracle import reference
from onchip.oracle.reference import Array, Linear


class Result(NamedTuple):
    """Loss and gradients.  Gradients of what wasn't given are None."""

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
    """Root mean square of log t - log s, each entry weighted by its probability: what rounding of logits is held to."""


class _Rows(NamedTuple):
    loss: Array  # [n]
    student: Array  # [n, V] gradient of the student's logits
    teacher: Array | None  # [n, V] gradient of the teacher's, if it has logits
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
) -> Result:
    """Loss and the gradients of sum(grad_loss * loss), all in float64; the options are those of `jsd`."""
    ignored = np.zeros(np.shape(student_hidden)[:-1], bool)
    if options.get("target") is not None:
        ignored = np.asarray(options["target"]) == options.get("ignore_index", -100)

    def head(hidden: Any, weight: Any, bias: Any) -> tuple[Linear, Array]:
        """The layer and its logits."""
        layer = Linear(np.where(ignored[..., None], 0, hidden), weight, bias)  # 0 * NaN is NaN
        return layer, layer.products(slice(None)).reshape(*ignored.shape, layer.vocab)

    def gradients(who: str, layer: Linear, bias: Any, dz: Array | None) -> dict[str, Array | None]:
        assert dz is not None
        layer.backward(slice(None), dz.reshape(-1, layer.vocab))
        made = {f"grad_{who}_hidden": layer.grad_hidden, f"grad_{who}_weight": layer.grad_weight}
        return made | {f"grad_{who}_bias": None if bias is None else layer.grad_bias}

    own, z = head(student_hidden, student_weight, student_bias)
    if teacher_hidden is None:
        r = jsd(z, teacher_logits, **options)
        teacher = {"grad_teacher_logits": r.grad_teacher_logits}
    else:
        other, u = head(teacher_hidden, teacher_weight, teacher_bias)
        r = jsd(z, u, **options)
        teacher = gradients("teacher", other, teacher_bias, r.grad_teacher_logits)
    student = gradients("student", own, student_bias, r.grad_student_logits)
    return Result(r.loss, **student, **teacher, distance=r.distance)


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
) -> Result:
    """Loss and the gradients of the logits.

    Ignored tokens give 0 everywhere, whatever their other inputs hold.  A target outside [0, V) that is not
    ignore_index gives NaN.  Logits from `vocab` on are out of both distributions.
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
    topk = None
    u = None
    if teacher_topk is not None:
        indices, values, kind, rest = teacher_topk
        k = np.asarray(indices).shape[-1]
        topk = (np.asarray(indices).reshape(-1, k)[r], np.asarray(values, np.float64).reshape(-1, k)[r], kind, rest)
    else:
        u_all = np.asarray(teacher_logits, np.float64)
        u = u_all.reshape(n_tokens, u_all.shape[-1])[r, :size]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        rows = _soft(z[r] / temperature, None if u is None else u / temperature, topk, beta, temperature)
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
    if rows.teacher is not None:
        du = np.zeros((n_tokens, u_all.shape[-1]))
        du[r, :size] = factor / temperature * rows.teacher * row[r, None]
        du = du.reshape(u_all.shape)
    loss = token_loss.reshape(shape) if reduction == "none" else token_loss.sum() / denominator
    distance = float(np.sqrt(rows.squares.mean())) if r.size else 0.0
    return Result(
        np.asarray(loss), grad_student_logits=dz.reshape(z_all.shape), grad_teacher_logits=du, distance=distance
    )


def _log_softmax(z: Array) -> Array:
    shift = z - z.max(1, keepdims=True)
    return np.asarray(shift - np.log(np.exp(shift).sum(1, keepdims=True)))


def _soft(z: Array, u: Array | None, topk: Any, beta: float, temperature: float) -> _Rows:
    """The divergence of each row from logits over temperature, and its gradients by these."""
    n, size = z.shape
    if topk is None:
        assert u is not None
        ls, lt = _log_softmax(z), _log_softmax(u)
        loss, by_s, by_t = _divergence(ls, lt, beta)
        return _Rows(loss, _centred(ls, by_s), _centred(lt, by_t), _squares(ls, lt))
    indices, values, kind, rest = topk
    i = np.arange(n)[:, None]
    values = values / temperature if kind == "logits" else values
    inside = np.zeros((n, size), bool)
    inside[i, indices] = True
    dz = np.zeros((n, size))
    if rest == "renormalised":  # both given that the next token is one of the K
        ls, lt = _log_softmax(z[i, indices]), _log_softmax(values)
        loss, by_s, _ = _divergence(ls, lt, beta)
        dz[i, indices] = _centred(ls, by_s)
    elif rest == "truncated":  # the sum over the K entries alone
        full, lt = _log_softmax(z), values
        ls = full[i, indices]
        loss, by_s, _ = _divergence(ls, lt, beta)
        dz[i, indices] = by_s
        dz -= np.exp(full) * by_s.sum(1, keepdims=True)
    else:  # one more outcome: any other token
        full = _log_softmax(z)
        other = np.log(np.where(inside, 0, np.exp(full)).sum(1, keepdims=True))
        ls = np.concatenate([full[i, indices], other], 1)
        lt = np.concatenate([values, np.log(np.maximum(0, 1 - np.exp(values).sum(1, keepdims=True)))], 1)
        loss, by_s, _ = _divergence(ls, lt, beta)
        by_event = _centred(ls, by_s)
        share = np.where(np.isneginf(other), 0, np.exp(full - other))
        dz = np.where(inside, 0, share * by_event[:, -1:])
        dz[i, indices] = by_event[:, :-1]
    return _Rows(loss, dz, None, _squares(ls, lt))


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


def _centred(log_p: Array, by_log_p: Array) -> Array:
    """The derivative by logits, from that by the log-probabilities that they give."""
    return np.asarray(by_log_p - np.exp(log_p) * by_log_p.sum(1, keepdims=True))


def _squares(ls: Array, lt: Array) -> Array:
    d = lt - ls
    return np.asarray(np.where(np.isfinite(d), (np.exp(ls) + np.exp(lt)) / 2 * d**2, 0).sum(1))
