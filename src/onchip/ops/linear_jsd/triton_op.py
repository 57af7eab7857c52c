"""linear_jsd and jsd for PyTorch on the Triton kernels: the plan of a call, and its registered operators.

Forward leaves what gradients need in the gradients' own memory: the gradient by each model's logits in that of its
weight's gradient, and the tokens' hidden states in that of hidden's.  Backward turns these into the gradients, in
place; they are cloned first where the graph is retained.  The launches are in triton_walk.py.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.ops.linear_jsd import triton_memory
from onchip.ops.linear_jsd.torch_call import NO_GRADIENTS, PARAMETERS, JsdCall, Left
from onchip.ops.linear_jsd.triton_memory import JsdPlan, config_of
from onchip.vocab.triton import memory as engine_memory
from onchip.vocab.triton import setup
from onchip.vocab.triton.setup import TritonSaved


def refusal(call: JsdCall) -> str | None:
    """Why the kernels can't serve a call, or None."""
    heads = [k for k in (0, 1) if call.models[k].hidden is not None]
    # Logits are read in any dtype, so without a product the check is made for a dtype that suits.
    device = call.first.device
    dtypes = [call.dtypes[k] for k in heads] or [torch.float16]
    if call.dtype == torch.float64:
        dtypes = [torch.float64]
    reasons = (setup.refusal(device.type, device.index, dtype) for dtype in dtypes)
    reason = next((x for x in reasons if x is not None), None)
    if reason is None and heads and call.grads_of(1)[3]:
        reason = "linear_jsd has no kernel for the gradient of teacher_logits; pass backend='plain' or jsd the logits"
    return reason


def _plan(call: JsdCall) -> JsdPlan:
    """The call's plan; it makes numbers of sizes that are symbols inside torch.compile, and so a graph for each."""
    p = call.problem(kernels=True)
    if call.student.hidden is None:
        triton_memory.PLANNER.require(p, "", call.options.scratch_bytes)
        return JsdPlan(call.number)
    heads = p.student, p.teacher
    sizes = [p.vocab, p.sent, *(x for h in heads for x in (h.tokens, h.hidden, h.vocab, h.copied))]
    if any(isinstance(x, torch.SymInt) for x in sizes):
        student, teacher = (
            replace(h, tokens=int(h.tokens), hidden=int(h.hidden), vocab=int(h.vocab), copied=int(h.copied))
            for h in heads
        )
        p = replace(p, vocab=int(p.vocab), sent=int(p.sent), student=student, teacher=teacher)
    return triton_memory.plan(p, "", call.options.scratch_bytes)


class JsdTritonOutputs(NamedTuple):
    """The operator's outputs."""

    loss: Tensor
    left: Left


class JsdTritonKept(NamedTuple):
    """What forward keeps for backward."""

    call: JsdCall
    left: Left


def _forward(call: JsdCall) -> JsdTritonOutputs:
    from onchip.ops.linear_jsd import triton_walk

    plan = _plan(call)
    call.check_ranks()
    if call.options.check_inputs or call.first.device.type == "cpu":
        call.tokens(check=True, compact=not call.shards.there and call.indices is None)  # for its checks alone
    call = _for_kernels(call)
    made = _memory(call, plan)
    return made._replace(loss=triton_walk.forward(call, plan, made.left))


def _for_kernels(call: JsdCall) -> JsdCall:
    """The call with all ranks' tokens, and a top-k's ids in ascending order."""
    if call.shards.there:
        stated.refuse("ranks exchange numbers")
    if call.indices is not None:
        indices, order = stated.call(_sorted, call.indices)
        call = call._replace(indices=indices, values=stated.call(torch.gather, call.values, -1, order))
    return call.of_all_tokens()


def _sorted(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's ids in ascending order, contiguous, and from where they come."""
    made = torch.sort(indices.to(torch.int64).contiguous())
    return made.values, made.indices


def _fake(call: JsdCall) -> JsdTritonOutputs:
    return _memory(call.of_all_tokens(fake=True), _plan(call), fake=True)


def _memory(call: JsdCall, plan: JsdPlan, *, fake: bool = False) -> JsdTritonOutputs:
    """Empty outputs."""

    def nothing(dtype: torch.dtype = call.first.dtype) -> Tensor:
        return stated.empty(0, dtype, call.first.device)

    def saved(who: int) -> TritonSaved:
        layer = call.layer(who)
        if layer is None:
            return TritonSaved(*(nothing() for _ in TritonSaved._fields))
        made = setup.make_saved(layer, config_of(call.head(who), plan), keep_weight=False, fake=fake)
        return made._replace(vectors=nothing(torch.int32))  # the call's own serve both models

    more = 0 if call.indices is None else call.indices.shape[-1] + 2
    stats = stated.empty((triton_memory.STATS + more, call.number), torch.float32, call.first.device)
    vectors = stated.empty(engine_memory.vector_elements(call.number), torch.int32, call.first.device)
    return JsdTritonOutputs(call.new_loss(), Left(stats, vectors, saved(0), saved(1)))


def _save(call: JsdCall, made: JsdTritonOutputs) -> JsdTritonKept:
    return JsdTritonKept(call, made.left)


def _gradients(kept: JsdTritonKept, upstream: Made, wanted: Wanted) -> Made:
    """Turn the kept memory into the gradients of hidden states and weights; return the others."""
    from onchip.ops.linear_jsd import triton_walk

    (grad_loss,) = upstream
    assert grad_loss is not None
    return triton_walk.backward(_for_kernels(kept.call), _plan(kept.call), kept.left, grad_loss, wanted)


def _fake_gradients(kept: JsdTritonKept, upstream: Made, wanted: Wanted) -> Made:
    saved, summed = (kept.left.student, kept.left.teacher), kept.call.shards.there
    new = [x for of in saved for x in (summed, of.weight_memory.numel() == 0, True, True)]
    return kept.call.empty_gradients([a and b for a, b in zip(wanted, new, strict=True)], None)


def _collect(kept: JsdTritonKept, made: Made, wanted: Wanted) -> Made:
    grads = list(made)
    for who, saved in enumerate((kept.left.student, kept.left.teacher)):
        layer = kept.call.layer(who)
        if layer is not None:
            hidden, grads[4 * who + 1] = setup.in_memory(saved, layer.weight, grads[4 * who + 1])
            if not kept.call.shards.there:
                grads[4 * who] = hidden
    return grads


OPERATOR = Operator(
    "jsd_by_triton",
    op=lambda call: call.options.op,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=_fake_gradients,
    differentiable=PARAMETERS,
    consumed=[
        "left_vectors",
        *[f"left_{who}_{memory}" for who in ("student", "teacher") for memory in ("hidden_memory", "weight_memory")],
    ],
    collect=_collect,
    states=True,
    clone=setup.clone,
    flops=lambda call: call.flops(NO_GRADIENTS, logits=True),
    gradient_flops=lambda kept, upstream, wanted: kept.call.flops(wanted, logits=False),
)


def run(call: JsdCall) -> Tensor:
    """The loss."""
    if not (torch.compiler.is_compiling() or OPERATOR.is_plain(call)):
        _plan(call)  # a budget that is too small shows here
    return OPERATOR(call).loss
