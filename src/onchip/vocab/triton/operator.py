"""The operator of a loss of a linear layer on the Triton kernels.

Forward computes the outputs, and leaves what backward needs in the memory of the gradients: the logits' exponentials in
that of the weight's gradient, the tokens' hidden states in that of hidden's.  Backward turns these into the gradients,
in place.  The launches are in `walks`; for a sharded vocabulary the exchange between ranks is in `shards`.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_register import Made, Wanted, stated_on
from onchip.vocab.rows.launches import reduce_losses
from onchip.vocab.torch.call import OF_LAYER
from onchip.vocab.torch.operator import LossMade, LossOperator, TorchLoss, check_ranks
from onchip.vocab.torch.softmax import Asked, KnownStats, TokenStats
from onchip.vocab.triton import setup, shards
from onchip.vocab.triton.memory import TritonPlan
from onchip.vocab.triton.setup import TritonSaved

if TYPE_CHECKING:  # Triton is imported where something is launched
    from onchip.vocab.triton import records, walks

    ByRun = Callable[[records.Run], tuple[walks.OutputGradients, Tensor | None]]
    ByOutputs = Callable[[Any, Made], tuple[records.TokenSoftmax, ByRun]]

C = TypeVar("C")


class TritonKept(NamedTuple, Generic[C]):
    """What backward gets."""

    call: C
    config: TritonPlan
    known: KnownStats
    saved: TritonSaved


class Targets(NamedTuple):
    """How kernels compute a loss whose labels are one id each."""

    token_weight: Tensor | None  # [T] float32
    divisor: Callable[[Tensor], Tensor | None]  # of the loss, given how many tokens count
    outputs: "Callable[[Any, Tensor, records.TokenSoftmax], Any]"  # (call, loss, softmax of all tokens)


def kernels(
    loss: TorchLoss,
    by_outputs: "ByOutputs",
    taken: Callable[[Any], Any] = lambda call: call,
    targets: Callable[[Any], Targets | None] = lambda call: None,
    of_labels: Callable[[Any], Any] | None = None,
    **functions: Any,
) -> LossOperator:
    """The operator; `functions` are more of the `Operator`'s, or replace those here.

    by_outputs: from what is kept and the upstream gradients, each token's softmax and a function of the run: the
    gradients of the log-probabilities, lse and entropy, and that of the losses' sum, if forward made its gradients.
    taken: the call as kernels take it.  targets: how they compute the loss; None: from statistics PyTorch does.
    of_labels: forward for labels of every entry.
    """
    given = {
        "forward": partial(_forward, loss, taken, targets, of_labels),
        "fake": lambda call: LossMade(loss.empty(call, True), shards.fake_saved(call)),
        "save": lambda call, made: TritonKept(call, shards.plan(call), made.out.known, made.saved),
        "gradients": partial(gradients, by_outputs, taken),
        "fake_gradients": _fake_gradients,
        "collect": _collect,
        "clone": setup.clone,
        "consumed": ("hidden_memory", "weight_memory", "scratch_memory"),
        "by_token": ("hidden", "ids", "token_temperature", "token_weight", "labels", "probs"),
        "exchanges": lambda call: call.shards.there,
        "ahead": setup.plan_ahead,
    }
    kept: Any = TritonKept
    return loss.operator("triton", TritonSaved, kept=kept[loss.call], states=True, **OF_LAYER, **given | functions)


def _forward(
    loss: TorchLoss,
    taken: Callable[[Any], Any],
    targets: Callable[[Any], Targets | None],
    of_labels: Callable[[Any], Any] | None,
    call: Any,
) -> LossMade[Any, TritonSaved]:
    from onchip.vocab.triton import walks

    config = shards.plan(call)
    if call.options.check_inputs or call.shards.there:
        _check(loss, call)
    if of_labels is not None and call.dense:
        made: LossMade[Any, TritonSaved] = of_labels(call)
        return made
    asked, of_targets, there, mine = loss.asked(call), targets(call), call.shards.there, call
    weight, divisor, _ = of_targets or (None, None, None)
    smoothed, exchange, fused = call.options.label_smoothing > 0, None, of_targets is not None
    if there:
        fused = fused and call.class_weight is None and not (asked.entropy or smoothed) and call.shards.most > 0
        mine, exchange = shards.begin(taken(call), weight, exchanges=config.in_forward or fused)
    saved = setup.make_saved(mine, config)
    mine = mine if there else taken(call)
    class_weight = asked.class_weight if there else mine.class_weight
    run = shards.run_of(mine, saved, class_weight, saved.weight, mine.weight_grad_out)
    number = run.vectors.number
    # With the entropy the argmax is followed, and with smoothing the mean of lse - z.
    mean_logits = asked.mean_logits and (there or not smoothed)
    followed = Asked(asked.entropy or asked.top, mean_logits, asked.sum_sq, None, asked.top and there)
    softmax = walks.forward(
        run,
        mine,
        config,
        saved,
        asked=followed,
        token_weight=weight,
        divisor=lambda: None if divisor is None else divisor(number),
        losses=fused and not there,
        exchange=exchange,
    )
    if exchange is not None and not config.in_forward:
        exchange.combine(run)
    elif exchange is not None and call.grads[0] and run.tokens > 0:
        saved = saved._replace(hidden_memory=exchange.sum.wait())
    if of_targets is not None and fused:
        known = softmax if exchange is None else exchange.known
        assert known.loss is not None
        reduced = reduce_losses(
            known.loss.view(call.ids.shape), number, of_targets.divisor(number), call.options.reduction
        )
        return LossMade(of_targets.outputs(call, reduced, known), saved)
    stats = TokenStats(
        softmax.lse, softmax.log_prob, softmax.top1, softmax.entropy, None, softmax.mean_logits, softmax.uniform_loss,
        softmax.log_sum_sq, softmax.top,
    )  # fmt: skip
    if not there:
        return LossMade(loss.of_stats(call, stats, None), saved)
    if stats.argmax is None:
        stats = stats._replace(argmax=stated.empty(len(stats.lse), torch.int64, stats.lse.device))
    if stats.uniform is None and stats.mean_logits is not None:
        stats = stats._replace(uniform=stated.call(torch.sub, stats.lse, stats.mean_logits))
    return LossMade(loss.outputs(*stated_on(call, partial(_of_ranks, loss), *stats)), saved)


def _check(loss: TorchLoss, call: Any) -> None:
    """Raise for wrong values, where these are checked."""
    if call.hidden.is_meta:
        return
    if call.shards.there:
        check_ranks(loss, call)
    if call.options.check_inputs or call.device == "cpu":
        call.tokens(check_values=call.options.check_inputs)


def _of_ranks(loss: TorchLoss, call: Any, *tensors: Any) -> list[Any]:
    """The outputs, from what each rank knows about its shard."""
    tokens = call.tokens(check_values=False)
    stats = shards.combined(loss.op, call, TokenStats(*tensors), tokens, loss.asked(call))
    return [*loss.of_stats(call, stats._replace(mean=None), tokens)]


def gradients(
    by_outputs: "ByOutputs", taken: Callable[[Any], Any], kept: TritonKept[Any], upstream: Made, wanted: Wanted
) -> Made:
    """Turn the kept memory into hidden's and weight's gradients; weight's is added to the caller's memory if given."""
    from onchip.vocab.triton import walks

    call, config, saved = taken(kept.call), kept.config, kept.saved
    known, by_run = by_outputs(kept, upstream)
    if call.shards.there:
        return shards.gradients(call, config, saved, known, by_run, wanted, upstream[0])
    weight = setup.weight_in_backward(call, config, saved)
    run = shards.run_of(call, saved, call.class_weight, weight, call.weight_grad_out)
    by, factor = by_run(run)
    return walks.backward(run, call, config, saved, known, by, wanted, add_to=call.weight_grad_out, factor=factor)


def _collect(kept: TritonKept[Any], made: Made, wanted: Wanted) -> Made:
    hidden, weight, bias = made
    if kept.config.in_forward or not kept.call.shards.there:
        hidden = kept.saved.hidden_memory
    if shards.in_memory(kept.call, kept.saved):
        weight = kept.saved.weight_memory[: kept.call.weight.shape[0]]  # which len() would make a number
    return hidden, weight, bias


def _fake_gradients(kept: TritonKept[Any], upstream: Made, wanted: Wanted) -> Made:
    new_hidden = wanted[0] and kept.call.shards.there and not kept.config.in_forward
    new_weight = wanted[1] and not shards.in_memory(kept.call, kept.saved)
    made: Made = kept.call.empty_gradients((new_hidden, new_weight, wanted[2]))
    return made
