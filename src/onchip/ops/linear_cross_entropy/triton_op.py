"""linear_cross_entropy for PyTorch on the Triton kernels (`vocab.triton.operator`; for labels of all entries
`vocab.triton.labels`).

If the targets are ids and the vocabulary isn't sharded, kernels compute the loss and its gradients from each token's
log-sum-exp and log-probability.  For labels of K ids, and for a sharded vocabulary, a few PyTorch operations on numbers
per token and id do so.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.options import LossTerms
from onchip.frontend.torch_register import Made, Wanted, stated_on
from onchip.ops.linear_cross_entropy import OP
from onchip.ops.linear_cross_entropy.torch_call import LOSS, LinearCrossEntropyCall
from onchip.vocab import loss as maths
from onchip.vocab.torch import dense
from onchip.vocab.torch.loss import LossOutputs, reduced_of_all, rows_of_all
from onchip.vocab.torch.operator import LossMade
from onchip.vocab.torch.softmax import KnownStats
from onchip.vocab.torch.tiles import divisor
from onchip.vocab.triton import operator, setup, shards
from onchip.vocab.triton.memory import rounds_in_forward
from onchip.vocab.triton.operator import TritonKept
from onchip.vocab.triton.setup import TritonSaved

if TYPE_CHECKING:  # Triton is imported where something is launched
    from onchip.vocab.triton.records import Run, TokenSoftmax
    from onchip.vocab.triton.walks import OutputGradients


def _targets(call: LinearCrossEntropyCall) -> operator.Targets | None:
    if call.kind != "ids":
        return None
    return operator.Targets(setup.flat(call.token_weight), partial(_divisor, call), _of_targets)


def _of_targets(call: LinearCrossEntropyCall, loss: Tensor, softmax: "TokenSoftmax") -> LossOutputs:
    made = (softmax.lse, softmax.log_prob, softmax.entropy, softmax.correct, softmax.top1)
    shaped: Any = (None if x is None else x.view(call.ids.shape) for x in made)
    return LossOutputs(loss, *shaped)


def _divisor(call: LinearCrossEntropyCall, number: Tensor) -> Tensor | None:
    """The loss's divisor, unless that is the number of tokens that are not ignored."""
    return None if call.normalizer is None else divisor(OP, call.options.reduction, call.normalizer, number)


def _by_outputs(kept: TritonKept[LinearCrossEntropyCall], upstream: Made) -> Any:
    from onchip.vocab.triton import records, walks

    call, known, (grad_loss,) = kept.call, kept.known, upstream
    assert grad_loss is not None
    softmax = records.TokenSoftmax(known.lse.reshape(-1), known.log_prob.reshape(known.lse.numel(), call.several))

    def by_run(run: "Run") -> "tuple[OutputGradients, Tensor | None]":
        if call.kind == "ids" and (call.class_weight is None or not call.shards.there):
            of_loss = grad_loss, _divisor(call, run.vectors.number), setup.flat(call.token_weight)
            mean = call.options.reduction == "mean"
            # Forward divided the numbers that it rounded.
            rounded = kept.config.in_forward and rounds_in_forward(setup.problem_of(call))
            return walks.loss_gradients(run, softmax, *of_loss, mean=mean, by_mean=mean and not rounded)
        made = stated_on(call, _of_ids, grad_loss, softmax.lse, softmax.log_prob)
        return walks.OutputGradients(*made), None

    return softmax, by_run


# ------------------------------------------------------------------------------------ labels of K ids, and of shards


def _as_kernels_take_it(call: LinearCrossEntropyCall) -> LinearCrossEntropyCall:
    """The call for kernels, with labels of K ids.  It includes z-loss and class weights, except for the part that
    smoothing spreads.  No id is ignored; one that equals ignore_index is out of range."""
    if call.kind == "ids" or call.dense:
        return call
    ids = stated.call(_ids, call.ids, call.options.ignore_index)
    each = call.class_weight if call.options.label_smoothing > 0 else None
    return replace(call, ids=ids, class_weight=each, options=replace(call.options, z_loss=0.0))


def _ids(ids: Tensor, ignore_index: int) -> Tensor:
    return torch.where(ids == ignore_index, -1, ids.to(torch.int64))


def _of_ids(call: LinearCrossEntropyCall, *tensors: Any) -> list[Tensor | None]:
    """The fields of `walks.OutputGradients`."""
    grad_loss, lse, log_prob = tensors
    tokens, terms = call.tokens(check_values=False), LossTerms.of(call.options).nonzero
    row = tokens.weight * tokens.upstream(grad_loss, call.options.reduction)
    share = None if call.class_weight is None or terms.label_smoothing is None else call.class_weight.mean()
    by_log_prob, by_lse, even = maths.by_outputs(terms, row, lse, tokens.q, call.vocab, share)
    own = None
    if even is not None:
        each = torch.ones_like(log_prob) if call.class_weight is None else call.class_weight[tokens.ids]
        own = -even[:, None] * each
    return [by_log_prob.contiguous(), by_lse, None, even, own]


# ------------------------------------------------------------------------------------------------ labels of every entry


def _forward_of_labels(call: LinearCrossEntropyCall) -> LossMade[LossOutputs, TritonSaved]:
    from onchip.vocab.triton import labels

    mine, config = dense.local(call), shards.plan(call)
    options, factor = dense.for_kernels(call.options, call.shards, forward=True)
    saved = setup.make_saved(mine, config)
    run = _run(mine, saved, options)
    out = LossOutputs.empty(mine, mine.hidden, kernels=True, reduced=False)
    top = torch.empty_like(out.lse.view(-1)) if options.return_stats and call.shards.there else None
    labels.forward(run, mine, config, saved, labels.labels_of(mine.labels, options.label_smoothing), out, top)
    if not call.shards.there:
        return LossMade(out._replace(loss=stated_on(call, reduced_of_all, out.loss)), saved)
    sums = dense.sums_of_kernels(options, out, factor, mine.labels, top)
    return LossMade(dense.combined(OP, call, sums, call.tokens(check_values=False)), saved)


def _run(mine: LinearCrossEntropyCall, saved: TritonSaved, options: Any) -> Any:
    out, each = mine.weight_grad_out, mine.class_weight
    return setup.make_run(mine, options, saved.vectors, out, each, weight=saved.weight)


def _gradients(kept: TritonKept[LinearCrossEntropyCall], upstream: Made, wanted: Wanted) -> Made:
    if not kept.call.dense:
        return operator.gradients(_by_outputs, _as_kernels_take_it, kept, upstream, wanted)
    assert upstream[0] is not None
    return _gradients_of_labels(kept, upstream[0], wanted)


def _gradients_of_labels(kept: TritonKept[LinearCrossEntropyCall], grad_loss: Tensor, wanted: Wanted) -> Made:
    """Turn hidden's memory into its gradient."""
    from onchip.vocab.triton import labels
    from onchip.vocab.triton.exchange import HiddenSum

    call, saved, known, shards_of = dense.local(kept.call), kept.saved, kept.known, kept.call.shards
    options, factor = dense.for_kernels(call.options, shards_of)
    row = stated_on(kept.call, rows_of_all, grad_loss)
    assert known.mass is not None
    mass, hidden_sum = known.mass.reshape(-1), None
    if shards_of.there:
        row, mass, hidden_sum = row * factor, mass / factor, HiddenSum(shards_of)
    run = _run(call, saved, options)
    known = KnownStats(known.lse.reshape(-1), known.log_prob.reshape(-1), mass=mass)
    given = labels.labels_of(call.labels, options.label_smoothing), known, row, wanted
    hidden, weight, bias = labels.backward(
        run, call, kept.config, saved, *given, add_to=call.weight_grad_out, hidden_sum=hidden_sum
    )
    rows = len(kept.call.weight)
    return hidden, shards.padded(weight, rows), shards.padded(bias, rows)


KERNELS = operator.kernels(
    LOSS,
    _by_outputs,
    _as_kernels_take_it,
    _targets,
    _forward_of_labels,
    gradients=_gradients,
    consumed=("hidden_memory", "weight_memory"),
    adds_to={"weight": "weight_grad_out"},
    exchanges=lambda call: call.shards.there and (call.kind != "ids" or call.shards.sequence >= 0),
)
