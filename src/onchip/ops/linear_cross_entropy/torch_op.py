"""linear_cross_entropy for PyTorch: the public function and module, torch.library and autograd.

Read from the top: the public function has its inputs checked (torch_inputs.py), chooses a backend and calls one
registered operator: that of triton_op.py, or `_forward_op` here, which walks the logits in tiles (torch_tiles.py).  In
backward, autograd scales what 'stash' left behind, or calls `_backward_op`, which walks the tiles again.  The maths is
in the package's docstring.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.backends import choose_backend
from onchip.fp8.torch_operands import QuantizedWeight, check_quantized_weight
from onchip.frontend.options import require_positive
from onchip.frontend.torch_autograd import asked_for, is_plain_one, scale_stash
from onchip.frontend.torch_inputs import (
    DTYPES,
    check_normalizer,
    check_weight_grad_out,
    copied_rows,
    copied_weight,
    temperature_tensor,
)
from onchip.ops.linear_cross_entropy import fp8_op, torch_tiles, triton_op
from onchip.ops.linear_cross_entropy.spec import OP, Options
from onchip.ops.linear_cross_entropy.torch_inputs import check_tensors
from onchip.ops.linear_cross_entropy.torch_tiles import differentiable_once
from onchip.vocab import memory
from onchip.vocab.chunks import Config
from onchip.vocab.memory import Problem
from onchip.vocab.triton import plan as planning

_DEVICES = ("cpu", "cuda", "meta")
BACKENDS = ("triton", "torch")


class LinearCrossEntropyStats(NamedTuple):
    """Per-token statistics, detached; each has the target's shape, and ignored tokens hold 0 (False)."""

    lse: Tensor
    """float32: log-sum-exp of the final logits."""
    log_prob: Tensor
    """float32: log-probability of the target."""
    entropy: Tensor
    """float32: entropy of the softmax, in nats."""
    correct: Tensor
    """bool: whether the target is the argmax (the first one, where logits tie)."""


def linear_cross_entropy(
    hidden: Tensor,  # [..., H]
    weight: Tensor | QuantizedWeight,  # [V, H]
    target: Tensor,  # [...]
    bias: Tensor | None = None,  # [V]
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    token_weight: Tensor | None = None,  # [...]
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
    check_inputs: bool = False,
    scratch_bytes: int | None = None,
    strategy: str = "auto",
    backend: str = "auto",
    return_stats: bool = False,
    weight_grad_out: Tensor | None = None,  # [V, H] float32
    precision: str = "full",
) -> Any:
    r"""Cross-entropy of a linear layer's output, without storing the [tokens, vocab] logits.

    With a = (hidden @ weight.T + bias) * logit_scale, z = softcap * tanh(a / softcap) / temperature (without softcap
    a / temperature) and lse = log(sum(exp(z))), the loss of a token is::

        token_weight * ((1 - label_smoothing) * (lse - z[target]) + label_smoothing * (lse - mean(z)) + z_loss * lse**2)

    'mean' divides the sum over tokens by `normalizer`, or else by the number of tokens that are not ignored.  So it is
    `F.cross_entropy(F.linear(hidden, weight, bias), target)`, with float32 logits whatever the inputs' dtype.

    Args:
        hidden: [..., H] float32, bfloat16 or float16, any strides.  The leading dimensions hold T tokens.
        weight: [V, H] like `nn.Linear`'s, of hidden's dtype (under autocast of any of the three).  A [H, V] kernel's
            transpose is read as it lies; "triton" copies it where V is no multiple of 8.  With precision="fp8" also
            what `quantize_weight` made of one.
        target: [...] of any integer dtype: the vocabulary index of each token, or `ignore_index`.
        bias: [V] of weight's dtype.  Without softcap -inf takes an entry out of the vocabulary.
        ignore_index: tokens with this target cost no loss and leave exact zeros, whatever they hold.
        reduction: "mean", "sum" or "none" (the loss then has target's shape).
        normalizer: number or 0-d tensor above 0 that "mean" divides by instead of the token count: for gradient
            accumulation, the count over all micro-batches.  Where every token is ignored any 0-d tensor will do.  A
            constant to autograd.
        token_weight: [...] factor of each token's loss; does not change what "mean" divides by.  A constant.
        label_smoothing: in [0, 1]: the part of the target's probability that is spread evenly over the vocabulary.
        z_loss: 0 or more: factor of lse**2, which keeps logits from drifting.
        softcap: above 0, or None: squashes the logits smoothly into (-softcap, softcap).
        logit_scale: above 0: factor of the logits, before softcap.
        temperature: above 0: divides the logits, after softcap; a number, or a [...] tensor with one per token.
        check_inputs: check values on the GPU too, which synchronises, a quantised weight's copies among them.  On the
            CPU they always are.
        scratch_bytes: bound on the peak memory above inputs, loss and returned gradients.  Default: 256 MiB or an
            eighth of the float32 logits, whichever is less, and at least what one chunk needs; without gradients
            "triton" takes 64 MiB.
        strategy: "stash" does 3 products in all: backend "triton" keeps the exponentials of the logits until backward,
            in the memory of the weight's gradient and what more it needs; "torch" computes gradients in forward,
            chunk by chunk of tokens, in float32.  "recompute" computes logits again in backward, chunk by chunk of the
            vocabulary (4 products, less memory).  "auto" is the fastest that fits scratch_bytes: with "triton" as
            many tokens' exponentials as fit, with "torch" one of the two.  There, with reduction="none", a gradient of
            weight or bias is always made by "recompute".
        backend: "triton" (kernels for NVIDIA GPUs from Ampere on, bfloat16 and float16), "torch" (the framework's own
            matrix products) or "auto": the first of these that can run.
        return_stats: also return float32 per-token statistics.
        weight_grad_out: [V, H] float32, contiguous: backward adds the weight's gradient to it, and weight gets none of
            its own.  For a main gradient that is kept in float32 over micro-batches.
        precision: "full": products of the inputs' dtype.  "fp8": an approximation whose three products are of numbers
            quantised to FP8 in blocks, as `fp8_linear`'s, with logits stored in bfloat16 and tokens taken in chunks;
            strategy must not be "recompute", and scratch_bytes bounds what the chunks take.  Its backend "triton" is
            cuBLAS's FP8 products and Triton kernels, for compute capability 9.0; "torch" is the same by float32
            products of the dequantised numbers, on any device, to see what it does to a model.

    Returns:
        The float32 loss, 0-d or of target's shape; with return_stats `(loss, LinearCrossEntropyStats)`.  If every
        token is ignored, "mean" is 0 with zero gradients.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device, range or option; on the CPU (with check_inputs also on the GPU) a target that
            is neither ignore_index nor in [0, V), a temperature or normalizer that is not above 0.  On the GPU without
            check_inputs such a target makes its token's loss, and the gradients that it enters, NaN.
        RuntimeError: differentiated twice, called inside a torch.func transform, or a weight that has changed since it
            was quantised (checked as values are).

    Memory: `onchip plan` prints it, with `--precision fp8` for precision="fp8"; `scratch_parts` of
    `onchip.vocab.memory` ("torch"), `onchip.vocab.triton.memory` ("triton") and `onchip.vocab.fp8.memory`
    (precision="fp8") are the formulas.  In float32 it is about 4 * chunk * V bytes for "stash" and
    4 * token_chunk * vocab_chunk for "recompute"; for "triton" about 4 * T * H where T <= H.

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
    per_token_temperature = temperature_tensor(OP, temperature)
    options = Options(
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=1.0 if isinstance(temperature, Tensor) else temperature,
        check_inputs=check_inputs,
        scratch_bytes=scratch_bytes,
        strategy=strategy,
        return_stats=return_stats,
        precision=precision,
    )
    quantized = weight if isinstance(weight, QuantizedWeight) else None
    if quantized is not None and precision != "fp8":
        raise TypeError(f"{OP}: weight is a QuantizedWeight, which precision='fp8' alone takes; pass the weight itself")
    matrix: Tensor = weight if quantized is None else quantized.weight  # type: ignore[assignment]
    dtype = check_tensors(hidden, matrix, target, bias, token_weight, per_token_temperature)
    normalizer = check_normalizer(OP, normalizer, reduction, "hidden", hidden.device)
    check_weight_grad_out(OP, weight_grad_out, matrix)
    grads = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, matrix, bias)]
    tensors = (hidden, matrix, bias, target, token_weight, per_token_temperature, normalizer, weight_grad_out)
    if precision == "fp8":
        copies: tuple[Tensor | None, ...] = (None,) * 4
        if quantized is not None:
            check_quantized_weight(OP, quantized, fp8_op.SCALE, wanted="hidden" if grads[0] else None)
            copies = quantized[1:5]
        loss, *stats = fp8_op.forward(tensors, copies, options, backend, grads)
        return (loss, LinearCrossEntropyStats(*stats)) if return_stats else loss
    device = hidden.device.type
    refusals = {
        "triton": planning.refusal(device, hidden.device.index, dtype),
        "torch": None if device in _DEVICES else f"it runs on {', '.join(_DEVICES)} tensors, not on {device!r}",
    }
    order = ("triton", "torch") if device == "cuda" else ("torch", "triton")
    chosen = choose_backend(OP, backend, {name: refusals[name] for name in order})

    problem = _problem(
        hidden,
        matrix,
        dtype,
        grads,
        softcap=softcap,
        stats=return_stats,
        smoothing=label_smoothing > 0,
        per_token_loss=reduction == "none",
        weight_grad_out=weight_grad_out is not None,
        on_gpu=chosen == "triton",
    )
    numbers = (
        dtype,
        int(options.ignore_index),
        options.reduction,
        float(options.label_smoothing),
        float(options.z_loss),
        None if options.softcap is None else float(options.softcap),
        float(options.logit_scale),
        float(options.temperature),
        options.check_inputs,
    )
    budget = None if options.scratch_bytes is None else int(options.scratch_bytes)
    if chosen == "triton":
        config = planning.plan(problem, options.strategy, budget)
        loss, *stats = triton_op.forward(*tensors, *numbers, *config, *grads, options.return_stats)
    else:
        strategy = memory.choose_strategy(problem, options.strategy, budget)
        loss, *stats = _forward_op(*tensors, *numbers, budget, strategy, *grads, options.return_stats)
    return (loss, LinearCrossEntropyStats(*stats[:4])) if return_stats else loss


class LinearCrossEntropyLoss(torch.nn.Module):
    """`linear_cross_entropy` as a module that owns no parameter: give it hidden and weight where logits stood.

    Takes the options of `linear_cross_entropy` once; what changes from call to call goes to `forward`.

    Example:
        >>> import torch
        >>> from onchip.torch import LinearCrossEntropyLoss
        >>> head = torch.nn.Linear(16, 100, bias=False)
        >>> criterion = LinearCrossEntropyLoss(label_smoothing=0.1)
        >>> loss = criterion(torch.randn(8, 16), head.weight, torch.randint(100, (8,)))
        >>> loss.backward()
    """

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        normalizer: float | Tensor | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        temperature: float = 1.0,
        check_inputs: bool = False,
        scratch_bytes: int | None = None,
        strategy: str = "auto",
        backend: str = "auto",
        return_stats: bool = False,
        precision: str = "full",
    ) -> None:
        super().__init__()
        self.options = Options(
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            logit_scale=logit_scale,
            temperature=temperature,
            check_inputs=check_inputs,
            scratch_bytes=scratch_bytes,
            strategy=strategy,
            return_stats=return_stats,
            precision=precision,
        )
        choose_backend(OP, backend, dict.fromkeys(BACKENDS))
        self.backend = backend
        if normalizer is not None and not isinstance(normalizer, Tensor):
            require_positive(OP, "normalizer", normalizer)
        self.normalizer = normalizer

    def forward(
        self,
        hidden: Tensor,  # [..., H]
        weight: Tensor | QuantizedWeight,  # [V, H]
        target: Tensor,  # [...]
        bias: Tensor | None = None,  # [V]
        *,
        normalizer: float | Tensor | None = None,
        token_weight: Tensor | None = None,  # [...]
        temperature: float | Tensor | None = None,
        weight_grad_out: Tensor | None = None,  # [V, H] float32
    ) -> Any:
        """The loss, or `(loss, stats)`; arguments as of `linear_cross_entropy`, these overriding the module's."""
        options = vars(self.options) | ({} if temperature is None else {"temperature": temperature})
        return linear_cross_entropy(
            hidden,
            weight,
            target,
            bias,
            normalizer=self.normalizer if normalizer is None else normalizer,
            token_weight=token_weight,
            backend=self.backend,
            weight_grad_out=weight_grad_out,
            **options,
        )

    def extra_repr(self) -> str:
        """The options that differ from their defaults."""
        defaults = vars(Options())
        return ", ".join(f"{k}={v!r}" for k, v in vars(self.options).items() if v != defaults[k])


def _problem(
    hidden: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    grads: Sequence[bool],
    *,
    softcap: float | None,
    stats: bool,
    smoothing: bool = False,
    per_token_loss: bool = False,
    weight_grad_out: bool = False,
    compacted: bool | None = None,
    on_gpu: bool = False,
) -> Problem:
    vocab, hidden_size = weight.shape
    device = "cpu" if hidden.device.type == "cpu" and not on_gpu else "cuda"
    return Problem(
        tokens=hidden.numel() // hidden_size,
        hidden=hidden_size,
        vocab=vocab,
        dtype=DTYPES[dtype],
        hidden_dtype=DTYPES[hidden.dtype],
        weight_dtype=DTYPES[weight.dtype],
        device=device,
        grad_hidden=grads[0],
        grad_weight=grads[1],
        grad_bias=grads[2],
        per_token_loss=per_token_loss,
        softcap=softcap is not None,
        smoothing=smoothing,
        stats=stats,
        weight_grad_out=weight_grad_out,
        # Before the targets are read, the worst case.
        compacted=device == "cpu" if compacted is None else compacted,
        copied=copied_rows(hidden) + (copied_weight(weight, dtype) if on_gpu else 0),
    )


# ------------------------------------------------------------------------------------------------ registered operators


# The arguments of both operators; `_Arguments` gives them their shapes and Python names, in the same order.
# torch.compile's cache on disk knows an operator by its name alone: a release that changes a schema must rename it.
_SCHEMA = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? token_weight, Tensor? token_temperature, "
    "Tensor? normalizer, Tensor? weight_grad_out, ScalarType dtype, int ignore_index, str reduction, "
    "float label_smoothing, float z_loss, float? softcap, float logit_scale, float temperature, bool check_inputs, "
    "int? scratch_bytes, str strategy, bool grad_hidden, bool grad_weight, bool grad_bias, bool stats"
)


class _Arguments(NamedTuple):
    """The arguments of `_forward_op`, in order."""

    hidden: Tensor  # [..., H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    target: Tensor  # [...]
    token_weight: Tensor | None  # [...]
    token_temperature: Tensor | None  # [...] or []
    normalizer: Tensor | None  # []
    weight_grad_out: Tensor | None  # [V, H] float32; used in backward
    dtype: torch.dtype
    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    temperature: float
    check_inputs: bool
    scratch_bytes: int | None
    strategy: str
    grad_hidden: bool
    grad_weight: bool
    grad_bias: bool
    stats: bool

    @property
    def grads(self) -> tuple[bool, bool, bool]:
        return self.grad_hidden, self.grad_weight, self.grad_bias

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """What the gradients of hidden, weight and bias are returned in."""
        return self.hidden.dtype, self.weight.dtype, (self.weight if self.bias is None else self.bias).dtype

    def prepare(self, *, check_values: bool) -> tuple[Tensor, torch_tiles.Head, torch_tiles.Tokens]:
        """Hidden states as [T, H], the head and the tokens, in the dtype of the products."""
        tokens = torch_tiles.select_tokens(
            self.target,
            self.weight.shape[0],
            self.token_weight,
            self.token_temperature,
            self.normalizer,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            temperature=self.temperature,
            check_values=check_values,
        )
        head = torch_tiles.Head(
            self.weight.to(self.dtype),
            # In the products' dtype first, as F.linear does under autocast.
            None if self.bias is None else self.bias.to(self.dtype).float(),
            self.label_smoothing,
            self.z_loss,
            self.softcap,
            self.logit_scale,
        )
        return self.hidden.reshape(-1, self.hidden.shape[-1]).to(self.dtype), head, tokens

    def plan(self, strategy: str, tokens: torch_tiles.Tokens) -> Config:
        compacted = tokens.index is not None
        problem = _problem(
            self.hidden,
            self.weight,
            self.dtype,
            self.grads,
            softcap=self.softcap,
            stats=self.stats,
            weight_grad_out=self.weight_grad_out is not None,
            compacted=compacted,
        )
        return memory.plan(problem, strategy, self.scratch_bytes)


@torch.library.custom_op(
    "onchip::linear_cross_entropy_torch", mutates_args=(), schema=f"({_SCHEMA}) -> ({', '.join(['Tensor'] * 9)})"
)
def _forward_op(*args: Any) -> tuple[Tensor, ...]:
    """Return loss, lse, log_prob, entropy, correct, and what 'stash' keeps: the gradients of hidden, weight and bias in
    float32, for an upstream gradient of 1.  What isn't asked for is empty, and so is the last, the link.
    """
    a = _Arguments(*args)
    shape = a.target.shape
    # An operator runs below autocast's dispatch but not outside its reach: products in here would be cast again.
    with torch.autocast(a.hidden.device.type, enabled=False):
        hidden, head, tokens = a.prepare(check_values=a.check_inputs)
        stashed = [hidden.new_empty(0, dtype=torch.float32) for _ in range(3)]
        if a.strategy == "stash":
            config = a.plan("stash", tokens)
            softmax, *made = torch_tiles.stash(hidden, head, tokens, config, grads=a.grads, stats=a.stats)
            stashed = [blank if x is None else x for x, blank in zip(made, stashed, strict=True)]
            if a.grad_hidden:
                stashed[0] = stashed[0].view(a.hidden.shape)
        else:
            softmax = torch_tiles.forward_only(hidden, head, tokens, a.plan("forward", tokens), stats=a.stats)
        loss = tokens.spread(softmax.loss(head, tokens), shape)
        if a.reduction != "none":
            loss = loss.sum() * tokens.inverse_count
        return (
            loss,
            tokens.spread(softmax.lse, shape),
            tokens.spread(softmax.log_prob(tokens), shape),
            tokens.spread(softmax.entropy(), shape) if a.stats else hidden.new_empty(0, dtype=torch.float32),
            tokens.spread(softmax.correct(tokens), shape) if a.stats else hidden.new_empty(0, dtype=torch.bool),
            *stashed,
            loss.new_empty(0),
        )


@_forward_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    a = _Arguments(*args)
    per_token = [a.target.new_empty(a.target.shape, dtype=torch.float32) for _ in range(4)]
    blank = [a.hidden.new_empty(0, dtype=torch.float32) for _ in range(5)]
    stash = a.strategy == "stash"

    def kept(x: Tensor | None, wanted: bool, blank: Tensor) -> Tensor:
        return x.new_empty(x.shape, dtype=torch.float32) if x is not None and stash and wanted else blank

    return (
        per_token[0] if a.reduction == "none" else a.hidden.new_empty((), dtype=torch.float32),
        per_token[1],
        per_token[2],
        per_token[3] if a.stats else blank[3],
        a.target.new_empty(a.target.shape if a.stats else 0, dtype=torch.bool),
        kept(a.hidden, a.grad_hidden, blank[0]),
        kept(a.weight, a.grad_weight, blank[1]),
        kept(a.bias, a.grad_bias, blank[2]),
        blank[4],
    )


@torch.library.custom_op(
    "onchip::linear_cross_entropy_torch_backward",
    mutates_args=("weight_grad_out",),
    schema=(
        "(Tensor grad_loss, Tensor lse, Tensor log_prob, "
        f"{_SCHEMA.replace('Tensor? weight_grad_out', 'Tensor(a!)? weight_grad_out')}) -> (Tensor, Tensor, Tensor)"
    ),
)
def _backward_op(grad_loss: Tensor, lse: Tensor, log_prob: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Return the gradients of hidden, weight and bias by 'recompute'; what isn't asked for is empty."""
    a = _Arguments(*args)
    with torch.autocast(a.hidden.device.type, enabled=False):
        hidden, head, tokens = a.prepare(check_values=False)
        scale = tokens.inverse_count
        if a.reduction == "none":
            tokens = replace(tokens, weight=tokens.weight * tokens.upstream(grad_loss))
        else:
            scale = scale * grad_loss
        made = torch_tiles.recompute(
            hidden,
            head,
            tokens,
            a.plan("recompute", tokens),
            lse=lse.reshape(-1),
            log_prob=log_prob.reshape(-1),
            scale=scale,
            grads=a.grads,
            dtypes=a.dtypes,
            weight_grad_out=a.weight_grad_out,
        )
        shapes = (a.hidden.shape, a.weight.shape, a.weight.shape[:1])
        return tuple(hidden.new_empty(0) if x is None else x.view(s) for x, s in zip(made, shapes, strict=True))


@_backward_op.register_fake
def _(grad_loss: Tensor, lse: Tensor, log_prob: Tensor, *args: Any) -> tuple[Tensor, ...]:
    a = _Arguments(*args)
    returned = (a.grad_hidden, a.grad_weight and a.weight_grad_out is None, a.grad_bias)
    return tuple(
        x.new_empty(x.shape) if x is not None and wanted else a.hidden.new_empty(0)
        for x, wanted in zip((a.hidden, a.weight, a.bias), returned, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    a = _Arguments(*inputs)
    _, lse, log_prob, _, _, *stashed, link = output
    ctx.mark_non_differentiable(*output[1:-1])
    ctx.set_materialize_grads(False)  # or autograd would make a [V, H] of zeros for each of them
    ctx.stash = None
    # Not saved as a tensor: other micro-batches may add to it before this one does, and that is no mistake.
    ctx.weight_grad_out = a.weight_grad_out
    if a.strategy == "stash":
        # Neither hidden nor weight is kept alive: the stash is enough, with the target to tell ignored tokens by.
        ctx.save_for_backward(link, *stashed, a.target)
        ctx.stash = _Stash(a.grads, a.dtypes, a.reduction, a.ignore_index)
    else:
        ctx.save_for_backward(link, lse, log_prob, *a[:7])
        ctx.options = a[8:]


class _Stash(NamedTuple):
    """What must be known of a call to use its stash."""

    grads: Sequence[bool]
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    reduction: str
    ignore_index: int


def _backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    nothing = (None,) * (len(_Arguments._fields) - 3)
    if grad_loss is None:
        return (None, None, None, *nothing)
    grads: list[Tensor | None]
    link, *saved = ctx.saved_tensors
    if ctx.stash is not None:
        stash = ctx.stash._replace(grads=asked_for(ctx, ctx.stash.grads))
        grads = _scale_stash(stash, saved, grad_loss, ctx.weight_grad_out)
    else:
        lse, log_prob, *tensors = saved
        a = _Arguments._make((*tensors, ctx.weight_grad_out, *ctx.options))
        to_hidden, to_weight, to_bias = asked_for(ctx, a.grads)
        a = a._replace(grad_hidden=to_hidden, grad_weight=to_weight, grad_bias=to_bias)
        made = _backward_op(grad_loss, lse, log_prob, *a)
        grads = [x if wanted else None for x, wanted in zip(made, a.grads, strict=True)]
        if a.weight_grad_out is not None:
            grads[1] = None
    return (*differentiable_once(grads, grad_loss, link), *nothing)


def _scale_stash(
    stash: _Stash, saved: Sequence[Tensor], grad_loss: Tensor, weight_grad_out: Tensor | None
) -> list[Tensor | None]:
    """The stashed gradients times the upstream gradient, in their parameters' dtypes."""
    if stash.reduction == "none":  # then only hidden has a gradient here: choose_strategy sees to it
        if not stash.grads[0]:
            return [None] * 3
        grad_hidden, _, _, target = saved
        upstream = grad_loss.float().masked_fill(target == stash.ignore_index, 0)
        return [scale_stash(grad_hidden, upstream[..., None], stash.dtypes[0]), None, None]
    as_is = is_plain_one(grad_loss)
    wanted = list(stash.grads)
    if weight_grad_out is not None and wanted[1]:
        with torch.no_grad():
            weight_grad_out.addcmul_(saved[1], grad_loss.float())
        wanted[1] = False
    return [
        scale_stash(stashed, None if as_is else grad_loss, dtype) if want else None
        for stashed, dtype, want in zip(saved[:3], stash.dtypes, wanted, strict=True)
    ]


_forward_op.register_autograd(_backward, setup_context=_setup_context)
