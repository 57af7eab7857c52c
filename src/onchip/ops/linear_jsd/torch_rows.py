"""Loss and gradients of rows of logits with PyTorch's own elementwise operations, on CPU and CUDA.

The formulas are in the package's docstring.  Nothing here synchronises a GPU.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Gradients = tuple[Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Loss:
    """The options that the rows need."""

    beta: float
    temperature: float
    temperature_squared: bool
    hard_weight: float
    topk_kind: str = ""
    topk_rest: str = ""

    @property
    def soft_factor(self) -> float:
        return (1 - self.hard_weight) * (self.temperature**2 if self.temperature_squared else 1.0)


def rows(
    loss: Loss,
    z: Tensor,  # [n, V] float32: the student's logits
    teacher: tuple[Tensor, ...],  # [n, V] float32 logits, or [n, K] int64 indices and float32 values
    label: Tensor,  # [n] int64
    *,
    want_student: bool,
    want_teacher: bool,
) -> Gradients:
    """The losses [n], and the gradients of z and of the teacher's logits, as wanted."""
    scaled = z if loss.temperature == 1 else z / loss.temperature
    if len(teacher) == 1:
        u = teacher[0] if loss.temperature == 1 else teacher[0] / loss.temperature
        ls, lt = torch.log_softmax(scaled, 1), torch.log_softmax(u, 1)
        del scaled, u
        value, dz, du = divergence(ls, lt, loss.beta, want_student, want_teacher)
        del ls, lt
    else:
        value, dz = _topk(loss, scaled, *teacher, want=want_student)
        du = None
    factor = loss.soft_factor
    value = value * factor
    if dz is not None:
        dz.mul_(factor / loss.temperature)
    if du is not None:
        du.mul_(factor / loss.temperature)
    if loss.hard_weight > 0:
        ce, d_ce = cross_entropy(z, label)
        value = value + loss.hard_weight * ce
        if dz is not None:
            dz.add_(d_ce, alpha=loss.hard_weight)
    return value, dz, du


def divergence(ls: Tensor, lt: Tensor, beta: float, want_s: bool, want_t: bool) -> Gradients:
    """The divergence of each row of log-probabilities, and its gradients by the logits that they come from.

    Works in `ls` and `lt`.
    """
    if beta == 1:
        value, dt, ds = divergence(lt, ls, 0.0, want_t, want_s)
        return value, ds, dt
    d = _difference(ls, lt)
    s, t = ls.exp_(), lt.exp_()
    if beta == 0:
        e = d.abs().neg_().expm1_()
        # Each term is t d - t + s, by expm1 from the smaller of s and t: it neither overflows nor cancels but in d.
        below = (e + 1).mul_(d).sub_(e).mul_(s)
        term = torch.where(d < 0, below, e.add_(d).mul_(t))
        del below, e
        term = torch.where(t == 0, s, term)  # 0 log 0 = 0
        value = term.clamp_(min=0).sum(1)
        del term
        # Not (t - s sum(t)): that would leave rounding errors for equal models.
        ds = s.sub_(t) if want_s else None
        if not want_t:
            return value, ds, None
        by_t = d.mul_(t).masked_fill_(t == 0, 0)
        return value, ds, by_t.sub_(t.mul_(by_t.sum(1, keepdim=True)))
    by_s, by_t = _mixture_terms(d, s, t, beta)
    value = by_s.add(by_t).clamp_(min=0).sum(1)
    ds = by_s.sub_(s.mul_(by_s.sum(1, keepdim=True))) if want_s else None
    dt = by_t.sub_(t.mul_(by_t.sum(1, keepdim=True))) if want_t else None
    return value, ds, dt


def _difference(ls: Tensor, lt: Tensor) -> Tensor:
    """log t - log s; 0 where both are 0."""
    return (lt - ls).masked_fill_((ls == -math.inf) & (lt == -math.inf), 0)


def _mixture_terms(d: Tensor, s: Tensor, t: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """(1 - beta) s log(s / m) and beta t log(t / m); works in d."""
    low = d.abs().neg_().expm1_()
    low = torch.where(d <= 0, low * beta, low.mul_(1 - beta)).log1p_()
    by_s = d.clamp(min=0).add_(low).mul_(s).mul_(beta - 1).masked_fill_(s == 0, 0)
    by_t = torch.sub(low, d.clamp_(max=0), out=low).mul_(t).mul_(-beta).masked_fill_(t == 0, 0)
    return by_s, by_t


def cross_entropy(z: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """The cross-entropy of each row, and its gradient."""
    top = z.amax(1, keepdim=True)
    e = (z - top).exp_()
    place = label[:, None]
    own = e.gather(1, place)
    others = e.scatter_(1, place, 0).sum(1, keepdim=True)
    below = top - z.gather(1, place)
    # log1p where the label is the largest, for the digits of a loss near 0.
    value = torch.where(below == 0, others.log1p(), below + (others + own).log())
    total = others + own
    # p_y - 1 as -(sum of the others), which keeps its digits where p_y is nearly 1.
    gradient = e.div_(total).scatter_(1, place, -others / total)
    return value[:, 0], gradient


def _topk(loss: Loss, z: Tensor, indices: Tensor, values: Tensor, *, want: bool) -> tuple[Tensor, Tensor | None]:
    """The losses and the gradient of z, both over temperature, with a top-k teacher."""
    if loss.topk_kind == "logits":
        values = values / loss.temperature
    if loss.topk_rest == "renormalised":
        ls, lt = torch.log_softmax(z.gather(1, indices), 1), torch.log_softmax(values, 1)
        value, ds, _ = divergence(ls, lt, loss.beta, want, False)
        return value, None if ds is None else torch.zeros_like(z).scatter_(1, indices, ds)
    if loss.topk_rest == "truncated":
        full = torch.log_softmax(z, 1)
        value, by_s = _sum_of_terms(full.gather(1, indices), values, loss.beta)
        if not want:
            return value, None
        gradient = full.exp_().mul_(-by_s.sum(1, keepdim=True))
        return value, gradient.scatter_add_(1, indices, by_s)
    lse = z.logsumexp(1, keepdim=True)
    outside = z.scatter(1, indices, -math.inf)
    other = outside.logsumexp(1, keepdim=True)
    # Of given log-probabilities: their sum may pass 1 by a rounding.
    given = values.logsumexp(1, keepdim=True).clamp(max=0)
    ls = torch.cat([z.gather(1, indices) - lse, other - lse], 1)
    lt = torch.cat([values, given.expm1().neg_().log_()], 1)
    value, ds, _ = divergence(ls, lt, loss.beta, want, False)
    if ds is None:
        return value, None
    share = outside.sub_(other.masked_fill(other == -math.inf, 0)).exp_()
    return value, share.mul_(ds[:, -1:]).scatter_(1, indices, ds[:, :-1])


def _sum_of_terms(ls: Tensor, lt: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The sum of the divergence's terms where the probabilities don't sum to 1, and its derivative by log s."""
    d = _difference(ls, lt)
    s, t = ls.exp(), lt.exp()
    if beta == 0:
        return d.mul_(t).masked_fill_(t == 0, 0).sum(1), t.neg_()
    if beta == 1:
        by_s = d.mul_(s).neg_().masked_fill_(s == 0, 0)
        return by_s.sum(1), by_s + s
    by_s, by_t = _mixture_terms(d, s, t, beta)
    return by_s.add(by_t).clamp_(min=0).sum(1), by_s
