"""linear_cross_entropy for PyTorch: the public function and module.

`linear_cross_entropy` checks its inputs and chooses a backend.  Each backend is an operator (`frontend.torch_register`)
that takes a `LinearCrossEntropyCall` (torch_call.py), for labels of any kind and a sharded vocabulary too.  It is made
in plain_op.py, triton_op.py or fp8_op.py, and runs a walk of the engine (`vocab`).
"""

import math
from typing import TYPE_CHECKING, Any, Generic, Unpack, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from onchip.fp8.torch_operands import QuantizedWeight
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
from onchip.frontend.topk import TopK
from onchip.frontend.torch_inputs import (
    check_class_weight,
    check_normalizer,
    check_weight_grad_out,
    choose_torch_backend,
    copied_rows,
    copied_weight,
    following,
    options_of,
    product_dtype,
    sizes_are_symbols,
    temperature_tensor,
)
from onchip.frontend.torch_labels import check_label_tensors, is_soft
from onchip.frontend.torch_module import LossModule, typed_as
from onchip.frontend.torch_parallel import WHOLE, HiddenLayout, OfShards, Sharding, Shards, localized
from onchip.frontend.torch_register import Operator, inside_operator, needed
from onchip.frontend.torch_repeat import repeatable
from onchip.frontend.torch_types import Backend, LossKeywords, OfToken, Result, Target, WithStats
from onchip.ops.linear_cross_entropy import (
    OP,
    LinearCrossEntropyOptions,
    Precision,
    Strategy,
    fp8_op,
    plain_op,
    triton_op,
)
from onchip.ops.linear_cross_entropy.torch_call import LinearCrossEntropyCall
from onchip.vocab.rows.launches import layout_refusal
from onchip.vocab.torch.dense import SENT
from onchip.vocab.torch.loss import LabelFields, returned
from onchip.vocab.torch.parallel import sent_bytes, sent_numbers
from onchip.vocab.triton import setup

BACKENDS = ("triton", "plain")


Weight = Tensor | QuantizedWeight


class HeadModuleKeywords(LossKeywords, Returning[Flag], Generic[Flag], total=False):
    """The module's keywords."""

    shift: bool
    strategy: Strategy
    precision: Precision
    temperature: float


class HeadKeywords(LossKeywords, OfToken, OfShards, total=False):
    """The function's keywords, except labels and return_stats."""

    shift: bool
    strategy: Strategy
    precision: Precision
    temperature: float | Tensor
    weight_grad_out: Tensor | None


class LossOfHead(HeadKeywords, Returning[Flag], Generic[Flag], total=False):
    """All its keywords."""

    labels: Target


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Weight,
    target: Target = None,
    bias: Tensor | None = None,
    **options: Unpack[LossOfHead[No]],
) -> Tensor: ...
@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Weight,
    target: Target = None,
    bias: Tensor | None = None,
    **options: Unpack[LossOfHead[Yes]],
) -> WithStats: ...
@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Weight,
    target: Target = None,
    bias: Tensor | None = None,
    **options: Unpack[LossOfHead[bool]],
) -> Tensor | WithStats: ...
@repeatable
def linear_cross_entropy(
    hidden: Tensor,  # [..., H]
    weight: Weight,  # [V, H]
    target: Target = None,  # [...], or probabilities
    bias: Tensor | None = None,  # [V]
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
    scratch_bytes: ScratchBytes = None,
    strategy: Strategy = "auto",
    backend: Backend = "auto",
    return_stats: bool = False,
    weight_grad_out: Tensor | None = None,  # [V, H] float32 or float64
    precision: Precision = "full",
    vocab_group: ProcessGroup | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    hidden_layout: HiddenLayout = "replicated",
    reduce_hidden_grad: bool = True,
) -> Tensor | WithStats:
    r"""Cross-entropy of a linear layer's output, without storing the [tokens, vocab] logits.

    With a = (hidden @ weight.T + bias) * logit_scale, z = softcap * tanh(a / softcap) / temperature (without softcap
    a / temperature) and lse = log(sum(exp(z))), the loss of a token is::

        token_weight * ((1 - label_smoothing) * (lse - z[target]) + label_smoothing * (lse - mean(z)) + z_loss * lse**2)

    'mean' divides the sum over tokens by `normalizer`, or else by the number of tokens that are not ignored.  So it is
    `F.cross_entropy(F.linear(hidden, weight, bias), target)`, with float32 logits (float64 for float64 inputs).

    Args:
        hidden: [..., H] float32, bfloat16, float16 or float64, any strides.  The leading dimensions hold T tokens.
        weight: [V, H] like `nn.Linear`'s, of hidden's dtype.  If one of them is float32 and the other has 16 bits, the
            products take 16-bit operands; under autocast they take its dtype.  float64 goes with float64 only, and
            autocast leaves it alone.  The transpose of an [H, V] weight is read in place, except that "triton" copies
            it if V is no multiple of 8.  With precision="fp8" it may also be the result of `quantize_weight`.
        target: [...] of any integer dtype: the vocabulary index of each token, or `ignore_index`.  Or soft labels q,
            for which the loss has sum(q * (lse - z)) in place of lse - z[target]: the probabilities of all entries,
            floating point [..., V], or those of K entries, `TopK(indices, values, kind, rest="truncated")` of
            [..., K] with kind "probs" or "log_probs".  q need not sum to 1.  All tokens count then, and there is no
            ignore_index.
        labels: another name for target, by keyword.
        bias: [V] of weight's or hidden's dtype.  Without softcap -inf takes an entry out of the vocabulary.
        shift: pass True if target holds the sequence's own tokens, [..., S]: position i then predicts label i + 1, and
            the last position costs nothing.  token_weight is indexed by label and shifted with it.  Everything else,
            including the losses of reduction="none", is indexed by hidden position.  Labels and their weights are
            copied and hidden isn't; with soft labels, [..., S, V] or [..., S, K], it is the other way round.
        ignore_index: tokens with this target add no loss, and their gradients are exactly 0, whatever values their
            hidden states hold.
        reduction: "mean", "sum" or "none" (the loss then has target's shape).
        normalizer: number or 0-d tensor above 0 that "mean" divides by instead of the token count: for gradient
            accumulation, the count over all micro-batches.  If every token is ignored, a 0-d tensor may hold anything.
        token_weight: [...] factor of each token's loss.  It doesn't change what "mean" divides by.
        class_weight: [V] float32 or of weight's dtype, 0 or more: factors w of the classes, as in
            `F.cross_entropy(weight=)`.  w[target] multiplies lse - z[target], w[v] each lse - z[v] that label smoothing
            adds; z-loss has no factor.  "mean" then divides by the sum of w[target] over tokens that are not ignored
            (by 1 if that is 0), unless there is a normalizer.  With soft labels w multiplies each entry's probability,
            and "mean" divides by the number of tokens.
        label_smoothing: in [0, 1]: how much of the target's probability is spread evenly over the vocabulary.
        z_loss: 0 or more: factor of lse**2, which keeps logits from drifting.
        softcap: above 0, or None: squashes the logits smoothly into (-softcap, softcap).
        logit_scale: above 0: multiplies the logits before softcap.
        temperature: above 0: divides the logits after softcap; a number or a [...] tensor.
        check_inputs: check values on the GPU too, including a quantised weight's copies.  This waits for the device.
            On the CPU values are always checked.
        scratch_bytes: bound on the peak memory above inputs, loss and returned gradients: bytes, a text like "1GiB" or
            "300 MiB", or a float in (0, 1], that part of the float32 logits (4 * T * V bytes).  Default: 256 MiB or an
            eighth of the float32 logits, whichever is more, and at least what one chunk needs; without gradients 64 MiB
            for "triton", and what chunks of 2048 tokens need for precision="fp8".
        strategy: "stash" does 3 matrix products: "triton" keeps the logits' exponentials until backward, as far as it
            can in the memory of the weight's gradient; "plain" computes gradients in forward, chunk by chunk of tokens.
            "recompute" does 4 products in less memory: backward computes the logits again.  "auto" is the fastest that
            fits scratch_bytes; with "triton" that may be one strategy for some tokens and the other for the rest.  With
            "plain" and reduction="none", gradients of weight and bias always take "recompute".
        backend: "triton" (kernels for NVIDIA GPUs from Ampere on, bfloat16 and float16), "plain" (PyTorch's own matrix
            products) or "auto": the first of these that can run the call.  Products in float32 or float64 take "plain".
        return_stats: also return per-token statistics (`LinearCrossEntropyStats`), without gradients.  For an lse with
            a gradient use `linear_log_probs`.
        weight_grad_out: [V, H] float32 (float64 if weight is), contiguous: backward adds the weight's gradient to it,
            and leaves weight.grad alone.  Use it to accumulate a float32 main gradient over micro-batches.
        precision: "full": products in the inputs' dtype.  "fp8": an approximation by three products of numbers that are
            quantised to FP8 in blocks, as in `fp8_linear`, chunk by chunk of tokens, with logits in bfloat16; strategy
            must not be "recompute".  Backend "triton" then needs compute capability 9.0; "plain" emulates the same on
            any device by products of the dequantised numbers.
        vocab_group: the process group over whose ranks the vocabulary is sharded (tensor parallelism).  Each rank
            passes its rows of weight, bias and weight_grad_out.  Everything else, including targets and class_weight,
            is for the whole vocabulary and the same on each rank; so is the loss, to the bit.  Of soft labels for all
            entries a rank passes its columns, [..., V_local], as many as its rows of weight.
            DTensors on a mesh of one dimension need no group: a weight with Shard(0), such labels with Shard(-1),
            hidden states with Replicate() or with their tokens sharded.  strategy="stash" with precision="full" raises.
            See the guide docs/guides/vocab_parallel.md.
        vocab_start: index of this rank's first row.  By default the rows are split as torch.chunk splits them: all
            ranks but the last ones have equally many.  Shards may be uneven or empty.
        vocab_size: size of the whole vocabulary, without padding; later rows are left out and get gradients of 0.
            Default: the number of rows of all ranks, each of which must then have the same number.
        hidden_layout: "replicated": each rank has all tokens.  "sequence": each has a part of the tokens, along one
            dimension of hidden, in the order of the ranks; the targets are those of all tokens.
        reduce_hidden_grad: if False, hidden's gradient is only the part that comes from this rank's rows, and the
            caller adds up the parts of all ranks.

    Gradients are those of hidden, weight and bias.  Every other tensor must not require one: pass it detached.

    Returns:
        The loss in float32 (float64 for float64 inputs), 0-d or of target's shape; with return_stats `(loss,
        LinearCrossEntropyStats)`.  If every token is ignored, "mean" is 0 with zero gradients.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape, device, range or option is wrong; scratch_bytes is too small (the message says what
            suffices); or, on the CPU (with check_inputs also on the GPU), a target is neither ignore_index nor in
            [0, V), or a temperature or normalizer is not above 0.  On the GPU without check_inputs such a target makes
            its token's loss, and the gradients that it enters, NaN.
        RuntimeError: the loss is differentiated twice, the call is inside a torch.func transform, or a weight has
            changed since it was quantised (checked whenever values are).

    Memory: `onchip plan` prints it, with `--precision fp8` for precision="fp8"; `scratch_parts` of
    `onchip.vocab.memory` ("plain"), `onchip.vocab.triton.memory` and `onchip.vocab.fp8.memory` (precision="fp8") are
    the formulas.  In float32 it is about 4 * chunk * V bytes for "stash" and 4 * token_chunk * vocab_chunk for
    "recompute"; for "triton" about 4 * T * H where T <= H.

    Example:
        >>> import torch
        >>> from onchip.torch import linear_cross_entropy
        >>> hidden = torch.randn(2, 8, 16, requires_grad=True)
        >>> weight = torch.randn(100, 16, requires_grad=True)
        >>> target = torch.randint(100, (2, 8))
        >>> loss = linear_cross_entropy(hidden, weight, target)
        >>> loss.backward()
        >>> weight.grad.shape
        torch.Size([100, 16])

    Sources: 'stash' is the chunked loss of Liger Kernel (arXiv:2410.10989), 'recompute' that of Cut Cross-Entropy
    (arXiv:2411.09009) without its gradient filter, which makes it exact.
    """
    _, target = one_target(OP, target, labels)
    soft, matrix = is_soft(target, hidden), weight.weight if isinstance(weight, QuantizedWeight) else weight
    sharding = Sharding(vocab_group, vocab_start, vocab_size, hidden_layout, reduce_hidden_grad)
    layer: dict[str, Any] = {"hidden": hidden, "weight": matrix, "bias": bias}
    by_entry = {"target": target} if soft and isinstance(target, Tensor) else {}
    shards = WHOLE
    if sharding.there(layer | by_entry):
        rows = {"weight": matrix, "bias": bias, "weight_grad_out": weight_grad_out, **by_entry}
        of_tokens = target.indices if isinstance(target, TopK) else target
        parts, found = localized(OP, sharding, rows, {"hidden": hidden}, tokens=of_tokens, last=("target",))
        layer, shards = {x: parts[x] for x in layer}, found or WHOLE
        hidden, matrix, bias = layer.values()
        target, weight_grad_out = parts.get("target", target), parts["weight_grad_out"]
    tau = temperature_tensor(OP, temperature)
    tensors = check_label_tensors(OP, target, layer, token_weight, class_weight, tau, soft=soft)
    shapes = shapes_of(tensors)
    if shards.there:
        shapes = shards.whole(shards.whole(shapes, ("weight", "bias"), ("hidden",)), tuple(by_entry), dim=-1)
    topk.check_loss_shapes(OP, "target", shapes, "hidden", soft=soft)
    leading = shapes["hidden"][:-1]
    check_class_weight(OP, tensors, "weight")
    options = options_of(
        LinearCrossEntropyOptions,
        shift=shift,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=1.0 if isinstance(temperature, Tensor) else temperature,
        check_inputs=check_inputs,
        scratch_bytes=scratch_in_bytes(OP, scratch_bytes, math.prod(leading) * matrix.shape[0]),
        strategy=strategy,
        return_stats=return_stats,
        precision=precision,
    )
    _check_options(options, leading, shards, soft=soft)
    dtype = product_dtype(OP, tensors)
    normalizer = check_normalizer(OP, normalizer, reduction, "hidden", hidden)
    check_weight_grad_out(OP, weight_grad_out, matrix)
    fp8_op.check_dtypes(weight, precision, dtype)
    copied, length = 0, None
    if shift and soft:
        length = leading[-1]
        hidden, target, token_weight, tau = _without_last(hidden, target, token_weight, tau)
        leading = (*leading[:-1], max(0, length - 1))
        # Hidden's gradient is made of these positions first.
        copied = hidden.numel() * hidden.element_size() if hidden.requires_grad else 0
    elif shift:
        assert isinstance(target, Tensor)
        # int64 holds every ignore_index.
        target = following(target, ignore_index, torch.int64)
        token_weight = None if token_weight is None else following(token_weight, 0, token_weight.dtype)
        copied = sum(x.numel() * x.element_size() for x in (target, token_weight) if x is not None)
    weights = token_weight, normalizer, class_weight
    given = LabelFields.of(OP, options, target, leading, *weights, dtype, soft=soft)
    chosen: str = precision
    if precision == "full":
        device = hidden.device
        refusal = layout_refusal("target", given.of_entries) or setup.refusal(device.type, device.index, dtype)
        chosen = choose_torch_backend(OP, backend, device, refusal)
    copied += copied_rows(hidden) + (copied_weight(matrix, dtype) if chosen == "triton" else 0)
    if shards.there:
        several = 1 if given.labels is None else SENT if given.kind == "dense" else given.labels.shape[-1]
        if chosen == "triton" and shards.most:
            # All ranks must make the same plan, so it leaves out what differs between them: copies, and the memory that
            # a layout of hidden states takes.
            copied = 4 * sent_numbers(math.prod(leading), several, shards)
        else:
            copied += sent_bytes(math.prod(leading), several, shards, hidden)
    call = LinearCrossEntropyCall(
        hidden=hidden,
        weight=matrix,
        bias=bias,
        token_temperature=tau,
        dtype=dtype,
        options=options,
        grads=needed(hidden, matrix, bias),
        copied=copied,
        compiled=sizes_are_symbols(hidden, matrix),
        shards=shards,
        # In FP8 ignored tokens are masked, not left out: which tokens share a scale must not depend on them.
        kernels=shards.there and chosen != "plain",
        **given._asdict(),
        weight_grad_out=weight_grad_out,
    )
    operator: Operator[Any, Any]
    arguments: Any = call
    if chosen == "fp8":
        operator, arguments = fp8_op.FP8, fp8_op.arguments_of(call, weight, backend)
    elif chosen == "triton" and (shards.rows > 0 or not shards.there):  # kernels have nothing to do in an empty shard
        operator = triton_op.KERNELS
    else:
        operator = plain_op.STASHED if call.require_memory() == "stash" else plain_op.RECOMPUTED
    # `operator(arguments)`, with one function less on the stack.
    if operator.is_plain(arguments):
        with inside_operator(hidden), operator.coming(arguments):
            made: Any = operator.forward(arguments)
        out = operator.attach(arguments, made).out
    else:
        out = operator.registered(arguments).out
    return returned(out, options, given.kind, length)


def _check_options(options: LinearCrossEntropyOptions, leading: tuple[int, ...], shards: Shards, *, soft: bool) -> None:
    """Raise for options that labels of this kind, or a sharded vocabulary, don't have."""
    stashed = options.precision == "full" and options.strategy == "stash"
    check_shift(OP, options.shift, leading, "hidden of shape [..., S, H]" if soft else "target of shape [..., S]")
    if soft:
        topk.refuse_options(OP, options)
    if soft and stashed:
        raise ValueError(f"{OP}: soft labels are computed by strategy 'recompute'; got 'stash'; pass 'auto'")
    if shards.there and stashed:
        raise ValueError(
            f"{OP}: strategy='stash' makes gradients before the ranks have exchanged their softmax; pass 'auto' or "
            "'recompute' with vocab_group"
        )
    if soft and options.shift and shards.sequence == len(leading) - 1:
        raise ValueError(
            f"{OP}: shift=True with soft labels leaves out each sequence's last hidden state, which may lie on another "
            "rank; pass hidden that isn't sharded within sequences, or the next positions' labels and a token_weight "
            "of 0 for the last position"
        )


def _without_last(
    hidden: Tensor, target: Any, token_weight: Tensor | None, tau: Tensor | None
) -> tuple[Tensor, Any, Tensor | None, Tensor | None]:
    """Views without each sequence's last position, which predicts nothing, and without its first soft labels, which
    nothing predicts, so that all of them are indexed by position."""
    if isinstance(target, TopK):
        target = target._replace(indices=target.indices[..., 1:, :], values=target.values[..., 1:, :])
    else:
        target = target[..., 1:, :]
    token_weight = None if token_weight is None else token_weight[..., 1:]
    return hidden[..., :-1, :], target, token_weight, tau if tau is None or tau.ndim == 0 else tau[..., :-1]


class LinearCrossEntropyLoss(LossModule[Result]):
    """`linear_cross_entropy` as a module without parameters: call it with hidden and weight in place of logits.

    It takes the options of `linear_cross_entropy` once; arguments that change from call to call go to `forward`.

    Example:
        >>> import torch
        >>> from onchip.torch import LinearCrossEntropyLoss
        >>> head = torch.nn.Linear(16, 100, bias=False)
        >>> criterion = LinearCrossEntropyLoss(label_smoothing=0.1)
        >>> loss = criterion(torch.randn(8, 16), head.weight, torch.randint(100, (8,)))
        >>> loss.backward()
    """

    @overload
    def __init__(self: "LinearCrossEntropyLoss[Tensor]", **options: Unpack[HeadModuleKeywords[No]]) -> None: ...
    @overload
    def __init__(self: "LinearCrossEntropyLoss[WithStats]", **options: Unpack[HeadModuleKeywords[Yes]]) -> None: ...
    @overload
    def __init__(
        self: "LinearCrossEntropyLoss[Tensor | WithStats]", **options: Unpack[HeadModuleKeywords[bool]]
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
        scratch_bytes: ScratchBytes = None,
        strategy: Strategy = "auto",
        backend: Backend = "auto",
        return_stats: bool = False,
        precision: Precision = "full",
    ) -> None:
        super().__init__(OP, LinearCrossEntropyOptions, BACKENDS, locals())

    def forward(
        self,
        hidden: Tensor,  # [..., H]
        weight: Weight,  # [V, H]
        target: Target = None,  # [...], or probabilities
        bias: Tensor | None = None,  # [V]
        *,
        labels: Target = None,
        normalizer: float | Tensor | None = None,
        token_weight: Tensor | None = None,  # [...]
        class_weight: Tensor | None = None,  # [V]
        temperature: float | Tensor | None = None,
        weight_grad_out: Tensor | None = None,  # [V, H] float32 or float64
        vocab_group: ProcessGroup | None = None,
        vocab_start: int | None = None,
        vocab_size: int | None = None,
        hidden_layout: HiddenLayout = "replicated",
        reduce_hidden_grad: bool = True,
    ) -> Result:
        """The loss, or `(loss, stats)`.  Arguments are as in `linear_cross_entropy` and override the module's."""
        keywords = self.keywords(
            normalizer=normalizer,
            token_weight=token_weight,
            class_weight=class_weight,
            temperature=temperature,
            weight_grad_out=weight_grad_out,
            vocab_group=vocab_group,
            vocab_start=vocab_start,
            vocab_size=vocab_size,
            hidden_layout=hidden_layout,
            reduce_hidden_grad=reduce_hidden_grad,
        )
        made: Any = linear_cross_entropy(hidden, weight, target, bias, labels=labels, **keywords)
        return made  # type: ignore[no-any-return]

    if TYPE_CHECKING:  # torch.nn.Module.__call__ has no types

        @typed_as(forward)
        def __call__(self, *given: Any, **options: Any) -> Any: ...
