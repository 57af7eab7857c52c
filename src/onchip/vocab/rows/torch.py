"""cross_entropy and log_probs in PyTorch's own operations, a chunk of rows at a time, on CPU and CUDA.

The engine's walk computes the softmax statistics of `Rows`, and `write_gradient` the gradient.  A walk holds one chunk
in float32 (in float64 for float64 logits) and works on it in place.  Nothing here synchronises a GPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onchip.vocab.torch.softmax import TokenGradient
from onchip.vocab.torch.tiles import Ids, Tile, apply, flatten, spans, temperature_of


class Rows:
    """A tensor [..., V] with any strides, read and written as T rows of V without a copy of the whole."""

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._leading = x.shape[:-1]
        self.vocab = x.shape[-1]
        self.flat = flatten(x)

    def reader(self, tokens: Ids, start: int, stop: int) -> Callable[[Tensor, int], None]:
        """As a Projection's; a tile covers all of the vocabulary."""
        return lambda out, first: self.read(tokens, start, stop, out)

    def read(self, tokens: Ids, start: int, stop: int, into: Tensor) -> None:
        """Read the logits of the computed tokens [start, stop), in the dtype of `into`."""
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

    def write(self, tokens: Ids, start: int, stop: int, values: Tensor) -> None:
        """The reverse: write `values`, rounded to the tensor's dtype."""
        if self.flat is None:
            self._x[self._places(tokens, start, stop)] = values.to(self._x.dtype)
        elif tokens.index is None:
            self.flat[start:stop] = values
        else:
            self.flat.index_copy_(0, tokens.index[start:stop], values.to(self.flat.dtype))

    def clear(self, rows: Tensor) -> None:
        """Write zeros to the given [n] rows of the tensor."""
        if self.flat is None:
            self._x[torch.unravel_index(rows, self._leading)] = 0
        else:
            self.flat.index_fill_(0, rows, 0)

    def _places(self, tokens: Ids, start: int, stop: int) -> tuple[Tensor, ...]:
        if tokens.index is None:
            rows = torch.arange(start, stop, dtype=torch.int64, device=self._x.device)
        else:
            rows = tokens.index[start:stop]
        return torch.unravel_index(rows, self._leading)


def write_gradient(logits: Tensor, options: Any, tokens: Ids, chunk: int, gradient: TokenGradient, out: Tensor) -> None:
    """Write the gradient of the logits to `out`, which may be `logits`, chunk by chunk."""
    n, vocab = tokens.number, logits.shape[-1]
    source, target = Rows(logits), Rows(out)
    spare = gradient.entropy_row is not None
    tile = Tile(min(n, chunk) * vocab, tokens, slope=options.softcap is not None, spare=spare)
    for start, stop in spans(n, chunk):
        z, slope, beside = tile.cut(stop - start, vocab)
        source.read(tokens, start, stop, z)
        apply(options, z, temperature_of(tokens, start, stop), slope)
        g = gradient.part(start, stop).of_logits(z, tokens.ids[start:stop], 0, slope, beside)
        target.write(tokens, start, stop, g)
    if tokens.index is not None:
        ignored = torch.ones(out.shape[:-1].numel(), dtype=torch.bool, device=out.device)
        target.clear(ignored.index_fill_(0, tokens.index, False).nonzero()[:, 0])
