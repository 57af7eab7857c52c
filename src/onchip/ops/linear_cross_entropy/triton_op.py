"""linear_cross_entropy for PyTorch on the Triton kernels.

`_forward` computes the loss, and leaves what gradients need in the memory that they will take: the exponentials of the
logits in the weight's, the tokens' hidden states in hidden's.  `_gradients` turns these into the gradients, in place.
What is launched is in `vocab.triton.walks`.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from onchip.frontend.torch_register import Made, Wanted, register
from onchip.ops.linear_cross_entropy.spec import OP
from onchip.ops.linear_cross_entropy.torch_call import Call, Outputs, empty_outputs
from onchip.vocab.triton import plan as planning
from onchip.vocab.triton import setup
from onchip.vocab.triton.memory import TritonPlan
from onchip.vocab.triton.setup import Saved

if TYPE_CHECKING:  # Triton is imported where something is launched
    from onchip.vocab.triton import launches


class TritonCall(NamedTuple):
    """The arguments of the operator."""

    call: Call
    compiled: bool
    """Whether torch.compile made the call: then its sizes may have been symbols."""

    @property
    def config(self) -> TritonPlan:
        call = self.call
        return planning.plan(call.problem("cuda"), call.options.strategy, call.budget, compiled=self.compiled)

    @property
    def ids(self) -> Tensor:
        """[T, 1] int64."""
        return self.call.target.reshape(-1, 1).to(torch.int64).contiguous()

    def run(self) -> "launches.Run":
        """The call as walks take it."""
        options = self.call.options
        head = planning.head_of(self.call, options.label_smoothing, options.z_loss)
        return setup.make_run(head, self.call.target.numel(), self.call.weight_grad_out)


class TritonOutputs(NamedTuple):
    """What the operator returns."""

    out: Outputs
    saved: Saved


class Kept(NamedTuple):
    """What backward is given."""

    arguments: TritonCall
    lse: Tensor
    log_prob: Tensor
    saved: Saved


def _forward(arguments: TritonCall) -> TritonOutputs:
    from onchip.vocab.triton import walks

    call, config, options = arguments.call, arguments.config, arguments.call.options
    shape = call.target.shape
    if options.check_inputs:
        call.tokens(check_values=True)
    run, saved = arguments.run(), setup.make_saved(call, config)
    out, vectors = walks.forward(run, call, config, arguments.ids, saved, stats=options.return_stats)
    losses, correct = walks.losses(run, vectors, out, setup.flat(call.token_weight))
    loss = losses.view(shape)
    if options.reduction != "none":
        loss = losses.sum() / call.divisor(vectors.number)
    return TritonOutputs(
        Outputs(
            loss,
            out.lse.view(shape),
            out.log_prob.view(shape),
            None if out.entropy is None else out.entropy.view(shape),
            None if correct is None else correct.view(shape),
        ),
        saved._replace(vectors=vectors.packed) if any(call.grads) else saved,
    )


def _fake(arguments: TritonCall) -> TritonOutputs:
    return TritonOutputs(empty_outputs(arguments.call), setup.make_saved(arguments.call, arguments.config, fake=True))


def _save(arguments: TritonCall, made: TritonOutputs) -> Kept:
    return Kept(arguments, made.out.lse, made.out.log_prob, made.saved)


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    """Turn hidden's and weight's memory into their gradients; weight's is added to the caller's if there is any."""
    from onchip.vocab.triton import launches, walks

    arguments, call, (grad_loss,) = kept.arguments, kept.arguments.call, upstream
    assert grad_loss is not None
    run, vectors = arguments.run(), launches.Vectors.unpack(kept.saved.vectors, call.target.numel())
    grad = grad_loss.reshape(-1).float()
    if call.options.reduction != "none":
        grad = (grad / call.divisor(vectors.number)).expand(call.target.numel())
    weights = setup.flat(call.token_weight)
    if weights is not None:
        grad = grad * weights
    known = launches.TokenSoftmax(kept.lse.reshape(-1), kept.log_prob.reshape(-1, 1))
    by_output = walks.loss_gradients(run, known, grad)
    return walks.backward(
        run,
        call,
        arguments.config,
        arguments.ids,
        kept.saved,
        vectors,
        known,
        by_output,
        wanted,
        add_to=call.weight_grad_out,
    )


def _fake_gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    new_weight = wanted[1] and kept.saved.weight_memory.numel() == 0
    return kept.arguments.call.empty_gradients((False, new_weight, wanted[2]))


LOSS = register(
    "linear_cross_entropy_triton_loss",
    op=OP,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=_fake_gradients,
    differentiable=("hidden", "weight", "bias"),
    adds_to={"weight": "weight_grad_out"},
    consumed=("hidden_memory", "weight_memory"),
    collect=setup.collect,
    clone=setup.clone,
)
