"""linear_jsd and jsd for PyTorch: the public functions, which check their inputs and choose how to compute."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from onchip.frontend.options import Reduction, ScratchBytes, one_target
from onchip.frontend.topk import TopK
from onchip.frontend.torch_inputs import (
    LOSS_DTYPES,
    check_kinds,
    check_normalizer,
    choose_torch_backend,
    product_dtype,
    refuse_gradient,
    require_tensors,
)
from onchip.frontend.torch_parallel import WHOLE, HiddenLayout, Sharding, Shards, localized
from onchip.frontend.torch_register import needed
from onchip.frontend.torch_repeat import repeatable
from onchip.frontend.torch_types import Backend
from onchip.ops.linear_jsd import (
    LOGITS_OP,
    OP,
    PARTS,
    JsdOptions,
    check_shapes,
    memory,
    named_arrays,
    plain_op,
    triton_op,
)
from onchip.ops.linear_jsd.torch_call import JsdCall, JsdModel

# The order of preference of "auto".
BACKENDS = ("triton", "plain")


@repeatable
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
    labels: Tensor | None = None,  # another name for target
    ignore_index: int = -100,
    token_weight: Tensor | None = None,  # [...]
    reduction: Reduction = "mean",
    normalizer: float | Tensor | None = None,
    student_bias: Tensor | None = None,  # [V]
    teacher_bias: Tensor | None = None,  # [V]
    teacher_logits: Tensor | None = None,  # [..., V]
    teacher_topk: TopK[Tensor] | None = None,
    hard_weight: float = 0.0,
    vocab: int | None = None,
    teacher_grad: bool = False,
    check_inputs: bool = False,
    scratch_bytes: ScratchBytes = None,
    backend: Backend = "auto",
    vocab_group: ProcessGroup | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    hidden_layout: HiddenLayout = "replicated",
    reduce_hidden_grad: bool = True,
) -> Tensor:
    r"""Generalised Jensen-Shannon divergence between a student's and a teacher's next-token distributions.

    With s = softmax((student_hidden @ student_weight.T + student_bias) / temperature), t the same for the teacher, and
    m = (1 - beta) * s + beta * t, the loss of a token is::

        jsd  = (1 - beta) * KL(s || m) + beta * KL(t || m)     # beta 0: KL(t || s); beta 1: KL(s || t)
        loss = token_weight * (hard_weight * cross_entropy + (1 - hard_weight) * jsd)

    where cross_entropy is the student's with `target`, at temperature 1, and `jsd` is multiplied by temperature**2 if
    `temperature_squared`.  KL(p || q) = sum(p * log(p / q)), in nats.  The loss is never below 0.  If both models'
    logits are the same numbers, loss and gradients are exactly 0.  No model's [tokens, V] logits are stored.

    Args:
        student_hidden: [..., Hs] float32, bfloat16, float16 or float64, any strides.  The leading dimensions hold T
            tokens.
        student_weight: [V, Hs], of student_hidden's dtype or of the mixtures that `linear_cross_entropy` takes.
        teacher_hidden: [..., Ht], with the same leading dimensions.  Ht and the dtype may differ from the student's,
            except that float64 goes with float64 only.
        teacher_weight: [V, Ht] likewise.
        beta: in [0, 1], the teacher's weight in m.  0 and 1 are special cases, forward and reverse KL.  Elsewhere the
            divergence tends to 0 towards both ends, so its value jumps there.
        temperature: above 0: divides both models' logits.
        temperature_squared: multiply the divergence by temperature**2, so that its gradients keep their size.
        target: [...] of any integer dtype: a label in [0, V), or `ignore_index` for a token that doesn't count.
        labels: another name for target.
        ignore_index, token_weight, reduction, normalizer, check_inputs: as in `linear_cross_entropy`.
        student_bias, teacher_bias: [V] of their weights' dtypes.  -inf takes an entry out of that distribution.
        teacher_logits: [..., V] float32, bfloat16, float16 or float64, instead of teacher_hidden and teacher_weight.
        teacher_topk: `TopK(indices, values, kind, rest)` instead of these, if only K entries per token are known.
        hard_weight: in [0, 1]: the weight of the cross-entropy with `target`; the divergence has the rest.
        vocab: how many entries count.  Those after them are padding and in neither distribution.  V may then differ
            between the models.
        teacher_grad: give gradients to those of the teacher's tensors that require them.  Otherwise the teacher is a
            constant.
        scratch_bytes: bound on the peak memory above inputs, loss and returned gradients: bytes, a text like "1GiB", or
            a float in (0, 1], that part of both models' float32 logits.  Default: 256 MiB or an eighth of those,
            whichever is more, and at least what one chunk needs.
        backend: "triton" (kernels for NVIDIA GPUs from Ampere on; products in bfloat16 and float16, no gradient of
            teacher_logits), "plain" (PyTorch's own operations, on any device) or "auto": the first of these that can
            run the call.
        vocab_group, vocab_start, vocab_size, hidden_layout, reduce_hidden_grad: for a vocabulary that is sharded over
            the ranks of a process group, as in `linear_cross_entropy`.  Each rank passes its rows of both models'
            weights and biases, or its columns of teacher_logits; teacher_topk has indices in the whole vocabulary, the
            same on each rank.  hidden_layout holds for both models' hidden states; without a target and teacher_topk,
            "sequence" splits their first dimension.  vocab_size takes the place of `vocab`.

    Returns:
        The loss in float32 (float64 for float64 inputs), 0-d or [...].  If every token is ignored, "mean" is 0 with
        zero gradients.  With beta 0 it is infinite if the student gives probability 0 to an entry that the teacher
        gives more; with beta 1 the other way round (and the gradients there are not finite).  Between them it is finite
        for any logits, including -inf.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape, device, range or option is wrong; there isn't exactly one teacher; scratch_bytes is too
            small; or, on the CPU (with check_inputs also on the GPU), a target is neither ignore_index nor in [0, V),
            or top-k indices are outside [0, V) or repeated.  On the GPU without check_inputs a number out of range
            makes its token's loss and gradients NaN.
        RuntimeError: the result is differentiated twice, or the call is inside a torch.func transform.

    Memory: `scratch_parts` of `onchip.ops.linear_jsd.memory` is the formula for "plain": about 13 * chunk * V bytes,
    and with 16-bit weights 4 * V * Hs for the float32 sum of their gradient.  The formula for "triton" is in
    `onchip.ops.linear_jsd.triton_memory`: by default at most 512 MiB, and about 4 * chunk * V bytes if T <= Hs.

    Example:
        >>> import torch
        >>> from onchip.torch import linear_jsd
        >>> hidden, weight = torch.randn(2, 8, 16, requires_grad=True), torch.randn(100, 16, requires_grad=True)
        >>> teacher_hidden, teacher_weight = torch.randn(2, 8, 32), torch.randn(100, 32)
        >>> loss = linear_jsd(hidden, weight, teacher_hidden, teacher_weight, beta=0.5, temperature=2.0)
        >>> loss.backward()
        >>> weight.grad.shape
        torch.Size([100, 16])

    Sources: GKD (arXiv:2306.13649), for the divergence; Liger Kernel (arXiv:2410.10989), for the chunks.
    """
    return _call(
        OP,
        student_hidden=student_hidden,
        student_weight=student_weight,
        teacher_hidden=teacher_hidden,
        teacher_weight=teacher_weight,
        beta=beta,
        temperature=temperature,
        temperature_squared=temperature_squared,
        target=one_target(OP, target, labels, needed=False)[1],
        ignore_index=ignore_index,
        token_weight=token_weight,
        reduction=reduction,
        normalizer=normalizer,
        student_bias=student_bias,
        teacher_bias=teacher_bias,
        teacher_logits=teacher_logits,
        teacher_topk=teacher_topk,
        hard_weight=hard_weight,
        vocab=vocab,
        teacher_grad=teacher_grad,
        check_inputs=check_inputs,
        scratch_bytes=scratch_bytes,
        backend=backend,
        sharding=Sharding(vocab_group, vocab_start, vocab_size, hidden_layout, reduce_hidden_grad),
    )


@repeatable
def jsd(
    student_logits: Tensor,  # [..., V]
    teacher_logits: Tensor | None = None,  # [..., V]
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    temperature_squared: bool = False,
    target: Tensor | None = None,  # [...]
    labels: Tensor | None = None,  # another name for target
    ignore_index: int = -100,
    token_weight: Tensor | None = None,  # [...]
    reduction: Reduction = "mean",
    normalizer: float | Tensor | None = None,
    teacher_topk: TopK[Tensor] | None = None,
    hard_weight: float = 0.0,
    vocab: int | None = None,
    teacher_grad: bool = False,
    check_inputs: bool = False,
    scratch_bytes: ScratchBytes = None,
    backend: Backend = "auto",
    vocab_group: ProcessGroup | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    r"""Generalised Jensen-Shannon divergence between two models' existing logits.

    The loss is that of `linear_jsd`, with s = softmax(student_logits / temperature) and t the same for the teacher.

    Args:
        student_logits: [..., V] float32, bfloat16, float16 or float64, any strides.  -inf takes an entry out of the
            distribution.  "triton" copies logits whose leading dimensions can't be flattened in place, or whose last
            stride isn't 1.
        teacher_logits: [..., V] float32, bfloat16, float16 or float64, any strides; copied likewise.
        beta, temperature, temperature_squared, target, labels, ignore_index: as in `linear_jsd`.
        token_weight, reduction, normalizer, teacher_topk, hard_weight, vocab: likewise.
        teacher_grad, check_inputs, scratch_bytes, backend, vocab_group, vocab_start, vocab_size: likewise.

    Softmaxes, loss and gradients are computed in float32 (float64 for float64 logits); a gradient is rounded to its
    logits' dtype once.

    Returns:
        The loss, as from `linear_jsd`.

    Raises:
        What `linear_jsd` raises.

    Memory: about 13 * chunk * V bytes, by `scratch_parts` of `onchip.ops.linear_jsd.memory`; "triton" needs far less.
    Between forward and backward only the inputs are kept.

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
    return _call(
        LOGITS_OP,
        student_logits=student_logits,
        teacher_logits=teacher_logits,
        beta=beta,
        temperature=temperature,
        temperature_squared=temperature_squared,
        target=one_target(LOGITS_OP, target, labels, needed=False)[1],
        ignore_index=ignore_index,
        token_weight=token_weight,
        reduction=reduction,
        normalizer=normalizer,
        teacher_topk=teacher_topk,
        hard_weight=hard_weight,
        vocab=vocab,
        teacher_grad=teacher_grad,
        check_inputs=check_inputs,
        scratch_bytes=scratch_bytes,
        backend=backend,
        sharding=Sharding(vocab_group, vocab_start, vocab_size),
    )


_SHARDED = ("student_weight", "teacher_weight", "student_bias", "teacher_bias", "student_logits", "teacher_logits")


def _localized(op: str, given: dict[str, Any], sharding: Sharding) -> tuple[dict[str, Any], Shards]:
    """The arguments, where the vocabulary is sharded this rank's, and which part that is."""
    weights = {name: given[name] for name in _SHARDED if given.get(name) is not None}
    names = ("student_hidden", "teacher_hidden")
    hidden = {name: given[name] for name in names if given.get(name) is not None}
    if not sharding.there(weights | hidden):
        return given, WHOLE
    if given["vocab"] is not None:
        raise ValueError(f"{op}: got vocab={given['vocab']} with a sharded vocabulary; pass vocab_size instead")
    last = [name for name in weights if name.endswith("logits")]
    tokens, topk = given["target"], given["teacher_topk"]
    if tokens is None and isinstance(topk, TopK):
        tokens = topk.indices
    tensors, shards = localized(op, sharding, weights, hidden, tokens=tokens, last=last)
    return given | tensors, shards or WHOLE


def _call(op: str, *, sharding: Sharding, **given: Any) -> Tensor:
    """`given` are the arguments of a public function."""
    given, shards = _localized(op, given, sharding)
    options, topk = JsdOptions.of(op, given), given["teacher_topk"]
    tensors = require_tensors(op, named_arrays(op, given, "target"), optional=())
    shapes: Any = {name: tuple(x.shape) for name, x in tensors.items()}
    if shards.there:
        names = [name for name in ("student_hidden", "teacher_hidden") if name in shapes]
        shapes = shards.whole(shapes, [x for x in _SHARDED if not x.endswith("logits")], names)
        shapes = shards.whole(shapes, [x for x in _SHARDED if x.endswith("logits")], dim=-1)
    shape, size = check_shapes(options, shapes, "target")
    options = options.with_scratch(given, math.prod(shape) * size)
    size = shards.rows if shards.there else size
    check_kinds(
        op,
        tensors,
        integers=("target", "teacher_topk.indices"),
        constants=("token_weight",),
        labels=("teacher_topk.values",),
        dtypes=LOSS_DTYPES,
    )
    if topk is not None:
        refuse_gradient(op, "teacher_topk.values", topk.values)
    dtypes = tuple(
        product_dtype(op, tensors, who) if f"{who}hidden" in tensors else torch.float32
        for who in ("student_", "teacher_")
    )
    first = next(iter(tensors.values()))
    normalizer = check_normalizer(op, given["normalizer"], options.reduction, "the student", first)
    student, teacher = (JsdModel(*(given.get(f"{who}_{part}") for part in PARTS)) for who in ("student", "teacher"))
    if not options.teacher_grad:
        teacher = JsdModel(*(None if x is None else x.detach() for x in teacher))
    grads = needed(*student, *teacher)
    given_logits = grads[3] or grads[7]
    indices, values, kind, rest = topk or (None, None, "", "")
    call = JsdCall(
        student, teacher, indices, values, given["target"], given["token_weight"], normalizer, dtypes, shape, size,
        kind, rest, options, any(grads) and options.reduction != "none" and not given_logits, grads, shards,
    )  # fmt: skip
    reason = triton_op.refusal(call)
    chosen = choose_torch_backend(op, given["backend"], first.device, reason)
    if chosen == "triton":
        return triton_op.run(call)
    memory.PLANNER.require(call.problem(), "", options.scratch_bytes)  # shows before anything runs
    return plain_op.OPERATOR(call).loss
