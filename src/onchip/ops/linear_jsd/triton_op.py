"""linear_jsd and jsd for PyTorch on the Triton kernels: what their operators compute, forward and backward.

`_forward` computes the loss, and leaves what gradients need in the memory that they will take: the gradient by each
model's logits in its weight's, the tokens' hidden states in hidden's.  `_gradients` turns these into the gradients,
in place; they are cloned first where the graph is retained.  What is launched is in triton_launches.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.frontend.torch_inputs import copied_rows, copied_weight
from onchip.frontend.torch_register import Made, Wanted, register
from onchip.ops.linear_jsd import triton_memory as jsd_spec
from onchip.ops.linear_jsd.spec import LOGITS_OP, OP
from onchip.ops.linear_jsd.torch_call import PARAMETERS, Call
from onchip.ops.linear_jsd.triton_memory import TritonConfig
from onchip.vocab.torch.tiles import Head, divisor
from onchip.vocab.triton import memory as triton_spec
from onchip.vocab.triton import plan as planning
from onchip.vocab.triton import setup

_WEIGHT, _LOGITS = 1, 3  # among the parts of a model


def refusal(
    tensors: Sequence[Tensor | None], grads: Sequence[bool], dtypes: Sequence[torch.dtype], topk: bool
) -> str | None:
    """Why the kernels can't serve a call, or None.  `tensors` and `grads` are those of `Call.parameters`."""
    first = next(x for x in tensors if x is not None)
    heads = [k for k in (0, 1) if tensors[4 * k] is not None]
    # Logits are read in any dtype: without a product, one is asked about that suits.
    reason = refusal_of(first.device.type, first.device.index, [dtypes[k] for k in heads] or [torch.float16])
    if reason is None and topk:
        reason = "it has no kernel for teacher_topk; pass backend='torch'"
    if reason is None and heads and grads[4 + _LOGITS]:
        reason = "linear_jsd has no kernel for the gradient of teacher_logits; pass backend='torch' or jsd the logits"
    return reason


def refusal_of(device: str, index: int | None, dtypes: Sequence[torch.dtype]) -> str | None:
    """Why the kernels can't serve products in `dtypes` on this device, or None."""
    reasons = (planning.refusal(device, index, dtype) for dtype in dtypes)
    return next((reason for reason in reasons if reason is not None), None)


def _plan(a: Call) -> TritonConfig:
    """Inside torch.compile sizes may be symbols: a plan makes numbers of them, and a graph for each."""
    copied = copied_rows(*a.parameters[::4]) + copied_rows(*a.parameters[_LOGITS::4], columns_apart=False)
    for weight, dtype in ((a.student_weight, a.student_dtype), (a.teacher_weight, a.teacher_dtype)):
        copied += 0 if weight is None else copied_weight(weight[: a.size], dtype)
    p = replace(a.problem(), copied=copied)
    if a.student_hidden is None:
        jsd_spec.PLANNER.require(p, "", a.options.scratch_bytes)
        return TritonConfig(0)
    heads = [replace(h, hidden=int(h.hidden), vocab=int(h.vocab)) for h in (p.student, p.teacher)]
    p = replace(p, tokens=int(p.tokens), vocab=int(p.vocab), student=heads[0], teacher=heads[1], copied=int(copied))
    return jsd_spec.plan(p, a.options.scratch_bytes)


class Outputs(NamedTuple):
    """The loss, and what forward leaves for backward; empty where nothing is needed."""

    loss: Tensor
    stats: Tensor  # float32, by position
    vectors: Tensor  # int32: `Vectors.packed`
    student_rows: Tensor  # [..., H]: hidden states by position
    student_memory: Tensor  # [V or more, H]: the gradient by the logits of the first positions
    student_scratch: Tensor  # that of the next ones
    teacher_rows: Tensor
    teacher_memory: Tensor
    teacher_scratch: Tensor


class Kept(NamedTuple):
    """What backward is given."""

    call: Call
    stats: Tensor
    vectors: Tensor
    student_rows: Tensor
    student_memory: Tensor
    student_scratch: Tensor
    teacher_rows: Tensor
    teacher_memory: Tensor
    teacher_scratch: Tensor

    def of(self, side: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, memory and scratch of the student (0) or the teacher (1)."""
        return self[3 + 3 * side : 6 + 3 * side]  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------------------- the operators


def _forward(a: Call) -> Outputs:
    from onchip.ops.linear_jsd import triton_launches as launches

    if a.options.check_inputs or a.first.device.type == "cpu":
        a.tokens(check=True)  # for its checks alone
    plan = _plan(a)
    made = _memory(a, plan)
    call = _call(_save(a, made), plan)
    if a.student_hidden is None:
        _number(a, call)
    losses = launches.forward(call, _flat(a.token_weight), plan.token_chunk, plan.held)
    reduced = losses.view(a.shape) if a.options.reduction == "none" else losses.sum() / _divisor(a, call.vectors)
    return made._replace(loss=reduced, vectors=call.vectors.packed)


def _fake(a: Call) -> Outputs:
    return _memory(a, _plan(a), fake=True)


def _save(call: Call, made: Outputs) -> Kept:
    return Kept(call, *made[1:])


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    """Turn the memories into the gradients of hidden states and weights; return those of biases and logits."""
    from onchip.ops.linear_jsd import triton_launches as launches

    a, (grad_loss,) = kept.call, upstream
    assert grad_loss is not None
    plan = _plan(a)
    call = _call(kept, plan, again=True)
    row = _row(a, grad_loss, call.vectors)
    bias, logits = ([_zeros(a, 4 * k + i, dtype) for k in (0, 1)] for i, dtype in ((2, torch.float32), (_LOGITS, None)))
    if a.student_hidden is None:
        student, teacher = (None if g is None else g.view(-1, g.shape[-1]) for g in logits)
        launches.gradients_of_logits(call, row, (student, teacher))
        return [None, None, None, logits[0], None, None, None, logits[1]]
    memories = [kept.of(k)[1] if a.grads[4 * k + _WEIGHT] else None for k in (0, 1)]
    if call.tokens > 0:
        launches.backward(
            call,
            row,
            plan.held,
            plan.vocab_chunk,
            plan.weight_chunk,
            grad_hidden=[kept.of(k)[0].view(call.tokens, -1) if a.grads[4 * k] else None for k in (0, 1)],
            grad_weight=[None if memory is None else memory[: a.size] for memory in memories],
            grad_bias=bias,
        )
    for memory in memories:
        if memory is not None:
            memory[a.size if call.tokens else 0 :].zero_()  # padding
    made: list[Tensor | None] = [None] * len(PARAMETERS)
    for i, x in zip((2, 6), bias, strict=True):
        like = a.parameters[i]
        made[i] = None if x is None or like is None else x.to(like.dtype)
    return made


def _fake_gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    return [_zeros(kept.call, i, None) if i % 4 in (2, _LOGITS) else None for i in range(len(PARAMETERS))]


def _collect(kept: Kept, made: Made, wanted: Wanted) -> Made:
    grads = list(made)
    for k in (0, 1):
        weight = kept.call.parameters[4 * k + _WEIGHT]
        if weight is not None:
            rows, memory, _ = kept.of(k)
            grads[4 * k : 4 * k + 2] = rows, memory[: weight.shape[0]]
    return grads


OPERATORS = {
    op: register(
        f"{op}_by_triton",
        op=op,
        forward=_forward,
        fake=_fake,
        save=_save,
        gradients=_gradients,
        fake_gradients=_fake_gradients,
        differentiable=PARAMETERS,
        consumed=("student_rows", "student_memory", "teacher_rows", "teacher_memory"),
        collect=_collect,
        clone=lambda x: setup.aligned(x, x.shape, x.dtype).copy_(x),
    )
    for op in (OP, LOGITS_OP)
}


def run(call: Call) -> Tensor:
    """The loss."""
    if not torch.compiler.is_compiling():
        _plan(call)  # a budget that is too small shows here
    return OPERATORS[call.options.op](call).loss


# ------------------------------------------------------------------------------------------------------- their parts


def _blank(a: Call) -> Tensor:
    return a.first.new_empty(0)


def _flat(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.reshape(-1).to(torch.float32).contiguous()


def _zeros(a: Call, index: int, dtype: torch.dtype | None) -> Tensor | None:
    """Zeros like a parameter that wants a gradient."""
    x = a.parameters[index]
    if x is None or not a.grads[index]:
        return None
    return torch.zeros_like(x, dtype=dtype or x.dtype, memory_format=torch.contiguous_format)


def _target(a: Call) -> tuple[Tensor, int]:
    """Targets [T] int64 and what is ignored of them; all are kept where there are none."""
    if a.target is None:
        return torch.zeros(a.tokens_in_all, dtype=torch.int64, device=a.first.device), -1
    return a.target.reshape(-1).to(torch.int64).contiguous(), a.options.ignore_index


def _divisor(a: Call, vectors: Any) -> Tensor:
    return divisor(a.options.op, a.options.reduction, a.normalizer, vectors.number)


def _row(a: Call, grad_loss: Tensor, vectors: Any) -> Tensor:
    """The factor of each position's gradients."""
    weights = _flat(a.token_weight)
    row = torch.ones_like(vectors.order, dtype=torch.float32) if weights is None else weights[vectors.order]
    if a.options.reduction == "none":
        row = row * grad_loss.reshape(-1).float()[vectors.order]
    else:
        row = row * (grad_loss / _divisor(a, vectors))
    return row.masked_fill(vectors.label < 0, float("nan"))


def _number(a: Call, call: Any) -> None:
    """Fill in the vectors of tokens that stay where they are: those of logits."""
    vectors, target = call.vectors, call.target
    kept = target != call.ignore_index
    numbers = torch.arange(call.tokens, dtype=torch.int32, device=target.device)
    vectors.position.copy_(numbers.masked_fill(~kept, -1))
    vectors.order.copy_(numbers)
    vectors.label.copy_(target.masked_fill((target < 0) | (target >= a.size), -1).masked_fill(~kept, 0))
    vectors.number.copy_(kept.sum().to(torch.int32))


def _memory(a: Call, plan: TritonConfig, *, fake: bool = False) -> Outputs:
    """The outputs, not yet filled."""
    empty = setup.empty if fake else setup.aligned
    pieces = []
    for k in (0, 1):
        hidden, weight = a.parameters[4 * k], a.parameters[4 * k + _WEIGHT]
        if hidden is None or weight is None or not any(a.grads[4 * k : 4 * k + 3]):
            pieces += [_blank(a), _blank(a), _blank(a)]
            continue
        head = a.head(k)
        dtype = (a.student_dtype, a.teacher_dtype)[k]
        columns = triton_spec.up(a.size, jsd_spec.VOCAB_TILE)
        rows = jsd_spec.memory_rows(head, a.size, plan)
        pieces += [
            hidden.new_empty(hidden.shape, dtype=hidden.dtype if a.grads[4 * k] else dtype),
            empty(weight, (rows, weight.shape[1]), weight.dtype) if a.grads[4 * k + _WEIGHT] else _blank(a),
            empty(hidden, (columns * (plan.held - jsd_spec.stashed(head, plan)),), dtype),
        ]
    device = a.first.device
    return Outputs(
        a.new_loss(),
        torch.empty(jsd_spec.vector_elements(a.tokens_in_all), dtype=torch.float32, device=device),
        torch.empty(triton_spec.vector_elements(a.tokens_in_all), dtype=torch.int32, device=device),
        *pieces,
    )


def _call(kept: Kept, plan: TritonConfig, *, again: bool = False) -> Any:
    """The call as the walks take it; `again`: with memory for what backward recomputes."""
    from onchip.ops.linear_jsd import triton_launches as launches
    from onchip.vocab.triton import launches as ce

    a = kept.call
    tokens = a.tokens_in_all
    # Backward's launches write to some of the vectors.
    vectors = ce.Vectors.unpack(kept.vectors.clone(), tokens) if again else ce.Vectors.empty(tokens, a.first.device)
    more = max(0, triton_spec.up(tokens, jsd_spec.TOKEN_TILE) - plan.held) if again else 0
    return launches.Call(
        a.options,
        tokens,
        a.size,
        _side(kept, 0, plan, more),
        _side(kept, 1, plan, more),
        vectors,
        *_target(a),
        torch.empty(tokens, dtype=torch.float32, device=a.first.device),
        kept.stats.view(-1, tokens) if tokens else kept.stats,
    )


def _side(kept: Kept, side: int, plan: TritonConfig, again: int) -> Any:
    from onchip.ops.linear_jsd import triton_launches as launches
    from onchip.vocab.triton import launches as ce

    a = kept.call
    hidden, weight, _, logits = a.parameters[4 * side : 4 * side + 4]
    grads = tuple(a.grads[4 * side : 4 * side + 4])
    if logits is not None:
        logits = logits.reshape(-1, logits.shape[-1])
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        return launches.Side(None, None, logits, None, None, grads)  # type: ignore[arg-type]
    assert hidden is not None
    assert weight is not None
    run = _run(a, side)
    dtype = run.head.weight.dtype
    rows = buffer = None
    hidden_memory, weight_memory, scratch = kept.of(side)
    if any(grads):
        rows = hidden_memory.view(-1).view(dtype)[: run.tokens * run.hidden].view(run.tokens, run.hidden)
        stashed = jsd_spec.stashed(a.head(side), plan)
        if plan.held or again:
            buffer = ce.logit_buffer(
                weight_memory.view(-1).view(dtype) if stashed else scratch[:0],
                plan.weight_chunk // jsd_spec.VOCAB_TILE,
                run.hidden * weight.element_size() // dtype.itemsize,
                stashed,
                scratch,
                plan.held - stashed,
                setup.aligned(scratch, (again * plan.vocab_chunk,), dtype),
                again,
            )
    return launches.Side(run, hidden.reshape(-1, run.hidden), None, rows, buffer, grads)  # type: ignore[arg-type]


def _run(a: Call, side: int) -> Any:
    """A model's last layer over the entries that count, and its kernels' tiles from the stored configs."""
    _, weight, bias, _ = a.parameters[4 * side : 4 * side + 4]
    assert weight is not None
    dtype = (a.student_dtype, a.teacher_dtype)[side]
    # In the products' dtype first, as F.linear does under autocast.
    bias = None if bias is None else bias[: a.size].to(dtype).float()
    # The products are linear_cross_entropy's, and tiles that suit them there do here.
    weight = setup.product_weight(weight[: a.size], dtype)
    return setup.make_run(Head(weight, bias, 0.0, 0.0, None, 1.0), a.tokens_in_all)
