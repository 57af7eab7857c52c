"""What walks over the [tokens, vocab] matrix in PyTorch do with one tile of logits, on CPU and CUDA.

Which tokens count, the framework's own matrix products, the running softmax and its gradient.  A walk holds one tile at
a time and works in it in place.  Nothing here synchronises a GPU, unless values are to be checked.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onchip.vocab.chunks import Config

# Where every logit so far is -inf, the running maximum is this: finite, so that a difference of two is never NaN.
LOWEST = torch.finfo(torch.float32).min / 4
# float16 can't hold a gradient of 1e-8: rows of the softmax gradient are scaled to about this before a product.
FLOAT16_ROW = 256.0


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
            return widen(hidden.index_select(0, self.index[start:stop]))
        part = hidden[start:stop]
        if masked and self.kept is not None:
            # 0 * NaN is NaN: a zero gradient row alone would let an ignored token's NaN into the weight gradient.
            part = part.masked_fill(~self.kept[start:stop, None], 0)
        return widen(part)

    def upstream(self, grad: Tensor) -> Tensor:
        """The computed tokens' upstream gradients [n] float32 of [...]; that of an ignored one is never used."""
        upstream = grad.reshape(-1).float()
        if self.index is not None:
            upstream = upstream[self.index]
        return upstream if self.kept is None else upstream.masked_fill(~self.kept, 0)

    def spread(self, values: Tensor, shape: Sequence[int]) -> Tensor:
        """Per-token values [n] in the target's shape, with 0 for ignored tokens."""
        if self.index is not None:
            return values.new_zeros(math.prod(shape)).index_copy_(0, self.index, values).view(shape)
        if self.kept is not None:
            values = values.masked_fill(~self.kept, 0)
        return values.view(shape)


def select_tokens(
    op: str,
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
        raise_for_label(op, "target", target, out_of_range, vocab, ignore_index)
    count = divisor(op, reduction, normalizer, kept, check_values=check_values)

    weight = torch.ones_like(label, dtype=torch.float32)
    if token_weight is not None:
        weight = token_weight.reshape(-1).to(torch.float32)
    tau: Tensor | float = temperature
    if token_temperature is not None:
        tau = token_temperature.expand(target.shape).reshape(-1).to(torch.float32)
        if check_values:
            check_temperature_values(op, tau, kept)

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


def divisor(op: str, reduction: str, normalizer: Tensor | None, kept: Tensor, *, check_values: bool = False) -> Tensor:
    """0-d float32: what the loss is divided by.  Where no token is kept it is 1, whatever the normalizer.

    `kept` says which tokens are, or holds their number.  The normalizer's value is checked on the CPU, and elsewhere if
    `check_values`.
    """
    if reduction != "mean":
        return torch.ones((), dtype=torch.float32, device=kept.device)
    number = kept.sum()
    if normalizer is None:
        return number.clamp(min=1).to(torch.float32)
    if normalizer.device != number.device:  # it is on the CPU, and a copy would synchronise
        normalizer = torch.full((), float(normalizer), dtype=torch.float32, device=number.device)
    check_values = check_values or number.device.type == "cpu"
    if check_values and bool(number > 0) and not 0 < float(normalizer) < float("inf"):
        raise ValueError(f"{op}: normalizer must be finite and above 0; got {float(normalizer)}")
    return normalizer.to(torch.float32).masked_fill(number == 0, 1)


def check_temperature_values(op: str, temperature: Tensor, kept: Tensor) -> None:
    """Raise if one of the tokens that are `kept` has a temperature that is not above 0."""
    wrong = kept & ~((temperature > 0) & (temperature < float("inf")))
    if bool(wrong.any()):
        value = float(temperature[wrong][0])
        raise ValueError(f"{op}: temperature must be finite and above 0 for every token; got {value}")


def raise_for_label(op: str, name: str, labels: Tensor, out_of_range: Tensor, vocab: int, ignore_index: int) -> None:
    """Raise for the first of the labels, an argument called `name`, that are out of range."""
    wrong = out_of_range.view(labels.shape)
    where = [int(i) for i in wrong.nonzero()[0]]
    position = f"{name}[{', '.join(map(str, where))}]" if where else name
    raise ValueError(
        f"{op}: {position} is {int(labels[tuple(where)])}, which is neither ignore_index ({ignore_index}) nor in "
        f"[0, {vocab}); {int(wrong.sum())} of {wrong.numel()} {name.rstrip('s')}s are out of range"
    )


# ------------------------------------------------------------------------------------------------- one tile at a time


def operand_dtype(x: Tensor) -> torch.dtype:
    """What a product reads: on the CPU float32, since 16-bit products there round their results to 16 bits."""
    return torch.float32 if x.device.type == "cpu" else x.dtype


def widen(x: Tensor) -> Tensor:
    return x.to(operand_dtype(x))


def product(out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool = False) -> None:
    """out = a @ b (+ out) in float32, whatever the operands' dtype."""
    kind: dict[str, Any] = {} if a.dtype == torch.float32 else {"out_dtype": torch.float32}
    if accumulate:
        torch.addmm(out, a, b, **kind, out=out)
    else:
        torch.mm(a, b, **kind, out=out)


def final_logits(
    out: Tensor, h: Tensor, head: Head, start: int, temperature: Tensor | float, slope: Tensor | None
) -> None:
    """The final logits of rows `h` and of the vocabulary from `start` on; `slope` gets their derivative's softcap."""
    stop = start + out.shape[1]
    product(out, h, widen(head.weight[start:stop]).t())
    if head.bias is not None:
        out.add_(head.bias[start:stop])
    transform(out, head, temperature, slope)


def transform(z: Tensor, head: Head, temperature: Tensor | float, slope: Tensor | None) -> None:
    """Logits to final logits in place; `slope` gets the derivative of the softcap."""
    if head.logit_scale != 1:
        z.mul_(head.logit_scale)
    if head.softcap is not None:
        z.div_(head.softcap).tanh_()
        if slope is not None:
            torch.mul(z, z, out=slope).neg_().add_(1)
        z.mul_(head.softcap)
    if isinstance(temperature, Tensor) or temperature != 1:
        z.div_(temperature)


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
            max=torch.full((n,), LOWEST, dtype=torch.float32, device=device),
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
        column, inside = column_of(label, start, z.shape[1])
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


def column_of(label: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Where each label lies in the vocabulary [start, start + width): a legal column [n, 1], and if it is there."""
    column = (label - start).clamp_(0, width - 1)
    return column[:, None], column + start == label


def to_gradient(
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
    column, inside = column_of(label, start, e.shape[1])
    e.scatter_(1, column, torch.where(inside, row * at_target, e.gather(1, column)[:, 0])[:, None])
    return e if slope is None else e.mul_(slope)


def gradient_rows(tokens: Tokens, scale: Tensor, operand: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The factor of each token's row of the gradient, and by what the products are then too large (None: nothing)."""
    tau = tokens.temperature
    row = tokens.weight * scale / (tau[:, 0] if isinstance(tau, Tensor) else tau)
    if operand != torch.float16 or row.numel() == 0:
        return row, None
    largest = row.abs().nan_to_num(nan=0).amax()
    too_large = torch.where(largest > 0, FLOAT16_ROW / largest, 1)
    return row * too_large, too_large


class Tile:
    """Buffers for one tile, allocated once per walk and handed out in the size that a tile has."""

    def __init__(self, size: int, like: Tensor, *, slope: bool = False, spare: bool = False, narrow: bool = False):
        def make(wanted: bool, dtype: torch.dtype) -> Tensor | None:
            return torch.empty(size, dtype=dtype, device=like.device) if wanted else None

        self._logits = torch.empty(size, dtype=torch.float32, device=like.device)
        self._slope = make(slope, torch.float32)
        self._spare = make(spare, torch.float32)
        self._narrow = make(narrow and operand_dtype(like) != torch.float32, like.dtype)

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


def spans(total: int, size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + size, total)) for start in range(0, total, max(1, size)))


def temperature_of(tokens: Tokens, start: int, stop: int) -> Tensor | float:
    tau = tokens.temperature
    return tau[start:stop] if isinstance(tau, Tensor) else tau


def shrink(gradient: Tensor | None, too_large: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or too_large is None else gradient.div_(too_large)


def add_hidden_gradient(
    grad_hidden: Tensor, g: Tensor, head: Head, vocab_chunk: int, tokens: Tokens, t0: int, t1: int, v0: int = 0
) -> None:
    """Add g @ weight[v0 : v0 + g.shape[1]] to the rows of grad_hidden of tokens [t0, t1)."""
    rows = grad_hidden[t0:t1] if tokens.index is None else grad_hidden.new_zeros(t1 - t0, grad_hidden.shape[1])
    for c0, c1 in spans(g.shape[1], vocab_chunk):
        product(rows, g[:, c0:c1], widen(head.weight[v0 + c0 : v0 + c1]), accumulate=True)
    if tokens.index is not None:
        grad_hidden.index_add_(0, tokens.index[t0:t1], rows)


# A tile's logits, slope and spare, its tokens [t0, t1) and the start of its vocabulary -> the logits' gradient.
GradientOfTile = Callable[[Tensor, Tensor | None, Tensor | None, int, int, int], Tensor]


def recompute_walk(
    hidden: Tensor,  # [T, H]
    head: Head,
    tokens: Tokens,
    config: Config,
    gradient: GradientOfTile,
    *,
    too_large: Tensor | None,
    grads: tuple[bool, bool, bool],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    spare: bool = False,
    weight_grad_out: Tensor | None = None,  # [V, H] float32
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of hidden, weight and bias in `dtypes`, chunk by chunk of the vocabulary; logits computed again.

    `gradient` turns a tile of final logits into that before softcap and scale, `too_large` times too large.  Weight's
    is added to `weight_grad_out` if that is given.
    """
    n, vocab = tokens.label.numel(), head.vocab
    size = min(n, config.token_chunk) * config.vocab_chunk
    tile = Tile(size, hidden, slope=head.softcap is not None, spare=spare, narrow=True)
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
    for v0, v1 in spans(vocab, config.vocab_chunk):
        if grad_weight is not None:
            into = grad_weight[v0:v1] if weight_part is None else weight_part[: v1 - v0]
            if n == 0:
                into.zero_()
        for t0, t1 in spans(n, config.token_chunk):
            rows = tokens.rows(hidden, t0, t1) if h is None else h
            z, slope, beside = tile.cut(t1 - t0, v1 - v0)
            final_logits(z, rows, head, v0, temperature_of(tokens, t0, t1), slope)
            g = gradient(z, slope, beside, t0, t1, v0)
            if grad_bias is not None:
                grad_bias[v0:v1].add_(g.sum(0))
            g = tile.operand(g)
            if grad_hidden is not None:
                add_hidden_gradient(grad_hidden, g, head, config.vocab_chunk, tokens, t0, t1, v0)
            if grad_weight is not None:
                product(into, g.t(), rows, accumulate=t0 > 0)
        if grad_weight is not None:
            shrink(into, too_large)
            if weight_grad_out is not None:
                grad_weight[v0:v1] += into
            elif weight_part is not None:
                grad_weight[v0:v1] = into
    grad_hidden, grad_bias = shrink(grad_hidden, too_large), shrink(grad_bias, too_large)
    return (
        None if grad_hidden is None else grad_hidden.to(dtypes[0]),
        None if weight_grad_out is not None else grad_weight,
        None if grad_bias is None else grad_bias.to(dtypes[2]),
    )
