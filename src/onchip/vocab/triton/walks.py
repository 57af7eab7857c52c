"""The computation of linear_cross_entropy with the Triton kernels: what is launched, in which order, on what memory.

`forward` makes the loss; where gradients are wanted it leaves the hidden states by position, and exponentials, from
which `backward` makes them.  Nothing here waits for the device: how many tokens are not ignored is known to the kernels
alone.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from onchip.vocab.triton.launches import (
    Exponentials,
    Partials,
    PerToken,
    Run,
    Upstream,
    Vectors,
    bias_sums,
    compact,
    finish,
    gather,
    gradient_again,
    hidden_product,
    merge,
    scale_hidden,
    settle,
    softmax,
    target_terms,
    weight_product,
)

# float16 can't hold a gradient of 1e-8: rows of the softmax gradient are scaled to about this before a product, and to
# 1 where they are scaled rows of hidden instead.
_FLOAT16_ROW = 256.0


def scale_for_float16(size: Tensor, vectors: Vectors, dtype: torch.dtype) -> Tensor | None:
    """By what rows of the gradient, of these sizes, are multiplied to lie in float16's range; None: they are left."""
    if dtype != torch.float16 or size.numel() == 0:
        return None
    there = torch.arange(size.numel(), device=size.device) < vectors.number
    largest = torch.where(there, size.abs().nan_to_num(nan=0), 0).amax()
    return torch.where(largest > 0, _FLOAT16_ROW / largest, 1)


def forward(
    run: Run,
    hidden: Tensor,  # [T, H], any strides
    target: Tensor,  # [T] int64
    token_weight: Tensor | None,  # [T] float32
    temperature: Tensor | float,  # [T] float32, or one for all
    ignore_index: int,
    rows: Tensor,  # [T or fewer, H]: so many tokens at a time
    kept: Exponentials | None,
    *,
    stats: bool,
) -> tuple[PerToken, Vectors]:
    """The loss and the statistics of each token.  `rows` and `kept` are filled in for backward, for which `rows` takes
    all tokens at once.
    """
    device, tokens, chunk = hidden.device, run.tokens, len(rows)
    vectors = Vectors.empty(tokens, device)
    loss, lse, log_prob = (torch.empty(tokens, dtype=torch.float32, device=device) for _ in range(3))
    entropy = torch.empty_like(loss) if stats else None
    out = PerToken(loss, lse, log_prob, entropy, torch.empty_like(loss, dtype=torch.bool) if stats else None)
    target_logit = torch.empty(tokens, dtype=torch.float32, device=device)
    smoothing = run.head.label_smoothing > 0
    partials = Partials.empty(run.vocab_tiles, chunk, device, smoothing=smoothing, stats=stats)
    if tokens == 0:
        return out, vectors
    compact(run, target, ignore_index, vectors).run()
    for first in range(0, tokens, chunk):
        gather(run, hidden, target, temperature, vectors, target_logit, rows, first).run()
        softmax(run, rows, vectors, partials, kept, first, stats=stats).run()
        merge(run, vectors, target_logit, partials, token_weight, out, first).run()
    if kept is not None:
        settle(run, kept, vectors, partials.maximum).run()
    return out, vectors


def backward(
    run: Run,
    vectors: Vectors,
    upstream: Upstream,
    rows: Tensor,  # [T, H] by position, for the products to use up
    hidden: Tensor,  # [T, H] by token, any strides
    places: Exponentials,
    chunk_tiles: tuple[int, int],
    halves: bool,
    *,
    grad_hidden: Tensor | None,  # [T, H] out; its memory may be that of `rows`
    grad_weight: Tensor | None,  # [V, H] out; its memory may be the exponentials', if those begin a chunk further on
    grad_bias: Tensor | None,  # [V] float32 out
    add: bool = False,
    after_again: Callable[[int, int], None] | None = None,
) -> None:
    """Fill in the gradients, in chunks of so many tiles of the vocabulary: of logits computed again, and of weight's
    gradient.  `after_again` is called with the first tile and the number of tiles of each chunk of the former.
    """
    tokens, held = run.tokens, min(places.held, run.tokens)
    sums = None
    if grad_hidden is not None:
        size = tokens if not halves else held + 2 * places.again_tokens
        sums = rows.new_zeros((size, run.hidden), dtype=torch.float32)
    if held > 0 and upstream.entropy_row is None:
        scale_hidden(run, rows, places, vectors, upstream).run()
    if sums is not None and held > 0:
        # Before weight's gradient takes the exponentials' place.
        hidden_product(run, places, vectors, upstream.scale, sums, False, 0, run.vocab_tiles).run()
    for chunk in _chunks(0, run.vocab_tiles, chunk_tiles[0]):
        if held < tokens:
            gradient_again(run, rows, vectors, upstream, places, *chunk).run()
            if after_again is not None:
                after_again(*chunk)
            if sums is not None:
                hidden_product(run, places, vectors, None, sums, halves, *chunk).run()
        if grad_bias is not None:
            bias_sums(run, places, vectors, upstream, grad_bias, *chunk).run()
        if grad_weight is not None:
            for part in _chunks(*chunk, chunk_tiles[1]):
                weight_product(run, places, rows, vectors, grad_weight, upstream.shrink, chunk[0], *part, add=add).run()
    if held > 0 and (grad_weight is not None or grad_bias is not None):
        target_terms(run, hidden, vectors, upstream, grad_weight, grad_bias).run()
    if sums is not None and grad_hidden is not None:
        again_rows = places.again_tokens if halves else 0
        finish(run, sums, vectors, upstream, grad_hidden, held, again_rows).run()


def _chunks(first: int, count: int, size: int) -> Iterator[tuple[int, int]]:
    """First tile and number of tiles of each chunk."""
    return ((start, min(size, first + count - start)) for start in range(first, first + count, size))
