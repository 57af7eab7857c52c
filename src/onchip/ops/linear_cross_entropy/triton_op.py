"""linear_cross_entropy for PyTorch on the Triton kernels.

`_forward` computes the loss, and leaves what gradients need in the memory that they will take: the exponentials of the
logits in the weight's, the tokens' hidden states in hidden's.  `_gradients` turns these into the gradients, in place.
What is launched is in `vocab.triton.walks`.
"""

from typing import NamedTuple

from torch import Tensor

from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.ops.linear_cross_entropy.spec import OP
from onchip.ops.linear_cross_entropy.torch_call import Call
from onchip.vocab.rows.launches import reduce_losses
from onchip.vocab.torch.loss import Outputs
from onchip.vocab.torch.softmax import Asked
from onchip.vocab.triton import setup
from onchip.vocab.triton.memory import TritonPlan, rounds_in_forward
from onchip.vocab.triton.setup import Saved


class TritonOutputs(NamedTuple):
    """What the operator returns."""

    out: Outputs
    saved: Saved


class Kept(NamedTuple):
    """What backward is given."""

    call: Call
    config: TritonPlan
    lse: Tensor
    log_prob: Tensor
    saved: Saved


def _forward(call: Call) -> TritonOutputs:
    from onchip.vocab.triton import walks

    config, options, shape = setup.plan(call), call.options, call.target.shape
    if options.check_inputs and not call.hidden.is_meta:
        call.tokens(check_values=True)
    saved = setup.make_saved(call, config)
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
    return TritonOutputs(Outputs(loss, *(None if x is None else x.view(shape) for x in made)), saved)  # type: ignore[arg-type]


def _fake(call: Call) -> TritonOutputs:
    return TritonOutputs(call.empty_outputs(), setup.make_saved(call, setup.plan(call), fake=True))


def _divisor(call: Call, number: Tensor) -> Tensor | None:
    """What the loss is divided by, unless it is the number of tokens that are not ignored."""
    return None if call.normalizer is None else call.divisor(number)


def _save(call: Call, made: TritonOutputs) -> Kept:
    return Kept(call, setup.plan(call), made.out.lse, made.out.log_prob, made.saved)


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    """Turn hidden's and weight's memory into their gradients; weight's is added to the caller's if there is any."""
    from onchip.vocab.triton import records, walks

    call, (grad_loss,) = kept.call, upstream
    assert grad_loss is not None
    run = setup.make_run(
        call,
        call.options,
        kept.saved.vectors,
        call.weight_grad_out,
        call.class_weight,
        weight=setup.weight_in_backward(call, kept.config, kept.saved),
    )
    known = records.TokenSoftmax(kept.lse.reshape(-1), kept.log_prob.reshape(-1, 1))
    divisor, weight = _divisor(call, run.vectors.number), setup.flat(call.token_weight)
    mean = call.options.reduction == "mean"
    # What forward rounded is divided already.
    rounded = kept.config.in_forward and rounds_in_forward(call.problem("cuda"))
    by_output, factor = walks.loss_gradients(
        run, known, grad_loss, divisor, weight, mean=mean, by_mean=mean and not rounded
    )
    return walks.backward(
        run, call, kept.config, kept.saved, known, by_output, wanted, add_to=call.weight_grad_out, factor=factor
    )


LOSS = Operator(
    "linear_cross_entropy_in_place",
    op=OP,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    adds_to={"weight": "weight_grad_out"},
    **setup.IN_PLACE,
)
