"""A head and a cross-entropy with a label for every entry of the vocabulary, by the Triton kernels.

Every token counts, and is its own position.  Nothing is kept: backward computes the logits again, a chunk of the
vocabulary at a time, and reads the labels again.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.vocab import loss as maths
from onchip.vocab.rows.launches import rows_of
from onchip.vocab.torch.call import LinearCall
from onchip.vocab.torch.loss import LossOutputs
from onchip.vocab.torch.softmax import Asked, KnownStats
from onchip.vocab.triton import launches, setup, softmax
from onchip.vocab.triton.blocks import odd
from onchip.vocab.triton.exchange import HiddenSum
from onchip.vocab.triton.memory import TritonPlan
from onchip.vocab.triton.products import Products, chunks, float16_scale
from onchip.vocab.triton.records import Labels, Partials, Picked, PositionTerms, Run
from onchip.vocab.triton.setup import Gradients, TritonSaved
from onchip.vocab.triton.tiling import VOCAB_TILE
from onchip.vocab.triton.token_launches import compact


class TritonSoftStats(NamedTuple):
    """What kernels make from labels as they are given, by the names of `LossOutputs`; None without return_stats."""

    expected: Tensor | None
    entropy: Tensor | None
    correct: Tensor | None
    argmax: Tensor | None
    target_logit: Tensor | None


def labels_of(values: Tensor | None, smoothing: float) -> Labels:
    """The labels in a tensor [..., V] whose leading dimensions reduce to two."""
    assert values is not None
    inner, outer, row = rows_of(values)
    return Labels(values, odd(inner), outer, row, values.stride(-1), smoothing)


def forward(
    run: Run,
    call: LinearCall,
    config: TritonPlan,
    saved: TritonSaved,
    labels: Labels,
    out: LossOutputs,
    top: Tensor | None = None,
) -> None:
    """Fill `out` with the loss of each token, without its weight, and with what kernels make, and `top` [T] with the
    largest logits; leave what backward needs in `saved`.
    """
    run, tokens, device = _cut(run), run.tokens, run.weight.device
    stated.zero(run.vectors.packed)
    if tokens == 0:
        return
    given = TritonSoftStats(*(getattr(out, name) for name in TritonSoftStats._fields))
    made = {"loss": out.loss, "lse": out.lse, "less": out.log_prob, "mass": out.mass, "stats": given}
    rows, _ = setup.rows_and_buffer(call, config, saved)
    temperature = call.token_temperature
    if temperature is not None:
        temperature = setup.flat(temperature.expand(call.hidden.shape[:-1]))
    # No token has a target, and none is ignored.
    ids = stated.call(torch.full, (tokens, 1), -1, dtype=torch.int64, device=device)
    picked = Picked(stated.empty(tokens, torch.float32, device), None, None)
    partials = Partials.empty(run.vocab, len(rows), device, Asked(entropy=run.options.return_stats), labels=True)
    compact(run.vectors, ids, 0).run()
    hidden = call.hidden.reshape(tokens, run.hidden)
    for first in range(0, tokens, len(rows)):
        launches.gather(run, hidden, ids, 0, temperature, picked, rows, first).run()
        launches.softmax(run, rows, partials, None, first, labels).run()
        run.launch(
            softmax.merge_labels,
            (-(-len(rows) // 16),),
            warps=8,
            partials=partials,
            **made,
            first=first,
            BLOCK_T=16,
            BLOCK=256,
        ).run()
        if top is not None:
            part = top[first : first + len(rows)]
            torch.amax(partials.maximum[:, : len(part)], 0, out=part)


def backward(
    run: Run,
    call: LinearCall,
    config: TritonPlan,
    saved: TritonSaved,
    labels: Labels,
    known: KnownStats,  # log_prob: the largest p - 1, where that p is above LEADING of kernels/triton/maths.py
    row: Tensor,  # [T] float32: of each token's loss, times the derivative of the logits by the product
    wanted: Sequence[bool],
    *,
    add_to: Tensor | None = None,
    hidden_sum: HiddenSum | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """As `walks.backward`: turn `saved` into hidden's gradient, and return the gradients of weight and bias; with
    `hidden_sum` hidden's too.
    """
    run, grads = _cut(run), Gradients.of(call, saved, wanted, add_to)
    if hidden_sum is not None:
        grads = hidden_sum.apart(grads)
    if run.tokens > 0:
        scale = float16_scale(stated.call(_with_mass, row, known.mass), run.vectors, run.dtype)
        row = stated.converted(row, Tensor.contiguous) if scale is None else stated.call(torch.mul, row, scale)
        nothing = stated.zero(stated.empty_like(row))
        terms = PositionTerms(
            row_scale=row,
            even=None,
            entropy_scale=None,
            mean=None,
            product_scale=nothing,
            lse=known.lse,
            entry=nothing,
            entry_label=stated.call(torch.full_like, row, -1, dtype=torch.int32),
            inverse_grad_scale=None if scale is None else stated.call(torch.reciprocal, scale),
            mass=known.mass,
            less=known.log_prob,
            more=stated.call(maths.slope_of_lse, run.loss_terms, known.lse),
        )
        products = Products.of(run, call, config, saved, grads, terms.product_scale, terms.inverse_grad_scale)
        start = next(chunks(0, run.vocab_tiles, config.vocab_chunk // VOCAB_TILE))
        recomputed = launches.gradient(run, products.rows, terms, products.buffer, *start, labels).fixed()
        for first, tiles in chunks(0, run.vocab_tiles, config.vocab_chunk // VOCAB_TILE):
            recomputed.again(first_tile=first, chunk_tiles=tiles).run()
            products.take_hidden(first, tiles)
            if hidden_sum is not None and first + tiles == run.vocab_tiles:
                hidden_sum.begin_with(products, call)
            products.take_chunk(first, tiles)
        if hidden_sum is None:
            products.finish()
    return grads.made(call.dtypes[2]) if hidden_sum is None else hidden_sum.complete(grads, call)


def _with_mass(row: Tensor, mass: Tensor) -> Tensor:
    return row * (1 + mass)


def _cut(run: Run) -> Run:
    """The run with lower tiles of logits: labels take as many registers as logits do."""
    tiles = {
        name: replace(run.tiles[name], rows=launches.low_rows(run)) for name in ("softmax_tiles", "gradient_tiles")
    }
    return replace(run, tiles={**run.tiles, **tiles})
