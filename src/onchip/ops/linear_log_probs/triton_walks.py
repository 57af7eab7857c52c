"""The computation of linear_log_probs with Triton kernels: what is launched, in which order, on what memory.

The kernels and most launches are those of linear_cross_entropy, whose target is here the *leader*: of a token's ids the
one with the largest logit.  A log-probability near 0 can only be the leader's, so it is the leader that is left out of
the sum of exponentials, and the other ids' log-probabilities follow from its own.  Where exponentials are kept for the
gradients, those of all ids are zeroed, and their entries are added to the gradients in float32.  Where the entropy has
an upstream gradient, what was kept is made the gradient of the logits, in place, before the products.

Nothing here waits for the device.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onchip.kernels.triton.launch import Launch
from onchip.ops.linear_log_probs import triton_kernels
from onchip.vocab.triton import launches
from onchip.vocab.triton import walks as triton_walks
from onchip.vocab.triton.launches import Exponentials, Partials, PerToken, Run, Upstream, Vectors


@dataclass(frozen=True)
class LogProbs:
    """What forward returns, by token."""

    log_prob: Tensor  # [T, K] float32
    lse: Tensor  # [T] float32
    entropy: Tensor | None  # [T] float32
    top1: Tensor | None  # [T] int64


@dataclass(frozen=True)
class Picked:
    """What is known of several ids per token, by position where not said otherwise."""

    logit: Tensor  # [T, K] float32
    label: Tensor  # [T, K] int32: -1 if ignored or out of range
    best: Tensor  # [T] float32: the largest of the logits
    leader: Tensor  # [T] int64, by token: the id that has it

    @staticmethod
    def empty(tokens: int, ids: int, device: torch.device) -> "Picked":
        def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return Picked(
            make(tokens, ids), make(tokens, ids, dtype=torch.int32), make(tokens), make(tokens, dtype=torch.int64)
        )


@dataclass(frozen=True)
class Gradients:
    """The upstream gradients, by token; None is 0."""

    log_prob: Tensor | None  # [T, K] float32
    lse: Tensor | None  # [T] float32
    entropy: Tensor | None  # [T] float32


# ------------------------------------------------------------------------------------------------------------ forward


def forward(
    run: Run,
    hidden: Tensor,  # [T, H], any strides
    ids: Tensor,  # [T, K] int64
    temperature: Tensor | float,  # [T] float32, or one for all
    ignore_index: int,
    rows: Tensor,  # [T or fewer, H]: so many tokens at a time
    kept: Exponentials | None,
    *,
    stats: bool,
) -> tuple[LogProbs, Vectors]:
    """The log-probabilities of each token's ids, and with `stats` its entropy and its largest logit's index.

    `rows` and `kept` are filled in for backward, for which `rows` takes all tokens at once.
    """
    device, tokens, chunk = hidden.device, run.tokens, len(rows)
    vectors = Vectors.empty(tokens, device)
    lse, leading, target_logit = (torch.empty(tokens, dtype=torch.float32, device=device) for _ in range(3))
    entropy = torch.empty_like(lse) if stats else None
    top1 = torch.empty_like(lse, dtype=torch.int64) if stats else None
    several = ids.shape[1] > 1
    log_prob = torch.empty_like(ids, dtype=torch.float32) if several else leading[:, None]
    if tokens == 0:
        return LogProbs(log_prob, lse, entropy, top1), vectors
    picked = None
    if several:
        picked = Picked.empty(tokens, ids.shape[1], device)
        launches.compact(run, (ids != ignore_index).any(1).to(torch.int64), 0, vectors).run()
        pick(run, hidden, ids, temperature, ignore_index, vectors, picked).run()
    else:
        launches.compact(run, ids[:, 0], ignore_index, vectors).run()
    target = ids[:, 0] if picked is None else picked.leader
    partials = Partials.empty(run.vocab_tiles, chunk, device, smoothing=False, stats=stats)
    out = PerToken(None, lse, leading, entropy, None, top1)
    for first in range(0, tokens, chunk):
        launches.gather(run, hidden, target, temperature, vectors, target_logit, rows, first).run()
        launches.softmax(run, rows, vectors, partials, kept, first, stats=stats).run()
        launches.merge(run, vectors, target_logit, partials, None, out, first).run()
    if kept is not None:
        launches.settle(run, kept, vectors, partials.maximum).run()
    if picked is not None:
        spread(run, ids, ignore_index, vectors, picked, leading, log_prob).run()
        if kept is not None:
            write(kept, picked.label, None, vectors, 0, kept.held, 0, run.vocab_tiles).run()
    return LogProbs(log_prob, lse, entropy, top1), vectors


def pick(
    run: Run,
    hidden: Tensor,
    ids: Tensor,
    temperature: Tensor | float,
    ignore_index: int,
    vectors: Vectors,
    picked: Picked,
) -> Launch:
    per_token = isinstance(temperature, Tensor)
    arguments = {
        "hidden": hidden,
        "weight": run.head.weight,
        "bias": run.head.bias,
        "ids": ids,
        "temperature": temperature if per_token else None,
        "order": vectors.order,
        "count": vectors.number,
        "picked": picked.logit,
        "label": picked.label,
        "best": picked.best,
        "leader": picked.leader,
        "hidden_stride_t": hidden.stride(0),
        "hidden_stride_h": hidden.stride(1),
        "weight_stride_v": run.head.weight.stride(0),
        "weight_stride_h": run.head.weight.stride(1),
        "H": run.hidden,
        "V": run.vocab,
        "K": ids.shape[1],
        "ignore_index": ignore_index,
        "inner_scale": run.inner_scale,
        "outer_scale": run.outer_scale / (1.0 if per_token else temperature),
        "BIAS": run.head.bias is not None,
        "SOFTCAP": run.head.softcap is not None,
        "TEMPERATURE": per_token,
        "BLOCK": 1024,
    }
    return Launch(triton_kernels.pick_logits, (run.tokens,), arguments)


def spread(
    run: Run, ids: Tensor, ignore_index: int, vectors: Vectors, picked: Picked, leading: Tensor, log_prob: Tensor
) -> Launch:
    block = 1024
    arguments = {
        "ids": ids,
        "position": vectors.position,
        "picked": picked.logit,
        "best": picked.best,
        "leading": leading,
        "log_prob": log_prob,
        "N": ids.numel(),
        "V": run.vocab,
        "K": ids.shape[1],
        "ignore_index": ignore_index,
        "BLOCK": block,
    }
    return Launch(triton_kernels.spread_log_probs, (-(-ids.numel() // block),), arguments)


def write(
    places: Exponentials,
    label: Tensor,  # [T, K] int32
    entry: Tensor | None,  # [T, K] float32; None: zeros
    vectors: Vectors,
    first: int,
    last: int,
    first_tile: int,
    tiles: int,
) -> Launch:
    block = 1024
    arguments = {
        "exponentials": places.matrix,
        "label": label,
        "entry": entry,
        "count": vectors.number,
        "first": first,
        "last": last,
        "first_tile": first_tile,
        "chunk_tiles": tiles,
        "K": label.shape[1],
        **places.arguments(again=True),
        "VALUE": entry is not None,
        "BLOCK": block,
    }
    return Launch(triton_kernels.write_entries, (-(-label.numel() // block),), arguments)


# ----------------------------------------------------------------------------------------------------------- backward


def backward(
    run: Run,
    vectors: Vectors,
    ids: Tensor,  # [T, K] int64
    ignore_index: int,
    known: LogProbs,
    gradients: Gradients,
    places: Exponentials,
    **how: Any,  # the further arguments of `triton_walks.backward`
) -> None:
    """Fill in the gradients, by linear_cross_entropy's walk."""
    given = upstream(run, vectors, ids, ignore_index, known, gradients)
    label, held = given.label.view(ids.shape), places.held

    def put_entries(first_tile: int, tiles: int) -> None:
        entry = None if held > 0 else given.at_target  # where some are added to the results, all are
        write(places, label, entry, vectors, held, run.tokens, first_tile, tiles).run()

    several = ids.shape[1] > 1
    if held > 0 and given.entropy_row is not None:
        make_gradient(run, places, vectors, given).run()
    triton_walks.backward(run, vectors, given, places=places, after_again=put_entries if several else None, **how)


def upstream(
    run: Run, vectors: Vectors, ids: Tensor, ignore_index: int, known: LogProbs, gradients: Gradients
) -> Upstream:
    """What linear_cross_entropy's backward is told of each token."""
    row, size = (torch.empty_like(known.lse) for _ in range(2))
    entropy_row, mean = (None if gradients.entropy is None else torch.empty_like(row) for _ in range(2))
    entry, label = torch.empty_like(known.log_prob), torch.empty_like(ids, dtype=torch.int32)
    terms(run, vectors, ids, ignore_index, known, gradients, row, entropy_row, mean, entry, label, size).run()
    entry = entry.view(-1)
    too_large = triton_walks.scale_for_float16(size, vectors, run.head.weight.dtype)
    if too_large is not None:
        row, entry = row * too_large, entry * too_large
        entropy_row = None if entropy_row is None else entropy_row * too_large
    return Upstream(
        lse=known.lse,
        log_prob=None,
        row=row,
        scale=row.clone() if entropy_row is None else torch.ones_like(row),
        at_target=entry,
        shrink=None if too_large is None else 1 / too_large,
        label=label.view(-1),
        ids=ids.shape[1],
        entropy_row=entropy_row,
        mean=mean,
    )


def make_gradient(run: Run, places: Exponentials, vectors: Vectors, given: Upstream) -> Launch:
    block = 32
    arguments = {
        "exponentials": places.matrix,
        "count": vectors.number,
        "lse": given.lse,
        "order": vectors.order,
        "base": vectors.base,
        "row": given.row,
        "entropy_row": given.entropy_row,
        "mean": given.mean,
        "inverse_exponential_scale": 1 / run.exponential_scale,
        **places.arguments(again=False),
        "BLOCK_T": block,
    }
    return Launch(triton_kernels.entropy_gradient, (run.vocab_tiles, places.held // block), arguments)


def terms(
    run: Run,
    vectors: Vectors,
    ids: Tensor,
    ignore_index: int,
    known: LogProbs,
    gradients: Gradients,
    row: Tensor,
    entropy_row: Tensor | None,
    mean: Tensor | None,
    entry: Tensor,
    label: Tensor,
    size: Tensor,
) -> Launch:
    block_k = 1
    while block_k < min(ids.shape[1], 32):
        block_k *= 2
    block_t = 256 // block_k
    arguments = {
        "ids": ids,
        "order": vectors.order,
        "count": vectors.number,
        "factor": vectors.factor,
        "lse": known.lse,
        "log_prob": known.log_prob,
        "entropy": None if gradients.entropy is None else known.entropy,
        "grad_log_prob": gradients.log_prob,
        "grad_lse": gradients.lse,
        "grad_entropy": gradients.entropy,
        "row": row,
        "entropy_row": entropy_row,
        "mean": mean,
        "entry": entry,
        "label": label,
        "size": size,
        "V": run.vocab,
        "K": ids.shape[1],
        "ignore_index": ignore_index,
        "scale": run.head.logit_scale / run.outer_scale,
        "LOG_PROB": gradients.log_prob is not None,
        "LSE": gradients.lse is not None,
        "ENTROPY": gradients.entropy is not None,
        "SOFTCAP": run.head.softcap is not None,
        "BLOCK_T": block_t,
        "BLOCK_K": block_k,
    }
    grid = (-(-run.tokens // block_t), -(-ids.shape[1] // block_k))
    return Launch(triton_kernels.gradient_terms, grid, arguments)
