"""linear_cross_entropy for PyTorch on the Triton kernels.

`_forward` computes the loss, and leaves what backward needs in the memory of the gradients: the logits' exponentials in
that of the weight's gradient, the tokens' hidden states in that of hidden's.  `_gradients` turns these into the
gradients, in place.  The launches are in `vocab.triton.walks`; for labels of all entries in `vocab.triton.labels`.

If the targets are ids and the vocabulary isn't sharded, kernels compute the loss and its gradients from each token's
log-sum-exp and log-probability.  For labels of K ids, and for a sharded vocabulary, a few PyTorch operations on numbers
per token and id do so.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.options import LossTerms
from onchip.frontend.torch_register import Made, Operator, Wanted, stated_on
from onchip.ops.linear_cross_entropy import OP
from onchip.ops.linear_cross_entropy.torch_call import LinearCrossEntropyCall
from onchip.vocab import loss as maths
from onchip.vocab.rows.launches import reduce_losses
from onchip.vocab.torch import dense
from onchip.vocab.torch.loss import LossOutputs, asked_by, reduced, scaled_rows
from onchip.vocab.torch.softmax import Asked, TokenStats
from onchip.vocab.triton import setup, shards
from onchip.vocab.triton.memory import TritonPlan, rounds_in_forward
from onchip.vocab.triton.setup import TritonSaved


class LinearCrossEntropyTritonOutputs(NamedTuple):
    """The operator's outputs."""

    out: LossOutputs
    saved: TritonSaved


class LinearCrossEntropyTritonKept(NamedTuple):
    """What forward keeps for backward."""

    call: LinearCrossEntropyCall
    config: TritonPlan
    lse: Tensor
    log_prob: Tensor
    mass: Tensor | None
    saved: TritonSaved


def _forward(call: LinearCrossEntropyCall) -> LinearCrossEntropyTritonOutputs:
    from onchip.vocab.triton import walks

    if call.shards.there:
        return _forward_of_shards(call)
    config, options, shape = _plan(call), call.options, call.hidden.shape[:-1]
    if options.check_inputs and not call.hidden.is_meta:
        call.tokens(check_values=True)
    saved = setup.make_saved(call, config)
    if call.kind != "ids":
        return LinearCrossEntropyTritonOutputs(
            (_forward_of_labels if call.dense else _forward_of_ids)(call, config, saved), saved
        )
    run = setup.make_run(call, options, saved.vectors, call.weight_grad_out, call.class_weight, weight=saved.weight)
    token_weight = setup.flat(call.token_weight)
    number = run.vectors.number
    out = walks.forward(
        run,
        call,
        config,
        saved,
        asked=Asked(entropy=options.return_stats),
        token_weight=token_weight,
        divisor=lambda: _divisor(call, number),
        losses=True,
    )
    assert out.loss is not None
    loss = out.loss.view(shape)
    if options.reduction != "none":
        loss = reduce_losses(out.loss, number, _divisor(call, number), mean=options.reduction == "mean")
    made = (out.lse, out.log_prob, out.entropy, out.correct, out.top1)
    shaped: Any = (None if x is None else x.view(shape) for x in made)
    return LinearCrossEntropyTritonOutputs(LossOutputs(loss, *shaped), saved)


def _plan(call: LinearCrossEntropyCall) -> TritonPlan:
    """The plan: the same in forward and backward, and for a fake call."""
    return shards.plan(call, **_known(call))


def _known(call: LinearCrossEntropyCall) -> dict[str, bool]:
    """Fields of the problem: for labels of K ids kernels get another call."""
    weighed = {"class_weight": call.class_weight is not None}
    return weighed | {"stats": call.options.return_stats} if call.dense else weighed


def _fake(call: LinearCrossEntropyCall) -> LinearCrossEntropyTritonOutputs:
    return LinearCrossEntropyTritonOutputs(call.empty_outputs(kernels=True), shards.fake_saved(call, **_known(call)))


def _divisor(call: LinearCrossEntropyCall, number: Tensor) -> Tensor | None:
    """The loss's divisor, unless that is the number of tokens that are not ignored."""
    return None if call.normalizer is None else call.divisor(number)


def _save(call: LinearCrossEntropyCall, made: LinearCrossEntropyTritonOutputs) -> LinearCrossEntropyTritonKept:
    return LinearCrossEntropyTritonKept(call, _plan(call), made.out.lse, made.out.log_prob, made.out.mass, made.saved)


def _gradients(kept: LinearCrossEntropyTritonKept, upstream: Made, wanted: Wanted) -> Made:
    """Turn the kept memory into hidden's and weight's gradients; weight's is added to the caller's memory if given."""
    from onchip.vocab.triton import records, walks

    call, (grad_loss,) = kept.call, upstream
    assert grad_loss is not None
    if call.dense:
        return _gradients_of_labels(kept, grad_loss, wanted)
    given, shape = _as_kernels_take_it(call), (kept.lse.numel(), call.several)
    known = records.TokenSoftmax(kept.lse.reshape(-1), kept.log_prob.reshape(shape))

    def by_output(run: records.Run) -> tuple[walks.OutputGradients, Tensor | None]:
        if call.kind == "ids" and (call.class_weight is None or not call.shards.there):
            divisor, weight = _divisor(call, run.vectors.number), setup.flat(call.token_weight)
            mean = call.options.reduction == "mean"
            # Forward divided the numbers that it rounded.
            rounded = kept.config.in_forward and rounds_in_forward(call.problem("cuda"))
            return walks.loss_gradients(run, known, grad_loss, divisor, weight, mean=mean, by_mean=mean and not rounded)
        made = stated_on(call, _by_outputs, grad_loss, known.lse, known.log_prob)
        return walks.OutputGradients(*made), None

    if call.shards.there:
        return shards.gradients(
            given,
            kept.config,
            kept.saved,
            known,
            by_output,
            wanted,
            given.class_weight,
            call.weight_grad_out,
            grad_loss,
        )
    run = setup.make_run(
        given,
        given.options,
        kept.saved.vectors,
        call.weight_grad_out,
        given.class_weight,
        weight=setup.weight_in_backward(given, kept.config, kept.saved),
    )
    by, factor = by_output(run)
    return walks.backward(
        run, given, kept.config, kept.saved, known, by, wanted, add_to=call.weight_grad_out, factor=factor
    )


# ------------------------------------------------------------------------------------ labels of K ids, and of shards


def _as_kernels_take_it(call: LinearCrossEntropyCall) -> LinearCrossEntropyCall:
    """The call for kernels, with labels of K ids.  It includes z-loss and class weights, except for the part that
    smoothing spreads.  No id is ignored; one that equals ignore_index is out of range."""
    if call.kind == "ids":
        return call
    ids = stated.call(_ids, call.ids, call.options.ignore_index)
    each = call.class_weight if call.options.label_smoothing > 0 else None
    return replace(call, ids=ids, class_weight=each, options=call.options.without_lse())


def _ids(ids: Tensor, ignore_index: int) -> Tensor:
    return torch.where(ids == ignore_index, -1, ids.to(torch.int64))


def _forward_of_ids(call: LinearCrossEntropyCall, config: TritonPlan, saved: TritonSaved) -> LossOutputs:
    """Forward for labels of K ids, which have a number each."""
    from onchip.vocab.triton import walks

    given, shape = _as_kernels_take_it(call), call.hidden.shape[:-1]
    run = setup.make_run(
        given, given.options, saved.vectors, call.weight_grad_out, given.class_weight, weight=saved.weight
    )
    made = walks.forward(run, given, config, saved, asked=Asked(entropy=call.options.return_stats))
    known = made.lse, made.log_prob, made.top1, made.entropy, made.uniform_loss
    loss, correct, *more = stated_on(call, _results, *known)
    entropy, top1 = (None if x is None else x.view(shape) for x in (made.entropy, made.top1))
    return LossOutputs(loss, made.lse.view(shape), made.log_prob.view(call.ids.shape), entropy, correct, top1, *more)


def _results(call: LinearCrossEntropyCall, *tensors: Any) -> list[Any]:
    """The outputs that aren't among these statistics."""
    lse, log_prob, top1, entropy, uniform = tensors
    stats = TokenStats(lse, log_prob, top1, entropy, None, None, uniform, None)
    made = LossOutputs.of(call, stats, call.tokens(check_values=False))
    return [made.loss, made.correct, made.expected, made.target_logit]


def _forward_of_shards(call: LinearCrossEntropyCall) -> LinearCrossEntropyTritonOutputs:
    options = call.options
    if not call.hidden.is_meta:
        call.check_ranks()
    if (options.check_inputs or call.device == "cpu") and not call.hidden.is_meta:
        call.tokens(check_values=options.check_inputs)
    if call.dense:
        return _forward_of_labels_of_shard(call)
    asked, given = asked_by(options, call.class_weight), _as_kernels_take_it(call)
    weight = setup.flat(call.token_weight) if call.kind == "ids" else None
    plain = call.kind == "ids" and call.class_weight is None and not (asked.entropy or asked.mean_logits)
    plain = plain and call.shards.most > 0
    known, whole, number, saved = shards.walk(
        given, asked, weight, lambda number: _divisor(call, number), exchanges=plain, **_known(call)
    )
    if plain and whole is not None:
        assert whole.loss is not None
        loss = whole.loss.view(call.leading)
        if options.reduction != "none":
            loss = reduce_losses(whole.loss, number, _divisor(call, number), mean=options.reduction == "mean")
        out = LossOutputs(loss, whole.lse.view(call.leading), whole.log_prob.view(call.ids.shape))
    else:
        out = LossOutputs(*stated_on(call, _outputs_of_shards, *known))
    return LinearCrossEntropyTritonOutputs(out, saved)


def _outputs_of_shards(call: LinearCrossEntropyCall, *tensors: Any) -> list[Any]:
    """The outputs, from this shard's statistics."""
    tokens = call.tokens(check_values=False)
    stats = shards.combined(OP, call, TokenStats(*tensors), tokens, asked_by(call.options, call.class_weight))
    return [*LossOutputs.of(call, stats, tokens)]


def _by_outputs(call: LinearCrossEntropyCall, *tensors: Any) -> list[Tensor | None]:
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


def _forward_of_labels(call: LinearCrossEntropyCall, config: TritonPlan, saved: TritonSaved) -> LossOutputs:
    from onchip.vocab.triton import labels

    options = call.options
    run = setup.make_run(call, options, saved.vectors, call.weight_grad_out, call.class_weight, weight=saved.weight)
    out = call.empty_outputs(kernels=True, reduced=False)
    labels.forward(run, call, config, saved, labels.labels_of(call.labels, options.label_smoothing), out)
    return out._replace(loss=stated_on(call, _reduced, out.loss))


def _forward_of_labels_of_shard(call: LinearCrossEntropyCall) -> LinearCrossEntropyTritonOutputs:
    from onchip.vocab.triton import labels

    mine, tokens = dense.local(call), call.tokens(check_values=call.options.check_inputs)
    options, factor = dense.for_kernels(call.options, call.shards, forward=True)
    config = _plan(call)
    saved = setup.make_saved(mine, config)
    run = setup.make_run(mine, options, saved.vectors, mine.weight_grad_out, mine.class_weight, weight=saved.weight)
    out = mine.empty_outputs(kernels=True, reduced=False)
    top = torch.empty_like(out.lse.view(-1)) if options.return_stats else None
    labels.forward(run, mine, config, saved, labels.labels_of(mine.labels, options.label_smoothing), out, top)
    sums = dense.sums_of_kernels(options, out, factor, mine.labels, top)
    return LinearCrossEntropyTritonOutputs(dense.combined(OP, call, sums, tokens), saved)


def _reduced(call: LinearCrossEntropyCall, losses: Any) -> Tensor:
    tokens = call.tokens(check_values=False)
    return reduced(call.options, losses.reshape(-1) * tokens.weight, tokens, call.leading)


def _gradients_of_labels(kept: LinearCrossEntropyTritonKept, grad_loss: Tensor, wanted: Wanted) -> Made:
    """Turn hidden's memory into its gradient."""
    from onchip.vocab.triton import labels
    from onchip.vocab.triton.exchange import HiddenSum

    call, saved, shards_of = dense.local(kept.call), kept.saved, kept.call.shards
    options, factor = dense.for_kernels(call.options, shards_of)
    row = stated_on(kept.call, _rows, grad_loss)
    assert kept.mass is not None
    mass, hidden_sum = kept.mass.reshape(-1), None
    if shards_of.there:
        row, mass, hidden_sum = row * factor, mass / factor, HiddenSum(shards_of)
    run = setup.make_run(call, options, saved.vectors, call.weight_grad_out, call.class_weight, weight=saved.weight)
    known = labels.KnownStats(kept.lse.reshape(-1), kept.log_prob.reshape(-1), mass)
    given = labels.labels_of(call.labels, options.label_smoothing), known, row, wanted
    hidden, weight, bias = labels.backward(
        run, call, kept.config, saved, *given, add_to=call.weight_grad_out, hidden_sum=hidden_sum
    )
    rows = len(kept.call.weight)
    return hidden, shards.padded(weight, rows), shards.padded(bias, rows)


def _rows(call: LinearCrossEntropyCall, grad_loss: Any) -> Tensor:
    """[T] float32: each token's upstream gradient, times the derivative of logits with respect to the product."""
    tokens = call.tokens(check_values=False)
    row, _ = scaled_rows(tokens, call.options, tokens.upstream(grad_loss, call.options.reduction), torch.float32)
    return row


LOSS = Operator(
    "linear_cross_entropy_by_triton",
    op=OP,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    adds_to={"weight": "weight_grad_out"},
    **(
        shards.IN_PLACE
        | {"exchanges": lambda call: call.shards.there and (call.kind != "ids" or call.shards.sequence >= 0)}
    ),
)
