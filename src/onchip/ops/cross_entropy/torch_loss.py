"""cross_entropy for PyTorch: its operator, for labels of any kind, on PyTorch's operations or Triton kernels.

The loss, and later the gradient, are computed from statistics of each row's softmax (`vocab.rows.walk`).  If each token
has one id and the vocabulary isn't sharded, kernels do everything.  Forward computes the loss.  If the loss is one
number and a gradient is wanted, forward also computes the gradient, for an upstream gradient of 1, while the logits are
in the caches, and writes it to a tensor of its own.  Backward leaves that tensor alone if the upstream gradient turns
out to be 1, which only the device knows; otherwise it computes the gradient again from the logits, so that it is
rounded once.  With reduction="none" or inplace_backward the logits are read in forward and again in backward.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_autograd import graph_is_kept
from onchip.frontend.torch_register import Made, Wanted, stated_on
from onchip.kernels.triton.launch import device_of
from onchip.ops.cross_entropy import OP
from onchip.ops.cross_entropy.torch_call import LOSS, CrossEntropyCall
from onchip.vocab.rows import operator, walk
from onchip.vocab.rows import torch as torch_rows
from onchip.vocab.rows.launches import count_targets, flat, launch_rows, launch_soft, reduce_losses
from onchip.vocab.rows.operator import RowsSaved
from onchip.vocab.torch import dense, parallel, tiles
from onchip.vocab.torch.loss import LossOutputs, reduced_of_all, rows_of_all
from onchip.vocab.torch.operator import LossKept, LossMade, check_ranks
from onchip.vocab.torch.softmax import Asked

Outputs = LossMade[LossOutputs, RowsSaved]
Kept = LossKept[CrossEntropyCall, RowsSaved]


def _forward(call: CrossEntropyCall) -> Outputs:
    if call.fused:
        return _forward_by_kernels(call)
    if call.shards.there:
        check_ranks(LOSS, call, call.require_memory)
    if call.dense:
        return LossMade(_of_every_entry(call), RowsSaved())
    stats, tokens = walk.statistics(OP, call, LOSS.asked(call), uniform=True)
    divisor = None
    if tokens is not None and call.kernels and call.kind == "ids":
        divisor = (1 / tokens.inverse_count).to(torch.float32)
    return LossMade(LossOutputs.of(call, stats, tokens), RowsSaved(divisor))


def _empty(call: CrossEntropyCall, divisor: Tensor | None = None) -> Outputs:
    """Outputs that are still to be filled."""
    gradient = stated.empty_like(call.logits) if call.in_forward else None
    out = LOSS.empty(call, call.kernels)
    if divisor is None and call.kernels and call.kind == "ids":
        divisor = stated.empty((), torch.float32, call.logits.device)
    return LossMade(out, RowsSaved(divisor, gradient))


def _overwrites(kept: Kept) -> bool:
    """Whether the gradient is written over the logits."""
    return kept.call.options.inplace_backward and not graph_is_kept()


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    """Write the logits' gradient to the one that is kept, unless forward has and the upstream gradient is 1; or to new
    memory, which is returned."""
    call, (grad_loss,), out = kept.call, upstream, kept.saved.gradient
    assert grad_loss is not None
    if not call.in_forward:
        # Detached, it still counts as a change of the logits: whatever saved them for its own backward will raise.
        out = call.logits.detach() if _overwrites(kept) else stated.empty_like(call.logits)
    assert out is not None
    if call.dense and call.kernels:
        _write_by_every_entry(kept, grad_loss, out)
    elif call.kind == "ids" and call.runs_kernels:
        _write_by_kernels(kept, grad_loss, out)
    else:
        operator.write_gradient(LOSS, kept, upstream, out)
    walk.clear_padding(call, out)
    return [None if call.in_forward else out]


def _fake_gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    return [None if kept.call.in_forward else stated.empty_like(kept.call.logits)]


# ------------------------------------------------------------------------------------------- one id each, by kernels


def _forward_by_kernels(call: CrossEntropyCall) -> Outputs:
    logits, options = call.logits, call.options
    if options.scratch_bytes is not None:
        call.config()
    if options.check_inputs:
        call.tokens(check_values=True)  # for its checks alone
    if options.reduction == "mean" and call.normalizer is None:
        divisor = count_targets(call.ids, options.ignore_index)
    else:
        divisor = tiles.divisor(
            OP, options.reduction, call.normalizer, stated.call(torch.ne, call.ids, options.ignore_index)
        )
    made, saved = _empty(call, divisor)
    losses = stated.empty(call.ids.shape, torch.float32, logits.device)
    out = made._replace(loss=losses)
    if call.number > 0:
        launch_rows(
            "losses", logits, saved.gradient, call.ids, call.token_weight, call.token_temperature, options,
            class_weight=call.class_weight, **out.of_id, divisor=divisor,
        )  # fmt: skip
    return LossMade(out._replace(loss=reduce_losses(losses, None, divisor, options.reduction)), saved)


def _write_by_kernels(kept: Kept, grad_loss: Tensor, out: Tensor) -> None:
    """Write the gradient of all logits, or of this rank's columns, to `out`."""
    call, options, shards = kept.call, kept.call.options, kept.call.shards
    mine = walk.without_padding(call, out)
    if mine.numel() == 0:
        return
    more = {}
    if shards.there:
        walk.refuse_to_state(call)
        more = {"start": shards.start, "whole": call.vocab}
    if _overwrites(kept):  # kernels write past autograd
        torch.autograd.graph.increment_version(out)
    with device_of(out):
        launch_rows(
            "gradients", mine if _overwrites(kept) else call.mine, mine, call.ids, call.token_weight,
            call.token_temperature, options, class_weight=call.class_weight, divisor=kept.saved.divisor,
            lse=flat(kept.known.lse), log_prob=flat(kept.known.log_prob), grad_loss=flat(grad_loss),
            PER_TOKEN=options.reduction == "none", UNLESS_ONE=call.in_forward, **more,
        )  # fmt: skip


# ----------------------------------------------------------------------------------------------- labels of every entry


def _of_every_entry(call: CrossEntropyCall) -> LossOutputs:
    options, shards, tau, labels = call.options, call.shards, call.token_temperature, _labels_of_mine(call)
    tokens: Any = None
    walk.refuse_to_state(call)
    if shards.there or not call.kernels or options.check_inputs:
        tokens = call.tokens(check_values=options.check_inputs)
    if not call.runs_kernels:
        return dense.statistics(OP, call, torch_rows.Rows(call.mine), tokens, call.config(tokens))
    if options.scratch_bytes is not None:
        call.config()
    options, factor = dense.for_kernels(options, shards, forward=True)
    out = LossOutputs.empty(call, call.logits, kernels=True, reduced=False)
    if call.number > 0:
        part = parallel.class_weight_of_shard(call.class_weight, shards)
        launch_soft("soft_losses", call.mine, labels, None, tau, options, part, **out.of_labels)
    if not shards.there:
        return out._replace(loss=stated_on(call, reduced_of_all, out.loss))
    # Once more, for all digits of lse: what it was rounded by.
    nowhere, all_count = torch.full_like(call.ids, parallel.ELSEWHERE), replace(options, ignore_index=parallel.IGNORED)
    known = walk.statistics_of_ids(call.mine, nowhere, tau, all_count, Asked(top=True), of_shard=True)
    sums = dense.sums_of_kernels(options, out._replace(lse=known.lse), factor, labels, known.top, known.low)
    return dense.combined(OP, call, sums, tokens)


def _labels_of_mine(call: CrossEntropyCall) -> Tensor:
    assert call.labels is not None
    return walk.without_padding(call, call.labels)


def _write_by_every_entry(kept: Kept, grad_loss: Tensor, out: Tensor) -> None:
    call, known, options = kept.call, kept.known, kept.call.options
    row = stated_on(call, rows_of_all, grad_loss)
    lse, less, mass = (None if x is None else x.reshape(-1) for x in (known.lse, known.log_prob, known.mass))
    part, mine = parallel.class_weight_of_shard(call.class_weight, call.shards), walk.without_padding(call, out)
    if mine.numel() > 0:
        options, factor = dense.for_kernels(options, call.shards)
        if call.shards.there and mass is not None:
            row, mass = row * factor, mass / factor
        with device_of(out):
            launch_soft(
                "soft_gradients", call.mine, _labels_of_mine(call), mine, call.token_temperature, options, part,
                lse=lse, less=less, mass=mass, row_factor=stated.converted(row, Tensor.contiguous),
            )  # fmt: skip


ROWS = operator.of_logits(
    LOSS,
    forward=_forward,
    fake=_empty,
    gradients=_gradients,
    fake_gradients=_fake_gradients,
    consumed=("gradient",),
    collect=lambda kept, made, wanted: [kept.saved.gradient] if kept.call.in_forward else made,
    overwrites=_overwrites,
)
