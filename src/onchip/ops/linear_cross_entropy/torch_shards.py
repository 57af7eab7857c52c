"""linear_cross_entropy for PyTorch where the vocabulary is sharded over ranks (`vocab.parallel`).

As 'recompute' does, forward keeps two numbers per token, those of the whole vocabulary, and backward computes the
logits of this rank's shard again.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.ops.linear_cross_entropy.spec import OP
from onchip.ops.linear_cross_entropy.torch_call import Call
from onchip.vocab.agreement import require_agreement
from onchip.vocab.torch import walk
from onchip.vocab.torch.call import OF_LAYER
from onchip.vocab.torch.loss import Outputs, asked_by, gradient_of_loss
from onchip.vocab.triton import shards
from onchip.vocab.triton.memory import TritonPlan
from onchip.vocab.triton.setup import Saved


class Kept(NamedTuple):
    """What backward is given."""

    call: Call
    lse: Tensor
    log_prob: Tensor


class TorchOutputs(NamedTuple):
    """What the operator returns."""

    out: Outputs


def check_ranks(call: Call) -> None:
    """On the CPU and with check_inputs: raise where ranks' arguments don't belong together."""
    require_agreement(
        OP, call, call.sizes, call.target, call.token_weight, call.normalizer, call.class_weight,
        call.token_temperature, split={"weight": call.weight}, hidden={"hidden": call.hidden},
        ids=call.target,
    )  # fmt: skip


def _forward(call: Call) -> TorchOutputs:
    check_ranks(call)
    options, tokens = call.options, call.tokens(check_values=call.options.check_inputs)
    stats = walk.statistics(OP, call, tokens, asked_by(options, call.class_weight))
    return TorchOutputs(Outputs.of(options, stats, tokens, call.target.shape))


def _fake(call: Call) -> TorchOutputs:
    return TorchOutputs(call.empty_outputs())


def _save(call: Call, made: TorchOutputs) -> Kept:
    return Kept(call, made.out.lse, made.out.log_prob)


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    call, (grad_loss,) = replace(kept.call, grads=tuple(wanted)), upstream
    assert grad_loss is not None
    tokens = call.tokens(check_values=False)
    gradient, grad_scale = gradient_of_loss(call, tokens, grad_loss, kept.lse, kept.log_prob)
    return walk.gradients(call, tokens, gradient, grad_scale, call.weight_grad_out)


LOSS = Operator(
    "linear_cross_entropy_of_shards",
    op=OP,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=lambda kept, upstream, wanted: kept.call.empty_gradients(wanted),
    differentiable=("hidden", "weight", "bias"),
    adds_to={"weight": "weight_grad_out"},
    **OF_LAYER,
)


# On the Triton kernels.


class TritonOutputs(NamedTuple):
    """What the operator returns."""

    out: Outputs
    saved: Saved


class TritonKept(NamedTuple):
    """What backward is given."""

    call: Call
    config: TritonPlan
    lse: Tensor
    log_prob: Tensor
    saved: Saved


def _triton_forward(call: Call) -> TritonOutputs:
    check_ranks(call)
    options, tokens = call.options, call.tokens(check_values=call.options.check_inputs)
    stats, saved = shards.statistics(OP, call, tokens, asked_by(options, call.class_weight))
    return TritonOutputs(Outputs.of(options, stats, tokens, call.target.shape), saved)


def _triton_fake(call: Call) -> TritonOutputs:
    return TritonOutputs(call.empty_outputs(), shards.fake_saved(call))


def _triton_save(call: Call, made: TritonOutputs) -> TritonKept:
    return TritonKept(call, shards.plan(call), made.out.lse, made.out.log_prob, made.saved)


def _triton_gradients(kept: TritonKept, upstream: Made, wanted: Wanted) -> Made:
    from onchip.vocab.triton import records, walks

    call, (grad_loss,), options = kept.call, upstream, kept.call.options
    assert grad_loss is not None
    tokens = call.tokens(check_values=False)
    each = tokens.upstream(grad_loss, options.reduction)
    row = tokens.weight * each
    known = records.TokenSoftmax(kept.lse.reshape(-1), kept.log_prob.reshape(-1, 1))
    classes, even, rest = tokens.classes, None, None
    if classes is not None and options.label_smoothing > 0:
        even = row * (options.label_smoothing / call.vocab)
        rest = even * (classes.total - classes.target)
    by_output = walks.OutputGradients(
        -(row if classes is None else row * classes.factor(options.label_smoothing))[:, None],
        row * (2 * options.z_loss * known.lse) if options.z_loss > 0 else None,
        None,
        even,
        rest,
    )
    return shards.gradients(
        call, kept.config, kept.saved, known, by_output, wanted, call.class_weight, call.weight_grad_out
    )


TRITON = Operator(
    "linear_cross_entropy_of_shards_in_place",
    op=OP,
    forward=_triton_forward,
    fake=_triton_fake,
    save=_triton_save,
    gradients=_triton_gradients,
    adds_to={"weight": "weight_grad_out"},
    **shards.IN_PLACE,
)


def operator(call: Call) -> Operator[Any, Any]:
    """What runs it."""
    return TRITON if call.runs_kernels else LOSS
