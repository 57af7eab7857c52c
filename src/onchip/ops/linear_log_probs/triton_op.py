"""linear_log_probs for PyTorch on Triton kernels.

As in linear_cross_entropy's triton_op.py, forward leaves what gradients need in the memory that they will take, and
backward turns it into them, in place.  What is launched is in `vocab.triton.walks`.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from onchip.frontend.torch_register import Made, Wanted, register
from onchip.ops.linear_log_probs.spec import OP
from onchip.ops.linear_log_probs.torch_call import Call, Outputs, empty_outputs
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
    def stats(self) -> bool:
        """Whether the entropy and top1 are followed."""
        return self.call.options.entropy or self.call.options.top1

    @property
    def config(self) -> TritonPlan:
        problem = self.call.problem(compacted=False, stats=self.stats)
        return planning.plan(problem, "auto", self.call.budget, compiled=self.compiled)

    @property
    def ids(self) -> Tensor:
        """[T, K] int64."""
        call = self.call
        k = call.ids.shape[-1] if call.ids.ndim == call.hidden.ndim else 1
        return call.ids.reshape(call.number, k).to(torch.int64).contiguous()

    def run(self) -> "launches.Run":
        """The call as walks take it."""
        return setup.make_run(planning.head_of(self.call), self.call.number)


class TritonOutputs(NamedTuple):
    """What the operator returns."""

    out: Outputs
    saved: Saved


class Kept(NamedTuple):
    """What backward is given."""

    arguments: TritonCall
    log_prob: Tensor
    entropy: Tensor | None
    lse: Tensor
    saved: Saved


def _forward(arguments: TritonCall) -> TritonOutputs:
    from onchip.vocab.triton import walks

    call, config = arguments.call, arguments.config
    shape = call.hidden.shape[:-1]
    if call.options.check_inputs:
        call.tokens(check_values=True)
    run, saved = arguments.run(), setup.make_saved(call, config)
    out, vectors = walks.forward(run, call, config, arguments.ids, saved, stats=arguments.stats)
    return TritonOutputs(
        Outputs(
            out.log_prob.view(call.ids.shape),
            None if out.entropy is None else out.entropy.view(shape),
            out.lse.view(shape),
            None if out.top1 is None else out.top1.view(shape),
        ),
        saved._replace(vectors=vectors.packed) if any(call.grads) else saved,
    )


def _fake(arguments: TritonCall) -> TritonOutputs:
    return TritonOutputs(
        empty_outputs(arguments.call, arguments.stats), setup.make_saved(arguments.call, arguments.config, fake=True)
    )


def _save(arguments: TritonCall, made: TritonOutputs) -> Kept:
    return Kept(arguments, made.out.log_prob, made.out.entropy, made.out.lse, made.saved)


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    """Turn hidden's and weight's memory into their gradients, and use up the scratch memory."""
    from onchip.vocab.triton import launches, walks

    arguments, call, ids = kept.arguments, kept.arguments.call, kept.arguments.ids
    log_prob, entropy, lse = (setup.flat(x) for x in upstream)
    return walks.backward(
        arguments.run(),
        call,
        arguments.config,
        ids,
        kept.saved,
        launches.Vectors.unpack(kept.saved.vectors, call.number),
        launches.TokenSoftmax(kept.lse.reshape(-1), kept.log_prob.reshape(ids.shape), setup.flat(kept.entropy)),
        walks.OutputGradients(
            None if log_prob is None else log_prob.view(ids.shape), lse, entropy if arguments.stats else None
        ),
        wanted,
    )


def _fake_gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    new_weight = wanted[1] and kept.saved.weight_memory.numel() == 0
    return kept.arguments.call.empty_gradients((False, new_weight, wanted[2]))


LOG_PROBS = register(
    "linear_log_probs_triton_values",
    op=OP,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=_fake_gradients,
    differentiable=("hidden", "weight", "bias"),
    differentiable_outputs=3,
    consumed=("hidden_memory", "weight_memory", "scratch_memory"),
    collect=setup.collect,
    clone=setup.clone,
)
