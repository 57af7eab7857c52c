"""cross_entropy for PyTorch: the public function and module, torch.library and autograd.

Read from the top: the public function has its inputs checked (torch_inputs.py) and calls a backend's registered
operator: that of triton_op.py, or `_forward_op` here, which walks the rows in chunks (torch_rows.py).  In
backward, autograd calls `_backward_op`, which walks them again into a new tensor, or with inplace_backward
`torch_rows.backward` over the logits themselves.  The maths is in the package's docstring.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.backends import choose_backend
from onchip.frontend.options import require_positive
from onchip.frontend.torch_autograd import differentiable_once, graph_is_kept
from onchip.frontend.torch_inputs import check_normalizer, temperature_tensor
from onchip.ops.cross_entropy import triton_op
from onchip.ops.cross_entropy.spec import OP, Options
from onchip.ops.cross_entropy.torch_inputs import check_inplace, check_tensors
from onchip.vocab.rows import torch as torch_rows
from onchip.vocab.rows.arguments import Arguments

_DEVICES = ("cpu", "cuda", "meta")
# Best first: the order in which "auto" asks them.
BACKENDS = ("triton", "torch")


class CrossEntropyStats(NamedTuple):
    """Per-token statistics, detached; each has the target's shape, and ignored tokens hold 0 (False)."""

    lse: Tensor
    """float32: log-sum-exp of the final logits."""
    log_prob: Tensor
    """float32: log-probability of the target."""
    entropy: Tensor
    """float32: entropy of the softmax, in nats."""
    correct: Tensor
    """bool: whether the target is the argmax (the first one, where logits tie)."""


def cross_entropy(
    logits: Tensor,  # [..., V]
    target: Tensor,  # [...]
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
    return_stats: bool = False,
    inplace_backward: bool = False,
    backend: str = "auto",
    scratch_bytes: int | None = None,
) -> Any:
    r"""Cross-entropy of logits that exist already, in little memory beside them.

    With a = logits * logit_scale, z = softcap * tanh(a / softcap) / temperature (without softcap a / temperature) and
    lse = log(sum(exp(z))), the loss of a token is::

        token_weight * ((1 - label_smoothing) * (lse - z[target]) + label_smoothing * (lse - mean(z)) + z_loss * lse**2)

    'mean' divides the sum over tokens by `normalizer`, or else by the number of tokens that are not ignored.  So it is
    `F.cross_entropy(logits.float().flatten(0, -2), target.flatten())`, without a float32 copy of the logits.  The
    vocabulary is the last dimension, whatever the number of dimensions.

    Args:
        logits: [..., V] float32, bfloat16 or float16, any strides, never copied as a whole.  The leading dimensions
            hold T tokens.  -inf takes an entry out of the vocabulary (without softcap, which makes it -softcap).
        target: [...] of any integer dtype: the vocabulary index of each token, or `ignore_index`.
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
        check_inputs: check values on the GPU too, which synchronises.  On the CPU they always are.
        return_stats: also return float32 per-token statistics.
        inplace_backward: let backward write the gradient over the logits: **after it they are gone**.  The logits must
            be computed (no leaf or view of one, nor expanded).  What else has saved them for its backward raises there
            instead of using the wrong numbers.  A graph that is kept (retain_graph, create_graph) leaves them alone
            and gets a new tensor.  Not inside torch.compile.
        backend: "triton" (kernels for NVIDIA GPUs from Ampere on, which read the logits once), "torch" (the framework's
            own operations) or "auto": the first of these that can run the call.
        scratch_bytes: bound on the peak memory above logits, loss and returned gradient.  Default: 256 MiB or an eighth
            of the float32 logits, whichever is less, and at least what a useful chunk of rows needs.  Backend "triton"
            needs little, whatever the bound.

    Returns:
        The float32 loss, 0-d or of target's shape; with return_stats `(loss, CrossEntropyStats)`.  If every token is
        ignored, "mean" is 0 with zero gradients.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device, range or option, a scratch_bytes below one row's (it names that), logits that
            can't be overwritten; on the CPU (with check_inputs also on the GPU) a target that is neither ignore_index
            nor in [0, V), a temperature or normalizer that is not above 0.  On the GPU without check_inputs such a
            target makes its token's loss and gradient NaN.
        RuntimeError: differentiated twice, called inside a torch.func transform, or inplace_backward inside
            torch.compile.

    Memory: forward keeps 8 bytes per token, and logits and target by reference.  `scratch_parts` of
    `onchip.vocab.rows.memory` is the formula of the peak: about 4 * rows * V bytes for chunks of so many rows,
    twice that with return_stats or softcap; with backend "triton" 48 bytes per token.  The gradient is one tensor of
    logits' dtype, or none with inplace_backward; "triton" makes it in forward already, unless reduction is "none".

    Example:
        >>> import torch
        >>> from onchip.torch import cross_entropy
        >>> hidden = torch.randn(2, 8, 16, requires_grad=True)
        >>> logits = hidden @ torch.randn(16, 100)
        >>> loss = cross_entropy(logits, torch.randint(100, (2, 8)), inplace_backward=True)
        >>> loss.backward()
        >>> hidden.grad.shape
        torch.Size([2, 8, 16])

    Sources: the gradient from the log-sum-exp alone, and over the logits' memory, as in Liger Kernel
    (arXiv:2410.10989); z-loss from PaLM (arXiv:2204.02311), softcap from Gemma 2 (arXiv:2408.00118).
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
        return_stats=return_stats,
        inplace_backward=inplace_backward,
        scratch_bytes=scratch_bytes,
    )
    check_tensors(logits, target, token_weight, per_token_temperature)
    normalizer = check_normalizer(OP, normalizer, reduction, "logits", logits.device)
    device = logits.device.type
    refusals = {
        "torch": None if device in _DEVICES else f"it runs on {', '.join(_DEVICES)} tensors, not on {device!r}",
        "triton": triton_op.refusal(logits),
    }
    chosen = choose_backend(OP, backend, {name: refusals[name] for name in BACKENDS})
    if inplace_backward:
        check_inplace(logits)
    forward = triton_op.forward if chosen == "triton" else _forward_op
    loss, *stats = forward(
        logits,
        target,
        token_weight,
        per_token_temperature,
        normalizer,
        int(options.ignore_index),
        options.reduction,
        float(options.label_smoothing),
        float(options.z_loss),
        None if options.softcap is None else float(options.softcap),
        float(options.logit_scale),
        float(options.temperature),
        options.check_inputs,
        None if options.scratch_bytes is None else int(options.scratch_bytes),
        options.return_stats,
        options.inplace_backward,
        torch.is_grad_enabled() and logits.requires_grad,
    )
    return (loss, CrossEntropyStats(*stats[:4])) if return_stats else loss


class CrossEntropyLoss(torch.nn.Module):
    """`cross_entropy` as a module, in the place of `torch.nn.CrossEntropyLoss` on logits [..., V].

    Takes the options of `cross_entropy` once; what changes from call to call goes to `forward`.  Beside what
    `torch.nn.CrossEntropyLoss` does: the vocabulary is the last dimension, class weights and targets of probabilities
    are not supported, and the mean of no tokens is 0, not NaN.

    Example:
        >>> import torch
        >>> from onchip.torch import CrossEntropyLoss
        >>> criterion = CrossEntropyLoss(label_smoothing=0.1)
        >>> loss = criterion(torch.nn.Linear(16, 100)(torch.randn(8, 16)), torch.randint(100, (8,)))
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
        return_stats: bool = False,
        inplace_backward: bool = False,
        backend: str = "auto",
        scratch_bytes: int | None = None,
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
            return_stats=return_stats,
            inplace_backward=inplace_backward,
            scratch_bytes=scratch_bytes,
        )
        choose_backend(OP, backend, dict.fromkeys(BACKENDS))
        self.backend = backend
        if normalizer is not None and not isinstance(normalizer, Tensor):
            require_positive(OP, "normalizer", normalizer)
        self.normalizer = normalizer

    def forward(
        self,
        logits: Tensor,  # [..., V]
        target: Tensor,  # [...]
        *,
        normalizer: float | Tensor | None = None,
        token_weight: Tensor | None = None,  # [...]
        temperature: float | Tensor | None = None,
    ) -> Any:
        """The loss, or `(loss, stats)`; arguments as of `cross_entropy`, these overriding the module's."""
        options = vars(self.options) | ({} if temperature is None else {"temperature": temperature})
        return cross_entropy(
            logits,
            target,
            normalizer=self.normalizer if normalizer is None else normalizer,
            token_weight=token_weight,
            backend=self.backend,
            **options,
        )

    def extra_repr(self) -> str:
        """The options that differ from their defaults."""
        defaults = vars(Options())
        return ", ".join(f"{k}={v!r}" for k, v in vars(self.options).items() if v != defaults[k])


# ------------------------------------------------------------------------------------------------ registered operators


# The arguments of both operators; `Arguments` gives them their shapes and Python names, in the same order.
# torch.compile's cache on disk knows an operator by its name alone: a release that changes a schema must rename it.
_SCHEMA = (
    "Tensor logits, Tensor target, Tensor? token_weight, Tensor? token_temperature, Tensor? normalizer, "
    "int ignore_index, str reduction, float label_smoothing, float z_loss, float? softcap, float logit_scale, "
    "float temperature, bool check_inputs, int? scratch_bytes, bool stats, bool inplace, bool grad"
)


@torch.library.custom_op(
    "onchip::cross_entropy_torch_forward",
    mutates_args=(),
    schema=f"({_SCHEMA}) -> ({', '.join(['Tensor'] * 6)})",
)
def _forward_op(*args: Any) -> tuple[Tensor, ...]:
    """Return loss, lse, log_prob, entropy, correct and the link; entropy and correct are empty unless asked for."""
    a = Arguments(*args)
    shape = a.target.shape
    head, tokens = a.prepare(check_values=a.check_inputs)
    softmax = torch_rows.forward(a.logits, head, tokens, a.chunk(tokens), stats=a.stats)
    loss = tokens.spread(softmax.loss(head, tokens), shape)
    if a.reduction != "none":
        loss = loss.sum() * tokens.inverse_count
    return (
        loss,
        tokens.spread(softmax.lse, shape),
        tokens.spread(softmax.log_prob(tokens), shape),
        tokens.spread(softmax.entropy(), shape) if a.stats else loss.new_empty(0),
        tokens.spread(softmax.correct(tokens), shape) if a.stats else loss.new_empty(0, dtype=torch.bool),
        loss.new_empty(0),
    )


@_forward_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    a = Arguments(*args)
    shape = a.target.shape
    per_token = [a.logits.new_empty(shape, dtype=torch.float32) for _ in range(4)]
    return (
        per_token[0] if a.reduction == "none" else a.logits.new_empty((), dtype=torch.float32),
        per_token[1],
        per_token[2],
        per_token[3] if a.stats else a.logits.new_empty(0, dtype=torch.float32),
        a.logits.new_empty(shape if a.stats else 0, dtype=torch.bool),
        a.logits.new_empty(0, dtype=torch.float32),
    )


@torch.library.custom_op(
    "onchip::cross_entropy_torch_backward",
    mutates_args=(),
    schema=f"(Tensor grad_loss, Tensor lse, Tensor log_prob, {_SCHEMA}) -> Tensor",
)
def _backward_op(grad_loss: Tensor, lse: Tensor, log_prob: Tensor, *args: Any) -> Tensor:
    """Return the gradient of the logits, contiguous whatever their strides."""
    a = Arguments(*args)
    out = torch.empty(a.logits.shape, dtype=a.logits.dtype, device=a.logits.device)
    _write_gradient(a, grad_loss, lse, log_prob, out)
    return out


@_backward_op.register_fake
def _(grad_loss: Tensor, lse: Tensor, log_prob: Tensor, *args: Any) -> Tensor:
    a = Arguments(*args)
    return torch.empty(a.logits.shape, dtype=a.logits.dtype, device=a.logits.device)


def _write_gradient(a: Arguments, grad_loss: Tensor, lse: Tensor, log_prob: Tensor, out: Tensor) -> None:
    head, tokens = a.prepare(check_values=False)
    upstream = tokens.inverse_count
    if a.reduction == "none":
        tokens = replace(tokens, weight=tokens.weight * tokens.upstream(grad_loss))
    else:
        upstream = upstream * grad_loss
    torch_rows.backward(
        a.logits,
        head,
        tokens,
        a.chunk(tokens),
        lse=lse.reshape(-1),
        log_prob=log_prob.reshape(-1),
        upstream=upstream,
        out=out,
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    a = Arguments(*inputs)
    _, lse, log_prob, *_, link = output
    ctx.mark_non_differentiable(*output[1:-1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(link, lse, log_prob, *a[:5])
    ctx.options = a[5:]


def _backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    nothing = (None,) * (len(Arguments._fields) - 1)
    if grad_loss is None:
        return (None, *nothing)
    link, lse, log_prob, *tensors = ctx.saved_tensors
    a = Arguments._make((*tensors, *ctx.options))
    if a.inplace and not graph_is_kept():
        # Detached, it still counts as a change of the logits: whatever saved them for its own backward will raise.
        gradient = a.logits.detach()
        with torch.no_grad():
            _write_gradient(a._replace(logits=gradient), grad_loss, lse, log_prob, gradient)
    else:
        gradient = _backward_op(grad_loss, lse, log_prob, *a)
    return (*differentiable_once(OP, [gradient], grad_loss, link), *nothing)


_forward_op.register_autograd(_backward, setup_context=_setup_context)
