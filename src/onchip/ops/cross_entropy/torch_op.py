"""cross_entropy for PyTorch: the public function and module.

The function checks its inputs, chooses a backend and calls the operator of torch_loss.py.
"""

from typing import TYPE_CHECKING, Any, Generic, Unpack, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from onchip.frontend import topk
from onchip.frontend.options import (
    Flag,
    No,
    Reduction,
    Returning,
    ScratchBytes,
    Yes,
    check_shift,
    one_target,
    scratch_in_bytes,
    shapes_of,
)
from onchip.frontend.torch_inputs import (
    check_class_weight,
    check_normalizer,
    choose_torch_backend,
    following,
    options_of,
    temperature_tensor,
)
from onchip.frontend.torch_labels import check_label_tensors, is_soft
from onchip.frontend.torch_module import LossModule, typed_as
from onchip.frontend.torch_parallel import WHOLE, OfShardedLogits, Sharding, localized
from onchip.frontend.torch_register import needed
from onchip.frontend.torch_repeat import repeatable
from onchip.frontend.torch_types import Backend, LossKeywords, OfToken, Result, Target, WithStats
from onchip.ops.cross_entropy import OP, CrossEntropyOptions
from onchip.ops.cross_entropy.torch_call import CrossEntropyCall, check_inplace
from onchip.ops.cross_entropy.torch_loss import ROWS
from onchip.vocab.rows.launches import layout_refusal, refusal
from onchip.vocab.torch.loss import LabelFields, returned

# Best first: "auto" asks them in this order.
BACKENDS = ("triton", "plain")


class LogitsModuleKeywords(LossKeywords, Returning[Flag], Generic[Flag], total=False):
    """The module's keywords."""

    shift: bool
    temperature: float
    inplace_backward: bool


class LogitsKeywords(LossKeywords, OfToken, OfShardedLogits, Returning[Flag], Generic[Flag], total=False):
    """The function's keywords."""

    labels: Target
    shift: bool
    temperature: float | Tensor
    inplace_backward: bool


@overload
def cross_entropy(logits: Tensor, target: Target = None, **options: Unpack[LogitsKeywords[No]]) -> Tensor: ...
@overload
def cross_entropy(logits: Tensor, target: Target = None, **options: Unpack[LogitsKeywords[Yes]]) -> WithStats: ...
@overload
def cross_entropy(
    logits: Tensor, target: Target = None, **options: Unpack[LogitsKeywords[bool]]
) -> Tensor | WithStats: ...
@repeatable
def cross_entropy(
    logits: Tensor,  # [..., V]
    target: Target = None,  # [...], or probabilities
    *,
    labels: Target = None,  # another name for target
    shift: bool = False,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    normalizer: float | Tensor | None = None,
    token_weight: Tensor | None = None,  # [...]
    class_weight: Tensor | None = None,  # [V]
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
    check_inputs: bool = False,
    return_stats: bool = False,
    inplace_backward: bool = False,
    backend: Backend = "auto",
    scratch_bytes: ScratchBytes = None,
    vocab_group: ProcessGroup | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
) -> Tensor | WithStats:
    """Cross-entropy of logits that exist already, with little extra memory.

    With a = logits * logit_scale, z = softcap * tanh(a / softcap) / temperature (without softcap a / temperature) and
    lse = log(sum(exp(z))), the loss of a token is::

        token_weight * ((1 - label_smoothing) * (lse - z[target]) + label_smoothing * (lse - mean(z)) + z_loss * lse**2)

    'mean' divides the sum over tokens by `normalizer`, or else by the number of tokens that are not ignored.  So it is
    `F.cross_entropy(logits.float().flatten(0, -2), target.flatten())`, without a float32 copy of the logits.  The
    vocabulary is the last dimension, whatever the number of dimensions.

    Args:
        logits: [..., V] float32, bfloat16, float16 or float64, any strides, never copied as a whole.  The leading
            dimensions hold T tokens.  -inf takes an entry out of the vocabulary (unless there is a softcap, which
            makes it -softcap).  Kernels take logits of a token that are all below -1e30 as if all were -inf:
            its loss is NaN.
        target: [...] of any integer dtype: the vocabulary index of each token, or `ignore_index`.  Or soft labels q,
            for which the loss has sum(q * (lse - z)) in place of lse - z[target]: the probabilities of all entries,
            floating point [..., V], or those of K entries, `TopK(indices, values, kind, rest="truncated")` of
            [..., K] with kind "probs" or "log_probs".  q need not sum to 1 and gets no gradient: pass it detached.  All
            tokens count then, and there is no ignore_index or inplace_backward.
        labels: another name for target, by keyword.
        shift: as in `linear_cross_entropy`: position i of each sequence [..., S] predicts label i + 1, and the last one
            costs nothing; logits aren't copied.  Only for targets that are ids.
        ignore_index, reduction, normalizer, token_weight, class_weight: as in `linear_cross_entropy`; token_weight is
            [...], class_weight [V] in float32 or logits' dtype.
        label_smoothing, z_loss, softcap, logit_scale, temperature, check_inputs, return_stats: likewise; temperature is
            a number or [...].
        inplace_backward: let backward write the gradient over the logits: **after it they are gone**.  The logits must
            be computed (neither a leaf nor a view of one) and not expanded.  If another operation has saved them for
            its own backward, that raises instead of using the wrong numbers.  If the graph is kept (retain_graph,
            create_graph), the logits stay and the gradient is a new tensor.  Not available inside torch.compile.
        backend: "triton" (kernels for NVIDIA GPUs from Ampere on, which read the logits once), "plain" (PyTorch's own
            operations) or "auto": the first of these that can run the call.
        scratch_bytes: bound on the peak memory above logits, loss and returned gradient, in one of the forms that
            `linear_cross_entropy` takes.  Default: 256 MiB or an eighth of the float32 logits, whichever is more, and
            at least what a useful chunk of rows needs.  "triton" needs little, whatever the bound.
        vocab_group, vocab_start, vocab_size: for a vocabulary that is sharded over the ranks of a process group, as in
            `linear_cross_entropy`.  Each rank passes its columns of the logits and of soft labels for all entries;
            everything else is the same on each rank.  DTensors with Shard(-1) need no group.  Soft labels for all
            entries then take backend "plain".

    Returns:
        The loss in float32 (float64 for float64 inputs), 0-d or of target's shape; with return_stats `(loss,
        CrossEntropyStats)`.  If every token is ignored, "mean" is 0 with zero gradients.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape, device, range or option is wrong; scratch_bytes doesn't suffice for one row (the message
            says what does); the logits can't be overwritten; or, on the CPU (with check_inputs also on the GPU), a
            target is neither ignore_index nor in [0, V), or a temperature or normalizer is not above 0.  On the GPU
            without check_inputs such a target makes its token's loss and gradient NaN.
        RuntimeError: the loss is differentiated twice, the call is inside a torch.func transform, or inplace_backward
            is used inside torch.compile.

    Memory: forward keeps 8 bytes per token, and logits and target by reference.  `scratch_parts` of
    `onchip.vocab.rows.memory` is the formula for the peak: about 4 * rows * V bytes for chunks of that many rows, twice
    that with return_stats or softcap; with backend "triton" 48 bytes per token, or 96 + 80 K with K soft labels per
    token.  The gradient is one tensor of logits' dtype, or none with inplace_backward; "triton" allocates it in forward
    already, unless reduction is "none".

    Example:
        >>> import torch
        >>> from onchip.torch import cross_entropy
        >>> hidden = torch.randn(2, 8, 16, requires_grad=True)
        >>> logits = hidden @ torch.randn(16, 100)
        >>> loss = cross_entropy(logits, torch.randint(100, (2, 8)), inplace_backward=True)
        >>> loss.backward()
        >>> hidden.grad.shape
        torch.Size([2, 8, 16])

    Sources: Liger Kernel (arXiv:2410.10989), for the gradient from the log-sum-exp alone, written over the logits; PaLM
    (arXiv:2204.02311), for z-loss; Gemma 2 (arXiv:2408.00118), for softcap.
    """
    _, target = one_target(OP, target, labels)
    soft, shards = is_soft(target, logits), WHOLE
    by_entry = {"logits": logits} | ({"target": target} if soft and isinstance(target, Tensor) else {})
    sharding = Sharding(vocab_group, vocab_start, vocab_size)
    if sharding.there(by_entry):
        if inplace_backward and type(logits) is not Tensor:
            raise ValueError(
                f"{OP}: inplace_backward=True would overwrite the memory under a {type(logits).__name__}; pass "
                "inplace_backward=False, or logits.to_local() and vocab_group"
            )
        parts, found = localized(OP, sharding, by_entry, {}, last=tuple(by_entry))
        logits, target, shards = parts["logits"], parts.get("target", target), found or WHOLE
    tau = temperature_tensor(OP, temperature)
    tensors = check_label_tensors(OP, target, {"logits": logits}, token_weight, class_weight, tau, soft=soft)
    shapes = shapes_of(tensors)
    shapes = shards.whole(shapes, tuple(by_entry), dim=-1) if shards.there else shapes
    topk.check_loss_shapes(OP, "target", shapes, "logits", soft=soft)
    check_class_weight(OP, tensors, "logits")
    options = options_of(
        CrossEntropyOptions,
        shift=shift,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=1.0 if isinstance(temperature, Tensor) else temperature,
        check_inputs=check_inputs,
        return_stats=return_stats,
        inplace_backward=inplace_backward,
        scratch_bytes=scratch_in_bytes(OP, scratch_bytes, logits.numel()),
    )
    leading = logits.shape[:-1]
    if soft:
        topk.refuse_options(OP, options)
        topk.refuse_shift(OP, shift, "target")
        if inplace_backward:
            raise ValueError(f"{OP}: inplace_backward=True takes targets that are ids; pass inplace_backward=False")
    check_shift(OP, shift, leading, "target of shape [..., S]")
    normalizer = check_normalizer(OP, normalizer, reduction, "logits", logits)
    if shift:
        assert isinstance(target, Tensor)
        # int64 holds every ignore_index.
        target = following(target, ignore_index, torch.int64)
        token_weight = None if token_weight is None else following(token_weight, 0, token_weight.dtype)
    weights = token_weight, normalizer, class_weight
    given = LabelFields.of(OP, options, target, leading, *weights, logits.dtype, soft=soft)
    chosen = choose_torch_backend(
        OP, backend, logits.device, layout_refusal("target", given.of_entries) or refusal(logits)
    )
    if inplace_backward:
        check_inplace(logits)
    call = CrossEntropyCall(
        logits=logits,
        token_temperature=tau,
        options=options,
        shards=shards,
        kernels=chosen == "triton",
        grads=needed(logits),
        **given._asdict(),
    )
    return returned(ROWS(call).out, options, given.kind)


class CrossEntropyLoss(LossModule[Result]):
    """`cross_entropy` as a module, in place of `torch.nn.CrossEntropyLoss` on logits [..., V].

    It takes the options of `cross_entropy` once; arguments that change from call to call go to `forward`.  Unlike in
    `torch.nn.CrossEntropyLoss`, the vocabulary is the last dimension, class weights go to `forward`, and the mean over
    no tokens is 0, not NaN.

    Example:
        >>> import torch
        >>> from onchip.torch import CrossEntropyLoss
        >>> criterion = CrossEntropyLoss(label_smoothing=0.1)
        >>> loss = criterion(torch.nn.Linear(16, 100)(torch.randn(8, 16)), torch.randint(100, (8,)))
        >>> loss.backward()
    """

    @overload
    def __init__(self: "CrossEntropyLoss[Tensor]", **options: Unpack[LogitsModuleKeywords[No]]) -> None: ...
    @overload
    def __init__(self: "CrossEntropyLoss[WithStats]", **options: Unpack[LogitsModuleKeywords[Yes]]) -> None: ...
    @overload
    def __init__(
        self: "CrossEntropyLoss[Tensor | WithStats]", **options: Unpack[LogitsModuleKeywords[bool]]
    ) -> None: ...
    def __init__(
        self,
        *,
        shift: bool = False,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        normalizer: float | Tensor | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        temperature: float = 1.0,
        check_inputs: bool = False,
        return_stats: bool = False,
        inplace_backward: bool = False,
        backend: Backend = "auto",
        scratch_bytes: ScratchBytes = None,
    ) -> None:
        super().__init__(OP, CrossEntropyOptions, BACKENDS, locals())

    def forward(
        self,
        logits: Tensor,  # [..., V]
        target: Target = None,  # [...], or probabilities
        *,
        labels: Target = None,
        normalizer: float | Tensor | None = None,
        token_weight: Tensor | None = None,  # [...]
        class_weight: Tensor | None = None,  # [V]
        temperature: float | Tensor | None = None,
        vocab_group: ProcessGroup | None = None,
        vocab_start: int | None = None,
        vocab_size: int | None = None,
    ) -> Result:
        """The loss, or `(loss, stats)`.  Arguments are as in `cross_entropy` and override the module's."""
        keywords = self.keywords(
            normalizer=normalizer,
            token_weight=token_weight,
            class_weight=class_weight,
            temperature=temperature,
            vocab_group=vocab_group,
            vocab_start=vocab_start,
            vocab_size=vocab_size,
        )
        made: Any = cross_entropy(logits, target, labels=labels, **keywords)
        return made  # type: ignore[no-any-return]

    if TYPE_CHECKING:  # torch.nn.Module.__call__ has no types

        @typed_as(forward)
        def __call__(self, *given: Any, **options: Any) -> Any: ...
