"""Helpers for walks over the [tokens, vocab] matrix in PyTorch, on CPU and CUDA: tiles of logits, the tokens that
count, and the framework's own matrix products.

Nothing here synchronises a GPU, unless values are to be checked.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.options import raise_for_label
from onchip.frontend.torch_inputs import accumulator
from onchip.kernels.torch_products import operand_dtype, product, widen


@dataclass(frozen=True)
class Projection:
    """The linear layer, in the products' dtype."""

    hidden: Tensor  # [T, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V] in the dtype of the logits

    @staticmethod
    def of(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> "Projection":
        # The bias in the products' dtype first, as F.linear does under autocast.
        bias = None if bias is None else bias.to(dtype).to(accumulator(dtype))
        return Projection(hidden.reshape(-1, hidden.shape[-1]).to(dtype), weight.to(dtype), bias)

    @property
    def vocab(self) -> int:
        return self.weight.shape[0]

    def logits(self, out: Tensor, h: Tensor, start: int) -> None:
        """The logits of rows `h` and of the vocabulary from `start` on, as many columns as `out` has."""
        stop = start + out.shape[1]
        product(out, h, self.weight[start:stop].to(h.dtype).t())
        if self.bias is not None:
            out.add_(self.bias[start:stop])

    def reader(self, tokens: "Ids", start: int, stop: int) -> Callable[[Tensor, int], None]:
        """Returns a function that fills a tile with logits of the computed tokens [start, stop), given the tile's place
        in the vocabulary.
        """
        h = tokens.rows(self.hidden, start, stop, masked=False)
        return lambda out, first: self.logits(out, h, first)


# Replaces an ignored id; it is in no tile.
NOWHERE = -1


@dataclass(frozen=True)
class Ids:
    """The ids of the n tokens that are computed: on the CPU those that have an id that counts, elsewhere all T."""

    index: Tensor | None  # [n] int64 rows of hidden; None: all of them
    kept: Tensor | None  # [T] bool, False for ignored tokens that are computed all the same
    ids: Tensor  # [n, K] int64 in [0, V), or NOWHERE
    bad: Tensor | None  # [n, K] bool, True where the id is out of range; None where that raised
    temperature: Tensor | float  # [n, 1] of this dtype, or one for all
    total: int  # T
    dtype: torch.dtype  # of logits, statistics and sums: float32 or float64

    @property
    def number(self) -> int:
        """n, the number of computed tokens."""
        return self.ids.shape[0]

    def rows(self, hidden: Tensor, start: int, stop: int, *, masked: bool = True) -> Tensor:
        """Rows [start, stop) of the computed tokens' hidden states, in the dtype that the products read."""
        if self.index is not None:
            return widen(hidden.index_select(0, self.index[start:stop]))
        part = hidden[start:stop]
        if masked and self.kept is not None:
            # 0 * NaN is NaN: a zero gradient row alone would let an ignored token's NaN into the weight gradient.
            part = part.masked_fill(~self.kept[start:stop, None], 0)
        return widen(part)

    def take(self, values: Tensor) -> Tensor:
        """The computed tokens' rows of [T, ...] values."""
        return values if self.index is None else values[self.index]

    def mask(self, values: Tensor, fill: float = 0) -> Tensor:
        """Values [n, ...] with `fill` for ignored tokens."""
        if self.kept is None:
            return values
        return values.masked_fill(~self.kept.view(-1, *[1] * (values.ndim - 1)), fill)

    def spread(self, values: Tensor, shape: Sequence[int], fill: int = 0) -> Tensor:
        """Values [n, ...] of the computed tokens, extended to all tokens in `shape`, with `fill` for ignored ones."""
        if self.index is not None:
            out = values.new_full((self.total, *values.shape[1:]), fill)
            return out.index_copy_(0, self.index, values).view(shape)
        return self.mask(values, fill).view(shape)


@dataclass(frozen=True)
class Tokens(Ids):
    """Tokens, with what a cross-entropy makes of them."""

    weight: Tensor  # [n]: 0 for ignored tokens, NaN for bad ones
    inverse_count: Tensor  # 0-d: 1 / what the mean divides by
    q: Tensor | None = None  # [n, K]: the ids' probabilities, times the weights of their classes; None: 1 of one id
    class_weight: Tensor | None = None  # [V] in the dtype of sums

    @property
    def label(self) -> Tensor:
        """[n] int64: the target, if each token has one id."""
        return self.ids[:, 0]

    def part(self, start: int, stop: int) -> "Tokens":
        """The computed tokens [start, stop), all of which count."""
        ids, bad, weight, q = (None if x is None else x[start:stop] for x in (self.ids, self.bad, self.weight, self.q))
        assert ids is not None
        assert weight is not None
        return replace(self, index=None, kept=None, ids=ids, bad=bad, weight=weight, q=q)

    def upstream(self, grad: Tensor, reduction: str) -> Tensor:
        """The upstream gradients of the computed tokens' weighted losses, [n] or one for all, from that of the reduced
        loss, [...] or []; that of an ignored token is never used.
        """
        each = self.mask(self.take(grad.reshape(-1).to(self.dtype))) if reduction == "none" else grad
        return each * self.inverse_count


def select(
    op: str,
    name: str,
    ids: Tensor,  # [...] or [..., K]
    tokens: int,
    vocab: int,
    token_temperature: Tensor | None,  # [...] or []
    *,
    ignore_index: int | None,
    temperature: float,
    dtype: torch.dtype,
    check_values: bool,
    compact: bool = True,
    first: tuple[int, ...] = (),
) -> Ids:
    """Sort out which ids (an argument called `name`) and which tokens count; without an ignore_index all do.

    Values are checked on the CPU, and elsewhere if `check_values`.  Without `compact` the CPU, where kernels run under
    an interpreter, is a device like any other.  `dtype` is that of the products, or of the logits given.  `first` is
    where the caller has the first id, in the last dimensions.
    """
    on_cpu = compact and ids.device.type == "cpu"
    check_values = check_values or on_cpu
    plain = ids.reshape(tokens, -1 if tokens else 1).to(torch.int64)
    counted = None if ignore_index is None else plain != ignore_index
    out_of_range = (plain < 0) | (plain >= vocab)
    out_of_range = out_of_range if counted is None else counted & out_of_range
    if check_values and bool(out_of_range.any()):
        wrong = out_of_range.view(ids.shape)
        where = [int(i) for i in wrong.nonzero()[0]]
        label, offset = int(ids[tuple(where)]), (0,) * (len(where) - len(first)) + first
        where = [i + j for i, j in zip(where, offset, strict=True)]
        raise_for_label(op, name, where, label, vocab, ignore_index, int(wrong.sum()), wrong.numel())
    kept = None if counted is None else counted.any(1)
    tau: Tensor | float = temperature
    total = accumulator(dtype)
    if token_temperature is not None:
        tau = token_temperature.reshape(-1).expand(tokens).to(total)
        if check_values:
            check_temperature_values(op, tau, kept)
        tau = (tau if kept is None else tau.masked_fill(~kept, 1))[:, None]
    plain = plain if counted is None else plain.masked_fill(~counted, NOWHERE)
    if not on_cpu:
        return Ids(None, kept, plain.masked_fill(out_of_range, 0), out_of_range, tau, tokens, total)
    index = None
    if kept is not None and not bool(kept.all()):
        index = kept.nonzero()[:, 0]
        plain = plain[index]
        tau = tau[index] if isinstance(tau, Tensor) else tau
    return Ids(index, None, plain, None, tau, tokens, total)


def weighed(
    op: str, chosen: Ids, token_weight: Tensor | None, reduction: str, normalizer: Tensor | None, *, check_values: bool
) -> Tokens:
    """Targets with the factors of their losses."""
    kept = chosen.kept
    if kept is None:
        kept = torch.full((), chosen.number, dtype=torch.int64, device=chosen.ids.device)
    count = divisor(op, reduction, normalizer, kept, dtype=chosen.dtype, check_values=check_values)
    if token_weight is None:
        weight = torch.ones_like(chosen.ids[:, 0], dtype=chosen.dtype)
    else:
        weight = chosen.take(token_weight.reshape(-1).to(chosen.dtype))
    weight = chosen.mask(weight)
    if chosen.bad is not None:
        weight = weight.masked_fill(chosen.bad[:, 0], float("nan"))
    return Tokens(**vars(chosen), weight=weight, inverse_count=1 / count)


def divisor(
    op: str,
    reduction: str,
    normalizer: Tensor | None,
    kept: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    check_values: bool = False,
) -> Tensor:
    """What the loss is divided by, 0-d, in `dtype`.  If no token is kept it is 1, whatever the normalizer.

    `kept` says which tokens are kept, or holds their number.  The normalizer's value is checked on the CPU, and
    elsewhere if `check_values`.
    """
    if reduction != "mean":
        return stated.call(torch.ones, (), dtype=dtype, device=kept.device)
    number = stated.call(torch.sum, kept)
    if normalizer is None:
        return stated.call(_at_least_one, number, dtype)
    if normalizer.device != number.device:  # it is on the CPU, and a copy would synchronise
        stated.refuse("a number is read")
        normalizer = torch.full((), float(normalizer), dtype=dtype, device=number.device)
    check_values = check_values or number.device.type == "cpu"
    if check_values and bool(number > 0) and not 0 < float(normalizer) < float("inf"):
        raise ValueError(f"{op}: normalizer must be finite and above 0; got {float(normalizer)}")
    return stated.call(_one_of_none, normalizer, number, dtype)


def _at_least_one(number: Tensor, dtype: torch.dtype) -> Tensor:
    return number.clamp(min=1).to(dtype)


def _one_of_none(normalizer: Tensor, number: Tensor, dtype: torch.dtype) -> Tensor:
    return normalizer.to(dtype).masked_fill(number == 0, 1)


def check_temperature_values(op: str, temperature: Tensor, kept: Tensor | None) -> None:
    """Raise if one of the tokens that are `kept` has a temperature that is not above 0."""
    wrong = ~((temperature > 0) & (temperature < float("inf")))
    wrong = wrong if kept is None else wrong & kept
    if bool(wrong.any()):
        value = float(temperature[wrong][0])
        raise ValueError(f"{op}: temperature must be finite and above 0 for every token; got {value}")


# ------------------------------------------------------------------------------------------------- one tile at a time


def apply(options: Any, z: Tensor, temperature: Tensor | float, slope: Tensor | None = None) -> None:
    """Turn logits into final logits in place; `slope` gets the derivative of the softcap."""
    if options.logit_scale != 1:
        z.mul_(options.logit_scale)
    if options.softcap is not None:
        z.div_(options.softcap).tanh_()
        if slope is not None:
            torch.mul(z, z, out=slope).neg_().add_(1)
        z.mul_(options.softcap)
    if isinstance(temperature, Tensor) or temperature != 1:
        z.div_(temperature)


class Tile:
    """Buffers for one tile, allocated once per walk and handed out in the size that a tile has."""

    def __init__(self, size: int, tokens: Ids, *, slope: bool = False, spare: bool = False, like: Tensor | None = None):
        """`like` is a tensor in the dtype that products read, for a gradient that they read too."""
        total = tokens.dtype

        def make(wanted: bool, dtype: torch.dtype = total) -> Tensor | None:
            return torch.empty(size, dtype=dtype, device=tokens.ids.device) if wanted else None

        self._logits = torch.empty(size, dtype=total, device=tokens.ids.device)
        self._slope = make(slope)
        self._spare = make(spare)
        self._narrow = None if like is None else make(operand_dtype(like) != total, like.dtype)

    def cut(self, rows: int, columns: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Logits, slope and spare as [rows, columns]."""
        buffers = (self._logits, self._slope, self._spare)
        logits, slope, spare = (b if b is None else b[: rows * columns].view(rows, columns) for b in buffers)
        assert logits is not None
        return logits, slope, spare

    def operand(self, gradient: Tensor) -> Tensor:
        """The gradient in the dtype that the products read."""
        if self._narrow is None:
            return gradient
        return self._narrow[: gradient.numel()].view(gradient.shape).copy_(gradient)


def flatten(x: Tensor) -> Tensor | None:
    """[..., V] as a view [T, V], or None if the strides allow no such view."""
    try:
        return x.view(x.shape[:-1].numel(), x.shape[-1])
    except RuntimeError:
        return None


def rows_of(x: Tensor, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of [..., V], unchanged."""
    flat = flatten(x)
    if flat is not None:
        return flat[start:stop]
    rows = torch.arange(start, stop, dtype=torch.int64, device=x.device)
    return x[torch.unravel_index(rows, x.shape[:-1])]


def spans(total: int, size: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + size, total)) for start in range(0, total, max(1, size)))


def temperature_of(tokens: Ids, start: int, stop: int) -> Tensor | float:
    tau = tokens.temperature
    return tau[start:stop] if isinstance(tau, Tensor) else tau
