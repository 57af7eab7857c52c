"""The computation of cross_entropy with PyTorch's own operations, a chunk of rows at a time, on CPU and CUDA.

Two walks over the rows: `forward` makes their softmax statistics, `backward` their gradient.  A walk holds one chunk in
float32 and works in it in place.  Nothing here synchronises a GPU.
"""

import torch
from torch import Tensor

from onchip.vocab.torch.tiles import Head, Softmax, Tokens, spans, temperature_of, to_gradient, transform


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


def forward(logits: Tensor, head: Head, tokens: Tokens, chunk: int, *, stats: bool) -> Softmax:
    """The softmax statistics of every computed token."""
    n, vocab = tokens.label.numel(), logits.shape[-1]
    rows = Rows(logits)
    softmax = Softmax.empty(n, logits.device)
    tile, spare = _buffer(n, chunk, logits), _buffer(n, chunk, logits) if stats else None
    for start, stop in spans(n, chunk):
        size = (stop - start) * vocab
        z = tile[:size].view(-1, vocab)
        rows.read(tokens, start, stop, z)
        transform(z, head, temperature_of(tokens, start, stop), None)
        part = softmax.part(start, stop)
        beside = None if spare is None else spare[:size].view(-1, vocab)
        part.absorb(z, 0, tokens.label[start:stop], smoothing=head.label_smoothing > 0, spare=beside)
    return softmax


def backward(
    logits: Tensor,
    head: Head,
    tokens: Tokens,
    chunk: int,
    *,
    lse: Tensor,  # [T] float32
    log_prob: Tensor,  # [T] float32
    upstream: Tensor,  # 0-d, or one for each computed token: the upstream gradient over what the mean divides by
    out: Tensor,
) -> None:
    """Write the gradient of the logits to `out`, which may be `logits`."""
    n, vocab = tokens.label.numel(), logits.shape[-1]
    tau = tokens.temperature
    row = tokens.weight * upstream * head.logit_scale / (tau[:, 0] if isinstance(tau, Tensor) else tau)
    if tokens.index is not None:
        lse, log_prob = lse[tokens.index], log_prob[tokens.index]
    factor = row * (1 + 2 * head.z_loss * lse)
    # exp(z - inf) is 0 for ignored tokens.
    shift = lse if tokens.kept is None else lse.masked_fill(~tokens.kept, float("inf"))
    source, target = Rows(logits), Rows(out)
    tile = _buffer(n, chunk, logits)
    derivative = None if head.softcap is None else _buffer(n, chunk, logits)
    for start, stop in spans(n, chunk):
        size, span = (stop - start) * vocab, slice(start, stop)
        z = tile[:size].view(-1, vocab)
        slope = None if derivative is None else derivative[:size].view(-1, vocab)
        source.read(tokens, start, stop, z)
        transform(z, head, temperature_of(tokens, start, stop), slope)
        e = z.sub_(shift[span, None]).exp_()
        g = to_gradient(e, factor[span], row[span], lse[span], log_prob[span], tokens.label[span], 0, head, slope)
        target.write(tokens, start, stop, g)
    if tokens.index is not None:
        ignored = torch.ones(out.shape[:-1].numel(), dtype=torch.bool, device=out.device)
        target.clear(ignored.index_fill_(0, tokens.index, False).nonzero()[:, 0])


def _buffer(n: int, chunk: int, like: Tensor) -> Tensor:
    return torch.empty(min(n, chunk) * like.shape[-1], dtype=torch.float32, device=like.device)
