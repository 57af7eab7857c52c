"""linear_jsd and jsd for PyTorch: the public functions, torch.library and autograd.

Read from the top: a public function has its inputs checked (torch_inputs.py) and calls one registered operator,
`_forward_op`, which walks chunks of tokens (torch_walk.py).  Where hidden states are given and the loss is one number,
that walk makes the gradients too, and backward scales them.  Otherwise backward walks again, in `_backward_op`.  The
maths is in the package's docstring.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onchip.core.backends import choose_backend
from onchip.frontend.torch_autograd import differentiable_once, is_plain_one, scale_stash
from onchip.frontend.torch_inputs import check_normalizer
from onchip.ops.linear_jsd import memory, triton_op
from onchip.ops.linear_jsd.spec import LOGITS_OP, OP, Options, TopK
from onchip.ops.linear_jsd.torch_arguments import PARTS, SCHEMA, TENSORS, Arguments
from onchip.ops.linear_jsd.torch_inputs import check_tensors
from onchip.ops.linear_jsd.torch_walk import walk
from onchip.vocab.torch.tiles import Tokens

_DEVICES = ("cpu", "cuda", "meta")
# The order of preference of "auto".
BACKENDS = ("triton", "torch")


def linear_jsd(
    student_hidden: Tensor,  # [..., Hs]
    student_weight: Tensor,  # [V, Hs]
    teacher_hidden: Tensor | None = None,  # [..., Ht]
    teacher_weight: Tensor | None = None,  # [V, Ht]
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    temperature_squared: bool = False,
    target: Tensor | None = None,  # [...]
    ignore_index: int = -100,
    token_weight: Tensor | None = None,  # [...]
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    student_bias: Tensor | None = None,  # [V]
    teacher_bias: Tensor | None = None,  # [V]
    teacher_logits: Tensor | None = None,  # [..., V]
    teacher_topk: TopK | None = None,
    hard_weight: float = 0.0,
    vocab: int | None = None,
    teacher_grad: bool = False,
    check_inputs: bool = False,
    scratch_bytes: int | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Generalised Jensen-Shannon divergence between a student's and a teacher's next-token distributions.

    With s = softmax((student_hidden @ student_weight.T + student_bias) / temperature), t the same of the teacher and
    m = (1 - beta) * s + beta * t, the loss of a token is::

        jsd  = (1 - beta) * KL(s || m) + beta * KL(t || m)     # beta 0: KL(t || s); beta 1: KL(s || t)
        loss = token_weight * (hard_weight * cross_entropy + (1 - hard_weight) * jsd)

    where cross_entropy is the student's with `target`, at temperature 1, and `jsd` is multiplied by temperature**2 if
    `temperature_squared`.  KL(p || q) = sum(p * log(p / q)), in nats.  The loss is 0 or more, and exactly 0 with
    exactly zero gradients where both models' logits are the same numbers.  No model's [tokens, V] logits are stored.

    Args:
        student_hidden: [..., Hs] float32, bfloat16 or float16, any strides.  The leading dimensions hold T tokens.
        student_weight: [V, Hs] like `nn.Linear`'s, of student_hidden's dtype (under autocast of any of the three).  A
            [Hs, V] kernel's transpose is read as it lies; "triton" copies it where V is no multiple of 8.
        teacher_hidden: [..., Ht], with the same leading dimensions; its dtype and Ht may differ from the student's.
        teacher_weight: [V, Ht] of teacher_hidden's dtype.
        beta: in [0, 1], the teacher's weight in m.  The ends are forward and reverse KL as special cases: the limit of
            the divergence itself is 0 at both ends, so that the value jumps there.
        temperature: above 0: divides both models' logits.
        temperature_squared: multiply the divergence by temperature**2, which keeps its gradients' size.
        target: [...] of any integer dtype: `ignore_index` takes a token out; otherwise the label in [0, V).
        ignore_index: tokens with this target cost no loss and leave exact zeros, whatever they hold.
        token_weight: [...] factor of each token's loss; does not change what "mean" divides by.  A constant.
        reduction: "mean" (over the tokens that are not ignored), "sum" or "none" (the loss then is [...]).
        normalizer: number or 0-d tensor above 0 that "mean" divides by instead of the token count.  Where every
            token is ignored any value of a 0-d tensor will do.  A constant.
        student_bias, teacher_bias: [V] of their weights' dtypes.  -inf takes an entry out of that distribution.
        teacher_logits: [..., V] float32, bfloat16 or float16, instead of teacher_hidden and teacher_weight.
        teacher_topk: `TopK(indices, values, kind, rest)` instead of them, where only K entries are known.
        hard_weight: in [0, 1]: the part of the loss that is the cross-entropy with `target`; the rest is divergence.
        vocab: entries from this one on, padding, are out of both distributions.  V may then differ between the models.
        teacher_grad: give gradients to the teacher's tensors too, where they require them.  Otherwise the teacher is a
            constant.
        check_inputs: check values on the GPU too, which synchronises.  On the CPU they always are.
        scratch_bytes: bound on the peak memory above inputs, loss and returned gradients.  Default: 256 MiB or an
            eighth of both models' float32 logits, whichever is less, and at least what one chunk needs.
        backend: "triton" (kernels for NVIDIA GPUs from Ampere on; products of bfloat16 and float16, no teacher_topk, no
            gradient of teacher_logits), "torch" (the framework's own operations, on any device) or "auto": the first of
            these that can run the call.

    Returns:
        The float32 loss, 0-d or [...].  If every token is ignored, "mean" is 0 with zero gradients.  With beta 0 it is
        infinite where the student gives probability 0 to what the teacher doesn't; with beta 1 the reverse (and the
        gradients there are not finite).  Between them it is finite for any logits, -inf among them.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device, range or option, not exactly one teacher; on the CPU (with check_inputs also
            on the GPU) a target that is neither ignore_index nor in [0, V), top-k indices outside of it or repeated.
            On the GPU without check_inputs what is out of range makes its token's loss and gradients NaN.
        RuntimeError: differentiated twice, or called inside a torch.func transform.

    Memory: `scratch_parts` of `onchip.ops.linear_jsd.memory` is the formula: about 13 * chunk * V bytes, and with
    16-bit weights 4 * V * Hs for their gradient's float32 sum.  That of backend "triton" is in `.triton_memory`:
    by default at most 512 MiB, about 4 * chunk * V bytes where T <= Hs.

    Example:
        >>> import torch
        >>> from onchip.torch import linear_jsd
        >>> hidden, weight = torch.randn(2, 8, 16, requires_grad=True), torch.randn(100, 16, requires_grad=True)
        >>> teacher_hidden, teacher_weight = torch.randn(2, 8, 32), torch.randn(100, 32)
        >>> loss = linear_jsd(hidden, weight, teacher_hidden, teacher_weight, beta=0.5, temperature=2.0)
        >>> loss.backward()
        >>> weight.grad.shape
        torch.Size([100, 16])

    Sources: GKD (arXiv:2306.13649) for the divergence; Liger Kernel (arXiv:2410.10989) for the chunks.
    """
    options = Options(
        op=OP,
        beta=beta,
        temperature=temperature,
        temperature_squared=temperature_squared,
        ignore_index=ignore_index,
        reduction=reduction,
        hard_weight=hard_weight,
        vocab=vocab,
        teacher_grad=teacher_grad,
        check_inputs=check_inputs,
        scratch_bytes=scratch_bytes,
    )
    named = {
        "student_hidden": student_hidden,
        "student_weight": student_weight,
        "student_bias": student_bias,
        "teacher_hidden": teacher_hidden,
        "teacher_weight": teacher_weight,
        "teacher_bias": teacher_bias,
        "teacher_logits": teacher_logits,
        "target": target,
        "token_weight": token_weight,
    }
    return _call(options, named, teacher_topk, normalizer, backend)


def jsd(
    student_logits: Tensor,  # [..., V]
    teacher_logits: Tensor | None = None,  # [..., V]
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    temperature_squared: bool = False,
    target: Tensor | None = None,  # [...]
    ignore_index: int = -100,
    token_weight: Tensor | None = None,  # [...]
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    teacher_topk: TopK | None = None,
    hard_weight: float = 0.0,
    vocab: int | None = None,
    teacher_grad: bool = False,
    check_inputs: bool = False,
    scratch_bytes: int | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Generalised Jensen-Shannon divergence between two models' existing logits.

    With s = softmax(student_logits / temperature), t the same of the teacher and m = (1 - beta) * s + beta * t, the
    loss of a token is::

        jsd  = (1 - beta) * KL(s || m) + beta * KL(t || m)     # beta 0: KL(t || s); beta 1: KL(s || t)
        loss = token_weight * (hard_weight * cross_entropy + (1 - hard_weight) * jsd)

    Args:
        student_logits: [..., V] float32, bfloat16 or float16, any strides.  -inf takes an entry out.  Those whose
            leading dimensions can't be flattened in place are copied; so are, with "triton", those whose last stride
            isn't 1.
        teacher_logits: [..., V] float32, bfloat16 or float16, any strides; copied likewise.

    The other arguments, what is returned and what is raised are those of `linear_jsd`.  Softmaxes, loss and gradients
    are made in float32 from the logits as they are; a gradient is rounded to its logits' dtype once.

    Memory: about 13 * chunk * V bytes, by `scratch_parts` of `onchip.ops.linear_jsd.memory`; between forward and
    backward nothing but the inputs is kept.  With backend "triton" there is nothing of that size: a row of
    logits is read twice for the loss (and a third time for its softmax), and once for its gradient.

    Example:
        >>> import torch
        >>> from onchip.torch import jsd
        >>> student = torch.randn(2, 8, 100, requires_grad=True)
        >>> loss = jsd(student, torch.randn(2, 8, 100), beta=0.0)  # forward KL
        >>> loss.backward()
        >>> student.grad.shape
        torch.Size([2, 8, 100])

    Source: GKD (arXiv:2306.13649).
    """
    options = Options(
        op=LOGITS_OP,
        beta=beta,
        temperature=temperature,
        temperature_squared=temperature_squared,
        ignore_index=ignore_index,
        reduction=reduction,
        hard_weight=hard_weight,
        vocab=vocab,
        teacher_grad=teacher_grad,
        check_inputs=check_inputs,
        scratch_bytes=scratch_bytes,
    )
    named = {
        "student_logits": student_logits,
        "teacher_logits": teacher_logits,
        "target": target,
        "token_weight": token_weight,
    }
    return _call(options, named, teacher_topk, normalizer, backend)


def _call(options: Options, named: dict[str, Any], topk: TopK | None, normalizer: Any, backend: str) -> Tensor:
    op = options.op
    shape, size, dtypes = check_tensors(op, options, named, topk)
    first = named["student_hidden"] if op == OP else named["student_logits"]
    device = first.device
    normalizer = check_normalizer(op, normalizer, options.reduction, "the student", device)
    tensors: list[Any] = [named.get(f"{who}_{part}") for who in ("student", "teacher") for part in PARTS]
    if not options.teacher_grad:
        tensors[4:] = [None if x is None else x.detach() for x in tensors[4:]]
    grads = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in tensors]
    refused = None if device.type in _DEVICES else f"it runs on {', '.join(_DEVICES)} tensors, not on {device.type!r}"
    refusals = {"torch": refused, "triton": triton_op.refusal(tensors, grads, dtypes, topk is not None)}
    chosen = choose_backend(op, backend, {name: refusals[name] for name in BACKENDS})

    stash = any(grads) and options.reduction != "none" and not (grads[3] or grads[7])
    arguments = Arguments._make(
        (
            *tensors,
            *((None, None) if topk is None else (topk.indices, topk.values)),
            named["target"],
            named["token_weight"],
            normalizer,
            *dtypes,
            op,
            list(shape),
            size,
            *(("", "") if topk is None else (topk.kind, topk.rest)),
            float(options.beta),
            float(options.temperature),
            options.temperature_squared,
            int(options.ignore_index),
            options.reduction,
            float(options.hard_weight),
            options.check_inputs,
            None if options.scratch_bytes is None else int(options.scratch_bytes),
            stash,
            grads,
        )
    )
    if chosen == "triton":
        return triton_op.forward(arguments)
    memory.PLANNER.require(arguments.problem(), "", arguments.scratch_bytes)  # shows before anything runs
    return _forward_op(*arguments)[0]  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------ registered operators


def _plan(a: Arguments, tokens: Tokens | None = None) -> int:
    """Tokens of a chunk; without `tokens` in the worst case."""
    return memory.plan(a.problem(tokens), a.scratch_bytes)


def _walk(a: Arguments, tokens: Tokens, row: Tensor, grads: Sequence[bool]) -> tuple[Tensor, list[Tensor | None]]:
    """The computed tokens' losses, and the eight gradients that are wanted."""
    student = a.model(0, grads)
    assert student is not None
    topk = None
    if a.indices is not None and a.values is not None:
        k = a.indices.shape[-1]
        topk = (a.indices.reshape(-1, k), a.values.reshape(-1, k))
    losses, *made = walk(
        a.loss, student, a.model(1, grads), topk, tokens, row=row, vocab=a.size, chunk=_plan(a, tokens)
    )
    return losses, made[0] + made[1]


@torch.library.custom_op(
    "onchip::linear_jsd_torch", mutates_args=(), schema=f"({SCHEMA}) -> ({', '.join(['Tensor'] * 10)})"
)
def _forward_op(*args: Any) -> tuple[Tensor, ...]:
    """Return the loss, and with `stash` the gradients in float32 for an upstream gradient of 1; what isn't asked for is
    empty, and so is the last, the link."""
    a = Arguments(*args)
    # An operator runs below autocast's dispatch but not outside its reach: products in here would be cast again.
    with torch.autocast(a.first.device.type, enabled=False):
        tokens = a.tokens(check=True)
        grads = a.grads if a.stash else [False] * 8
        losses, made = _walk(a, tokens, tokens.weight * tokens.inverse_count, grads)
        loss = tokens.spread(losses * tokens.weight, a.shape)
        if a.reduction != "none":
            loss = loss.sum() * tokens.inverse_count
        stashed = (_shaped(x, like, a.first) for x, like in zip(made, a.parameters, strict=True))
        return loss, *stashed, loss.new_empty(0)


def _shaped(x: Tensor | None, like: Tensor | None, first: Tensor) -> Tensor:
    return first.new_empty(0, dtype=torch.float32) if x is None or like is None else x.view(like.shape)


@_forward_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    a = Arguments(*args)
    loss = a.first.new_empty(a.shape if a.reduction == "none" else (), dtype=torch.float32)
    stashed = [
        a.first.new_empty(x.shape if x is not None and a.stash and wanted else 0, dtype=torch.float32)
        for x, wanted in zip(a.parameters, a.grads, strict=True)
    ]
    return loss, *stashed, loss.new_empty(0)


@torch.library.custom_op(
    "onchip::linear_jsd_torch_backward",
    mutates_args=(),
    schema=f"(Tensor grad_loss, {SCHEMA}) -> ({', '.join(['Tensor'] * 8)})",
)
def _backward_op(grad_loss: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Return the gradients in their parameters' dtypes; what isn't asked for is empty."""
    a = Arguments(*args)
    with torch.autocast(a.first.device.type, enabled=False):
        tokens = a.tokens(check=False)
        row = tokens.weight * tokens.inverse_count
        row = row * (tokens.upstream(grad_loss) if a.reduction == "none" else grad_loss)
        _, made = _walk(a, tokens, row, a.grads)
        return tuple(
            a.first.new_empty(0) if x is None or like is None else x.view(like.shape).to(like.dtype)
            for x, like in zip(made, a.parameters, strict=True)
        )


@_backward_op.register_fake
def _(grad_loss: Tensor, *args: Any) -> tuple[Tensor, ...]:
    a = Arguments(*args)
    return tuple(
        x.new_empty(x.shape) if x is not None and wanted else a.first.new_empty(0)
        for x, wanted in zip(a.parameters, a.grads, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    a = Arguments(*inputs)
    ctx.mark_non_differentiable(*output[1:-1])
    ctx.set_materialize_grads(False)  # or autograd would make a [V, H] of zeros for each of them
    ctx.stash, ctx.grads, ctx.op = a.stash, a.grads, a.op
    if a.stash:
        # No input is kept alive: the stash is enough.
        ctx.dtypes = [None if x is None else x.dtype for x in a.parameters]
        ctx.save_for_backward(*output[1:])
    else:
        ctx.options = a[TENSORS:]
        ctx.save_for_backward(*a[:TENSORS], output[-1])


def _backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    nothing = (None,) * (len(Arguments._fields) - 8)
    if grad_loss is None:
        return (*[None] * 8, *nothing)
    grads: list[Tensor | None]
    *saved, link = ctx.saved_tensors
    if ctx.stash:
        factor = None if is_plain_one(grad_loss) else grad_loss
        grads = [
            scale_stash(x, factor, dtype) if wanted else None
            for x, dtype, wanted in zip(saved, ctx.dtypes, ctx.grads, strict=True)
        ]
    else:
        made = _backward_op(grad_loss, *saved, *ctx.options)
        grads = [x if wanted else None for x, wanted in zip(made, ctx.grads, strict=True)]
    return (*differentiable_once(ctx.op, grads, grad_loss, link), *nothing)


_forward_op.register_autograd(_backward, setup_context=_setup_context)
