"""linear_log_probs for PyTorch on Triton kernels.

As in linear_cross_entropy's triton_op.py, forward leaves what gradients need in the memory that they will take, and
backward turns it into them, in place.  What is launched is in `vocab.triton.walks`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.frontend.torch_register import Made, Wanted, register
from onchip.ops.linear_log_probs.spec import OP
from onchip.ops.linear_log_probs.torch_call import Call, Outputs, empty_outputs
from onchip.vocab.triton import plan as planning
from onchip.vocab.triton import setup
from onchip.vocab.triton.memory import TritonConfig
from onchip.vocab.triton.setup import Saved


class TritonCall(NamedTuple):
    """What the operator is told."""

    call: Call
    compiled: bool
    """Whether torch.compile made the call: then its sizes may have been symbols."""

    @property
    def stats(self) -> bool:
        """Whether the entropy and top1 are followed."""
        return self.call.options.entropy or self.call.options.top1

    @property
    def config(self) -> TritonConfig:
        problem = self.call.problem(compacted=False, stats=self.stats)
        return planning.plan(problem, "auto", self.call.budget, compiled=self.compiled)

    @property
    def ids(self) -> Tensor:
        """[T, K] int64."""
        call = self.call
        k = call.ids.shape[-1] if call.ids.ndim == call.hidden.ndim else 1
        return call.ids.reshape(call.number, k).to(torch.int64).contiguous()


class TritonOutputs(NamedTuple):
    """What the operator returns."""

    out: Outputs
    saved: Saved


class Kept(NamedTuple):
    """What backward is given."""

    told: TritonCall
    log_prob: Tensor
    entropy: Tensor | None
    lse: Tensor
    saved: Saved


def _forward(told: TritonCall) -> TritonOutputs:
    from onchip.vocab.triton import walks

    call, config, options = told.call, told.config, told.call.options
    shape = call.hidden.shape[:-1]
    if options.check_inputs:
        call.tokens(check_values=True)
    run = setup.make_run(planning.head_of(call), call.number)
    per_token = None if call.token_temperature is None else setup.flat(call.token_temperature.expand(shape))
    saved = planning.saved_of(call, config)
    rows, buffer = planning.rows_and_buffer(call, config, saved)
    out, vectors = walks.forward(
        run,
        call.hidden.reshape(call.number, run.hidden),
        told.ids,
        float(options.temperature) if per_token is None else per_token,
        int(options.ignore_index),
        rows,
        buffer,
        stats=told.stats,
    )
    return TritonOutputs(
        Outputs(
            out.log_prob.view(call.ids.shape),
            None if out.entropy is None else out.entropy.view(shape),
            out.lse.view(shape),
            None if out.top1 is None else out.top1.view(shape),
        ),
        saved._replace(vectors=vectors.packed) if any(call.grads) else saved,
    )


def _fake(told: TritonCall) -> TritonOutputs:
    return TritonOutputs(empty_outputs(told.call, told.stats), planning.saved_of(told.call, told.config, fake=True))


def _save(told: TritonCall, made: TritonOutputs) -> Kept:
    return Kept(told, made.out.log_prob, made.out.entropy, made.out.lse, made.saved)


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    """Turn hidden's and weight's memory into their gradients, and use up the overflow."""
    from onchip.vocab.triton import launches, walks

    told, call, saved = kept.told, kept.told.call, kept.saved
    ids = told.ids
    memory = planning.backward_memory(call, told.config, saved, wanted)
    if call.number > 0:
        log_probs = setup.flat(upstream[0])
        walks.backward(
            setup.make_run(planning.head_of(call), call.number),
            launches.Vectors.unpack(saved.vectors, call.number),
            ids,
            int(call.options.ignore_index),
            launches.TokenSoftmax(kept.lse.reshape(-1), kept.log_prob.reshape(ids.shape), setup.flat(kept.entropy)),
            walks.OutputGradients(
                None if log_probs is None else log_probs.view(ids.shape),
                setup.flat(upstream[2]),
                setup.flat(upstream[1]) if told.stats else None,
            ),
            **memory,
        )
    return planning.new_gradients(call, saved, memory)


def _fake_gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    new_weight = wanted[1] and kept.saved.weight_memory.numel() == 0
    return kept.told.call.empty_gradients((False, new_weight, wanted[2]))


def _collect(kept: Kept, made: Made, wanted: Wanted) -> Made:
    return planning.all_gradients(kept.told.call, kept.saved, made)


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
    consumed=("hidden_memory", "weight_memory", "overflow"),
    collect=_collect,
    clone=planning.clone,
)
