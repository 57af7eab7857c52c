"""linear_log_probs for PyTorch where the vocabulary is sharded over ranks (`vocab.parallel`): both backends."""

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.ops.linear_log_probs.spec import OP
from onchip.ops.linear_log_probs.torch_call import Call, Outputs, TorchOutputs, asked_by, gradient_by_outputs
from onchip.vocab import parallel
from onchip.vocab.agreement import require_agreement
from onchip.vocab.torch import walk
from onchip.vocab.torch.call import OF_LAYER
from onchip.vocab.triton import setup, shards
from onchip.vocab.triton.memory import TritonPlan
from onchip.vocab.triton.setup import Saved


class Kept(NamedTuple):
    """What backward is given."""

    call: Call
    log_prob: Tensor
    entropy: Tensor | None
    lse: Tensor
    mean: Tensor | None


def run(call: Call) -> Outputs:
    """What the backend that was chosen computes."""
    made: Outputs = (TRITON if call.runs_kernels else LOG_PROBS)(call).out
    return made


def _check_ranks(call: Call) -> None:
    """On the CPU and with check_inputs: raise where ranks' arguments don't belong together."""
    require_agreement(
        OP, call, call.sizes, call.ids, call.token_temperature, split={"weight": call.weight},
        hidden={"hidden": call.hidden}, ids=call.ids,
    )  # fmt: skip


def _forward(call: Call) -> TorchOutputs:
    _check_ranks(call)
    tokens = call.tokens(check_values=call.options.check_inputs)
    stats = walk.statistics(OP, call, tokens, asked_by(call.options))
    return TorchOutputs.of(call.options, stats, tokens, call.leading, call.ids)


def _fake(call: Call) -> TorchOutputs:
    return TorchOutputs.empty(call.options, parallel.local(call, fake=True).hidden, call.ids)


def _save(call: Call, made: TorchOutputs) -> Kept:
    return Kept(call, made.out.log_prob, made.out.entropy, made.out.lse, made.mean)


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    call = replace(kept.call, grads=tuple(wanted))
    tokens = call.tokens(check_values=False)
    gradient, grad_scale = gradient_by_outputs(kept, upstream, tokens)
    return walk.gradients(call, tokens, gradient, grad_scale, stats=gradient.entropy_row is not None)


LOG_PROBS = Operator(
    "linear_log_probs_of_shards",
    op=OP,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=lambda kept, upstream, wanted: kept.call.empty_gradients(wanted),
    differentiable=("hidden", "weight", "bias"),
    differentiable_outputs=3,
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
    log_prob: Tensor
    entropy: Tensor | None
    lse: Tensor
    saved: Saved


def _stats(call: Call) -> bool:
    """Whether the entropy and top1 are followed."""
    return bool(call.options.entropy or call.options.top1)


def _triton_forward(call: Call) -> TritonOutputs:
    _check_ranks(call)
    tokens = call.tokens(check_values=call.options.check_inputs)
    stats, saved = shards.statistics(OP, call, tokens, asked_by(call.options), stats=_stats(call))
    return TritonOutputs(TorchOutputs.of(call.options, stats, tokens, call.leading, call.ids).out, saved)


def _triton_fake(call: Call) -> TritonOutputs:
    return TritonOutputs(_fake(call).out, shards.fake_saved(call, stats=_stats(call)))


def _triton_save(call: Call, made: TritonOutputs) -> TritonKept:
    out = made.out
    return TritonKept(call, shards.plan(call, stats=_stats(call)), out.log_prob, out.entropy, out.lse, made.saved)


def _triton_gradients(kept: TritonKept, upstream: Made, wanted: Wanted) -> Made:
    from onchip.vocab.triton import records, walks

    call, shape = kept.call, (kept.lse.numel(), kept.call.several)
    log_prob, entropy, lse = (setup.flat(x) for x in upstream)
    by_output = walks.OutputGradients(
        None if log_prob is None else log_prob.view(shape), lse, entropy if call.options.entropy else None
    )
    known = records.TokenSoftmax(kept.lse.reshape(-1), kept.log_prob.reshape(shape), setup.flat(kept.entropy))
    return shards.gradients(call, kept.config, kept.saved, known, by_output, wanted)


TRITON = Operator(
    "linear_log_probs_of_shards_in_place",
    op=OP,
    forward=_triton_forward,
    fake=_triton_fake,
    save=_triton_save,
    gradients=_triton_gradients,
    differentiable_outputs=3,
    **(shards.IN_PLACE | {"consumed": ("hidden_memory", "weight_memory", "scratch_memory")}),
)
