"""linear_log_probs for PyTorch: the public function, torch.library and autograd.

Read from the top: the public function has its inputs checked (torch_inputs.py), chooses a backend and calls its
registered operator: that of triton_op.py, or `_forward_op` here, which walks the logits in tiles (torch_walks.py) and
keeps a few numbers per token.  In backward, autograd calls `_backward_op`, which walks the tiles again.  The maths is
in the package's docstring.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.backends import choose_backend
from onchip.frontend.torch_autograd import differentiable_once
from onchip.frontend.torch_inputs import DTYPES, copied_rows, copied_weight, temperature_tensor
from onchip.ops.linear_log_probs import torch_walks, triton_op
from onchip.ops.linear_log_probs.spec import OP, Options
from onchip.ops.linear_log_probs.torch_inputs import check_tensors
from onchip.vocab import memory
from onchip.vocab.memory import Problem
from onchip.vocab.torch.tiles import Head, operand_dtype
from onchip.vocab.triton import plan as planning

_DEVICES = ("cpu", "cuda", "meta")
BACKENDS = ("triton", "torch")  # "auto" takes the first that can run


class LogProbs(NamedTuple):
    """What `linear_log_probs` returns if more than log_prob was asked for; None is what wasn't."""

    log_prob: Tensor
    """[...] or [..., K] float32: log-probability of each id; 0 for ignored ones."""
    entropy: Tensor | None
    """[...] float32: entropy of the softmax, in nats; 0 for tokens whose ids are all ignored.  Differentiable."""
    lse: Tensor | None
    """[...] float32: log-sum-exp of the final logits; 0 for such tokens.  Differentiable."""
    top1: Tensor | None
    """[...] int64: the vocabulary index of the largest logit (the first one, where they tie); -1 for such tokens."""


def linear_log_probs(
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V, H]
    ids: Tensor,  # [...] or [..., K]
    bias: Tensor | None = None,  # [V]
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    lse: bool = False,
    top1: bool = False,
    check_inputs: bool = False,
    scratch_bytes: int | None = None,
    backend: str = "auto",
) -> Any:
    r"""Log-probabilities of given ids under a linear layer's softmax, without storing the [tokens, vocab] logits.

    With a = (hidden @ weight.T + bias) * logit_scale, z = softcap * tanh(a / softcap) / temperature (without softcap
    a / temperature) and p = softmax(z), token by token::

        log_prob = z[ids] - lse,    lse = log(sum(exp(z))),    entropy = -sum(p * log(p))

    So log_prob is `F.linear(hidden, weight, bias).log_softmax(-1).gather(-1, ids[..., None])[..., 0]`, with float32
    logits whatever the inputs' dtype.  log_prob, entropy and lse are differentiable with respect to hidden, weight and
    bias, with any upstream gradient for each number of theirs.

    Args:
        hidden: [..., H] float32, bfloat16 or float16, any strides.  The leading dimensions hold T tokens.
        weight: [V, H] like `nn.Linear`'s, of hidden's dtype (under autocast of any of the three).  A [H, V] kernel's
            transpose is read as it lies; "triton" copies it where V is no multiple of 8.
        ids: [...] or [..., K] of any integer dtype: one or K vocabulary indices for each token, or `ignore_index`.
            The same id may occur several times.
        bias: [V] of weight's dtype.  Without softcap -inf takes an entry out of the vocabulary.
        ignore_index: an id of this value has log_prob 0 and no gradient.  A token whose ids all have it costs nothing
            on the CPU, leaves exact zeros (top1: -1) and may hold anything.
        softcap: above 0, or None: squashes the logits smoothly into (-softcap, softcap).
        logit_scale: above 0: factor of the logits, before softcap.
        temperature: above 0: divides the logits, after softcap; a number, or a [...] tensor with one per token, which
            is a constant to autograd.
        entropy: also return the entropy of each token's softmax, in nats.
        lse: also return each token's log-sum-exp.
        top1: also return the index of each token's largest logit.
        check_inputs: check values on the GPU too, which synchronises.  On the CPU they always are.
        scratch_bytes: bound on the peak memory above inputs, results and returned gradients.  Default: 256 MiB or an
            eighth of the float32 logits, whichever is less, and at least what one chunk needs.
        backend: "triton" (kernels for NVIDIA GPUs from Ampere on, bfloat16 and float16), "torch" (the framework's own
            matrix products), or "auto": the first of these that can run the call.

    Returns:
        float32 log_prob of ids' shape.  If entropy, lse or top1 is asked for, `LogProbs(log_prob, entropy, lse, top1)`
        instead, with None for what isn't.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device, range or option, or a scratch_bytes that is too small (it names the
            smallest); on the CPU (with check_inputs also on the GPU) an id that is neither ignore_index nor in [0, V),
            or a temperature that is not above 0.  On the GPU without check_inputs such an id's log_prob is NaN, and so
            are the gradients that its token enters.
        RuntimeError: differentiated twice, or called inside a torch.func transform.

    Memory: `scratch_parts` of `onchip.vocab.memory` is the formula (of `onchip.vocab.triton.memory` that of "triton");
    in float32 about 4 * token_chunk * vocab_chunk bytes (twice that with entropy), and 4 * T * H for hidden's gradient
    in 16 bits.  Between forward and backward the op keeps log_prob, lse and with entropy=True two more floats per
    token; "triton" also the memory of the gradients that backward will return, with what they are made of.

    Example:
        >>> import torch
        >>> from onchip.torch import linear_log_probs
        >>> hidden = torch.randn(2, 8, 16, requires_grad=True)
        >>> weight = torch.randn(100, 16, requires_grad=True)
        >>> ids = torch.randint(100, (2, 8))
        >>> out = linear_log_probs(hidden, weight, ids, entropy=True)
        >>> (out.log_prob.mean() + 0.01 * out.entropy.mean()).backward()
        >>> weight.grad.shape
        torch.Size([100, 16])

    Sources: logits that are computed again in backward from their log-sum-exp are those of Cut Cross-Entropy
    (arXiv:2411.09009), without its gradient filter; the running softmax is that of Milakov and Gimelshein
    (arXiv:1805.02867).
    """
    token_temperature = temperature_tensor(OP, temperature)
    options = Options(
        ignore_index=ignore_index,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=1.0 if isinstance(temperature, Tensor) else temperature,
        entropy=entropy,
        lse=lse,
        top1=top1,
        check_inputs=check_inputs,
        scratch_bytes=scratch_bytes,
    )
    dtype = check_tensors(hidden, weight, ids, bias, token_temperature)
    device = hidden.device.type
    refusals = {
        "torch": None if device in _DEVICES else f"it runs on {', '.join(_DEVICES)} tensors, not on {device!r}",
        "triton": triton_op.refusal(device, hidden.device.index, dtype),
    }
    chosen = choose_backend(OP, backend, {name: refusals[name] for name in BACKENDS})
    grads = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    arguments = _Arguments(
        hidden,
        weight,
        bias,
        ids,
        token_temperature,
        dtype,
        int(options.ignore_index),
        None if options.softcap is None else float(options.softcap),
        float(options.logit_scale),
        float(options.temperature),
        options.check_inputs,
        None if options.scratch_bytes is None else int(options.scratch_bytes),
        options.entropy,
        *grads,
    )
    if chosen == "triton":
        log_prob, entropies, lses, argmax = _forward_triton(arguments, top1)
    else:
        strategy = "recompute" if any(grads) else "forward"
        memory.PLANNER.require(arguments.problem(compacted=device == "cpu"), strategy, arguments.scratch_bytes)
        log_prob, entropies, lses, argmax, _ = _forward_op(*arguments)
    if not (entropy or lse or top1):
        return log_prob
    return LogProbs(log_prob, entropies if entropy else None, lses if lse else None, argmax if top1 else None)


# ------------------------------------------------------------------------------------------------ registered operators


# The arguments of both operators; `_Arguments` gives them their shapes and Python names, in the same order.
# torch.compile's cache on disk knows an operator by its name alone: a release that changes a schema must rename it.
_SCHEMA = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor ids, Tensor? token_temperature, ScalarType dtype, "
    "int ignore_index, float? softcap, float logit_scale, float temperature, bool check_inputs, int? scratch_bytes, "
    "bool with_entropy, bool grad_hidden, bool grad_weight, bool grad_bias"
)


class _Arguments(NamedTuple):
    """The arguments of `_forward_op`, in order."""

    hidden: Tensor  # [..., H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    ids: Tensor  # [...] or [..., K]
    token_temperature: Tensor | None  # [...] or []
    dtype: torch.dtype
    ignore_index: int
    softcap: float | None
    logit_scale: float
    temperature: float
    check_inputs: bool
    scratch_bytes: int | None
    with_entropy: bool
    grad_hidden: bool
    grad_weight: bool
    grad_bias: bool

    @property
    def grads(self) -> tuple[bool, bool, bool]:
        return self.grad_hidden, self.grad_weight, self.grad_bias

    def problem(self, *, compacted: bool, entropy: bool | None = None) -> Problem:
        vocab, size = self.weight.shape
        return Problem(
            tokens=self.hidden.numel() // size,
            hidden=size,
            vocab=vocab,
            ids=self.ids.shape[-1] if self.ids.ndim == self.hidden.ndim else 1,
            dtype=DTYPES[self.dtype],
            hidden_dtype=DTYPES[self.hidden.dtype],
            weight_dtype=DTYPES[self.weight.dtype],
            device="cpu" if self.hidden.device.type == "cpu" else "cuda",
            grad_hidden=self.grad_hidden,
            grad_weight=self.grad_weight,
            grad_bias=self.grad_bias,
            softcap=self.softcap is not None,
            stats=self.with_entropy if entropy is None else entropy,
            op=OP,
            compacted=compacted,
            copied=copied_rows(self.hidden),
        )

    def prepare(self, *, check_values: bool) -> tuple[Tensor, Head, torch_walks.Picks]:
        """Hidden states as [T, H], the head and the ids, in the dtype of the products."""
        size = self.hidden.shape[-1]
        picks = torch_walks.select(
            self.ids,
            self.hidden.numel() // size,
            self.weight.shape[0],
            self.token_temperature,
            ignore_index=self.ignore_index,
            temperature=self.temperature,
            check_values=check_values,
        )
        # The bias in the products' dtype first, as F.linear does under autocast.
        bias = None if self.bias is None else self.bias.to(self.dtype).float()
        head = Head(self.weight.to(self.dtype), bias, 0.0, 0.0, self.softcap, self.logit_scale)
        return self.hidden.reshape(-1, size).to(self.dtype), head, picks


def _forward_triton(a: _Arguments, top1: bool) -> tuple[Tensor, ...]:
    problem = a.problem(compacted=False)
    copied = problem.copied + copied_weight(a.weight, a.dtype)
    config = planning.plan(replace(problem, stats=a.with_entropy or top1, copied=copied), "auto", a.scratch_bytes)
    return triton_op.forward(*a[:11], *config, a.with_entropy or top1, *a.grads)


@torch.library.custom_op(
    "onchip::linear_log_probs_torch", mutates_args=(), schema=f"({_SCHEMA}) -> ({', '.join(['Tensor'] * 5)})"
)
def _forward_op(*args: Any) -> tuple[Tensor, ...]:
    """Return log_prob, entropy, lse, top1 and the mean of the logits under their softmax; entropy and mean are empty
    where the entropy isn't asked for.
    """
    a = _Arguments(*args)
    shape = a.hidden.shape[:-1]
    # An operator runs below autocast's dispatch but not outside its reach: products in here would be cast again.
    with torch.autocast(a.hidden.device.type, enabled=False):
        hidden, head, picks = a.prepare(check_values=a.check_inputs)
        config = memory.plan(a.problem(compacted=picks.tokens.index is not None), "forward", a.scratch_bytes)
        softmax = torch_walks.forward(hidden, head, picks, config, entropy=a.with_entropy)
        entropy, mean = hidden.new_empty(0, dtype=torch.float32), hidden.new_empty(0, dtype=torch.float32)
        if a.with_entropy:
            entropy = picks.spread(softmax.log_total - softmax.mean_offset).view(shape)
            mean = picks.spread(softmax.max + softmax.mean_offset).view(shape)
        return (
            picks.spread(softmax.log_prob(picks)).view(a.ids.shape),
            entropy,
            picks.spread(softmax.lse).view(shape),
            picks.spread(softmax.argmax, -1).view(shape),
            mean,
        )


@_forward_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    a = _Arguments(*args)
    shape = a.hidden.shape[:-1]

    def make(shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return a.hidden.new_empty(shape, dtype=dtype)

    asked = shape if a.with_entropy else 0
    return make(a.ids.shape), make(asked), make(shape), make(shape, torch.int64), make(asked)


@torch.library.custom_op(
    "onchip::linear_log_probs_torch_backward",
    mutates_args=(),
    schema=(
        "(Tensor? grad_log_prob, Tensor? grad_entropy, Tensor? grad_lse, Tensor log_prob, Tensor entropy, Tensor lse, "
        f"Tensor mean, {_SCHEMA}) -> (Tensor, Tensor, Tensor)"
    ),
)
def _backward_op(
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    log_prob: Tensor,
    entropy: Tensor,
    lse: Tensor,
    mean: Tensor,
    *args: Any,
) -> tuple[Tensor, ...]:
    """Return the gradients of hidden, weight and bias; what isn't asked for is empty."""
    a = _Arguments(*args)
    with torch.autocast(a.hidden.device.type, enabled=False):
        hidden, head, picks = a.prepare(check_values=False)
        total = picks.total
        ids_shape = (total, picks.ids.shape[1])

        def rows(x: Tensor | None, *shape: int) -> Tensor | None:
            return x if x is None else picks.take(x.reshape(shape or (total,)).float())

        log_probs, lses = rows(log_prob, *ids_shape), rows(lse)
        assert log_probs is not None
        assert lses is not None
        known, too_large = torch_walks.prepare(
            picks,
            head,
            operand_dtype(hidden),
            log_prob=log_probs,
            lse=lses,
            mean=rows(mean) if a.with_entropy else None,
            entropy=rows(entropy) if a.with_entropy else None,
            grad_log_prob=rows(grad_log_prob, *ids_shape),
            grad_entropy=rows(grad_entropy) if a.with_entropy else None,
            grad_lse=rows(grad_lse),
        )
        problem = a.problem(compacted=picks.tokens.index is not None, entropy=known.entropy is not None)
        made = torch_walks.backward(
            hidden,
            head,
            picks,
            memory.plan(problem, "recompute", a.scratch_bytes),
            known,
            too_large,
            grads=a.grads,
            dtypes=(a.hidden.dtype, a.weight.dtype, (a.weight if a.bias is None else a.bias).dtype),
        )
        shapes = (a.hidden.shape, a.weight.shape, a.weight.shape[:1])
        return tuple(hidden.new_empty(0) if x is None else x.view(s) for x, s in zip(made, shapes, strict=True))


@_backward_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    a = _Arguments(*args[7:])
    return tuple(
        x.new_empty(x.shape) if x is not None and wanted else a.hidden.new_empty(0)
        for x, wanted in zip((a.hidden, a.weight, a.bias), a.grads, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    log_prob, entropy, lse, top1, mean = output
    ctx.mark_non_differentiable(top1, mean)
    ctx.set_materialize_grads(False)  # a tile of work is saved where the entropy has no gradient
    ctx.save_for_backward(log_prob, entropy, lse, mean, *inputs[:5])
    ctx.options = inputs[5:]


def _backward(
    ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None, grad_lse: Tensor | None, *_: Any
) -> tuple[Any, ...]:
    nothing = (None,) * (len(_Arguments._fields) - 3)
    upstream = (grad_log_prob, grad_entropy, grad_lse)
    if all(x is None for x in upstream):
        return (None, None, None, *nothing)
    log_prob, entropy, lse, mean, *tensors = ctx.saved_tensors
    a = _Arguments._make((*tensors, *ctx.options))
    made = _backward_op(*upstream, log_prob, entropy, lse, mean, *a)
    grads = [x if wanted else None for x, wanted in zip(made, a.grads, strict=True)]
    return (*differentiable_once(OP, grads, *upstream, log_prob), *nothing)


_forward_op.register_autograd(_backward, setup_context=_setup_context)
