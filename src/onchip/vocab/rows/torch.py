"""The computation of cross_entropy with PyTorch's own operations, a chunk of rows at a time, on CPU and CUDA.

Two walks over the rows: `forward` makes their softmax statistics, `backward` their gradient.  A walk holds one chunk in
float32 and works in it in place.  Nothing here synchronises a GPU.
"""

import torch
from torch import Tensor

from onchip.vocab.torch.loss import Loss, loss_gradient, scaled_rows
from onchip.vocab.torch.softmax import Running, TokenStats
from onchip.vocab.torch.tiles import Tokens, Transform, apply, spans, temperature_of


class Rows:
    """A tensor [..., V] of any strides, read and written as T rows of V without a copy of the whole."""

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._leading = x.shape[:-1]
        self.flat = flatten(x)

    def read(self, tokens: Tokens, start: int, stop: int, into: Tensor) -> None:
        """The logits of the computed tokens [start, stop), as float32."""
        if self.flat is None:
            into.copy_(self._x[self._places(tokens, start, stop)])
        elif tokens.index is None:
            into.copy_(self.flat[start:stop])
        elif self.flat.dtype == into.dtype:
            torch.index_select(self.flat, 0, tokens.index[start:stop], out=into)
        else:
            into.copy_(self.flat.index_select(0, tokens.index[start:stop]))
        if tokens.kept is not None:
            # 0 * NaN is NaN: a zero factor alone would let an ignored token's NaN into its gradient.
            into.masked_fill_(~tokens.kept[start:stop, None], 0)

    def write(self, tokens: Tokens, start: int, stop: int, values: Tensor) -> None:
        """The reverse, rounded to the tensor's dtype."""
        if self.flat is None:
            self._x[self._places(tokens, start, stop)] = values.to(self._x.dtype)
        elif tokens.index is None:
            self.flat[start:stop] = values
        else:
            self.flat.index_copy_(0, tokens.index[start:stop], values.to(self.flat.dtype))

    def clear(self, rows: Tensor) -> None:
        """Zeros in the given [n] rows of the tensor."""
        if self.flat is None:
            self._x[torch.unravel_index(rows, self._leading)] = 0
        else:
            self.flat.index_fill_(0, rows, 0)

    def _places(self, tokens: Tokens, start: int, stop: int) -> tuple[Tensor, ...]:
        device = self._x.device
        rows = torch.arange(start, stop, device=device) if tokens.index is None else tokens.index[start:stop]
        return torch.unravel_index(rows, self._leading)


def flatten(x: Tensor) -> Tensor | None:
    """[..., V] as a view [T, V], or None where the strides allow no such view."""
    try:
        return x.view(x.shape[:-1].numel(), x.shape[-1])
    except RuntimeError:
        return None


def forward(logits: Tensor, transform: Transform, loss: Loss, tokens: Tokens, chunk: int, *, stats: bool) -> TokenStats:
    """The softmax statistics of every computed token."""
    n, vocab = tokens.number, logits.shape[-1]
    rows = Rows(logits)
    running = Running.empty(tokens.ids)
    tile, spare = _buffer(n, chunk, logits), _buffer(n, chunk, logits) if stats else None
    for start, stop in spans(n, chunk):
        size = (stop - start) * vocab
        z = tile[:size].view(-1, vocab)
        rows.read(tokens, start, stop, z)
        apply(transform, z, temperature_of(tokens, start, stop), None)
        beside = None if spare is None else spare[:size].view(-1, vocab)
        running.part(start, stop).absorb(z, 0, tokens.ids[start:stop], uniform=loss.uniform, spare=beside)
    return running.stats(tokens, vocab, entropy=stats, uniform=loss.uniform)


def backward(
    logits: Tensor,
    transform: Transform,
    loss: Loss,
    tokens: Tokens,
    chunk: int,
    *,
    lse: Tensor,  # [T] float32
    log_prob: Tensor,  # [T] float32
    upstream: Tensor,  # 0-d, or one for each computed token: the upstream gradient over what the mean divides by
    out: Tensor,
) -> None:
    """Write the gradient of the logits to `out`, which may be `logits`."""
    n, vocab = tokens.number, logits.shape[-1]
    row, _ = scaled_rows(tokens, transform, upstream, torch.float32)
    gradient = loss_gradient(loss, row, tokens.take(lse), tokens.take(log_prob)[:, None], vocab, tokens.kept)
    source, target = Rows(logits), Rows(out)
    tile = _buffer(n, chunk, logits)
    derivative = None if transform.softcap is None else _buffer(n, chunk, logits)
    for start, stop in spans(n, chunk):
        size = (stop - start) * vocab
        z = tile[:size].view(-1, vocab)
        slope = None if derivative is None else derivative[:size].view(-1, vocab)
        source.read(tokens, start, stop, z)
        apply(transform, z, temperature_of(tokens, start, stop), slope)
        g = gradient.part(start, stop).of_logits(z, tokens.ids[start:stop], 0, slope, None)
        target.write(tokens, start, stop, g)
    if tokens.index is not None:
        ignored = torch.ones(out.shape[:-1].numel(), dtype=torch.bool, device=out.device)
        target.clear(ignored.index_fill_(0, tokens.index, False).nonzero()[:, 0])


def _buffer(n: int, chunk: int, like: Tensor) -> Tensor:
    return torch.empty(min(n, chunk) * like.shape[-1], dtype=torch.float32, device=like.device)
