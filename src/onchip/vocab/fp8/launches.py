"""Launches Triton's kernels for precision='fp8': the softmax of a chunk's logits, and its gradient in FP8.

Functions that torch.py has too do the same.
"""

from typing import Any

import torch
from torch import Tensor

from onchip.fp8.numbers import BLOCK, blocks
from onchip.frontend.options import LossTerms
from onchip.kernels.triton.launch import Launch, device_of
from onchip.kernels.triton.maths import LOG2E
from onchip.vocab import loss as maths
from onchip.vocab.fp8 import kernels
from onchip.vocab.fp8.memory import TERMS
from onchip.vocab.fp8.torch import LogitsCall, LogitsGradient, fill
from onchip.vocab.rows import walk
from onchip.vocab.rows.launches import launch_rows, launch_soft, shares_of_ids, transform_scales
from onchip.vocab.torch.loss import LossOutputs, asked_by, loss_gradient, scaled_rows
from onchip.vocab.torch.softmax import Asked, TokenGradient, TokenStats

# Of a gradient's program.  Two on a multiprocessor, with a few registers spilled, take 0.64 ms for 2048 x 128256 logits
# on an H100; one, with none spilled, takes 0.95.
WARPS, REGISTERS = 8, 128


def target_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    """[n] or [n, K] float32: the targets' logits, computed from numbers that are not quantised."""
    out = hidden.new_empty(target.shape, dtype=torch.float32)
    arguments = {
        "hidden": hidden,
        "weight": weight,
        "bias": bias,
        "target": target,
        "logits": out,
        "weight_stride_v": weight.stride(0),
        "weight_stride_h": weight.stride(1),
        "K": target.numel() // max(1, len(target)),
        "H": weight.shape[1],
        "V": weight.shape[0],
        "BLOCK_H": 1024,
    }
    with device_of(hidden):
        Launch(kernels.target_logits, (target.numel(),), arguments).run()
    return out


def softmax_of_chunk(
    part: LogitsCall, logits: Tensor, of_targets: Tensor | None, out: LossOutputs, into: LogitsGradient
) -> None:
    """Compute the loss and the statistics of a chunk's tokens, and the gradient of its logits."""
    with device_of(logits):
        if part.dense:
            _dense_softmax(part, logits, out, into)
        elif part.of_ids:
            _softmax_of_ids(part, logits, out, into)
        else:
            terms = logits.new_empty((TERMS, len(logits)), dtype=torch.float32) if into.wanted else None
            launch_rows(
                "losses", logits, None, part.ids, part.token_weight, part.temperature, part.options,
                part.class_weight, **out.of_id, divisor=part.divisor, target_logit=of_targets, terms_out=terms,
            )  # fmt: skip
            if terms is not None:
                gradient_launch(part, logits, terms, into, target=part.ids).run()


def _softmax_of_ids(part: LogitsCall, logits: Tensor, out: LossOutputs, into: LogitsGradient) -> None:
    """The same for soft labels of K ids."""
    vocab, options, tokens = logits.shape[1], part.options, part.tokens(logits.shape[1])
    # No id is ignored: one that looks like it is out of range.
    ids = torch.where(part.ids == options.ignore_index, -1, part.ids)
    memory = {"lse": out.lse, "log_prob": out.log_prob, "entropy": out.entropy, "top1": out.argmax}
    stats = walk.statistics_of_ids(
        logits, ids, part.temperature, options, asked_by(options, part.class_weight), uniform=True, into=memory
    )
    # The rest kernels have filled.
    fill(out, LossOutputs.of(part, stats, tokens), ("loss", "correct", "expected", "target_logit"))
    if not into.wanted:
        return
    row, _ = scaled_rows(tokens, options, tokens.inverse_count, torch.float32)
    gradient = loss_gradient(options, row, stats.lse, stats.log_prob, vocab, tokens, shares_of_ids)
    of_ids = ids_in_blocks(tokens.ids, gradient.at_ids, vocab)
    gradient_launch(part, logits, gradient_terms(part, gradient), into, **of_ids).run()


def statistics_of_chunk(part: LogitsCall, logits: Tensor, of_targets: Tensor | None, asked: Asked) -> TokenStats:
    """As torch.py's."""
    with device_of(logits):
        if part.of_ids:
            given = logits, part.ids, part.temperature, part.options, asked
            return walk.statistics_of_ids(*given, uniform=True, of_shard=True)
        return walk.statistics_of_targets(logits, part.ids, part.temperature, part.options, asked, of_targets)


def gradient_of_chunk(
    part: LogitsCall, logits: Tensor, of_targets: Tensor | None, gradient: TokenGradient, into: LogitsGradient
) -> None:
    """As torch.py's."""
    with device_of(logits):
        if of_targets is None:
            of_ids = ids_in_blocks(part.ids, gradient.at_ids, logits.shape[1])
            gradient_launch(part, logits, gradient_terms(part, gradient), into, **of_ids).run()
            return
        at_target, inner = gradient.at_ids[:, 0], transform_scales(part.options)["inner_scale"]
        if inner is not None:
            at_target = at_target * (1 - (of_targets * inner).tanh().square())
        terms = gradient_terms(part, gradient, at_target)
        gradient_launch(part, logits, terms, into, target=part.ids).run()


def gradient_terms(part: LogitsCall, gradient: TokenGradient, at_target: Tensor | None = None) -> Tensor:
    """[6, n] float32: what the kernel makes a gradient of."""
    return _terms(part, gradient.center, gradient.factor, gradient.even, at_target)


def _terms(part: LogitsCall, lse: Tensor, *others: Tensor | None) -> Tensor:
    """The terms of `kernels._gradient`, from lse on; 0 for those that don't exist."""
    k, zero = transform_scales(part.options)["outer_scale"], torch.zeros_like(lse)
    assert k is not None
    scale = zero + k * LOG2E.value if part.temperature is None else k * LOG2E.value / part.temperature
    rows = [scale, lse * LOG2E.value, *(zero if x is None else x for x in others)]
    return torch.stack(rows + [zero] * (TERMS - len(rows)))


def ids_in_blocks(ids: Tensor, at_ids: Tensor, vocab: int) -> dict[str, Any]:
    """Ids [n, K] in ascending order with their entries of the gradient, and where the ids of each 128 vocabulary
    entries begin among them.
    """
    ids, order = ids.sort(1)
    begins = (
        torch.arange(blocks(vocab) + 1, dtype=torch.int64, device=ids.device)
        .mul_(BLOCK)
        .expand(len(ids), -1)
        .contiguous()
    )
    firsts = torch.searchsorted(ids, begins, out_int32=True).T.contiguous()
    return {"ids": ids, "at_ids": at_ids.gather(1, order), "firsts": firsts, "K": ids.shape[1]}


def _dense_softmax(part: LogitsCall, logits: Tensor, out: LossOutputs, into: LogitsGradient) -> None:
    """The same for labels of every entry."""
    options, tokens, labels = part.options, part.tokens(logits.shape[1]), part.labels
    assert labels is not None
    launch_soft("soft_losses", logits, labels, None, part.temperature, options, part.class_weight, **out.of_labels)
    out.loss.mul_(tokens.weight)
    if not into.wanted:
        return
    row, _ = scaled_rows(tokens, options, tokens.inverse_count, torch.float32)
    more = maths.slope_of_lse(LossTerms.of(options), out.lse)
    terms = _terms(part, out.lse, row, more, out.mass, out.log_prob)
    of_labels = {
        "labels": labels,
        "labels_stride": labels.stride(0),
        "entries_stride": labels.stride(1),
        "label_smoothing": options.label_smoothing,
    }
    gradient_launch(part, logits, terms, into, **of_labels).run()


def gradient_launch(
    part: LogitsCall,
    logits: Tensor,  # [n, V]
    terms: Tensor,  # [6, n] float32
    into: LogitsGradient,
    **more: Any,
) -> Launch:
    """The launch for the gradient of a chunk's tokens; `more` are fields of `ChunkLogits`."""
    n, vocab = logits.shape
    given = dict.fromkeys(kernels.ChunkLogits._fields) | more
    given |= {"data": logits, "stride": logits.stride(0), "terms": terms, "class_weight": part.class_weight}
    given["inner_scale"] = transform_scales(part.options)["inner_scale"]
    arguments = {
        "logits": kernels.ChunkLogits(**given),
        "rows": None if into.rows is None else into.rows.data,
        "row_scales": None if into.rows is None else into.rows.scales,
        "columns": None if into.columns is None else into.columns.data.view(torch.int32),
        "column_scales": None if into.columns is None else into.columns.scales,
        "sums": into.sums,
        "rows_stride": 0 if into.rows is None else into.rows.data.stride(0),
        "columns_stride": 0 if into.columns is None else into.columns.data.stride(0) // 4,
        "n_16": n + 16,
        "V_16": vocab + 16,
        "SMOOTHING": part.options.label_smoothing > 0 and not part.dense,
        "RAGGED": vocab % BLOCK > 0,
    }
    # Rows that are not aligned take more, one number at a time, and so do sums, labels, and ids beside a softcap.
    more_taken = into.sums is not None or part.dense or (part.of_ids and given["inner_scale"] is not None)
    registers = REGISTERS if vocab % 16 == 0 and not more_taken else None
    return Launch(kernels.softmax_gradient, (blocks(n), blocks(vocab)), arguments, WARPS, registers=registers)
