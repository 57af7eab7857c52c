"""log_probs for PyTorch, for logits that exist already: the public function.

It checks its inputs, chooses a backend and calls the operator of rows_call.py, which reads the rows once and keeps a
few numbers per token; backward reads them again and writes a new tensor.
"""

from typing import Unpack, overload

from torch import Tensor
from torch.distributed import ProcessGroup

from onchip.frontend.options import No, ScratchBytes, Yes, one_target, scratch_in_bytes, shapes_of
from onchip.frontend.torch_inputs import check_tensors, choose_torch_backend, temperature_tensor
from onchip.frontend.torch_parallel import WHOLE, Sharding, localized
from onchip.frontend.torch_register import needed
from onchip.frontend.torch_repeat import repeatable
from onchip.frontend.torch_types import Backend
from onchip.ops.linear_log_probs import LOGITS_OP, LogitsOptions, check_logits_shapes
from onchip.ops.linear_log_probs.rows_call import LOG_PROBS, LogProbsRowsCall
from onchip.ops.linear_log_probs.torch_op import LogProbs, LogProbsOfLogits, returned
from onchip.vocab.rows.launches import refusal

# Best first: "auto" asks them in this order.
BACKENDS = ("triton", "plain")


@overload
def log_probs(logits: Tensor, ids: Tensor | None = None, **options: Unpack[LogProbsOfLogits[No]]) -> Tensor: ...
@overload
def log_probs(logits: Tensor, ids: Tensor | None = None, **options: Unpack[LogProbsOfLogits[Yes]]) -> LogProbs: ...
@overload
def log_probs(
    logits: Tensor, ids: Tensor | None = None, **options: Unpack[LogProbsOfLogits[bool]]
) -> Tensor | LogProbs: ...
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
) -> Tensor | LogProbs:
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
    options = LogitsOptions(
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
    chosen = choose_torch_backend(LOGITS_OP, backend, logits.device, refusal(logits))
    call = LogProbsRowsCall(
        logits, ids, token_temperature, options, shards or WHOLE, chosen == "triton", needed(logits)
    )  # fmt: skip
    return returned(options, LOG_PROBS(call).out)
