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
from onchip.frontend.torch_register import Made, Operator, Wanted, stated_on
from onchip.kernels.triton.launch import device_of
from onchip.ops.cross_entropy import OP
from onchip.ops.cross_entropy.torch_call import CrossEntropyCall, CrossEntropyKept, CrossEntropyOutputs
from onchip.vocab.rows import torch as torch_rows
from onchip.vocab.rows import walk
from onchip.vocab.rows.launches import count_targets, flat, launch_rows, launch_soft, reduce_losses, shares_of_ids
from onchip.vocab.torch import dense, loss, parallel, tiles
from onchip.vocab.torch.loss import asked_by, gradient_of_loss, scaled_rows
from onchip.vocab.torch.softmax import Asked, TokenGradient, TokenStats
from onchip.vocab.torch.tiles import Tile, Tokens, apply, spans, temperature_of


def _forward(call: CrossEntropyCall) -> CrossEntropyOutputs:
    if call.fused:
        return _forward_by_kernels(call)
    if call.shards.there:
        call.check_ranks()
    if call.dense:
        return CrossEntropyOutputs(_of_every_entry(call), None, None)
    stats, tokens = walk.statistics(OP, call, asked_by(call.options, call.class_weight), uniform=True)
    if tokens is not None:
        divisor = (1 / tokens.inverse_count).to(torch.float32) if call.kernels and call.kind == "ids" else None
        return CrossEntropyOutputs(loss.LossOutputs.of(call, stats, tokens), divisor, None)
    known = stats.lse, stats.log_prob, stats.argmax, stats.entropy, stats.uniform
    made, correct, *more = stated_on(call, _results, *known)
    shape = call.logits.shape[:-1]
    lse, log_prob = stats.lse.view(shape), stats.log_prob.view(call.ids.shape)
    entropy, argmax = (None if x is None else x.view(shape) for x in (stats.entropy, stats.argmax))
    return CrossEntropyOutputs(loss.LossOutputs(made, lse, log_prob, entropy, correct, argmax, *more), None, None)


def _results(call: CrossEntropyCall, *tensors: Any) -> list[Any]:
    """The outputs that aren't among these statistics."""
    lse, log_prob, argmax, entropy, uniform = tensors
    stats = TokenStats(lse, log_prob, argmax, entropy, None, None, uniform, None)
    made = loss.LossOutputs.of(call, stats, call.tokens(check_values=False))
    return [made.loss, made.correct, made.expected, made.target_logit]


def _gradients(kept: CrossEntropyKept, upstream: Made, wanted: Wanted) -> Made:
    """Write the logits' gradient to `kept.gradient`, unless forward has and the upstream gradient is 1; or to new
    memory, which is returned."""
    call, (grad_loss,) = kept.call, upstream
    assert grad_loss is not None
    out = kept.gradient if call.in_forward else kept.new_gradient()
    assert out is not None
    if call.dense:
        _write_by_every_entry(kept, grad_loss, out)
    elif call.kind == "ids" and call.runs_kernels:
        _write_by_kernels(kept, grad_loss, out)
    elif call.kernels:
        made = stated_on(call, _of_all_tokens, grad_loss, kept.lse, kept.log_prob)
        walk.write_gradient(call, None, TokenGradient(*made), out)
    else:
        tokens = call.tokens(check_values=False)
        gradient, _ = gradient_of_loss(call, tokens, grad_loss, kept.lse, kept.log_prob)
        walk.write_gradient(call, tokens, gradient, out)
    walk.clear_padding(call, out)
    return [None if call.in_forward else out]


def _of_all_tokens(call: CrossEntropyCall, *tensors: Any) -> list[Any]:
    """The fields of a `TokenGradient` for all T tokens, from the upstream gradient, lse and log-probabilities."""
    grad_loss, lse, log_prob = tensors
    gradient, _ = gradient_of_loss(call, call.tokens(check_values=False), grad_loss, lse, log_prob, shares_of_ids)
    return [*vars(gradient).values()]


def _fake_gradients(kept: CrossEntropyKept, upstream: Made, wanted: Wanted) -> Made:
    return [None if kept.call.in_forward else stated.empty_like(kept.call.logits)]


# ------------------------------------------------------------------------------------------- one id each, by kernels


def _forward_by_kernels(call: CrossEntropyCall) -> CrossEntropyOutputs:
    logits, options = call.logits, call.options
    if options.scratch_bytes is not None:
        call.config()
    if options.check_inputs:
        call.tokens(check_values=True)  # for its checks alone
    mean = options.reduction == "mean"
    if mean and call.normalizer is None:
        divisor = count_targets(call.ids, options.ignore_index)
    else:
        divisor = tiles.divisor(
            OP, options.reduction, call.normalizer, stated.call(torch.ne, call.ids, options.ignore_index)
        )
    made = CrossEntropyOutputs.empty(call)._replace(divisor=divisor)
    losses = stated.empty(call.ids.shape, torch.float32, logits.device)
    out = made.out._replace(loss=losses)
    if call.number > 0:
        launch_rows(
            "losses", logits, made.gradient, call.ids, call.token_weight, call.token_temperature, options,
            class_weight=call.class_weight, **out.of_id, divisor=divisor,
        )  # fmt: skip
    if options.reduction != "none":
        out = out._replace(loss=reduce_losses(losses, None, divisor, mean=mean))
    return made._replace(out=out)


def _write_by_kernels(kept: CrossEntropyKept, grad_loss: Tensor, out: Tensor) -> None:
    """Write the gradient of all logits, or of this rank's columns, to `out`."""
    call, options, shards = kept.call, kept.call.options, kept.call.shards
    mine = walk.without_padding(call, out)
    if mine.numel() == 0:
        return
    more = {}
    if shards.there:
        walk.refuse_to_state(call)
        more = {"start": shards.start, "whole": call.vocab}
    if kept.overwrites:  # kernels write past autograd
        torch.autograd.graph.increment_version(out)
    with device_of(out):
        launch_rows(
            "gradients", mine if kept.overwrites else call.mine, mine, call.ids, call.token_weight,
            call.token_temperature, options, class_weight=call.class_weight, divisor=kept.divisor,
            lse=flat(kept.lse), log_prob=flat(kept.log_prob), grad_loss=flat(grad_loss),
            PER_TOKEN=options.reduction == "none", UNLESS_ONE=call.in_forward, **more,
        )  # fmt: skip


# ----------------------------------------------------------------------------------------------- labels of every entry


def _of_every_entry(call: CrossEntropyCall) -> loss.LossOutputs:
    options, tau, labels = call.options, call.token_temperature, _labels_of_mine(call)
    if call.kernels and call.shards.there:
        return _of_every_entry_in_shard(call)
    if not call.kernels:
        walk.refuse_to_state(call)
        tokens = call.tokens(check_values=options.check_inputs)
        rows, config = torch_rows.Rows(call.mine), call.config(tokens)
        made = dense.dense_stats(OP, rows, options, call.shards, tokens, config, labels, call.class_weight)
        return dense.outputs_of(call, made, tokens)
    if options.check_inputs:
        call.tokens(check_values=True)
    if options.scratch_bytes is not None:
        call.config()
    out = loss.LossOutputs.empty(call, call.logits, kernels=True, reduced=False)
    if call.number > 0:
        launch_soft("soft_losses", call.logits, labels, None, tau, options, call.class_weight, **out.of_labels)
    return out._replace(loss=stated_on(call, _reduced, out.loss))


def _of_every_entry_in_shard(call: CrossEntropyCall) -> loss.LossOutputs:
    """By kernels; a rank without columns, which has none to run, tells the others the same."""
    walk.refuse_to_state(call)
    tokens, tau, labels = (
        call.tokens(check_values=call.options.check_inputs),
        call.token_temperature,
        _labels_of_mine(call),
    )
    part = parallel.class_weight_of_shard(call.class_weight, call.shards)
    if not call.runs_kernels:
        given = replace(call.options, label_smoothing=0.0), tokens, call.config(tokens), labels, part
        return dense.combined(OP, call, dense.dense_sums(torch_rows.Rows(call.mine), *given), tokens)
    if call.options.scratch_bytes is not None:
        call.config()
    options, factor = dense.for_kernels(call.options, call.shards, forward=True)
    out = loss.LossOutputs.empty(call, call.logits, kernels=True, reduced=False)
    if call.number > 0:
        launch_soft("soft_losses", call.mine, labels, None, tau, options, part, **out.of_labels)
    # Once more, for all digits of lse: what it was rounded by.
    nowhere, all_count = torch.full_like(call.ids, parallel.ELSEWHERE), replace(options, ignore_index=parallel.IGNORED)
    known = walk.statistics_of_ids(call.mine, nowhere, tau, all_count, Asked(top=True), of_shard=True)
    sums = dense.sums_of_kernels(options, out._replace(lse=known.lse), factor, labels, known.top, known.low)
    return dense.combined(OP, call, sums, tokens)


def _labels_of_mine(call: CrossEntropyCall) -> Tensor:
    assert call.labels is not None
    return walk.without_padding(call, call.labels)


def _reduced(call: CrossEntropyCall, losses: Any) -> Tensor:
    tokens = call.tokens(check_values=False)
    return loss.reduced(call.options, losses.reshape(-1) * tokens.weight, tokens, call.logits.shape[:-1])


def _write_by_every_entry(kept: CrossEntropyKept, grad_loss: Tensor, out: Tensor) -> None:
    call, options = kept.call, kept.call.options
    if not call.kernels:
        walk.refuse_to_state(call)
        _write_rows(kept, call.tokens(check_values=False), grad_loss, walk.without_padding(call, out))
        return
    row = stated_on(call, _rows, grad_loss)
    lse, less, mass = (None if x is None else x.reshape(-1) for x in (kept.lse, kept.log_prob, kept.mass))
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


def _rows(call: CrossEntropyCall, grad_loss: Any) -> Tensor:
    """[T] float32: each token's upstream gradient, times the logits' constant factors."""
    return _scaled(call, call.tokens(check_values=False), grad_loss)


def _scaled(call: CrossEntropyCall, tokens: Tokens, grad_loss: Tensor) -> Tensor:
    return scaled_rows(tokens, call.options, tokens.upstream(grad_loss, call.options.reduction), torch.float32)[0]


def _write_rows(kept: CrossEntropyKept, tokens: Tokens, grad_loss: Tensor, out: Tensor) -> None:
    """Write the gradient of this rank's logits, a chunk of rows at a time."""
    call, options, config = kept.call, kept.call.options, kept.call.config(tokens)
    if out.numel() == 0:
        return
    row, labels = _scaled(call, tokens, grad_loss), _labels_of_mine(call)
    part = parallel.class_weight_of_shard(call.class_weight, call.shards)
    whole, vocab = dense.Whole.of(call.vocab, call.class_weight), config.vocab_chunk
    source, into = torch_rows.Rows(call.mine), torch_rows.Rows(out)
    tile = Tile(min(tokens.number, config.token_chunk) * vocab, tokens, slope=options.softcap is not None)
    for start, stop in spans(tokens.number, config.token_chunk):
        z, slope, _ = tile.cut(stop - start, vocab)
        source.read(tokens, start, stop, z)
        apply(options, z, temperature_of(tokens, start, stop), slope)
        known = (x[start:stop] for x in (row, *dense.known_of(kept)))
        g = dense.dense_gradient(options, z, slope, dense.rows_of(labels, start, stop), part, whole, *known)
        into.write(tokens, start, stop, g)


LOSS = Operator(
    "cross_entropy_of_logits",
    op=OP,
    forward=_forward,
    fake=CrossEntropyOutputs.empty,
    save=CrossEntropyKept.of,
    gradients=_gradients,
    fake_gradients=_fake_gradients,
    differentiable=("logits",),
    consumed=("gradient",),
    collect=lambda kept, made, wanted: [kept.gradient] if kept.call.in_forward else made,
    states=True,
    overwrites=lambda kept: kept.overwrites,
)
