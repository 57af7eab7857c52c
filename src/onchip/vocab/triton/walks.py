"""The computation of a head and a loss with the Triton kernels: what is launched, in which order, on what memory.

`forward` makes the log-probabilities of each token's ids; where gradients are wanted it leaves the hidden states by
position, and exponentials, from which `backward` makes them.  A cross-entropy is a function of one id's log-probability
and of lse.  Where exponentials are kept, those of all ids are zeroed, and their entries are added to the gradients in
float32.  Where the entropy has an upstream gradient, what was kept is made the logits' gradient, in place, before the
products.

Nothing here waits for the device: how many tokens are not ignored is known to the kernels alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.vocab.triton import launches
from onchip.vocab.triton.launches import LogitBuffer, Partials, Picked, Run, Terms, TokenSoftmax, Vectors

# float16 can't hold a gradient of 1e-8: rows of the softmax gradient are scaled to about this before a product, and to
# 1 where they are scaled rows of hidden instead.
_FLOAT16_ROW = 256.0


def float16_scale(size: Tensor, vectors: Vectors, dtype: torch.dtype, largest: float = _FLOAT16_ROW) -> Tensor | None:
    """What makes the largest of the positions' rows, of these sizes, suit float16; None: they are left."""
    if dtype != torch.float16 or size.numel() == 0:
        return None
    there = torch.arange(size.numel(), device=size.device) < vectors.number
    found = torch.where(there, size.abs().nan_to_num(nan=0), 0).amax()
    return torch.where(found > 0, largest / found, 1)


class OutputGradients(NamedTuple):
    """The upstream gradients, by token; None is 0."""

    log_prob: Tensor | None  # [T, K] float32
    lse: Tensor | None = None  # [T] float32
    entropy: Tensor | None = None  # [T] float32


# ------------------------------------------------------------------------------------------------------------ forward


def forward(
    run: Run,
    hidden: Tensor,  # [T, H], any strides
    ids: Tensor,  # [T, K] int64
    temperature: Tensor | float,  # [T] float32, or one for all
    ignore_index: int,
    rows: Tensor,  # [T or fewer, H]: so many tokens at a time
    kept: LogitBuffer | None,
    *,
    stats: bool,
) -> tuple[TokenSoftmax, Vectors]:
    """The log-probabilities of each token's ids, and lse; with `stats` entropy and top1 as well.

    `rows` and `kept` are filled in for backward, for which `rows` takes all tokens at once.
    """
    tokens, k = ids.shape
    smoothing = run.head.label_smoothing > 0

    def empty(*more: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((tokens, *more), dtype=dtype, device=hidden.device)

    leading = empty()
    made = TokenSoftmax(
        empty(),
        leading[:, None] if k == 1 else empty(k),
        empty() if stats else None,
        leading,
        empty() if smoothing else None,
        empty(dtype=torch.int64) if stats else None,
    )
    vectors = Vectors.empty(tokens, hidden.device)
    if tokens == 0:
        return made, vectors
    picked = Picked(empty(), *((None, None) if k == 1 else (empty(k), empty(k, dtype=torch.int32))))
    partials = Partials.empty(run.vocab_tiles, len(rows), hidden.device, smoothing=smoothing, stats=stats)
    if k == 1:
        launches.compact(run, ids, ignore_index, vectors).run()
    else:
        launches.compact(run, (ids != ignore_index).any(1).to(torch.int64), 0, vectors).run()
    for first in range(0, tokens, len(rows)):
        launches.gather(run, hidden, ids, ignore_index, temperature, vectors, picked, rows, first).run()
        launches.softmax(run, rows, vectors, partials, kept, first).run()
        launches.merge(run, vectors, picked.target_logit, partials, made, first).run()
    if kept is not None:
        launches.rebase(run, kept, vectors, partials).run()
    if picked.picked_label is not None:
        launches.spread(run, ids, ignore_index, vectors, picked, made).run()
        if kept is not None:
            label = picked.picked_label
            launches.write(run, kept, label, None, vectors, 0, kept.kept, 0, run.vocab_tiles).run()
    return made, vectors


def losses(run: Run, vectors: Vectors, made: TokenSoftmax, token_weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Each token's weighted cross-entropy, and where top1 is known whether it is the target."""
    loss = torch.empty_like(made.lse)
    correct = None if made.top1 is None else torch.empty_like(made.top1, dtype=torch.bool)
    if run.tokens > 0:
        launches.losses(run, vectors, made, token_weight, loss, correct).run()
    return loss, correct


def loss_gradients(run: Run, made: TokenSoftmax, grad_loss: Tensor) -> OutputGradients:
    """Those by the log-probability and lse, of those [T] by each token's loss."""
    z_loss = run.head.z_loss
    return OutputGradients(-grad_loss[:, None], grad_loss * made.lse * (2 * z_loss) if z_loss > 0 else None)


# ----------------------------------------------------------------------------------------------------------- backward


@dataclass(frozen=True)
class Products:
    """The products that make a head's gradients of its logits' gradient, in `buffer`."""

    run: Run
    vectors: Vectors
    buffer: LogitBuffer
    rows: Tensor  # [T, H] by position, for the products to use up
    product_scale: Tensor  # [T] float32: what multiplies that of the positions that are kept
    inverse_grad_scale: Tensor | None  # [] float32
    sums: Tensor | None  # [T or more, H] float32 zeros: hidden's gradient by position
    grad_weight: Tensor | None  # [V, H] out; its memory may be the buffer's, if that begins a chunk further on
    grad_bias: Tensor | None  # [V] float32 out
    weight_tiles: int
    """Tiles of the vocabulary in a chunk of weight's gradient."""
    add: bool = False
    halves: bool = False

    @property
    def kept(self) -> int:
        return min(self.buffer.kept, self.run.tokens)

    def take_kept(self, *, scale: bool = True) -> None:
        """What comes before weight's gradient takes the place of what is kept."""
        if self.kept > 0 and scale:
            launches.scale_rows(self.run, self.rows, self.product_scale, self.vectors, self.kept).run()
        if self.kept > 0 and self.sums is not None:
            self._add_hidden(self.product_scale, 0, self.run.vocab_tiles, halves=False)

    def take_chunk(self, first: int, tiles: int) -> None:
        """A chunk of the vocabulary, with what is recomputed of it."""
        run, vectors, buffer, inverse = self.run, self.vectors, self.buffer, self.inverse_grad_scale
        if self.kept < run.tokens and self.sums is not None:
            self._add_hidden(None, first, tiles, halves=self.halves)
        if self.grad_bias is not None:
            args = (self.product_scale, inverse, self.grad_bias, first, tiles)
            launches.bias_sums(run, buffer, vectors, *args).run()
        if self.grad_weight is not None:
            for part in chunks(first, first + tiles, self.weight_tiles):
                launches.weight_product(
                    run, buffer, self.rows, vectors, self.grad_weight, inverse, first, *part, add=self.add
                ).run()

    def _add_hidden(self, scale: Tensor | None, first: int, tiles: int, *, halves: bool) -> None:
        assert self.sums is not None
        launches.hidden_product(self.run, self.buffer, self.vectors, scale, self.sums, halves, first, tiles).run()


def backward(
    run: Run,
    vectors: Vectors,
    ids: Tensor,  # [T, K] int64
    ignore_index: int,
    known: TokenSoftmax,
    upstream: OutputGradients,
    buffer: LogitBuffer,
    *,
    rows: Tensor,  # [T, H] by position, for the products to use up
    hidden: Tensor,  # [T, H] by token, any strides
    chunk_tiles: tuple[int, int],
    halves: bool,
    grad_hidden: Tensor | None,  # [T, H] out; its memory may be that of `rows`
    grad_weight: Tensor | None,  # [V, H] out; its memory may be the buffer's, if that begins a chunk further on
    grad_bias: Tensor | None,  # [V] float32 out
    add: bool = False,
) -> None:
    """Fill in the gradients, in chunks of so many tiles of the vocabulary: of logits that are recomputed, and of
    weight's gradient.
    """
    kept, recomputed = min(buffer.kept, run.tokens), buffer.rows.recomputed
    terms = position_terms(run, vectors, ids, ignore_index, known, upstream)
    sums = None
    if grad_hidden is not None:
        size = kept + 2 * recomputed if halves else run.tokens
        sums = rows.new_zeros((size, run.hidden), dtype=torch.float32)
    products = Products(
        run, vectors, buffer, rows, terms.product_scale, terms.inverse_grad_scale, sums, grad_weight, grad_bias,
        chunk_tiles[1], add, halves,
    )  # fmt: skip
    if kept > 0 and terms.entropy_scale is not None:
        launches.entropy_gradient(run, buffer, vectors, terms).run()
    products.take_kept(scale=terms.entropy_scale is None)
    for chunk in chunks(0, run.vocab_tiles, chunk_tiles[0]):
        if kept < run.tokens:
            launches.gradient(run, rows, vectors, terms, buffer, *chunk).run()
            if terms.ids > 1:
                label = terms.entry_label.view(ids.shape)
                entry = terms.entry if kept == 0 else None  # where some are added to the results, all are
                launches.write(run, buffer, label, entry, vectors, kept, run.tokens, *chunk).run()
        products.take_chunk(*chunk)
    if kept > 0 and (grad_weight is not None or grad_bias is not None):
        launches.target_terms(run, hidden, vectors, terms, grad_weight, grad_bias).run()
    if sums is not None and grad_hidden is not None:
        half_rows = recomputed if halves else 0
        inverse = terms.inverse_grad_scale
        launches.finish(run, sums, vectors, inverse, grad_hidden, kept, half_rows, terms if kept else None).run()


def position_terms(
    run: Run, vectors: Vectors, ids: Tensor, ignore_index: int, known: TokenSoftmax, upstream: OutputGradients
) -> Terms:
    """What the gradients of the positions' logits are made of."""
    tokens = run.tokens
    sizes = [tokens] * 4 + [ids.numel()] + [tokens] * 3
    packed = known.lse.new_empty(sum(sizes))
    row_scale, product_scale, even, entropy_scale, entry, lse, mean, size = packed.split(sizes)
    entry_label = torch.empty_like(ids, dtype=torch.int32)
    entropy = upstream.entropy is not None
    terms = Terms(
        row_scale,
        even if run.head.label_smoothing > 0 else None,
        entropy_scale if entropy else None,
        mean if entropy else None,
        product_scale,
        lse,
        entry,
        entry_label.view(-1),
        None,
    )
    arguments = {
        **{f"grad_{name}": x for name, x in upstream._asdict().items()},
        **terms._asdict(),
        "log_prob": known.log_prob,
        "lse": known.lse,
        "entropy": known.entropy,
        "position_lse": lse,
        "size": size,
        "ignore_index": ignore_index,
    }
    launches.position_terms(run, vectors, arguments, ids).run()
    grad_scale = float16_scale(size, vectors, run.head.weight.dtype)
    if grad_scale is not None:
        packed[: sum(sizes[:5])] *= grad_scale
        terms = terms._replace(inverse_grad_scale=1 / grad_scale)
    return terms._replace(product_scale=torch.ones_like(lse)) if entropy else terms


def chunks(first: int, last: int, size: int) -> Iterator[tuple[int, int]]:
    """First and number of each chunk."""
    return ((start, min(size, last - start)) for start in range(first, last, max(1, size)))
