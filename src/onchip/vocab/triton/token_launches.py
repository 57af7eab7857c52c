"""Launches of the kernels that number tokens, and that take rows of hidden's gradient to where they belong."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_parallel import Shards
from onchip.kernels.triton.launch import Launch
from onchip.vocab.torch import parallel
from onchip.vocab.torch.call import Layer
from onchip.vocab.triton import softmax, vectors
from onchip.vocab.triton import sums as sum_kernels
from onchip.vocab.triton.records import BLOCK, ChunkSums, PositionTerms, Run, Sum, Vectors


def compact(
    found: Vectors, target: Tensor, ignore_index: int, numbers: Tensor | None = None, sizes: Sequence[int] = (0,)
) -> Launch:
    """Number the tokens that are not ignored, in all and, with `numbers`, in chunks of these sizes, and one of none.
    From the second chunk on they are even.
    """
    arguments = {
        "target": target,
        "vectors": found,
        "numbers": found.number if numbers is None else numbers,
        "T": len(target),
        "ignore_index": ignore_index,
        "first_size": sizes[0],
        "size": sizes[min(1, len(sizes) - 1)],
        "chunks": 0 if numbers is None else len(sizes) + 1,
        "BLOCK": 4096,
    }
    return Launch(softmax.compact_tokens, (1,), arguments, warps=8)


def number_ids(ids: Tensor, shards: Shards, ignore_index: int, header: Tensor | None) -> Tensor:
    """[N] int64: ids as a shard numbers them; `vocab.torch.parallel` says what replaces others."""
    out = stated.empty(ids.shape, torch.int64, ids.device)
    arguments = {
        "ids": ids,
        "out": out,
        "header": header,
        "start": shards.start,
        "rows": shards.rows,
        "vocab": shards.vocab,
        "ignore_index": ignore_index,
        "N": len(ids),
        "ELSEWHERE": parallel.ELSEWHERE,
        "IGNORED": parallel.IGNORED,
        "BAD": parallel.BAD,
        "BLOCK": BLOCK,
    }
    if len(ids) > 0:
        Launch(vectors.number_ids, (-(-len(ids) // BLOCK),), arguments).run()
    return out


def keep_hidden(run: Run, layer: Layer, made: ChunkSums, into: Sum) -> Launch:
    """Leave hidden's gradient at these positions for `scale_hidden`."""
    sums, first, number, slices = made
    out = into.first.view(layer.hidden.dtype)
    memory = {"sums": sums, "left": into.first, "digits": into.digits, "out": out}
    cut = {"keeps": 1, "begin": first, "kept": 0, "slices": slices, "slice_rows": number}
    return _hidden_rows(run, layer.weight, number, None, **memory, **cut)


def scale_hidden(run: Run, left: Sum, terms: PositionTerms, weight_sum: Tensor | None, out: Tensor) -> Launch:
    """Hidden's gradient, from what `keep_hidden` left."""
    memory = {"sums": run.vectors.factor, "left": left.first, "digits": left.digits, "out": out}
    more = {"scales": 1, "kept": run.tokens, "ids": terms.ids, "weight_sum": weight_sum}
    return _hidden_rows(run, run.weight, run.tokens, terms, **memory, **more)


def finish_hidden(
    run: Run,
    weight: Tensor,
    sums: Tensor,
    terms: PositionTerms | None,
    weight_sum: Tensor | None,
    inverse_grad_scale: Tensor | None,
    kept: int,
    half_rows: int,
    out: Tensor,
) -> Launch:
    """Hidden's gradient, from sums that lack the ids' terms of `kept` positions, if there are any.  With `half_rows`
    the sums of the other positions are in two halves, that many rows apart.  `weight` is the caller's.
    """
    # What isn't read looks to the compiler as in other calls, so that there is one kernel for all numbers of tokens.
    memory = {"sums": sums, "out": out, "left": None, "digits": None, "inverse_grad_scale": inverse_grad_scale}
    if terms is not None and out.element_size() == 2:
        memory |= {"left": out.view(torch.int16), "digits": out.view(torch.uint8)}
    elif terms is not None:
        memory |= {"left": out}
    cut = {"kept": kept, "slices": 2 if half_rows else 1, "slice_rows": half_rows}
    ids = 0 if terms is None or kept == 0 else terms.ids
    return _hidden_rows(run, weight, run.tokens, terms, **memory, **cut, ids=ids, weight_sum=weight_sum)


def scale_rounded(x: Tensor, factor: Tensor) -> Launch:
    """Multiply `x` by a factor, [] float32, which PyTorch's operators would round to the dtype of x."""
    arguments = {"x": x, "factor": factor, "N": x.numel(), "BLOCK": BLOCK}
    return Launch(sum_kernels.scale_rounded, (max(1, min(4096, -(-x.numel() // BLOCK))),), arguments)


def shard_rows(
    run: Run,
    weight: Tensor,  # the caller's
    made: ChunkSums,
    terms: PositionTerms,
    share: Tensor,
    weight_sum: Tensor | None,
    factor: Tensor,
    out: Tensor,  # [T, H]
) -> Launch:
    """A shard's part of hidden's gradient at these positions, from products with its softmax."""
    return run.launch(
        sum_kernels.shard_rows,
        (made.number, -(-run.hidden // BLOCK)),
        sums=made.sums,
        share=share,
        weight=weight,
        weight_stride_v=weight.stride(0),
        weight_stride_h=weight.stride(1),
        label=terms.entry_label,
        at_target=terms.entry,
        row_scale=terms.row_scale,
        even=terms.even,
        weight_sum=weight_sum,
        inverse_grad_scale=terms.inverse_grad_scale,
        factor=factor,
        out=out,
        begin=made.first,
        slices=made.slices,
        slice_rows=made.number,
        ids=terms.ids,
        BLOCK=BLOCK,
    )


def _hidden_rows(run: Run, weight: Tensor, rows: int, terms: PositionTerms | None, **more: Any) -> Launch:
    """Launch for so many rows; if there are terms, or will be, what isn't known yet is replaced by something of its
    kind.
    """
    floats = run.vectors.factor
    arguments: dict[str, Any] = {
        "weight": weight,
        "weight_stride_v": weight.stride(0),
        "weight_stride_h": weight.stride(1),
        "label": run.vectors.label,
        "at_target": floats,
        "row_scale": floats,
        "even": floats if run.options.label_smoothing > 0 else None,
        "inverse_grad_scale": floats if run.dtype == torch.float16 else None,
        "keeps": 0,
        "scales": 0,
        "begin": 0,
        "slices": 0,
        "slice_rows": 0,
        "ids": 0,
        "weight_sum": None,
    }
    if terms is not None:
        arguments |= {"label": terms.entry_label, "at_target": terms.entry, "row_scale": terms.row_scale}
        arguments |= {"even": terms.even, "inverse_grad_scale": terms.inverse_grad_scale}
    arguments |= more
    if arguments["even"] is not None and arguments["weight_sum"] is None:
        arguments["weight_sum"] = floats
    return run.launch(sum_kernels.hidden_rows, (rows, -(-run.hidden // BLOCK)), **arguments, BLOCK=BLOCK)
