"""The operator of a loss of a linear layer on the Triton kernels.

Forward computes the outputs, and leaves what backward needs in the memory of the gradients: the logits' exponentials in
that of the weight's gradient, the tokens' hidden states in that of hidden's.  Backward turns these into the gradients,
in place.  The launches are in `walks`; for a sharded vocabulary the exchange between ranks is in `shards`.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from onchip.frontend.torch_register import Made, Wanted, stated_on
from onchip.vocab.torch.call import OF_LAYER
from onchip.vocab.torch.operator import LossMade, LossOperator, TorchLoss, check_ranks
from onchip.vocab.torch.softmax import KnownStats, TokenStats
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


def kernels(
    loss: TorchLoss, by_outputs: "ByOutputs", taken: Callable[[Any], Any] = lambda call: call, **functions: Any
) -> LossOperator:
    """The operator; `functions` are more of the `Operator`'s, or replace those here.

    by_outputs: from what is kept and the upstream gradients, each token's softmax and a function of the run: the
    gradients of the log-probabilities, lse and entropy, and that of the losses' sum, if forward made its gradients.
    taken: the call as kernels take it.
    """
    given = {
        "forward": partial(forward, loss, taken),
        "fake": lambda call: LossMade(loss.empty(call, True), shards.fake_saved(call)),
        "save": lambda call, made: TritonKept(call, shards.plan(call), made.out.known, made.saved),
        "gradients": partial(gradients, by_outputs, taken),
        "fake_gradients": _fake_gradients,
        "collect": _collect,
        "clone": setup.clone,
        "consumed": ("hidden_memory", "weight_memory", "scratch_memory"),
        "by_token": ("hidden", "ids", "token_temperature", "token_weight", "labels", "probs"),
        "exchanges": lambda call: call.shards.there,
    }
    kept: Any = TritonKept
    return loss.operator("triton", TritonSaved, kept=kept[loss.call], states=True, **OF_LAYER, **given | functions)


def forward(loss: TorchLoss, taken: Callable[[Any], Any], call: Any) -> LossMade[Any, TritonSaved]:
    """The outputs, from statistics that kernels make."""
    from onchip.vocab.triton import walks

    asked = loss.asked(call)
    if call.shards.there:
        check(loss, call)
        return of_shards(loss, call, shards.walk(taken(call), shards.plan(call), asked))
    given, config, saved, run = begin(loss, call, taken)
    # With the entropy the argmax is followed, and the mean of lse - z without being asked for.
    mean_logits = asked.mean_logits and not given.options.label_smoothing
    asked = asked._replace(entropy=asked.entropy or asked.top, mean_logits=mean_logits, class_weight=None, top=False)
    made = walks.forward(run, given, config, saved, asked=asked)
    stats = TokenStats(
        made.lse, made.log_prob, made.top1, made.entropy, None, made.mean_logits, made.uniform_loss, made.log_sum_sq
    )
    return LossMade(loss.of_stats(call, stats, None), saved)


def check(loss: TorchLoss, call: Any) -> None:
    """Raise for wrong values, where these are checked."""
    if call.hidden.is_meta:
        return
    if call.shards.there:
        check_ranks(loss, call)
    if call.options.check_inputs or (call.shards.there and call.device == "cpu"):
        call.tokens(check_values=call.options.check_inputs)


def begin(loss: TorchLoss, call: Any, taken: Callable[[Any], Any]) -> tuple[Any, TritonPlan, TritonSaved, Any]:
    """What a walk over a whole vocabulary begins with: the call as kernels take it, its plan, memory and run."""
    config = shards.plan(call)
    if call.options.check_inputs:
        check(loss, call)
    saved, given = setup.make_saved(call, config), taken(call)
    return given, config, saved, run_of(given, saved, saved.weight)


def run_of(call: Any, saved: TritonSaved, weight: Tensor, options: Any = None) -> Any:
    """The run for a call as kernels take it, or with other `options`; `weight` as in `setup.make_run`."""
    out, each = call.weight_grad_out, call.class_weight
    return setup.make_run(call, options or call.options, saved.vectors, out, each, weight=weight)


def of_shards(loss: TorchLoss, call: Any, walked: shards.Walked) -> LossMade[Any, TritonSaved]:
    """The outputs, from what each rank knows about its shard."""
    return LossMade(loss.outputs(*stated_on(call, partial(_of_ranks, loss), *walked.known)), walked.saved)


def _of_ranks(loss: TorchLoss, call: Any, *tensors: Any) -> list[Any]:
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
    run = run_of(call, saved, setup.weight_in_backward(call, config, saved))
    by, factor = by_run(run)
    return walks.backward(run, call, config, saved, known, by, wanted, add_to=call.weight_grad_out, factor=factor)


def _collect(kept: TritonKept[Any], made: Made, wanted: Wanted) -> Made:
    hidden, weight, bias = made
    if kept.config.in_forward or not kept.call.shards.there:
        hidden = kept.saved.hidden_memory
    if shards.in_memory(kept.call, kept.saved):
        weight = kept.saved.weight_memory[: len(kept.call.weight)]
    return hidden, weight, bias


def _fake_gradients(kept: TritonKept[Any], upstream: Made, wanted: Wanted) -> Made:
    new_hidden = wanted[0] and kept.call.shards.there and not kept.config.in_forward
    new_weight = wanted[1] and not shards.in_memory(kept.call, kept.saved)
    made: Made = kept.call.empty_gradients((new_hidden, new_weight, wanted[2]))
    return made
