"""The computation of linear_cross_entropy with PyTorch's own matrix products, tile by tile, on CPU and CUDA.

Three walks over the [tokens, vocab] matrix: `forward_only`, `stash` and `recompute`.  A walk holds one tile of logits
at a time and works in it in place.  Nothing here synchronises a GPU, unless values are to be checked.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onchip.ops.linear_cross_entropy.spec import OP, Config

# Where every logit so far is -inf, the running maximum is this: finite, so that a difference of two is never NaN.
_LOWEST = torch.finfo(torch.float32).min / 4
# float16 can't hold a gradient of 1e-8: rows of the softmax gradient are scaled to about this before a product.
_FLOAT16_ROW = 256.0


@dataclass(frozen=True)
class Head:
    """The linear layer in the products' dtype, and what happens to its logits."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V] float32
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float

    @property
    def vocab(self) -> int:
        return self.weight.shape[0]


@dataclass(frozen=True)
class Tokens:
    """The n tokens that are computed: on the CPU those that are not ignored, elsewhere all T."""

    index: Tensor | None  # [n] int64 rows of hidden; None: all of them
    kept: Tensor | None  # [T] bool, False for ignored tokens that are computed all the same
    bad: Tensor | None  # [T] bool, True where the target is out of range; None where that raised
    label: Tensor  # [n] int64 in [0, V)
    weight: Tensor  # [n] float32: 0 for ignored tokens, NaN for bad ones
    temperature: Tensor | float  # [n, 1] float32, or one for all
    inverse_count: Tensor  # 0-d float32: 1 / what the mean divides by

    def rows(self, hidden: Tensor, start: int, stop: int, *, masked: bool = True) -> Tensor:
        """Rows [start, stop) of the computed tokens' hidden states, in the dtype that the products read."""
        if self.index is not None:
            return _widen(hidden.index_select(0, self.index[start:stop]))
        part = hidden[start:stop]
        if masked and self.kept is not None:
            # 0 * NaN is NaN: a zero gradient row alone would let an ignored token's NaN into the weight gradient.
            part = part.masked_fill(~self.kept[start:stop, None], 0)
        return _widen(part)

    def spread(self, values: Tensor, shape: Sequence[int]) -> Tensor:
        """Per-token values [n] in the target's shape, with 0 for ignored tokens."""
        if self.index is not None:
            return values.new_zeros(math.prod(shape)).index_copy_(0, self.index, values).view(shape)
        if self.kept is not None:
            values = values.masked_fill(~self.kept, 0)
        return values.view(shape)


def select_tokens(
    target: Tensor,
    vocab: int,
    token_weight: Tensor | None,
    token_temperature: Tensor | None,
    normalizer: Tensor | None,
    *,
    ignore_index: int,
    reduction: str,
    temperature: float,
    check_values: bool,
) -> Tokens:
    """Sort out which tokens count.  Values are checked on the CPU, and elsewhere if `check_values`."""
    on_cpu = target.device.type == "cpu"
    check_values = check_values or on_cpu
    label = target.reshape(-1).to(torch.int64)
    kept = label != ignore_index
    out_of_range = kept & ((label < 0) | (label >= vocab))
    if check_values and bool(out_of_range.any()):
        _raise_for_label(target, out_of_range, vocab, ignore_index)
    if normalizer is not None:
        check_normalizer_value(normalizer, always=check_values)
        count = normalizer.to(torch.float32)
    elif reduction == "mean":
        count = kept.sum().clamp(min=1).to(torch.float32)
    else:
        count = torch.ones((), dtype=torch.float32, device=target.device)

    weight = torch.ones_like(label, dtype=torch.float32)
    if token_weight is not None:
        weight = token_weight.reshape(-1).to(torch.float32)
    tau: Tensor | float = temperature
    if token_temperature is not None:
        tau = token_temperature.expand(target.shape).reshape(-1).to(torch.float32)
        wrong = kept & ~((tau > 0) & (tau < float("inf")))
        if check_values and bool(wrong.any()):
            value = float(tau[wrong][0])
            raise ValueError(f"{OP}: temperature must be finite and above 0 for every token; got {value}")

    index = bad = None
    if on_cpu:
        if not bool(kept.all()):
            index = kept.nonzero()[:, 0]
            label, weight = label[index], weight[index]
            tau = tau[index] if isinstance(tau, Tensor) else tau
        kept_mask = None
    else:
        kept_mask, bad = kept, out_of_range
        label = label.masked_fill(~kept | bad, 0)
        weight = weight.masked_fill(~kept, 0).masked_fill(bad, float("nan"))
        tau = tau.masked_fill(~kept, 1) if isinstance(tau, Tensor) else tau
    return Tokens(index, kept_mask, bad, label, weight, tau[:, None] if isinstance(tau, Tensor) else tau, 1 / count)


def check_normalizer_value(normalizer: Tensor, *, always: bool = False) -> None:
    """Raise if the value is wrong; unless `always`, only where it lies on the CPU and reading it is free."""
    if (always or normalizer.device.type == "cpu") and not 0 < float(normalizer) < float("inf"):
        raise ValueError(f"{OP}: normalizer must be finite and above 0; got {float(normalizer)}")


def _raise_for_label(target: Tensor, out_of_range: Tensor, vocab: int, ignore_index: int) -> None:
    wrong = out_of_range.view(target.shape)
    where = [int(i) for i in wrong.nonzero()[0]]
    label = int(target[tuple(where)])
    position = f"target[{', '.join(map(str, where))}]" if where else "target"
    raise ValueError(
        f"{OP}: {position} is {label}, which is neither ignore_index ({ignore_index}) nor in [0, {vocab}); "
        f"{int(wrong.sum())} of {wrong.numel()} targets are out of range"
    )


# ------------------------------------------------------------------------------------------------- one tile at a time


def _operand_dtype(x: Tensor) -> torch.dtype:
    """What a product reads: on the CPU float32, since 16-bit products there round their results to 16 bits."""
    return torch.float32 if x.device.type == "cpu" else x.dtype


def _widen(x: Tensor) -> Tensor:
    return x.to(_operand_dtype(x))


def _product(out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool = False) -> None:
    """out = a @ b (+ out) in float32, whatever the operands' dtype."""
    kind: dict[str, Any] = {} if a.dtype == torch.float32 else {"out_dtype": torch.float32}
    if accumulate:
        torch.addmm(out, a, b, **kind, out=out)
    else:
        torch.mm(a, b, **kind, out=out)


def _logits(out: Tensor, h: Tensor, head: Head, start: int, temperature: Tensor | float, slope: Tensor | None) -> None:
    """The final logits of rows `h` and of the vocabulary from `start` on; `slope` gets their derivative's softcap."""
    stop = start + out.shape[1]
    _product(out, h, _widen(head.weight[start:stop]).t())
    if head.bias is not None:
        out.add_(head.bias[start:stop])
    if head.logit_scale != 1:
        out.mul_(head.logit_scale)
    if head.softcap is not None:
        out.div_(head.softcap).tanh_()
        if slope is not None:
            torch.mul(out, out, out=slope).neg_().add_(1)
        out.mul_(head.softcap)
    if isinstance(temperature, Tensor) or temperature != 1:
        out.div_(temperature)


@dataclass
class Softmax:
    """The running softmax of each token over the vocabulary seen so far, all [n] float32 (argmax int64)."""

    max: Tensor
    target: Tensor  # the target's logit
    others: Tensor  # sum of exp(z - max) over all but the target
    offset_sum: Tensor  # sum of z - max, for label smoothing
    moment: Tensor  # sum of exp(z - max) * (z - max), for the entropy
    argmax: Tensor

    @staticmethod
    def empty(n: int, device: torch.device) -> "Softmax":
        names = ("target", "others", "offset_sum", "moment")
        zeros = {name: torch.zeros(n, dtype=torch.float32, device=device) for name in names}
        return Softmax(
            max=torch.full((n,), _LOWEST, dtype=torch.float32, device=device),
            argmax=torch.full((n,), -1, device=device),
            **zeros,
        )

    def part(self, start: int, stop: int) -> "Softmax":
        """The same storage for tokens [start, stop)."""
        return Softmax(**{name: x[start:stop] for name, x in vars(self).items()})

    def absorb(self, z: Tensor, start: int, label: Tensor, *, smoothing: bool, spare: Tensor | None) -> Tensor:
        """Take in the logits of the vocabulary from `start` on, and return exp(z - max) with 0 in the target's place.

        Overwrites `z`.  With `spare`, of z's shape, also follows the entropy and the argmax; the result is then there.
        """
        if spare is None:
            top = z.amax(1)
        else:
            top, at = z.max(1)
            self.argmax.copy_(torch.where(top > self.max, at + start, self.argmax))
        new_max = torch.maximum(self.max, top)
        drop = self.max - new_max
        decay = drop.exp()
        column, inside = _column(label, start, z.shape[1])
        self.target.copy_(torch.where(inside, z.gather(1, column)[:, 0], self.target))
        z.sub_(new_max[:, None])
        if smoothing:
            self.offset_sum.add_(drop, alpha=start).add_(z.sum(1))
        if spare is None:
            e = z.exp_()
        else:
            e = torch.exp(z, out=spare)
            total = self.others + torch.where(label < start, (self.target - self.max).exp(), 0)
            # p log p is 0 at p = 0, and 0 * -inf is not.
            new = z.clamp_(min=-1e30).mul_(e).sum(1)
            self.moment.add_(drop * total).mul_(decay).add_(new)
        e.scatter_(1, column, torch.where(inside, 0, e.gather(1, column)[:, 0])[:, None])
        self.others.mul_(decay).add_(e.sum(1))
        self.max.copy_(new_max)
        return e

    @property
    def total(self) -> Tensor:
        return self.others + (self.target - self.max).exp()

    @property
    def log_total(self) -> Tensor:
        # log1p where the target leads: there the loss is small, and 1 + others would round it away.
        return torch.where(self.target == self.max, self.others.log1p(), self.total.log())

    @property
    def lse(self) -> Tensor:
        return self.max + self.log_total

    @property
    def target_log_prob(self) -> Tensor:
        return (self.target - self.max) - self.log_total

    def log_prob(self, tokens: Tokens) -> Tensor:
        """Of the target, NaN where that is out of range."""
        value = self.target_log_prob
        return value if tokens.bad is None else value.masked_fill(tokens.bad, float("nan"))

    def entropy(self) -> Tensor:
        return self.log_total - self.moment / self.total

    def correct(self, tokens: Tokens) -> Tensor:
        value = self.argmax == tokens.label
        return value if tokens.bad is None else value & ~tokens.bad

    def loss(self, head: Head, tokens: Tokens) -> Tensor:
        """The loss of each token, weighted but not yet reduced."""
        loss = torch.zeros_like(self.max)
        if head.label_smoothing < 1:
            loss = -(1 - head.label_smoothing) * self.log_prob(tokens)
        if head.label_smoothing > 0:
            loss = loss + head.label_smoothing * (self.log_total - self.offset_sum / head.vocab)
        if head.z_loss > 0:
            loss = loss + head.z_loss * self.lse.square()
        return loss * tokens.weight


def _column(label: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Where each label lies in the vocabulary [start, start + width): a legal column [n, 1], and if it is there."""
    column = (label - start).clamp_(0, width - 1)
    return column[:, None], column + start == label


def _to_gradient(
    e: Tensor,
    factor: Tensor,
    row: Tensor,
    lse: Tensor,
    log_prob: Tensor,
    label: Tensor,
    start: int,
    head: Head,
    slope: Tensor | None,
) -> Tensor:
    """Turn `e` in place into the gradient of the logits before softcap and scale: row * d(loss) / dz * slope.

    `factor` makes e's entries row * d(loss) / d(lse) * p; the target's entry is written anew from its log-probability.
    """
    e.mul_(factor[:, None])
    even = head.label_smoothing / head.vocab
    if head.label_smoothing > 0:
        e.sub_((row * even)[:, None])
    # p - 1 as expm1(log p): -1 added to a rounded p would lose all digits of a p near 1.
    at_target = torch.expm1(log_prob) + (head.label_smoothing - even)
    if head.z_loss > 0:
        at_target = at_target + 2 * head.z_loss * lse * log_prob.exp()
    column, inside = _column(label, start, e.shape[1])
    e.scatter_(1, column, torch.where(inside, row * at_target, e.gather(1, column)[:, 0])[:, None])
    return e if slope is None else e.mul_(slope)


def _gradient_rows(tokens: Tokens, scale: Tensor, operand: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The factor of each token's row of the gradient, and by what the products are then too large (None: nothing)."""
    tau = tokens.temperature
    row = tokens.weight * scale / (tau[:, 0] if isinstance(tau, Tensor) else tau)
    if operand != torch.float16 or row.numel() == 0:
        return row, None
    largest = row.abs().nan_to_num(nan=0).amax()
    too_large = torch.where(largest > 0, _FLOAT16_ROW / largest, 1)
    return row * too_large, too_large


class _Tile:
    """Buffers for one tile, allocated once per walk and handed out in the size that a tile has."""

    def __init__(self, size: int, like: Tensor, *, slope: bool = False, spare: bool = False, narrow: bool = False):
        def make(wanted: bool, dtype: torch.dtype) -> Tensor | None:
            return torch.empty(size, dtype=dtype, device=like.device) if wanted else None

        self._logits = torch.empty(size, dtype=torch.float32, device=like.device)
        self._slope = make(slope, torch.float32)
        self._spare = make(spare, torch.float32)
        self._narrow = make(narrow and _operand_dtype(like) != torch.float32, like.dtype)

    def cut(self, rows: int, columns: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Logits, slope and spare as [rows, columns]."""
        buffers = (self._logits, self._slope, self._spare)
        logits, slope, spare = (b if b is None else b[: rows * columns].view(rows, columns) for b in buffers)
        assert logits is not None
        return logits, slope, spare

    def operand(self, gradient: Tensor) -> Tensor:
        """The gradient as the products read it."""
        if self._narrow is None:
            return gradient
        return self._narrow[: gradient.numel()].view(gradient.shape).copy_(gradient)


def _spans(total: int, size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + size, total)) for start in range(0, total, max(1, size)))


# ---------------------------------------------------------------------------------------------------------- the walks


def _temperature(tokens: Tokens, start: int, stop: int) -> Tensor | float:
    tau = tokens.temperature
    return tau[start:stop] if isinstance(tau, Tensor) else tau


def forward_only(hidden: Tensor, head: Head, tokens: Tokens, config: Config, *, stats: bool) -> Softmax:
    """The softmax of every token; one product."""
    n = tokens.label.numel()
    softmax = Softmax.empty(n, hidden.device)
    tile = _Tile(min(n, config.token_chunk) * config.vocab_chunk, hidden, spare=stats)
    for t0, t1 in _spans(n, config.token_chunk):
        h = tokens.rows(hidden, t0, t1, masked=False)
        part, label = softmax.part(t0, t1), tokens.label[t0:t1]
        for v0, v1 in _spans(head.vocab, config.vocab_chunk):
            z, _, spare = tile.cut(t1 - t0, v1 - v0)
            _logits(z, h, head, v0, _temperature(tokens, t0, t1), None)
            part.absorb(z, v0, label, smoothing=head.label_smoothing > 0, spare=spare)
    return softmax


def stash(
    hidden: Tensor,  # [T, H]
    head: Head,
    tokens: Tokens,
    config: Config,
    *,
    grads: tuple[bool, bool, bool],
    stats: bool,
) -> tuple[Softmax, Tensor | None, Tensor | None, Tensor | None]:
    """The softmax, and the gradients of hidden, weight and bias in float32, for an upstream gradient of 1."""
    n, vocab = tokens.label.numel(), head.vocab
    softmax = Softmax.empty(n, hidden.device)
    row, too_large = _gradient_rows(tokens, tokens.inverse_count * head.logit_scale, _operand_dtype(hidden))
    tile = _Tile(min(n, config.token_chunk) * vocab, hidden, slope=head.softcap is not None, spare=stats, narrow=True)
    grad_hidden = hidden.new_zeros(hidden.shape, dtype=torch.float32) if grads[0] else None
    grad_weight = hidden.new_empty(head.weight.shape, dtype=torch.float32) if grads[1] else None
    if grad_weight is not None and n == 0:
        grad_weight.zero_()
    grad_bias = hidden.new_zeros(vocab, dtype=torch.float32) if grads[2] else None
    for t0, t1 in _spans(n, config.token_chunk):
        h = tokens.rows(hidden, t0, t1)
        part, label = softmax.part(t0, t1), tokens.label[t0:t1]
        z, slope, spare = tile.cut(t1 - t0, vocab)
        for v0, v1 in _spans(vocab, config.vocab_chunk):
            part_slope = None if slope is None else slope[:, v0:v1]
            _logits(z[:, v0:v1], h, head, v0, _temperature(tokens, t0, t1), part_slope)
        e = part.absorb(z, 0, label, smoothing=head.label_smoothing > 0, spare=spare)
        r, lse = row[t0:t1], part.lse
        factor = r * (1 + 2 * head.z_loss * lse) / part.total
        g = _to_gradient(e, factor, r, lse, part.target_log_prob, label, 0, head, slope)
        if grad_bias is not None:
            grad_bias.add_(g.sum(0))
        g = tile.operand(g)
        if grad_hidden is not None:
            _add_hidden_gradient(grad_hidden, g, head, config.vocab_chunk, tokens, t0, t1)
        if grad_weight is not None:
            _product(grad_weight, g.t(), h, accumulate=t0 > 0)
    return softmax, _shrink(grad_hidden, too_large), _shrink(grad_weight, too_large), _shrink(grad_bias, too_large)


def _shrink(gradient: Tensor | None, too_large: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or too_large is None else gradient.div_(too_large)


def _add_hidden_gradient(
    grad_hidden: Tensor, g: Tensor, head: Head, vocab_chunk: int, tokens: Tokens, t0: int, t1: int, v0: int = 0
) -> None:
    """Add g @ weight[v0 : v0 + g.shape[1]] to the rows of grad_hidden of tokens [t0, t1)."""
    rows = grad_hidden[t0:t1] if tokens.index is None else grad_hidden.new_zeros(t1 - t0, grad_hidden.shape[1])
    for c0, c1 in _spans(g.shape[1], vocab_chunk):
        _product(rows, g[:, c0:c1], _widen(head.weight[v0 + c0 : v0 + c1]), accumulate=True)
    if tokens.index is not None:
        grad_hidden.index_add_(0, tokens.index[t0:t1], rows)


def recompute(
    hidden: Tensor,  # [T, H]
    head: Head,
    tokens: Tokens,
    config: Config,
    *,
    lse: Tensor,  # [T] float32
    log_prob: Tensor,  # [T] float32
    scale: Tensor,  # 0-d float32: the upstream gradient over what the mean divides by
    grads: tuple[bool, bool, bool],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    weight_grad_out: Tensor | None = None,  # [V, H] float32
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of hidden, weight and bias in `dtypes`; weight's is added to `weight_grad_out` if that is given."""
    n, vocab = tokens.label.numel(), head.vocab
    row, too_large = _gradient_rows(tokens, scale * head.logit_scale, _operand_dtype(hidden))
    if tokens.index is not None:
        lse, log_prob = lse[tokens.index], log_prob[tokens.index]
    factor = row * (1 + 2 * head.z_loss * lse)
    # exp(z - inf) is 0 for ignored tokens, whatever their logits are.
    shift = lse if tokens.kept is None else lse.masked_fill(~tokens.kept, float("inf"))
    tile = _Tile(min(n, config.token_chunk) * config.vocab_chunk, hidden, slope=head.softcap is not None, narrow=True)
    grad_hidden = hidden.new_zeros(hidden.shape, dtype=torch.float32) if grads[0] else None
    grad_weight = weight_grad_out if grads[1] else None
    if grads[1] and weight_grad_out is None:
        grad_weight = torch.empty(head.weight.shape, dtype=dtypes[1], device=hidden.device)
    grad_bias = hidden.new_zeros(vocab, dtype=torch.float32) if grads[2] else None
    weight_part = None
    if grads[1] and (dtypes[1] != torch.float32 or weight_grad_out is not None):
        weight_part = hidden.new_empty((config.vocab_chunk, hidden.shape[1]), dtype=torch.float32)
    whole = config.token_chunk >= n  # then the rows of hidden are made ready once
    h = tokens.rows(hidden, 0, n) if whole else None
    for v0, v1 in _spans(vocab, config.vocab_chunk):
        if grad_weight is not None:
            into = grad_weight[v0:v1] if weight_part is None else weight_part[: v1 - v0]
            if n == 0:
                into.zero_()
        for t0, t1 in _spans(n, config.token_chunk):
            rows = tokens.rows(hidden, t0, t1) if h is None else h
            label = tokens.label[t0:t1]
            z, slope, _ = tile.cut(t1 - t0, v1 - v0)
            _logits(z, rows, head, v0, _temperature(tokens, t0, t1), slope)
            e = z.sub_(shift[t0:t1, None]).exp_()
            g = _to_gradient(e, factor[t0:t1], row[t0:t1], lse[t0:t1], log_prob[t0:t1], label, v0, head, slope)
            if grad_bias is not None:
                grad_bias[v0:v1].add_(g.sum(0))
            g = tile.operand(g)
            if grad_hidden is not None:
                _add_hidden_gradient(grad_hidden, g, head, config.vocab_chunk, tokens, t0, t1, v0)
            if grad_weight is not None:
                _product(into, g.t(), rows, accumulate=t0 > 0)
        if grad_weight is not None:
            _shrink(into, too_large)
            if weight_grad_out is not None:
                grad_weight[v0:v1] += into
            elif weight_part is not None:
                grad_weight[v0:v1] = into
    grad_hidden, grad_bias = _shrink(grad_hidden, too_large), _shrink(grad_bias, too_large)
    return (
        None if grad_hidden is None else grad_hidden.to(dtypes[0]),
        None if weight_grad_out is not None else grad_weight,
        None if grad_bias is None else grad_bias.to(dtypes[2]),
    )
