"""Launches of the kernels of a head and a loss; walks.py has their order, records.py their arguments."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.kernels.triton.launch import SPILLED, Launch
from onchip.vocab.torch.softmax import Asked
from onchip.vocab.triton import gradients
from onchip.vocab.triton import softmax as softmax_kernels
from onchip.vocab.triton.records import (
    BLOCK,
    TOKEN_TILE,
    VOCAB_TILE,
    End,
    Labels,
    LogitBuffer,
    Partials,
    Picked,
    PositionTerms,
    Run,
    Sum,
    Tiles,
)
from onchip.vocab.triton.tiling import IN_TURNS, hidden_apart, staggers, takes_turns

# Bytes of a thread's stack that a few numbers take, which a tile needs once.
FEW = 16


def gather(
    run: Run,
    hidden: Tensor,
    ids: Tensor,  # [T, K] int64
    ignore_index: int,
    temperature: Tensor | None,  # [T] float32
    picked: Picked,
    rows: Tensor,
    first: int,
) -> Launch:
    return run.launch(
        softmax_kernels.gather_tokens,
        (min(len(rows), run.tokens - first),),
        picked=picked,
        hidden=hidden,
        hidden_stride_t=hidden.stride(0),
        hidden_stride_h=hidden.stride(1),
        ids=ids,
        K=ids.shape[1],
        ignore_index=ignore_index,
        temperature=temperature,
        outer_scale=run.outer_scale / (run.options.temperature if temperature is None else 1.0),
        rows=rows,
        first=first,
        SHIFT=run.dtype != torch.float16,  # whose exponents don't reach
        BLOCK=BLOCK,
        PAD=TOKEN_TILE,
    )


def partial_columns(run: Run, asked: Asked) -> int:
    """How many logits a partial covers: as many as a kernel takes at a time that makes only what is asked for."""
    plain = not any((asked.entropy, asked.mean_logits, asked.sum_sq))
    return IN_TURNS if plain and run.plain and takes_turns(run.hidden) else VOCAB_TILE


def softmax(
    run: Run, rows: Tensor, partials: Partials, kept: LogitBuffer | None, first: int, labels: Labels | None = None
) -> Launch:
    vectors = run.vectors
    label, factor, shift = (x[first:] for x in (vectors.label, vectors.factor, vectors.shift))
    vectors = vectors._replace(label=label, factor=factor, shift=shift)
    rows = rows[: run.tokens - first]  # beyond them lie another chunk's, whose scales may overflow
    in_turns = partials.columns == IN_TURNS
    weighed = run.class_weight is not None and partials.offset_sum is not None
    if in_turns or (labels is None and run.plain and partials.plain and not weighed and staggers(run.hidden)):
        from onchip.vocab.triton import gluon_launches

        make = gluon_launches.softmax_in_turns if in_turns else gluon_launches.softmax_staggered
        made = make(run, rows, partials, kept, first, vectors)
        if partials.offset_sum is None or not made.spills():
            return made

    def launch(t: Tiles, filled: bool) -> Launch:
        arguments = {
            **run.weight_blocks(VOCAB_TILE, t.depth),
            "rows": run.operand(rows, t.rows, t.depth),
            "rows_stride": rows.stride(0),
            "T": len(rows),
            "first": first,
            "vectors": vectors,
            "labels": labels,
            "partials": partials,
            "exponentials": None if kept is None else run.operand(kept.matrix, t.rows, VOCAB_TILE // t.parts),
            "buffer": None if kept is None else kept.rows,
            "BLOCK_T": t.rows,
            "FILLED": filled,
        }
        return run.product(softmax_kernels.softmax_tiles, t, arguments)

    sums_alone = labels is None and partials.plain and partials.offset_sum is None
    most = SPILLED if partials.moment is not None else spilled_by_labels(run, labels)
    return _in_registers(run, "softmax_tiles", launch, simple=sums_alone, most=most)


def low_rows(run: Run) -> int:
    """Rows of a low tile of logits: no fewer than the weight's product takes in a step."""
    return max(64, run.tiles["weight_gradient"].depth)


def spilled_by_labels(run: Run, labels: Labels | None) -> int:
    """Bytes of a thread's stack above which tiles of logits, and of labels, are made lower.  Labels of 16 bits leave
    room for what follows, except for a softcap.
    """
    plain = labels is not None and labels.probs.element_size() == 2 and run.options.softcap is None
    return FEW if plain else SPILLED


def _in_registers(
    run: Run, name: str, launch: Callable[[Tiles, bool], Launch], *, simple: bool, most: int = SPILLED
) -> Launch:
    """The launch with tiles of this name.  If more follows a product than the compiler keeps in registers, apart from
    `most` bytes, it is launched with lower tiles, and with what takes fewer registers; failing that, by more warps.

    `simple`: nothing follows that could be too much, except a bias or softcap.
    """
    tiles = run.tiles[name]
    made = launch(tiles, False)
    if simple and run.bias is None and run.options.softcap is None:
        return made
    for warps, limit in ((tiles.warps, most), (16, SPILLED)):
        if made.spills(limit):
            made = launch(replace(tiles, rows=min(tiles.rows, low_rows(run)), warps=warps), True)
    return made


def column_sums(run: Run, x: Tensor, factor: Tensor | None = None) -> Tensor:
    """[H] float32: the sum of the weight's rows or, with a `factor` for each, of as many rows as there are
    positions.
    """
    parts, block = 64, 128
    out = stated.empty((parts, run.hidden), torch.float32, x.device)
    run.launch(
        gradients.column_sums,
        (parts, -(-run.hidden // block)),
        x=x,
        factor=run.vectors.factor if factor is None else factor,
        of_positions=int(factor is not None),
        out=out,
        x_stride_n=x.stride(0),
        x_stride_h=x.stride(1),
        N=len(x),
        PARTS=parts,
        BLOCK_T=16,
        BLOCK=block,
    ).run()
    return stated.call(torch.sum, out, 0)


def write(
    run: Run,
    buffer: LogitBuffer,
    label: Tensor,  # [T, K] int32
    entry: Tensor | None,  # [T, K] float32; None: zeros
    positions: tuple[int, int],  # the first, and the last and one
    first_tile: int,
    tiles: int,
) -> Launch:
    return run.launch(
        gradients.write_entries,
        (-(-label.numel() // BLOCK),),
        **buffer.known,
        label=label,
        entry=entry,
        K=label.shape[1],
        first=positions[0],
        last=positions[1],
        first_tile=first_tile,
        chunk_tiles=tiles,
        BLOCK=BLOCK,
    )


def gradient(
    run: Run,
    rows: Tensor,
    terms: PositionTerms,
    buffer: LogitBuffer,
    first_tile: int,
    tiles: int,
    labels: Labels | None = None,
) -> Launch:
    """The gradient of logits that are recomputed."""
    # If some targets' entries are added to the results, all are; those of several ids are written apart.
    at_target = terms.entry if buffer.kept == 0 and terms.ids == 1 else None
    if labels is None and terms.even is None and terms.entropy_scale is None and run.plain and staggers(run.hidden):
        from onchip.vocab.triton import gluon_launches

        return gluon_launches.gradient_staggered(run, rows, terms, buffer, at_target, first_tile, tiles)

    def launch(t: Tiles, filled: bool) -> Launch:
        arguments = {
            **buffer.known,
            "labels": labels,
            "terms": terms,
            **run.weight_blocks(VOCAB_TILE, t.depth),
            "rows": run.operand(rows, t.rows, t.depth),
            "rows_stride": rows.stride(0),
            "exponentials": run.operand(buffer.matrix, t.rows, VOCAB_TILE // t.parts),
            "at_target": at_target,
            "first": buffer.kept,
            "first_tile": first_tile,
            "chunk_tiles": tiles,
            "BLOCK_T": t.rows,
            "FILLED": filled,
        }
        return run.product(gradients.gradient_tiles, t, arguments)

    alone = labels is None and terms.even is None and terms.entropy_scale is None
    return _in_registers(run, "gradient_tiles", launch, simple=alone, most=spilled_by_labels(run, labels))


def weight_product(
    run: Run,
    buffer: LogitBuffer,
    rows: Tensor,
    into: Sum,  # or a gradient without digits
    inverse_grad_scale: Tensor | None,
    even_sum: Tensor | None,  # [H] float32
    recomputed_from: int,
    first_tile: int,
    tiles: int,
    *,
    add: bool,
    end: End | None = None,  # of a sum with digits
) -> Launch:
    out, digits = into
    t = run.tiles["weight_gradient"]
    parts = t.parts * out.element_size() // rows.element_size()  # the same bytes in shared memory
    arguments = {
        **buffer.known,
        "exponentials": run.operand(buffer.matrix, t.depth, t.rows),
        "rows": run.operand(rows, t.depth, t.columns),
        "rows_stride": rows.stride(0),
        "out": run.operand(out, t.rows, t.columns // parts) if digits is None else out,
        "digits": digits,
        "out_stride": out.stride(0),
        "inverse_grad_scale": inverse_grad_scale,
        **(end or End(None, None))._asdict(),
        "even_sum": even_sum,
        "recomputed_from": recomputed_from,
        "first_tile": first_tile,
        "chunk_tiles": tiles,
        "ADD": add,
        "PAIRED": into.paired,
        "BLOCK_V": t.rows,
        "BLOCK_H": t.columns,
        "PARTS": parts,
    }
    return run.product(gradients.weight_gradient, t, arguments)


def swaps_columns(run: Run) -> bool:
    """Whether `add_weight` takes hidden's rows with pairs of columns swapped, for its kernel in Gluon."""
    return run.gluon and run.hidden % 32 == 0


def add_weight(
    run: Run,
    buffer: LogitBuffer,
    rows: Tensor,  # by `scale_rows`, with `swap` as `swaps_columns` says
    into: Sum,
    inverse_grad_scale: Tensor | None,
    even_sum: Tensor | None,  # [H] float32
    first_tile: int,
    tiles: int,
    *,
    add: bool,
    end: End | None = None,
) -> Launch:
    """A chunk of tokens' part of the weight's sum: the first one, or added to the parts of the chunks before it.  With
    `end`, the last chunk that has tokens replaces the first 16 bits by the gradient, as the nearest bfloat16.
    """
    if swaps_columns(run):
        from onchip.vocab.triton import gluon_launches

        make = gluon_launches.weight_added
        return make(run, buffer, rows, into, inverse_grad_scale, even_sum, first_tile, tiles, add=add, end=end)
    return weight_product(run, buffer, rows, into, inverse_grad_scale, even_sum, 0, first_tile, tiles, add=add, end=end)


def hidden_product(
    run: Run,
    buffer: LogitBuffer,
    product_scale: Tensor,
    sums: Tensor,
    halves: bool,
    first_tile: int,
    tiles: int,
    *,
    apart: bool | None = None,
    slices: int = 1,
    positions: tuple[int, int] | None = None,
) -> Launch:
    """hidden's product for `positions` (the first, and one past the last, that are kept), times `product_scale`;
    without them, for all that aren't kept; in `slices` of sums.

    `apart`: whether by the kernel of apart.py, where that can run; None leaves it to H.
    """
    first, last = positions or (min(buffer.kept, run.tokens), run.tokens)
    out = sums[first:] if positions is None else sums if slices > 1 else sums[: last - first]
    rows = len(sums) // slices
    common = {
        **buffer.known,
        "out_stride": out.stride(0),
        "product_scale": product_scale,
        "scaled": int(positions is not None),
        "first": first,
        "last": last,
        "slice_rows": rows if slices > 1 else buffer.rows.in_third if positions is None else 0,
        "first_tile": first_tile,
        "chunk_tiles": tiles,
        "slices": max(slices, 2 if positions is not None or halves else 1),
    }
    if run.gluon and run.weight.stride(1) == 1 and (hidden_apart(run.hidden) if apart is None else apart):
        from onchip.vocab.triton import gluon_launches

        return gluon_launches.hidden_apart(run, buffer, out, common)
    t = run.tiles["hidden_gradient"]
    arguments = {
        **common,
        **run.weight_blocks(t.depth, t.columns),
        "exponentials": run.operand(buffer.matrix, t.rows, t.depth),
        "out": run.operand(out, t.rows, t.columns // t.parts),
        "out_rows": len(out),
        "BLOCK_T": t.rows,
        "BLOCK_H": t.columns,
    }
    return run.product(gradients.hidden_gradient, t, arguments)
