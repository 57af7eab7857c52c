"""linear_cross_entropy for PyTorch with soft labels where the vocabulary is sharded over ranks (`vocab.parallel`).

Labels of K ids are the same on each rank, with ids of the whole vocabulary; of labels for every entry each rank has
those of its shard (`vocab.soft_shards`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.ops.linear_cross_entropy import plain_soft, triton_soft
from onchip.ops.linear_cross_entropy.plain_soft import SoftMade
from onchip.ops.linear_cross_entropy.soft_call import SoftCall
from onchip.ops.linear_cross_entropy.spec import OP
from onchip.vocab import memory, parallel, soft_shards
from onchip.vocab.agreement import require_agreement
from onchip.vocab.torch import soft, walk
from onchip.vocab.torch.call import OF_LAYER
from onchip.vocab.torch.soft import SoftOutputs
from onchip.vocab.triton import shards
from onchip.vocab.triton.memory import TritonPlan
from onchip.vocab.triton.setup import Saved


class Kept(NamedTuple):
    """What backward is given."""

    call: SoftCall
    lse: Tensor
    log_prob: Tensor
    largest: Tensor | None
    mass: Tensor | None


def run(call: SoftCall) -> SoftOutputs:
    """What the backend that was chosen computes."""
    operator: Operator[Any, Any] = TRITON if not call.dense and call.runs_kernels else LOSS
    if call.dense:
        memory.PLANNER.require(call.problem(compacted=False), "stash", call.budget)
        operator = DENSE
    made: SoftOutputs = operator(call).out
    return made


def _check_ranks(call: SoftCall) -> None:
    """On the CPU and with check_inputs: raise where ranks' arguments don't belong together."""
    require_agreement(
        OP, call, (call.sizes, call.dense, call.kind), call.ids, None if call.dense else call.labels,
        call.token_weight, call.normalizer, call.class_weight, call.token_temperature,
        split={"weight": call.weight}, hidden={"hidden": call.hidden},
    )  # fmt: skip


def _fake(call: SoftCall) -> SoftMade:
    return plain_soft.fake(call)


def _save(call: SoftCall, made: SoftMade) -> Kept:
    return Kept(call, *made.out[1:5])


# K ids.


def _forward(call: SoftCall) -> SoftMade:
    _check_ranks(call)
    tokens = call.tokens(check_values=call.options.check_inputs)
    stats = walk.statistics(OP, call, tokens, soft.asked_by(call.options, call.class_weight))
    return plain_soft.made_of(call, tokens, stats)


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    call = replace(kept.call, grads=tuple(wanted))
    tokens = call.tokens(check_values=False)
    gradient, grad_scale = plain_soft.gradient_of_ids(kept, tokens, upstream)
    return walk.gradients(call, tokens, gradient, grad_scale, call.weight_grad_out)


# Every entry.


def _local(call: Any) -> Any:
    """The call of this rank's shard, without padding: as `parallel.local`, and its part of what else is by entry."""
    mine, rows = parallel.local(call), call.shards.rows
    out = call.weight_grad_out
    return replace(
        mine,
        labels=call.labels[..., :rows],
        class_weight=parallel.class_weight_of_shard(call.class_weight, call.shards),
        weight_grad_out=None if out is None else out[:rows],
    )


def _dense_forward(call: SoftCall) -> SoftMade:
    _check_ranks(call)
    options, tokens, mine = call.options, call.tokens(check_values=call.options.check_inputs), _local(call)
    config = plain_soft.dense_plan(mine, tokens)
    made = soft_shards.dense_stats(OP, mine.layer, options, call.shards, tokens, config, mine.labels, call.class_weight)
    return plain_soft.made_of_dense(call, tokens, made)


def _dense_gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    call = kept.call
    mine, whole = _local(call), soft.Whole.of(call.vocab, call.class_weight)
    start_sum = partial(parallel.start_sum, call.shards)
    hidden, *others = plain_soft.dense_gradients(kept, mine, whole, upstream, wanted, start_sum)
    return hidden, *(parallel.padded(x, len(call.weight)) for x in others)


def _operator(name: str, forward: Any, gradients: Any) -> Operator[SoftCall, SoftMade]:
    return Operator(
        name,
        op=OP,
        forward=forward,
        fake=_fake,
        save=_save,
        gradients=gradients,
        fake_gradients=lambda kept, upstream, wanted: kept.call.empty_gradients(wanted),
        differentiable=("hidden", "weight", "bias"),
        adds_to={"weight": "weight_grad_out"},
        **OF_LAYER,
    )


LOSS = _operator("linear_cross_entropy_soft_of_shards", _forward, _gradients)
DENSE = _operator("linear_cross_entropy_dense_of_shards", _dense_forward, _dense_gradients)


# K ids on the Triton kernels.


class TritonOutputs(NamedTuple):
    """What the operator returns."""

    out: SoftOutputs
    saved: Saved


class TritonKept(NamedTuple):
    """What backward is given."""

    call: SoftCall
    config: TritonPlan
    lse: Tensor
    log_prob: Tensor
    saved: Saved


def _triton_forward(call: SoftCall) -> TritonOutputs:
    _check_ranks(call)
    tokens, asked = call.tokens(check_values=call.options.check_inputs), soft.asked_by(call.options, None)
    stats, saved = shards.statistics(OP, triton_soft.as_kernels_take_it(call), tokens, asked)
    return TritonOutputs(plain_soft.made_of(call, tokens, stats).out, saved)


def _triton_fake(call: SoftCall) -> TritonOutputs:
    return TritonOutputs(_fake(call).out, shards.fake_saved(triton_soft.as_kernels_take_it(call)))


def _triton_save(call: SoftCall, made: TritonOutputs) -> TritonKept:
    config = shards.plan(triton_soft.as_kernels_take_it(call))
    return TritonKept(call, config, made.out.lse, made.out.log_prob, made.saved)


def _triton_gradients(kept: TritonKept, upstream: Made, wanted: Wanted) -> Sequence[Tensor | None]:
    call = kept.call
    given: Any = triton_soft.as_kernels_take_it(call)
    known, by_output = triton_soft.gradient_by_outputs(call, upstream, kept.lse, kept.log_prob)
    return shards.gradients(
        given, kept.config, kept.saved, known, by_output, wanted, weight_grad_out=call.weight_grad_out
    )


TRITON = Operator(
    "linear_cross_entropy_soft_of_shards_in_place",
    op=OP,
    forward=_triton_forward,
    fake=_triton_fake,
    save=_triton_save,
    gradients=_triton_gradients,
    adds_to={"weight": "weight_grad_out"},
    **(shards.IN_PLACE | {"consumed": ("hidden_memory", "weight_memory", "scratch_memory")}),
)
