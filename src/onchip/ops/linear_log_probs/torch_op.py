"""linear_log_probs, and log_probs for logits that exist already, for PyTorch: the public functions.

They check their inputs, choose a backend and call one of the operators of torch_call.py.
"""

from typing import Any, Generic, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from onchip.frontend.options import Flag, No, ScratchBytes, Yes, check_shift, one_target, scratch_in_bytes, shapes_of
from onchip.frontend.torch_inputs import (
    check_tensors,
    choose_torch_backend,
    copied_rows,
    copied_weight,
    following,
    options_of,
    product_dtype,
    sizes_are_symbols,
    temperature_tensor,
)
from onchip.frontend.torch_parallel import WHOLE, HiddenLayout, OfShardedLogits, OfShards, Sharding, localized
from onchip.frontend.torch_register import needed
from onchip.frontend.torch_repeat import repeatable
from onchip.frontend.torch_types import Backend
from onchip.ops.linear_log_probs import (
    LOGITS_OP,
    OP,
    LogitsOptions,
    LogProbs,
    LogProbsOptions,
    Results,
    check_logits_shapes,
    check_shapes,
)
from onchip.ops.linear_log_probs.torch_call import (
    KERNELS,
    PRODUCTS,
    ROWS,
    LogProbsCall,
    LogProbsOutputs,
    LogProbsRowsCall,
)
from onchip.vocab import memory
from onchip.vocab.rows.launches import refusal as rows_refusal
from onchip.vocab.torch.parallel import sent_bytes
from onchip.vocab.triton import setup

Given = Tensor | None
Values = LogProbs[Tensor]
BACKENDS = ("triton", "plain")  # "auto" takes the first that can run


class Keywords(TypedDict, total=False):
    """The keywords of both ops, except those that ask for results."""

    labels: Tensor | None
    ignore_index: int
    softcap: float | None
    logit_scale: float
    temperature: float | Tensor
    scratch_bytes: ScratchBytes
    backend: Backend
    check_inputs: bool


class LogProbsOfLogits(Keywords, OfShardedLogits, Results[Flag], Generic[Flag], total=False):
    """The keywords of `log_probs`."""


class LogProbsOfHead(Keywords, OfShards, Results[Flag], Generic[Flag], total=False):
    """The keywords of `linear_log_probs`."""

    shift: bool


@overload
def linear_log_probs(
    hidden: Tensor, weight: Tensor, ids: Given = None, bias: Given = None, **options: Unpack[LogProbsOfHead[No]]
) -> Tensor: ...
@overload
def linear_log_probs(
    hidden: Tensor, weight: Tensor, ids: Given = None, bias: Given = None, **options: Unpack[LogProbsOfHead[Yes]]
) -> Values: ...
@overload
def linear_log_probs(
    hidden: Tensor, weight: Tensor, ids: Given = None, bias: Given = None, **options: Unpack[LogProbsOfHead[bool]]
) -> Tensor | Values: ...
@repeatable
def linear_log_probs(
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V, H]
    ids: Tensor | None = None,  # [...] or [..., K]
    bias: Tensor | None = None,  # [V]
    *,
    labels: Tensor | None = None,  # another name for ids
    shift: bool = False,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    lse: bool = False,
    top1: bool = False,
    mean_logits: bool = False,
    log_sum_sq_probs: bool = False,
    check_inputs: bool = False,
    scratch_bytes: ScratchBytes = None,
    backend: Backend = "auto",
    vocab_group: ProcessGroup | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    hidden_layout: HiddenLayout = "replicated",
    reduce_hidden_grad: bool = True,
) -> Tensor | Values:
    r"""Log-probabilities of given ids under a linear layer's softmax, without storing the [tokens, vocab] logits.

    With a = (hidden @ weight.T + bias) * logit_scale, z = softcap * tanh(a / softcap) / temperature (without softcap
    a / temperature) and p = softmax(z), token by token::

        log_prob = z[ids] - lse,    lse = log(sum(exp(z))),    entropy = -sum(p * log(p))

    So log_prob is `F.linear(hidden, weight, bias).log_softmax(-1).gather(-1, ids[..., None])[..., 0]`, with float32
    logits whatever the inputs' dtype.  log_prob, entropy and lse are differentiable with respect to hidden, weight and
    bias, with any upstream gradient for each of their numbers.

    Args:
        hidden: [..., H] float32, bfloat16, float16 or float64, any strides.  The leading dimensions hold T tokens.
        weight, bias: [V, H] and [V], of hidden's dtype or of the mixtures that `linear_cross_entropy` takes.
        ids: [...] or [..., K] of any integer dtype: one or K vocabulary indices for each token, or `ignore_index`.
            The same id may occur several times.
        labels: another name for ids, by keyword.
        shift: pass True if ids are the sequence's own tokens, [..., S] or [..., S, K]: position i of each sequence then
            takes the ids of position i + 1, and the last one has none, as if they were ignored.  ids are copied, hidden
            isn't.
        ignore_index: an id of this value has log_prob 0 and no gradient.  If all ids of a token have it, the results
            and gradients are exact zeros (top1: -1), whatever its hidden state holds, and on the CPU the token costs
            nothing.
        softcap, logit_scale, temperature, check_inputs, backend: as in `linear_cross_entropy`.
        entropy: also return the entropy of each token's softmax, in nats.
        lse: also return each token's log-sum-exp.
        top1: also return the index of each token's largest logit.
        mean_logits: also return the mean of each token's final logits z over the vocabulary; -inf if one of them is.
        log_sum_sq_probs: also return log(sum(p**2)) for each token, the logarithm of the probability that two samples
            are the same.  top1, mean_logits and log_sum_sq_probs have no gradient.
        scratch_bytes: bound on the peak memory above inputs, results and returned gradients, in one of the forms that
            `linear_cross_entropy` takes.  Default: 256 MiB or an eighth of the float32 logits, whichever is more, and
            at least what one chunk needs; without gradients 64 MiB for "triton".
        vocab_group, vocab_start, vocab_size, hidden_layout, reduce_hidden_grad: for a vocabulary that is sharded over
            the ranks of a process group, as in `linear_cross_entropy`.  ids are indices in the whole vocabulary, for
            all tokens, and each rank returns the same.

    Returns:
        log_prob in ids' shape, in float32 (float64 for float64 inputs).  If anything else is asked for,
        `LogProbs(log_prob, entropy, lse, top1, mean_logits, log_sum_sq_probs)` instead, with None for the rest.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape, device, range or option is wrong; scratch_bytes is too small (the message says what
            suffices); or, on the CPU (with check_inputs also on the GPU), an id is neither ignore_index nor in [0, V),
            or a temperature is not above 0.  On the GPU without check_inputs such an id's log_prob is NaN, and so are
            the gradients that its token enters.
        RuntimeError: the result is differentiated twice, or the call is inside a torch.func transform.

    Memory: `scratch_parts` of `onchip.vocab.memory` ("plain") and `onchip.vocab.triton.memory` ("triton") are the
    formulas.  In float32 it is about 4 * token_chunk * vocab_chunk bytes (twice that with entropy); with 16-bit hidden
    states their gradient takes 4 * T * H bytes more.  Between forward and backward the op keeps log_prob, lse and, with
    entropy=True, two more floats per token.  "triton" also allocates the gradients in forward already, and keeps in
    their memory what backward needs.

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

    Sources: Cut Cross-Entropy (arXiv:2411.09009), without its gradient filter, for computing logits again in backward;
    Milakov and Gimelshein (arXiv:1805.02867), for the running softmax.
    """
    ids = one_target(OP, ids, labels, name="ids")[1]
    sharding, shards = Sharding(vocab_group, vocab_start, vocab_size, hidden_layout, reduce_hidden_grad), WHOLE
    if sharding.there({"hidden": hidden, "weight": weight, "bias": bias}):
        parts, found = localized(OP, sharding, {"weight": weight, "bias": bias}, {"hidden": hidden}, tokens=ids)
        (hidden, weight, bias), shards = (parts[x] for x in ("hidden", "weight", "bias")), found or WHOLE
    token_temperature = temperature_tensor(OP, temperature)
    tensors = check_tensors(OP, hidden=hidden, weight=weight, ids=ids, bias=bias, temperature=token_temperature)
    shapes = shapes_of(tensors)
    check_shapes(shards.whole(shapes, ("weight", "bias"), ("hidden",)) if shards.there else shapes)
    options = options_of(
        LogProbsOptions,
        shift=shift,
        ignore_index=ignore_index,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=1.0 if isinstance(temperature, Tensor) else temperature,
        entropy=entropy,
        lse=lse,
        top1=top1,
        mean_logits=mean_logits,
        log_sum_sq_probs=log_sum_sq_probs,
        check_inputs=check_inputs,
        scratch_bytes=scratch_in_bytes(OP, scratch_bytes, hidden.shape[:-1].numel() * weight.shape[0]),
    )
    check_shift(OP, shift, hidden.shape[:-1], "hidden of shape [..., S, H]")
    dtype, shifted_bytes = product_dtype(OP, tensors), 0
    if shift:
        ids = following(ids, ignore_index, torch.int64, dim=hidden.ndim - 2)
        shifted_bytes = ids.numel() * ids.element_size()
    refusal = setup.refusal(hidden.device.type, hidden.device.index, dtype)
    chosen = choose_torch_backend(OP, backend, hidden.device, refusal)
    copied = copied_rows(hidden) + shifted_bytes + (copied_weight(weight, dtype) if chosen == "triton" else 0)
    if shards.there:
        several = ids.shape[-1] if ids.ndim == hidden.ndim else 1
        copied += sent_bytes(ids.numel() // several, several, shards, hidden)
    call = LogProbsCall(
        hidden=hidden,
        weight=weight,
        bias=bias,
        ids=ids,
        token_temperature=token_temperature,
        dtype=dtype,
        options=options,
        grads=needed(hidden, weight, bias),
        copied=copied,
        compiled=sizes_are_symbols(hidden, weight),
        shards=shards,
        kernels=shards.there and chosen == "triton",
    )
    if chosen == "triton" and (shards.rows > 0 or not shards.there):  # kernels have nothing to do in an empty shard
        return returned(options, KERNELS(call).out)
    strategy = "recompute" if any(call.grads) else "forward"
    memory.PLANNER.require(call.problem(compacted=call.device == "cpu"), strategy, call.budget)
    return returned(options, PRODUCTS(call).out)


@overload
def log_probs(logits: Tensor, ids: Given = None, **options: Unpack[LogProbsOfLogits[No]]) -> Tensor: ...
@overload
def log_probs(logits: Tensor, ids: Given = None, **options: Unpack[LogProbsOfLogits[Yes]]) -> Values: ...
@overload
def log_probs(logits: Tensor, ids: Given = None, **options: Unpack[LogProbsOfLogits[bool]]) -> Tensor | Values: ...
@repeatable
def log_probs(
    logits: Tensor,  # [..., V]
    ids: Tensor | None = None,  # [...] or [..., K]
    *,
    labels: Tensor | None = None,  # another name for ids
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    lse: bool = False,
    top1: bool = False,
    mean_logits: bool = False,
    log_sum_sq_probs: bool = False,
    check_inputs: bool = False,
    scratch_bytes: ScratchBytes = None,
    backend: Backend = "auto",
    vocab_group: ProcessGroup | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
) -> Tensor | Values:
    """Log-probabilities of given ids under the softmax of logits that exist already, with little extra memory.

    With a = logits * logit_scale, z = softcap * tanh(a / softcap) / temperature (without softcap a / temperature) and
    p = softmax(z), token by token::

        log_prob = z[ids] - lse,    lse = log(sum(exp(z))),    entropy = -sum(p * log(p))

    So log_prob is `logits.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]`, without a float32 copy of the
    logits or a matrix of their softmax.  log_prob, entropy and lse are differentiable with respect to the logits, with
    any upstream gradient for each of their numbers.

    Args:
        logits: [..., V] float32, bfloat16, float16 or float64, any strides, never copied as a whole.  The leading
            dimensions hold T tokens.  -inf takes an entry out of the vocabulary (unless there is a softcap, which
            makes it -softcap).  Kernels take logits of a token that are all below -1e30 as if all were -inf:
            its log_prob is infinite or NaN.
        ids, labels: [...] or [..., K] of any integer dtype, as in `linear_log_probs`.
        ignore_index, softcap, logit_scale, temperature: as in `linear_log_probs`; temperature is a number or [...].
        entropy, lse, top1, mean_logits, log_sum_sq_probs, check_inputs: likewise.
        scratch_bytes: bound on the peak memory above logits, results and returned gradient, in one of the forms that
            `linear_cross_entropy` takes.  Default: 256 MiB or an eighth of the float32 logits, whichever is more, and
            at least what a useful chunk of rows needs.
        backend: "triton" (kernels for NVIDIA GPUs from Ampere on, which read the logits once), "plain" (the framework's
            own operations) or "auto": the first of these that can run the call.
        vocab_group, vocab_start, vocab_size: for a vocabulary that is sharded over the ranks of a process group, as in
            `linear_cross_entropy`.  Each rank passes its columns of the logits; everything else is the same on each
            rank.  A DTensor with Shard(-1) needs no group.

    Returns:
        log_prob of ids' shape in float32 (float64 for float64 inputs), or `LogProbs`, as in `linear_log_probs`.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape, device, range or option is wrong; scratch_bytes doesn't suffice for one row (the message
            says what does); or, on the CPU (with check_inputs also on the GPU), an id is neither ignore_index nor in
            [0, V), or a temperature is not above 0.  On the GPU without check_inputs such an id's log_prob is NaN, and
            so is its token's gradient.
        RuntimeError: the result is differentiated twice, or the call is inside a torch.func transform.

    Memory: `scratch_parts` of `onchip.vocab.rows.memory` is the formula, with `ids` = K: 4 * rows * V bytes for chunks
    of that many rows, as much again with entropy, and in backward with softcap; with "triton" a few numbers per token
    and id.  Between forward and backward the op keeps logits and ids by reference, log_prob, lse and, with
    entropy=True, two more floats per token.  The gradient is one tensor of logits' dtype.

    Example:
        >>> import torch
        >>> from onchip.torch import log_probs
        >>> logits = torch.randn(2, 8, 100, requires_grad=True)
        >>> out = log_probs(logits, torch.randint(100, (2, 8)), entropy=True)
        >>> (out.log_prob.mean() + 0.01 * out.entropy.mean()).backward()
        >>> logits.grad.shape
        torch.Size([2, 8, 100])

    Source: Liger Kernel (arXiv:2410.10989), for the gradient from the log-sum-exp alone.
    """
    ids = one_target(LOGITS_OP, ids, labels, name="ids")[1]
    sharding, shards = Sharding(vocab_group, vocab_start, vocab_size), None
    if sharding.there({"logits": logits}):
        parts, shards = localized(LOGITS_OP, sharding, {"logits": logits}, {}, last=("logits",))
        logits = parts["logits"]
    token_temperature = temperature_tensor(LOGITS_OP, temperature)
    tensors = check_tensors(LOGITS_OP, logits=logits, ids=ids, temperature=token_temperature)
    shapes = shapes_of(tensors)
    check_logits_shapes(shapes if shards is None else shards.whole(shapes, ("logits",), dim=-1))
    options = options_of(
        LogitsOptions,
        ignore_index=ignore_index,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=1.0 if isinstance(temperature, Tensor) else temperature,
        entropy=entropy,
        lse=lse,
        top1=top1,
        mean_logits=mean_logits,
        log_sum_sq_probs=log_sum_sq_probs,
        check_inputs=check_inputs,
        scratch_bytes=scratch_in_bytes(LOGITS_OP, scratch_bytes, logits.numel()),
    )
    chosen = choose_torch_backend(LOGITS_OP, backend, logits.device, rows_refusal(logits))
    call = LogProbsRowsCall(
        logits=logits,
        ids=ids,
        token_temperature=token_temperature,
        options=options,
        shards=shards or WHOLE,
        kernels=chosen == "triton",
        grads=needed(logits),
    )
    return returned(options, ROWS(call).out)


def returned(options: LogProbsOptions, made: LogProbsOutputs) -> Tensor | Values:
    """What a public function returns."""
    asked = (options.entropy, options.lse, options.top1, options.mean_logits, options.log_sum_sq_probs)
    if not any(asked):
        return made.log_prob
    more: Any = (x if wanted else None for x, wanted in zip(made[1:6], asked, strict=True))
    return LogProbs(made.log_prob, *more)
