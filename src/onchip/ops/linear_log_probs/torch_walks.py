"""The computation of linear_log_probs with PyTorch's own matrix products, tile by tile, on CPU and CUDA.

Two walks over the [tokens, vocab] matrix: `forward` and `backward`.  A walk holds one tile of logits at a time and
works in it in place.  Nothing here synchronises a GPU, unless values are to be checked.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onchip.ops.linear_log_probs.spec import OP
from onchip.vocab.chunks import Config
from onchip.vocab.torch.tiles import (
    FLOAT16_ROW,
    LOWEST,
    Head,
    Tile,
    Tokens,
    check_temperature_values,
    final_logits,
    raise_for_label,
    recompute_walk,
    spans,
    temperature_of,
)

# exp of this is 0 in float32: offsets are cut off here, so that p log p is 0 at p = 0 where 0 * -inf would not be.
_VANISHED = -128.0
# In place of an ignored id: in no tile.
_NOWHERE = -1


@dataclass(frozen=True)
class Picks:
    """The ids of the n tokens that are computed: on the CPU those with an id that counts, elsewhere all T."""

    tokens: Tokens  # which rows of hidden, and their temperatures; its labels and weights aren't used
    ids: Tensor  # [n, K] int64 in [0, V), or _NOWHERE
    bad: Tensor | None  # [n, K] bool, True where the id is out of range; None where that raised
    total: int  # T

    @property
    def counted(self) -> Tensor:
        """[n, K] bool: the id is not ignored."""
        return self.ids != _NOWHERE

    def take(self, values: Tensor) -> Tensor:
        """The computed tokens' rows of [T, ...] values."""
        return values if self.tokens.index is None else values[self.tokens.index]

    def spread(self, values: Tensor, fill: int = 0) -> Tensor:
        """Values [n, ...] as [T, ...], with `fill` for the tokens whose ids are all ignored."""
        if self.tokens.index is not None:
            return values.new_full((self.total, *values.shape[1:]), fill).index_copy_(0, self.tokens.index, values)
        if self.tokens.kept is not None:
            return values.masked_fill(~self.tokens.kept.view(-1, *[1] * (values.ndim - 1)), fill)
        return values


def select(
    ids: Tensor,  # [...] or [..., K]
    tokens: int,
    vocab: int,
    token_temperature: Tensor | None,  # [...] or []
    *,
    ignore_index: int,
    temperature: float,
    check_values: bool,
) -> Picks:
    """Sort out which ids and tokens count.  Values are checked on the CPU, and elsewhere if `check_values`."""
    on_cpu = ids.device.type == "cpu"
    check_values = check_values or on_cpu
    plain = ids.reshape(tokens, -1 if tokens else 1).to(torch.int64)
    counted = plain != ignore_index
    out_of_range = counted & ((plain < 0) | (plain >= vocab))
    if check_values and bool(out_of_range.any()):
        raise_for_label(OP, "ids", ids, out_of_range, vocab, ignore_index)
    kept = counted.any(1)
    tau: Tensor | float = temperature
    if token_temperature is not None:
        tau = token_temperature.reshape(-1).expand(tokens).to(torch.float32)
        if check_values:
            check_temperature_values(OP, tau, kept)
        tau = tau.masked_fill(~kept, 1)[:, None]
    plain = plain.masked_fill(~counted, _NOWHERE)
    index = None
    if on_cpu and not bool(kept.all()):
        index = kept.nonzero()[:, 0]
        plain = plain[index]
        tau = tau[index] if isinstance(tau, Tensor) else tau
    bad = None if on_cpu else out_of_range
    if bad is not None:
        plain = plain.masked_fill(bad, 0)
    unused = torch.empty(0, device=ids.device)
    chosen = Tokens(index, None if on_cpu else kept, None, plain[:, 0], unused, tau, unused)
    return Picks(chosen, plain, bad, tokens)


# ------------------------------------------------------------------------------------------------------------ forward


@dataclass
class Softmax:
    """The running softmax of each token over the vocabulary seen so far, [n] float32."""

    max: Tensor
    others: Tensor  # sum of exp(z - max) over all but the argmax
    moment: Tensor  # sum of exp(z - max) * (z - max), for the entropy
    argmax: Tensor  # int64, -1 where all logits so far are -inf
    picked: Tensor  # [n, K]: the ids' logits

    @staticmethod
    def empty(n: int, ids: int, device: torch.device) -> "Softmax":
        return Softmax(
            max=torch.full((n,), LOWEST, dtype=torch.float32, device=device),
            others=torch.zeros(n, dtype=torch.float32, device=device),
            moment=torch.zeros(n, dtype=torch.float32, device=device),
            argmax=torch.full((n,), -1, device=device),
            picked=torch.zeros((n, ids), dtype=torch.float32, device=device),
        )

    def part(self, start: int, stop: int) -> "Softmax":
        """The same storage for tokens [start, stop)."""
        return Softmax(**{name: x[start:stop] for name, x in vars(self).items()})

    def absorb(self, z: Tensor, start: int, ids: Tensor, spare: Tensor | None) -> None:
        """Take in the logits of the vocabulary from `start` on; overwrites `z`.  With `spare`, follow the entropy."""
        column = (ids - start).clamp_(0, z.shape[1] - 1)
        self.picked.copy_(torch.where(column + start == ids, z.gather(1, column), self.picked))
        top, at = z.max(1)
        leads = ~(top <= self.max)  # True for NaN
        new_max = torch.maximum(self.max, top)
        drop = self.max - new_max
        decay = drop.exp()
        led = (self.argmax >= 0).to(torch.float32)
        z.sub_(new_max[:, None])
        if spare is None:
            e = z.exp_()
        else:
            e = torch.exp(z, out=spare)
            new = z.clamp_(min=_VANISHED).mul_(e).sum(1)
            self.moment.add_(drop * (self.others + led)).mul_(decay).add_(new)
        e.scatter_(1, at[:, None], torch.where(leads, 0, e.gather(1, at[:, None])[:, 0])[:, None])
        self.others.add_(led * leads).mul_(decay).add_(e.sum(1))
        self.argmax.copy_(torch.where(leads, at + start, self.argmax))
        self.max.copy_(new_max)

    @property
    def log_total(self) -> Tensor:
        return torch.where(self.argmax >= 0, self.others.log1p(), self.others.log())

    @property
    def lse(self) -> Tensor:
        return self.max + self.log_total

    @property
    def mean_offset(self) -> Tensor:
        """The logits' mean under their softmax, minus the largest."""
        return self.moment / (self.others + (self.argmax >= 0).to(torch.float32))

    def log_prob(self, picks: Picks) -> Tensor:
        """[n, K]: 0 for ignored ids, NaN for those out of range."""
        value = ((self.picked - self.max[:, None]) - self.log_total[:, None]).masked_fill(~picks.counted, 0)
        return value if picks.bad is None else value.masked_fill(picks.bad, float("nan"))


def forward(hidden: Tensor, head: Head, picks: Picks, config: Config, *, entropy: bool) -> Softmax:
    """The softmax of every token of `hidden` [T, H]; one product."""
    tokens, n = picks.tokens, picks.ids.shape[0]
    softmax = Softmax.empty(n, picks.ids.shape[1], hidden.device)
    tile = Tile(min(n, config.token_chunk) * config.vocab_chunk, hidden, spare=entropy)
    for t0, t1 in spans(n, config.token_chunk):
        h = tokens.rows(hidden, t0, t1, masked=False)
        part, ids = softmax.part(t0, t1), picks.ids[t0:t1]
        for v0, v1 in spans(head.vocab, config.vocab_chunk):
            z, _, spare = tile.cut(t1 - t0, v1 - v0)
            final_logits(z, h, head, v0, temperature_of(tokens, t0, t1), None)
            part.absorb(z, v0, ids, spare)
    return softmax


# ----------------------------------------------------------------------------------------------------------- backward


@dataclass(frozen=True)
class Known:
    """What backward knows of each computed token before it sees a logit; [n] float32, upstream gradients times the
    factor that leads from the final logits to the product.

    With p = exp(z - center - width), the gradient of a logit that is no id's is -p (common + entropy (z - center)).
    """

    center: Tensor  # the mean logit where the entropy has a gradient, else the log-sum-exp
    width: Tensor | None  # then the entropy
    common: Tensor
    entropy: Tensor | None  # the upstream gradient of the entropy, None where there is none
    at_ids: Tensor  # [n, K]: the gradients of the ids' logits

    def part(self, start: int, stop: int) -> "Known":
        def cut(x: Tensor | None) -> Any:
            return None if x is None else x[start:stop]

        return Known(**{name: cut(x) for name, x in vars(self).items()})


def prepare(
    picks: Picks,
    head: Head,
    operand: torch.dtype,
    *,
    log_prob: Tensor,  # [n, K] float32
    lse: Tensor,  # [n] float32
    mean: Tensor | None,  # [n] float32
    entropy: Tensor | None,  # [n] float32
    grad_log_prob: Tensor | None,  # [n, K] float32
    grad_entropy: Tensor | None,  # [n] float32
    grad_lse: Tensor | None,  # [n] float32
) -> tuple[Known, Tensor | None]:
    """What is known of each token, and by what the gradients are then too large (None: nothing)."""
    kept, tau = picks.tokens.kept, picks.tokens.temperature
    factor = head.logit_scale / (tau[:, 0] if isinstance(tau, Tensor) else tau)

    def scaled(grad: Tensor | None) -> Tensor | None:
        # A NaN that is sent to an ignored token must not leak.
        return grad if grad is None else (grad if kept is None else grad.masked_fill(~kept, 0)) * factor

    g_entropy, g_lse = scaled(grad_entropy), scaled(grad_lse)
    g = torch.zeros_like(log_prob)
    if grad_log_prob is not None:
        g = grad_log_prob.masked_fill(~picks.counted, 0)
        g = g * (factor[:, None] if isinstance(factor, Tensor) else factor)
    if picks.bad is not None:
        g = g.masked_fill(picks.bad, float("nan"))

    too_large = None
    if operand == torch.float16 and g.numel():
        size = g.abs().sum(1)
        for more in (g_entropy, g_lse):
            size = size if more is None else size + more.abs()
        largest = size.nan_to_num(nan=0).amax()
        too_large = torch.where(largest > 0, FLOAT16_ROW / largest, 1)
        g = g * too_large
        g_entropy = None if g_entropy is None else g_entropy * too_large
        g_lse = None if g_lse is None else g_lse * too_large

    same, rest = _shares(picks.ids, g)
    if g_lse is not None:
        rest = rest - g_lse[:, None]
    common = g.sum(1) if g_lse is None else g.sum(1) - g_lse
    center, width = lse, None
    if g_entropy is not None:
        assert mean is not None
        assert entropy is not None
        center, width = mean, entropy
        rest = rest + g_entropy[:, None] * (log_prob + entropy[:, None]).clamp(min=_VANISHED)
    # exp(z - inf) is 0 for ignored tokens, whatever their logits are.
    if kept is not None:
        center = center if width is None else center.masked_fill(~kept, 0)
        if width is None:
            center = center.masked_fill(~kept, float("inf"))
        else:
            width = width.masked_fill(~kept, float("inf"))
    # 1 - p as -expm1(log p): 1 minus a rounded p would lose all digits of a p near 1.
    at_ids = -(same * torch.expm1(log_prob)) - log_prob.exp() * rest
    return Known(center, width, common, g_entropy, at_ids), too_large


def _shares(ids: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """For each id of a token the sum of `g` over its occurrences, and the sum over the other ids; [n, K] each."""
    if ids.shape[1] == 1:
        return g, torch.zeros_like(g)
    same, rest = torch.empty_like(g), torch.empty_like(g)
    for k in range(ids.shape[1]):  # not all at once: that would be [n, K, K]
        equal = ids == ids[:, k : k + 1]
        same[:, k] = torch.where(equal, g, 0).sum(1)
        rest[:, k] = torch.where(equal, 0, g).sum(1)
    return same, rest


def _to_gradient(
    z: Tensor, known: Known, ids: Tensor, start: int, slope: Tensor | None, spare: Tensor | None
) -> Tensor:
    """Turn the logits in place into the gradient of the logits before softcap and scale."""
    z.sub_(known.center[:, None])
    if known.entropy is None or known.width is None:
        z.exp_().mul_(-known.common[:, None])
    else:
        p = torch.sub(z, known.width[:, None], out=spare).exp_()
        z.clamp_(min=_VANISHED).mul_(-known.entropy[:, None]).sub_(known.common[:, None]).mul_(p)
    # The ids that lie elsewhere repeat one that lies here, so that no two write different numbers to one place; where
    # none does, what is there is written again.
    column = (ids - start).clamp_(0, z.shape[1] - 1)
    inside = column + start == ids
    one = inside.to(torch.int8).argmax(1, keepdim=True)
    column = torch.where(inside, column, column.gather(1, one))
    value = torch.where(inside, known.at_ids, known.at_ids.gather(1, one))
    z.scatter_(1, column, torch.where(inside.gather(1, one), value, z.gather(1, column)))
    return z if slope is None else z.mul_(slope)


def backward(
    hidden: Tensor,  # [T, H]
    head: Head,
    picks: Picks,
    config: Config,
    known: Known,
    too_large: Tensor | None,
    *,
    grads: tuple[bool, bool, bool],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of hidden, weight and bias in `dtypes`, chunk by chunk of the vocabulary; logits computed again."""

    def gradient(z: Tensor, slope: Tensor | None, spare: Tensor | None, t0: int, t1: int, v0: int) -> Tensor:
        return _to_gradient(z, known.part(t0, t1), picks.ids[t0:t1], v0, slope, spare)

    return recompute_walk(
        hidden,
        head,
        picks.tokens,
        config,
        gradient,
        too_large=too_large,
        grads=grads,
        dtypes=dtypes,
        spare=known.entropy is not None,
    )
