"""The walk over chunks of tokens with PyTorch's own matrix products, on CPU and CUDA.

A chunk holds both models' logits of the whole vocabulary in float32.  Its losses and gradients are made in blocks of
rows, in place, by the formulas of the package's docstring.  Nothing here synchronises a GPU.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from onchip.ops.linear_jsd.memory import BLOCKS, SLAB
from onchip.ops.linear_jsd.spec import Options, TopK
from onchip.vocab.rows.torch import Rows
from onchip.vocab.torch.tiles import Tokens, product, spans

Gradients = tuple[Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Model:
    """A model's last layer in the products' dtype, or its logits; and which gradients are wanted."""

    hidden: Tensor | None  # [T, H]
    weight: Tensor | None  # [V', H]
    bias: Tensor | None  # [V'] float32
    logits: Tensor | None  # [T, V']
    grads: tuple[bool, bool, bool, bool]  # of each of these

    @property
    def any_grad(self) -> bool:
        return any(self.grads)


def _widen(x: Tensor) -> Tensor:
    """What a product reads: float32 on the CPU, whose 16-bit products round, and for float16, whose range is short."""
    return x.float() if x.device.type == "cpu" or x.dtype == torch.float16 else x


class _Side:
    """One model during a walk: the rows of its hidden states, its logits' buffer, its gradients so far."""

    def __init__(self, model: Model, tokens: Tokens, chunk: int, vocab: int) -> None:
        self.model, self.tokens, self.vocab = model, tokens, vocab
        some = model.logits if model.hidden is None else model.hidden
        assert some is not None
        self.buffer = some.new_empty((chunk, vocab), dtype=torch.float32)
        h, w, b, logits = (model.hidden, model.weight, model.bias, model.logits)
        self.made: list[Tensor | None] = [
            x.new_zeros(x.shape, dtype=x.dtype if x is logits else torch.float32) if x is not None and wanted else None
            for x, wanted in zip((h, w, b, logits), model.grads, strict=True)
        ]
        self.rows: Tensor | None = None

    def fill(self, start: int, stop: int) -> Tensor:
        """The logits of the computed tokens [start, stop)."""
        out = self.buffer[: stop - start]
        m = self.model
        if m.hidden is None:
            assert m.logits is not None
            Rows(m.logits[:, : self.vocab]).read(self.tokens, start, stop, out)
            return out
        assert m.weight is not None
        self.rows = _widen(self.tokens.rows(m.hidden, start, stop))
        step = SLAB if self.rows.dtype != m.weight.dtype else self.vocab
        for v0, v1 in spans(self.vocab, step):
            product(out[:, v0:v1], self.rows, _widen(m.weight[v0:v1]).t())
        if m.bias is not None:
            out.add_(m.bias[: self.vocab])
        return out

    def add(self, start: int, stop: int) -> None:
        """Add what the gradient of these tokens' logits, in the buffer, gives."""
        m, tokens, vocab = self.model, self.tokens, self.vocab
        g = self.buffer[: stop - start]
        grad_hidden, grad_weight, grad_bias, grad_logits = self.made
        if grad_logits is not None:
            Rows(grad_logits[:, :vocab]).write(tokens, start, stop, g)
        if grad_bias is not None:
            grad_bias[:vocab] += g.sum(0)
        if grad_hidden is None and grad_weight is None:
            return
        assert m.weight is not None
        assert self.rows is not None
        g = g.to(self.rows.dtype)
        step = SLAB if self.rows.dtype != m.weight.dtype else vocab
        if grad_hidden is not None:
            part = grad_hidden[start:stop] if tokens.index is None else torch.zeros_like(grad_hidden[: stop - start])
            for v0, v1 in spans(vocab, step):
                product(part, g[:, v0:v1], _widen(m.weight[v0:v1]), accumulate=True)
            if tokens.index is not None:
                grad_hidden.index_copy_(0, tokens.index[start:stop], part)
        if grad_weight is not None:
            product(grad_weight[:vocab], g.t(), self.rows, accumulate=True)


def walk(
    loss: Options,
    student: Model,
    teacher: Model | TopK,  # of [T, K] indices and values
    tokens: Tokens,
    *,
    row: Tensor,  # [n] float32: factor of each token's gradient
    vocab: int,
    chunk: int,
) -> tuple[Tensor, list[Tensor | None]]:
    """The losses of the computed tokens, without weights, and the gradients of both models' parameters that are wanted:
    of logits in their own dtype, of all else in float32."""
    n, label = tokens.number, tokens.label.clamp(min=0)  # an ignored one is in no place, and is computed all the same
    chunk = min(n, chunk)
    sides = [_Side(m, tokens, chunk, vocab) for m in (student, teacher) if isinstance(m, Model)]
    losses = row.new_empty(n)
    want = [*(side.model.any_grad for side in sides), False]
    block = -(-chunk // BLOCKS)
    for start, stop in spans(n, chunk):
        filled = [side.fill(start, stop) for side in sides]
        for b0, b1 in spans(stop - start, block):
            t0, t1 = start + b0, start + b1
            given = filled[1][b0:b1] if isinstance(teacher, Model) else _topk_rows(teacher, tokens, t0, t1, vocab)
            value, *gradients = rows(
                loss, filled[0][b0:b1], given, label[t0:t1], want_student=want[0], want_teacher=want[1]
            )
            losses[t0:t1] = value
            for into, g in zip(filled, gradients, strict=False):
                if g is not None:
                    torch.mul(g, row[t0:t1, None], out=into[b0:b1])
                    if tokens.kept is not None:  # an infinite divergence times 0 is NaN
                        into[b0:b1].masked_fill_(~tokens.kept[t0:t1, None], 0)
            del value, gradients
        for side in sides:
            if side.model.any_grad:
                side.add(start, stop)
    return losses, [x for side in sides for x in side.made]


def _topk_rows(topk: TopK, tokens: Tokens, start: int, stop: int, vocab: int) -> TopK:
    """Those of the computed tokens [start, stop); NaN where an index is out of range: on the CPU that has raised."""
    ids, values = (
        x[start:stop] if tokens.index is None else x.index_select(0, tokens.index[start:stop]) for x in topk[:2]
    )
    ids = ids.to(torch.int64)
    bad = (ids < 0) | (ids >= vocab)
    values = values.float().masked_fill(bad, math.nan)
    return topk._replace(indices=ids.masked_fill(bad, 0), values=values)


# ------------------------------------------------------------------------------------------------------ rows of logits


def rows(
    loss: Options,
    z: Tensor,  # [n, V] float32: the student's logits
    teacher: Tensor | TopK,  # [n, V] float32 logits, or of [n, K] int64 indices and float32 values
    label: Tensor,  # [n] int64
    *,
    want_student: bool,
    want_teacher: bool,
) -> Gradients:
    """The losses [n], and the gradients of z and of the teacher's logits, as wanted."""
    scaled = z if loss.temperature == 1 else z / loss.temperature
    if isinstance(teacher, Tensor):
        u = teacher if loss.temperature == 1 else teacher / loss.temperature
        ls, lt = torch.log_softmax(scaled, 1), torch.log_softmax(u, 1)
        del scaled, u
        value, dz, du = divergence(ls, lt, loss.beta, want_student, want_teacher)
        del ls, lt
    else:
        value, dz = _topk(loss, scaled, teacher, want=want_student)
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


def _topk(loss: Options, z: Tensor, teacher: TopK, *, want: bool) -> tuple[Tensor, Tensor | None]:
    """The losses and the gradient of z, both over temperature, with a top-k teacher."""
    indices, values, kind, rest = teacher
    if kind == "logits":
        values = values / loss.temperature
    if rest == "renormalised":
        ls, lt = torch.log_softmax(z.gather(1, indices), 1), torch.log_softmax(values, 1)
        value, ds, _ = divergence(ls, lt, loss.beta, want, False)
        return value, None if ds is None else torch.zeros_like(z).scatter_(1, indices, ds)
    if rest == "truncated":
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
