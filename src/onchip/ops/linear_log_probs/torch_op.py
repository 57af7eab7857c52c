"""linear_log_probs for PyTorch: the public function, and the backend of PyTorch's own products.

From `linear_log_probs` to a product or a kernel: the public function checks its inputs (torch_inputs.py) and chooses a
backend, whose operator (`frontend.torch_register`) runs its `_forward` (here or in triton_op.py), which runs a walk of
the engine (`vocab`) and keeps a few numbers per token.  Backward walks over the logits again.  The maths is in the
package's docstring.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.backends import choose_backend
from onchip.frontend.torch_inputs import copied_rows, copied_weight, temperature_tensor
from onchip.frontend.torch_register import Made, Wanted, needed, register
from onchip.ops.linear_log_probs import spec, triton_op
from onchip.ops.linear_log_probs.spec import OP, Options
from onchip.ops.linear_log_probs.torch_call import Call, Outputs, empty_gradients, empty_outputs
from onchip.ops.linear_log_probs.torch_gradient import gradient_of_log_probs
from onchip.ops.linear_log_probs.torch_inputs import check_tensors
from onchip.vocab.torch import walk
from onchip.vocab.torch.tiles import Projection, Transform, operand_dtype
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

    Memory: `scratch_parts` of `onchip.ops.linear_log_probs.spec` is the formula (of `.triton_spec` that of "triton");
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
        "triton": planning.refusal(device, hidden.device.index, dtype),
    }
    call = Call(
        hidden,
        weight,
        bias,
        ids,
        token_temperature,
        dtype,
        options,
        needed(hidden, weight, bias),
        copied_rows(hidden),
    )
    if choose_backend(OP, backend, {name: refusals[name] for name in BACKENDS}) == "triton":
        call = call._replace(copied=call.copied + copied_weight(weight, dtype))
        made = triton_op.LOG_PROBS(triton_op.TritonCall(call, torch.compiler.is_compiling()))
        log_prob, entropies, lses, argmax = made[:4]
    else:
        spec.require_scratch(call.problem(compacted=device == "cpu"), call.budget)
        log_prob, entropies, lses, argmax, _ = LOG_PROBS(call)
    if not (entropy or lse or top1):
        return log_prob
    return LogProbs(log_prob, entropies if entropy else None, lses if lse else None, argmax if top1 else None)


# ------------------------------------------------------------------------------------------------- registered operator


class TorchOutputs(NamedTuple):
    """`Outputs`, and for backward the mean of the logits under their softmax; entropy and mean where that is asked
    for."""

    log_prob: Tensor
    entropy: Tensor | None
    lse: Tensor
    top1: Tensor
    mean: Tensor | None


class Kept(NamedTuple):
    """What backward is given."""

    call: Call
    log_prob: Tensor
    entropy: Tensor | None
    lse: Tensor
    mean: Tensor | None


def _layer(call: Call) -> Projection:
    return Projection.of(call.hidden, call.weight, call.bias, call.dtype)


def _forward(call: Call) -> TorchOutputs:
    shape = call.hidden.shape[:-1]
    tokens = call.tokens(check_values=call.options.check_inputs)
    config = spec.plan(call.problem(compacted=tokens.index is not None), "forward", call.budget)
    stats = walk.forward(_layer(call), Transform.of(call.options), tokens, config, entropy=call.options.entropy)
    return TorchOutputs(
        tokens.spread(stats.log_prob, call.ids.shape),
        None if stats.entropy is None else tokens.spread(stats.entropy, shape),
        tokens.spread(stats.lse, shape),
        tokens.spread(stats.argmax, shape, -1),
        None if stats.mean is None else tokens.spread(stats.mean, shape),
    )


def _fake(call: Call) -> TorchOutputs:
    made: Outputs = empty_outputs(call, call.options.entropy)
    mean = None if made.entropy is None else torch.empty_like(made.entropy)
    return TorchOutputs(made.log_prob, made.entropy, made.lse, torch.empty_like(made.lse, dtype=torch.int64), mean)


def _save(call: Call, made: TorchOutputs) -> Kept:
    return Kept(call, made.log_prob, made.entropy, made.lse, made.mean)


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    call = kept.call._replace(grads=tuple(wanted))
    tokens, layer, transform = call.tokens(check_values=False), _layer(call), Transform.of(call.options)
    with_entropy = call.options.entropy

    def rows(x: Tensor | None, *shape: int) -> Tensor | None:
        return None if x is None else tokens.take(x.reshape(tokens.total, *shape).float())

    log_prob, lse = rows(kept.log_prob, tokens.ids.shape[1]), rows(kept.lse)
    assert log_prob is not None
    assert lse is not None
    gradient, grad_scale = gradient_of_log_probs(
        tokens,
        transform,
        operand_dtype(layer.hidden),
        log_prob=log_prob,
        lse=lse,
        mean=rows(kept.mean) if with_entropy else None,
        entropy=rows(kept.entropy) if with_entropy else None,
        grad_log_prob=rows(upstream[0], tokens.ids.shape[1]),
        grad_entropy=rows(upstream[1]) if with_entropy else None,
        grad_lse=rows(upstream[2]),
    )
    problem = call.problem(compacted=tokens.index is not None, entropy=gradient.entropy_row is not None)
    made = walk.recompute(
        layer,
        transform,
        tokens,
        spec.plan(problem, "recompute", call.budget),
        gradient,
        grad_scale=grad_scale,
        grads=wanted,
        dtypes=call.dtypes,
    )
    return None if made[0] is None else made[0].view(call.hidden.shape), *made[1:]


def _fake_gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    return empty_gradients(kept.call, wanted)


LOG_PROBS = register(
    "linear_log_probs_recomputed",
    op=OP,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=_fake_gradients,
    differentiable=("hidden", "weight", "bias"),
    differentiable_outputs=3,
)
