"""linear_cross_entropy with precision='fp8': its operator and autograd.

Forward computes hidden's gradient and keeps the logits' gradient in FP8, both for an upstream gradient of 1.  Backward
multiplies them by the upstream gradient and computes the weight's.  The walk is `vocab.fp8.walk`.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.backends import choose_backend
from onchip.fp8.torch_operands import Copies, QuantizedWeight, check_unchanged, copies_of, quantizer
from onchip.fp8.torch_products import multiply, scaled_mm_refusal
from onchip.fp8.torch_quantize import operand
from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_autograd import scale_stash
from onchip.frontend.torch_inputs import DTYPES, torch_refusal
from onchip.frontend.torch_parallel import Shards
from onchip.frontend.torch_register import Made, Wanted
from onchip.kernels.triton.launch import device_refusal
from onchip.ops.linear_cross_entropy import OP, LinearCrossEntropyOptions
from onchip.ops.linear_cross_entropy.torch_call import LOSS, LinearCrossEntropyCall
from onchip.vocab.chunks import ChunkConfig
from onchip.vocab.fp8 import memory, walk
from onchip.vocab.fp8.torch import LogitsCall
from onchip.vocab.fp8.walk import QUANTIZERS, SCALE, Parts, products_of
from onchip.vocab.rows.launches import flat
from onchip.vocab.torch import dense, parallel
from onchip.vocab.torch import labels as labels_of
from onchip.vocab.torch.call import DIFFERENTIABLE
from onchip.vocab.torch.loss import LossOutputs, loss_gradient, scaled_rows
from onchip.vocab.torch.operator import LossMade, check_ranks
from onchip.vocab.torch.softmax import Asked, Running, TokenStats
from onchip.vocab.torch.tiles import Tokens
from onchip.vocab.torch.tiles import divisor as divisor_of


def check_options(options: LinearCrossEntropyOptions, *, grad_bias: bool) -> None:
    """Raise for options that this precision doesn't have."""
    if options.strategy == "recompute":
        raise ValueError(
            f"{OP}: precision='fp8' computes logits once and keeps their gradient; pass strategy='auto', or "
            "precision='full' to recompute"
        )
    if options.reduction == "none" and grad_bias:
        raise ValueError(
            f"{OP}: with precision='fp8' and reduction='none' bias gets no gradient, since that is summed over tokens "
            "before their upstream gradients are known; pass bias.detach(), another reduction, or precision='full'"
        )


def refusals(device: torch.device) -> dict[str, str | None]:
    """Why each backend can't serve a call on this device, or None; in the order in which "auto" tries them."""
    triton = scaled_mm_refusal(device) or device_refusal(device.type, device.index, torch.bfloat16)
    return {"triton": triton, "plain": torch_refusal(device)}


class Fp8Call(NamedTuple):
    """The arguments of the operator."""

    call: LinearCrossEntropyCall
    copies: Copies  # of the weight; of a shard of the vocabulary, of the rows that are of it
    check_weight: bool  # compare the copies, which the caller made, with it
    backend: str


class LinearCrossEntropyFp8Kept(NamedTuple):
    """What forward keeps for backward; not the weight, whose products are all computed in forward."""

    parts: Parts
    hidden: Tensor | None  # where weight needs a gradient
    target: Tensor | None  # to tell ignored tokens by; None of soft labels, which count all
    weight_grad_out: Tensor | None
    dtypes: tuple[torch.dtype, ...]  # of hidden, weight and bias
    backend: str
    ignore_index: int
    reduction: str
    shards: Shards
    tokens: int  # of all ranks
    shape: tuple[int, ...]  # of this rank's hidden states
    rows: int  # of its weight, padding among them


def _forward(arguments: Fp8Call) -> LossMade[LossOutputs, Parts]:
    call, backend = arguments.call, arguments.backend
    if call.shards.there:
        check_ranks(LOSS, call, partial(_check_own, arguments))
    mine, check = parallel.local(call), call.options.check_inputs or not call.hidden.is_cuda
    tokens = call.tokens(check_values=check) if check or call.shards.there else None
    if not call.shards.there:
        _check_own(arguments)
    chunk = _plan(mine, backend)
    asked = _logits_call(call, tokens)
    source = walk.Source(backend, mine.hidden, mine.weight, arguments.copies, mine.bias, asked)
    if call.shards.there:
        assert tokens is not None
        return _forward_of_shards(call, mine, source, tokens, chunk)
    softmax, parts = walk.forward(source, call.hidden, call.grads, chunk)
    shape = call.hidden.shape[:-1]
    out = LossOutputs._make(
        x if x is None else x.view(call.ids.shape if name == "log_prob" else shape)
        for name, x in zip(LossOutputs._fields, softmax, strict=True)
    )
    if call.options.reduction != "none":
        out = out._replace(loss=softmax.loss.sum() / asked.divisor)
    return LossMade(out, parts)


def _check_own(arguments: Fp8Call) -> None:
    """Raise for what this rank alone may find wrong."""
    mine = parallel.local(arguments.call, fake=True)
    if arguments.check_weight:
        check_unchanged(OP, mine.weight, arguments.copies, SCALE, QUANTIZERS[arguments.backend])
    _plan(mine, arguments.backend)


def _plan(mine: LinearCrossEntropyCall, backend: str) -> int:
    """How many tokens a chunk has, of this rank's call."""
    # Of the inputs' own dtypes, whatever autocast's.
    problem = mine.problem("cuda" if backend == "triton" else "cpu", **_known(mine))
    return memory.plan(replace(problem, dtype=DTYPES[mine.hidden.dtype]), mine.budget, mine.shards.ranks)


def _known(call: LinearCrossEntropyCall) -> dict[str, bool]:
    """Fields of the problem."""
    options = call.options
    return {
        "per_token_loss": options.reduction == "none",
        "stats": options.return_stats,
        "class_weight": call.class_weight is not None,
    }


def _logits_call(call: LinearCrossEntropyCall, tokens: Tokens | None) -> LogitsCall:
    """The call for the logits; in a shard, with ids as the shard numbers them."""
    shards, options, labels, kind = call.shards, call.options, call.labels, call.kind
    ids, tau = call.ids.to(torch.int64), call.token_temperature
    tau = None if tau is None else tau.expand(call.leading)
    if kind in ("probs", "log_probs"):
        labels, kind = labels_of.probs(call, weighed=False), "probs"
    options = replace(options, reduction="none")
    if shards.there:
        assert tokens is not None
        divisor = 1 / tokens.inverse_count
        tau = tokens.temperature[:, 0] if isinstance(tokens.temperature, Tensor) else None
        if kind != "ids":  # none is ignored
            ids = torch.where(ids == options.ignore_index, -1, ids)
        ids = parallel.ids_for_kernels(ids, shards, options.ignore_index)
        options = replace(options, ignore_index=parallel.IGNORED)
        labels = labels[..., : shards.rows] if labels is not None and call.dense else labels
    elif kind == "ids":
        divisor = divisor_of(OP, call.options.reduction, call.normalizer, ids != options.ignore_index)
    else:
        number = torch.full((), call.number, dtype=torch.int64, device=ids.device)
        divisor = divisor_of(OP, call.options.reduction, call.normalizer, number)
    return LogitsCall(
        ids.reshape((call.number, call.several) if kind == "probs" else (call.number,)).contiguous(),
        None if call.token_weight is None else flat(call.token_weight),
        None if tau is None else flat(tau),
        labels,
        kind,
        divisor,
        parallel.class_weight_of_shard(call.class_weight, shards),
        options,
        shards.there,
    )


def _forward_of_shards(
    call: LinearCrossEntropyCall, mine: LinearCrossEntropyCall, source: walk.Source, tokens: Tokens, chunk: int
) -> LossMade[LossOutputs, Parts]:
    """Each rank computes the statistics of its shard, and one all-gather gives those of the whole vocabulary.  From
    these each rank computes the gradient of its own logits.  The logits are kept in between if all tokens are one
    chunk, and otherwise computed again.
    """
    shards, options, parts = call.shards, call.options, Parts.empty(mine.hidden, mine.weight, call.grads)
    there = shards.rows > 0 and tokens.number > 0
    if parts.grad_hidden is not None and not there:
        parts.grad_hidden.zero_()
    row, _ = scaled_rows(tokens, options, tokens.inverse_count, torch.float32)
    if call.dense:
        assert source.call.labels is not None
        config = ChunkConfig("forward", chunk, max(1, shards.rows))
        given = tokens, config, source.call.labels, call.class_weight
        made = dense.dense_stats(OP, walk.Fp8Logits(source), options, shards, *given)
        if there and any(call.grads):
            known = call.class_weight, call.vocab, row, made.known, shards
            gradient = dense.gradient(options, source.call.labels, *known)
            walk.gradients(source, parts, parallel.gradient_of_shard(gradient, shards), [], chunk)
        return LossMade(dense.outputs_of(call, made, tokens), parts)
    asked = LOSS.asked(call)
    of_shard = asked._replace(class_weight=source.call.class_weight if asked.mean_logits else None)
    known_here, held = walk.statistics(source, of_shard, chunk) if there else (_nothing(tokens, shards, of_shard), [])
    stats = parallel.combine(OP, shards, known_here, tokens, of_shard, check_values=options.check_inputs)
    if there and any(call.grads):
        gradient = loss_gradient(options, row, stats.lse, stats.log_prob, shards.vocab, tokens)
        walk.gradients(source, parts, parallel.gradient_of_shard(gradient, shards), held, chunk)
    return LossMade(LossOutputs.of(call, stats, tokens), parts)


def _nothing(tokens: Tokens, shards: Shards, asked: Asked) -> TokenStats:
    """The statistics over an empty shard, or of no tokens."""
    here = parallel.of_shard(tokens, shards)
    return Running.empty(here.ids, torch.float32).stats(here, 1, asked)


def _fake(arguments: Fp8Call) -> LossMade[LossOutputs, Parts]:
    call = arguments.call
    mine = parallel.local(call, fake=True)
    parts = Parts.empty(mine.hidden, mine.weight, call.grads)
    # What of labels of every entry is in no statistics is there where ranks have exchanged it, and else kernels'.
    return LossMade(LOSS.empty(call, not call.shards.there), parts)


def _save(arguments: Fp8Call, made: LossMade[LossOutputs, Parts]) -> LinearCrossEntropyFp8Kept:
    call, options = arguments.call, arguments.call.options
    return LinearCrossEntropyFp8Kept(
        made.saved,
        call.hidden if call.grads[1] else None,
        call.ids if call.kind == "ids" else None,
        call.weight_grad_out,
        call.dtypes,
        arguments.backend,
        options.ignore_index,
        options.reduction,
        call.shards,
        call.number,
        tuple(call.hidden.shape),
        len(call.weight),
    )


def _gradients(kept: LinearCrossEntropyFp8Kept, upstreams: Made, wanted: Wanted) -> Made:
    """Sum the ranks' parts of hidden's gradient in float32, while the product for the weight's gradient runs."""
    (grad_loss,), shards = upstreams, kept.shards
    assert grad_loss is not None
    upstream, parts, summed = _upstream_of(kept, grad_loss), kept.parts, None
    grad_hidden = grad_bias = None
    if wanted[0] and parts.grad_hidden is not None and shards.there:
        summed = parallel.start_sum(shards, parts.grad_hidden * upstream)
    elif wanted[0] and parts.grad_hidden is not None:
        grad_hidden = scale_stash(parts.grad_hidden, upstream, kept.dtypes[0])
    if wanted[2] and parts.grad_bias is not None:
        grad_bias = scale_stash(parts.grad_bias, upstream, kept.dtypes[2])
    grad_weight = _weight_gradient(kept, upstream) if wanted[1] else None
    if summed is not None:
        grad_hidden = summed().to(kept.dtypes[0])
    return grad_hidden, parallel.padded(grad_weight, kept.rows), parallel.padded(grad_bias, kept.rows)


def _upstream_of(kept: LinearCrossEntropyFp8Kept, grad_loss: Tensor) -> Tensor:
    """[] or [..., 1] float32: the upstream gradient, 0 for ignored tokens."""
    upstream = grad_loss.float()
    if kept.reduction != "none":
        return upstream
    ignored = _ignored(kept)
    return upstream[..., None] if ignored is None else upstream[..., None].masked_fill(ignored, 0)


def _ignored(kept: LinearCrossEntropyFp8Kept) -> Tensor | None:
    """[..., 1] bool."""
    return None if kept.target is None else (kept.target == kept.ignore_index)[..., None]


def _weight_gradient(kept: LinearCrossEntropyFp8Kept, upstream: Tensor) -> Tensor | None:
    """The gradient of this rank's rows; None if it was added to the caller's memory."""
    assert kept.hidden is not None
    ignored, per_token, add_to = _ignored(kept), kept.reduction == "none", kept.weight_grad_out
    h = parallel.whole_hidden(kept.hidden, kept.shards)
    if add_to is not None and kept.shards.there:
        add_to = add_to[: kept.shards.rows]
    # Not 0 times it: an ignored token's hidden state may be NaN.
    h = h if ignored is None else h.masked_fill(ignored, 0)
    if per_token:
        h = h * upstream
    h = h.reshape(-1, h.shape[-1])
    _, turned = quantizer(QUANTIZERS[kept.backend])(h, "e4m3", SCALE, by_block=True, rows=False)
    if not per_token and turned is not None:
        stated.call(Tensor.mul_, turned.scales, upstream)
    products, columns = products_of(kept.backend, h), operand(kept.parts.columns, kept.parts.column_scales)
    made = multiply(products, columns, turned, by_block=True, dtype=kept.dtypes[1], add_to=add_to)
    return made if add_to is None else None


def _fake_gradients(kept: LinearCrossEntropyFp8Kept, upstreams: Made, wanted: Wanted) -> Made:
    parts = kept.parts
    like = next(x for x in (parts.grad_hidden, kept.hidden, parts.grad_bias) if x is not None)
    shapes = kept.shape, (kept.rows, kept.shape[-1]), (kept.rows,)
    there = wanted[0], wanted[1] and kept.weight_grad_out is None, wanted[2]
    sizes = zip(there, shapes, kept.dtypes, strict=True)
    return [stated.empty(shape, dtype, like.device) if want else None for want, shape, dtype in sizes]


def _flops(arguments: Any) -> int:
    """Operations for the logits and for hidden's gradient, both in forward."""
    made: int = arguments.call.flops * (1 + arguments.call.grads[0])
    return made


def _weight_flops(kept: LinearCrossEntropyFp8Kept, upstreams: Made, wanted: Wanted) -> int:
    """Operations for the weight's gradient."""
    if not wanted[1] or kept.parts.columns is None:
        return 0
    return 2 * len(kept.parts.columns) * kept.tokens * kept.shape[-1]


FP8 = LOSS.operator(
    "fp8",
    Parts,
    call=Fp8Call,
    kept=LinearCrossEntropyFp8Kept,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=_fake_gradients,
    differentiable=DIFFERENTIABLE,
    adds_to={"weight": "weight_grad_out"},
    flops=_flops,
    gradient_flops=_weight_flops,
)


def check_dtypes(weight: Tensor | QuantizedWeight, precision: str, dtype: torch.dtype) -> None:
    """Raise for a weight, or a dtype of products, that a precision doesn't take."""
    if isinstance(weight, QuantizedWeight) and precision != "fp8":
        raise TypeError(f"{OP}: weight is a QuantizedWeight, which only precision='fp8' takes; pass the weight itself")
    if precision == "fp8" and dtype == torch.float64:
        raise TypeError(f"{OP}: precision='fp8' takes no float64; pass precision='full', or cast hidden and weight")


def arguments_of(call: LinearCrossEntropyCall, weight: Tensor | QuantizedWeight, backend: str) -> Fp8Call:
    """The operator's arguments for a call."""
    check_options(call.options, grad_bias=call.grads[2])
    refused, shards, given = refusals(call.hidden.device), call.shards, weight
    if call.dense and shards.there:
        refused["triton"] = (
            "soft labels for all entries take no sharded vocabulary here; pass backend='plain', which emulates FP8, or "
            "K ids"
        )
    chosen = choose_backend(OP, backend, refused)
    if shards.there:
        if shards.rows == 0:  # for which kernels have nothing to do
            chosen = "plain"
        if isinstance(weight, QuantizedWeight) and len(call.weight) > shards.rows:
            raise ValueError(
                f"{OP}: weight was quantised with {len(call.weight) - shards.rows} rows of padding, which would share "
                "scales with rows of the vocabulary; pass the weight itself"
            )
        given = weight if isinstance(weight, QuantizedWeight) else call.weight[: shards.rows]
    wanted = "hidden" if call.grads[0] else None
    copies = copies_of(OP, given, SCALE, QUANTIZERS[chosen], by_block=True, wanted=wanted)
    check = weight is not call.weight and (call.options.check_inputs or not call.weight.is_cuda)
    return Fp8Call(call, copies, check, chosen)
