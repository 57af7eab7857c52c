"""linear_jsd and jsd for PyTorch on the Triton kernels: two registered operators and autograd between them.

`_forward_op` computes the loss, and leaves what gradients need in the memory that they will take: the gradient by each
model's logits in its weight's, the tokens' hidden states in hidden's.  `_backward_op` turns these into the gradients,
in place; autograd clones them first where the graph is retained.  What is launched is in triton_launches.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.frontend.torch_autograd import differentiable_once, graph_is_kept
from onchip.frontend.torch_inputs import copied_rows, copied_weight
from onchip.kernels.triton.launch import device_of
from onchip.ops.linear_jsd import triton_spec as jsd_spec
from onchip.ops.linear_jsd.torch_arguments import SCHEMA, TENSORS, Arguments
from onchip.ops.linear_jsd.triton_spec import TritonConfig
from onchip.vocab.torch.tiles import Head, divisor
from onchip.vocab.triton import memory as triton_spec
from onchip.vocab.triton import plan as planning
from onchip.vocab.triton import setup

_WEIGHT, _LOGITS = 1, 3  # among the parts of a model


def refusal(
    tensors: Sequence[Tensor | None], grads: Sequence[bool], dtypes: Sequence[torch.dtype], topk: bool
) -> str | None:
    """Why the kernels can't serve a call, or None.  `tensors` and `grads` are those of `Arguments.parameters`."""
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


def _plan(a: Arguments) -> TritonConfig:
    """Inside torch.compile sizes may be symbols: a plan makes numbers of them, and a graph for each."""
    copied = copied_rows(*a.parameters[::4]) + copied_rows(*a.parameters[_LOGITS::4], columns_apart=False)
    for weight, dtype in ((a.student_weight, a.student_dtype), (a.teacher_weight, a.teacher_dtype)):
        copied += 0 if weight is None else copied_weight(weight[: a.size], dtype)
    p = replace(a.problem(), copied=copied)
    if a.student_hidden is None:
        jsd_spec.require_scratch(p, jsd_spec.scratch_bytes(p, TritonConfig(0)), a.scratch_bytes, a.op)
        return TritonConfig(0)
    heads = [replace(h, hidden=int(h.hidden), vocab=int(h.vocab)) for h in (p.student, p.teacher)]
    p = replace(p, tokens=int(p.tokens), vocab=int(p.vocab), student=heads[0], teacher=heads[1], copied=int(copied))
    return jsd_spec.plan(p, a.scratch_bytes)


class Saved(NamedTuple):
    """What forward leaves for backward; empty where nothing is needed."""

    stats: Tensor  # float32, by position
    vectors: Tensor  # int32: `Vectors.packed`
    student_hidden: Tensor  # [..., H]: hidden states by position
    student_weight: Tensor  # [V or more, H]: the gradient by the logits of the first positions
    student_overflow: Tensor  # that of the next ones
    teacher_hidden: Tensor
    teacher_weight: Tensor
    teacher_overflow: Tensor

    def of(self, side: int) -> tuple[Tensor, Tensor, Tensor]:
        return self[2 + 3 * side : 5 + 3 * side]  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------------ registered operators


@torch.library.custom_op(
    "onchip::linear_jsd_triton", mutates_args=(), schema=f"({SCHEMA}) -> ({', '.join(['Tensor'] * 10)})"
)
def _forward_op(*args: Any) -> tuple[Tensor, ...]:
    """Return the loss, `Saved` and the link."""
    from onchip.ops.linear_jsd import triton_launches as launches

    a = Arguments(*args)
    with device_of(a.first), torch.autocast(a.first.device.type, enabled=False):
        if a.check_inputs or a.first.device.type == "cpu":
            a.tokens(check=True)  # for its checks alone
        config = _plan(a)
        saved = _saved(a, config)
        call = _call(a, saved, config)
        if a.student_hidden is None:
            _number(a, call)
        losses = launches.forward(call, _flat(a.token_weight), config.token_chunk, config.held)
        loss = losses.view(a.shape)
        if a.reduction != "none":
            loss = losses.sum() / _divisor(a, call.vectors)
        return loss, *saved._replace(vectors=call.vectors.packed), loss.new_empty(0)


@_forward_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    a = Arguments(*args)
    loss = a.first.new_empty(a.shape if a.reduction == "none" else (), dtype=torch.float32)
    return loss, *_saved(a, _plan(a), fake=True), loss.new_empty(0)


@torch.library.custom_op(
    "onchip::linear_jsd_triton_backward",
    mutates_args=("student_hidden_memory", "student_weight_memory", "teacher_hidden_memory", "teacher_weight_memory"),
    schema=(
        "(Tensor grad_loss, Tensor stats, Tensor vectors, "
        "Tensor(a!) student_hidden_memory, Tensor(b!) student_weight_memory, Tensor student_overflow, "
        "Tensor(c!) teacher_hidden_memory, Tensor(d!) teacher_weight_memory, Tensor teacher_overflow, "
        f"{SCHEMA}) -> ({', '.join(['Tensor'] * 4)})"
    ),
)
def _backward_op(grad_loss: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Turn the memories into the gradients of hidden states and weights; return those of both biases, and of logits."""
    from onchip.ops.linear_jsd import triton_launches as launches

    saved, a = Saved(*args[:8]), Arguments(*args[8:])
    with device_of(a.first), torch.autocast(a.first.device.type, enabled=False):
        config = _plan(a)
        call = _call(a, saved, config, again=True)
        row = _row(a, grad_loss, call.vectors)
        bias: list[Any] = [_zeros(a, 4 * k + 2, torch.float32) for k in (0, 1)]
        logits: list[Any] = [_zeros(a, 4 * k + 3, None) for k in (0, 1)]
        if a.student_hidden is None:
            launches.gradients_of_logits(call, row, _rows_of_logits(a, logits))
            return *(_blank(a) for _ in bias), *(_blank(a) if x is None else x for x in logits)
        weights = []
        for k in (0, 1):
            memory = saved.of(k)[1] if a.grads[4 * k + _WEIGHT] else None
            weights.append(None if memory is None else memory[: a.size])
            if memory is not None and call.tokens == 0:
                memory.zero_()
        if call.tokens > 0:
            launches.backward(
                call,
                row,
                config.held,
                config.vocab_chunk,
                config.weight_chunk,
                grad_hidden=[saved.of(k)[0].view(call.tokens, -1) if a.grads[4 * k] else None for k in (0, 1)],
                grad_weight=weights,
                grad_bias=bias,
            )
        for k in (0, 1):
            if a.grads[4 * k + _WEIGHT]:
                saved.of(k)[1][a.size :].zero_()  # padding
        biases = (
            _blank(a) if x is None or like is None else x.to(like.dtype)
            for x, like in zip(bias, a.parameters[2::4], strict=True)
        )
        return *biases, *(_blank(a) for _ in logits)


@_backward_op.register_fake
def _(grad_loss: Tensor, *args: Any) -> tuple[Tensor, ...]:
    a = Arguments(*args[8:])
    return tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format) if x is not None and wanted else _blank(a)
        for x, wanted in ((a.parameters[i], a.grads[i]) for i in (2, 6, 3, 7))
    )


# ------------------------------------------------------------------------------------------------------- their parts


def _blank(a: Arguments) -> Tensor:
    return a.first.new_empty(0)


def _flat(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.reshape(-1).to(torch.float32).contiguous()


def _zeros(a: Arguments, index: int, dtype: torch.dtype | None) -> Tensor | None:
    """Zeros like a parameter that wants a gradient."""
    x = a.parameters[index]
    if x is None or not a.grads[index]:
        return None
    return torch.zeros_like(x, dtype=dtype or x.dtype, memory_format=torch.contiguous_format)


def _target(a: Arguments) -> tuple[Tensor, int]:
    """Targets [T] int64 and what is ignored of them; all are kept where there are none."""
    if a.target is None:
        return torch.zeros(a.tokens_in_all, dtype=torch.int64, device=a.first.device), -1
    return a.target.reshape(-1).to(torch.int64).contiguous(), a.ignore_index


def _divisor(a: Arguments, vectors: Any) -> Tensor:
    return divisor(a.op, a.reduction, a.normalizer, vectors.number)


def _row(a: Arguments, grad_loss: Tensor, vectors: Any) -> Tensor:
    """The factor of each position's gradients."""
    weights = _flat(a.token_weight)
    row = torch.ones_like(vectors.order, dtype=torch.float32) if weights is None else weights[vectors.order]
    if a.reduction == "none":
        row = row * grad_loss.reshape(-1).float()[vectors.order]
    else:
        row = row * (grad_loss / _divisor(a, vectors))
    return row.masked_fill(vectors.label < 0, float("nan"))


def _number(a: Arguments, call: Any) -> None:
    """Fill in the vectors of tokens that stay where they are: those of logits."""
    vectors, target = call.vectors, call.target
    kept = target != call.ignore_index
    numbers = torch.arange(call.tokens, dtype=torch.int32, device=target.device)
    vectors.position.copy_(numbers.masked_fill(~kept, -1))
    vectors.order.copy_(numbers)
    vectors.label.copy_(target.masked_fill((target < 0) | (target >= a.size), -1).masked_fill(~kept, 0))
    vectors.number.copy_(kept.sum().to(torch.int32))


def _saved(a: Arguments, config: TritonConfig, *, fake: bool = False) -> Saved:
    """The tensors of `Saved`, not yet filled."""
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
        wanted = a.grads[4 * k + _WEIGHT]
        pieces += [
            hidden.new_empty(hidden.shape, dtype=hidden.dtype if a.grads[4 * k] else dtype),
            empty(weight, (jsd_spec.memory_rows(head, a.size, config), weight.shape[1]), weight.dtype)
            if wanted
            else _blank(a),
            empty(hidden, (columns * (config.held - jsd_spec.stashed(head, config)),), dtype),
        ]
    device = a.first.device
    return Saved(
        torch.empty(jsd_spec.vector_elements(a.tokens_in_all), dtype=torch.float32, device=device),
        torch.empty(triton_spec.vector_elements(a.tokens_in_all), dtype=torch.int32, device=device),
        *pieces,
    )


def _call(a: Arguments, saved: Saved, config: TritonConfig, *, again: bool = False) -> Any:
    """The call as the walks take it; `again`: with memory for what backward recomputes."""
    from onchip.ops.linear_jsd import triton_launches as launches
    from onchip.vocab.triton import launches as ce

    tokens = a.tokens_in_all
    # Backward's launches write to some of the vectors.
    vectors = ce.Vectors.unpack(saved.vectors.clone(), tokens) if again else ce.Vectors.empty(tokens, a.first.device)
    more = max(0, triton_spec.up(tokens, jsd_spec.TOKEN_TILE) - config.held) if again else 0
    return launches.Call(
        a.loss,
        tokens,
        a.size,
        _side(a, 0, saved, config, more),
        _side(a, 1, saved, config, more),
        vectors,
        *_target(a),
        torch.empty(tokens, dtype=torch.float32, device=a.first.device),
        saved.stats.view(-1, tokens) if tokens else saved.stats,
    )


def _side(a: Arguments, side: int, saved: Saved, config: TritonConfig, again: int) -> Any:
    from onchip.ops.linear_jsd import triton_launches as launches
    from onchip.vocab.triton import launches as ce

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
    hidden_memory, weight_memory, overflow = saved.of(side)
    if any(grads):
        rows = hidden_memory.view(-1).view(dtype)[: run.tokens * run.hidden].view(run.tokens, run.hidden)
        stashed = jsd_spec.stashed(a.head(side), config)
        if config.held or again:
            buffer = ce.logit_buffer(
                weight_memory.view(-1).view(dtype) if stashed else overflow[:0],
                config.weight_chunk // jsd_spec.VOCAB_TILE,
                run.hidden * weight.element_size() // dtype.itemsize,
                stashed,
                overflow,
                config.held - stashed,
                setup.aligned(overflow, (again * config.vocab_chunk,), dtype),
                again,
            )
    return launches.Side(run, hidden.reshape(-1, run.hidden), None, rows, buffer, grads)  # type: ignore[arg-type]


def _run(a: Arguments, side: int) -> Any:
    """A model's last layer over the entries that count, and its kernels' tiles from the stored configs."""
    _, weight, bias, _ = a.parameters[4 * side : 4 * side + 4]
    assert weight is not None
    dtype = (a.student_dtype, a.teacher_dtype)[side]
    # In the products' dtype first, as F.linear does under autocast.
    bias = None if bias is None else bias[: a.size].to(dtype).float()
    # The products are linear_cross_entropy's, and tiles that suit them there do here.
    weight = setup.product_weight(weight[: a.size], dtype)
    return setup.make_run(Head(weight, bias, 0.0, 0.0, None, 1.0), a.tokens_in_all)


def _rows_of_logits(a: Arguments, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
    student, teacher = (None if g is None else g.view(-1, g.shape[-1]) for g in grads)
    return student, teacher


# ---------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    a = Arguments(*inputs)
    ctx.mark_non_differentiable(*output[1:-1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:], *a[:TENSORS])
    ctx.options = a[TENSORS:]


def _backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    nothing = (None,) * (len(Arguments._fields) - 8)
    if grad_loss is None:
        return (*[None] * 8, *nothing)
    kept = ctx.saved_tensors  # once: checkpointing unpacks them no second time
    saved, link = Saved(*kept[:8]), kept[8]
    a = Arguments(*kept[9:], *ctx.options)
    if graph_is_kept():
        memories: dict[str, Tensor] = saved._asdict()
        for name in ("student_hidden", "student_weight", "teacher_hidden", "teacher_weight"):
            memory = memories[name]
            memories[name] = setup.aligned(memory, memory.shape, memory.dtype).copy_(memory)
        saved = Saved(**memories)
    biases_and_logits = _backward_op(grad_loss, *saved, *a)
    grads: list[Tensor | None] = []
    for k in (0, 1):
        hidden, weight, _overflow = saved.of(k)
        parameter = a.parameters[4 * k + _WEIGHT]
        rows = 0 if parameter is None else parameter.shape[0]
        grads += [hidden, weight[:rows], biases_and_logits[k], biases_and_logits[2 + k]]
    wanted = [x if is_wanted else None for x, is_wanted in zip(grads, a.grads, strict=True)]
    return (*differentiable_once(a.op, wanted, grad_loss, link), *nothing)


_forward_op.register_autograd(_backward, setup_context=_setup_context)


def forward(a: Arguments) -> Tensor:
    """The loss."""
    if not torch.compiler.is_compiling():
        _plan(a)  # a budget that is too small shows here
    return _forward_op(*a)[0]  # type: ignore[no-any-return]
