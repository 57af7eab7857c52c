"""linear_cross_entropy for PyTorch with soft labels: checks, and the operators of backend "torch".

The maths is in `onchip.vocab.torch.soft`.  Labels of K ids go through the walks of the other losses; those of every
entry are taken with the whole vocabulary, a chunk of tokens at a time.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.fp8.torch_operands import QuantizedWeight
from onchip.frontend import topk
from onchip.frontend.options import check_head, check_shift, scratch_in_bytes, shapes_of
from onchip.frontend.topk import TopK
from onchip.frontend.torch_inputs import (
    check_class_weight,
    check_normalizer,
    check_weight_grad_out,
    choose_torch_backend,
    copied_rows,
    copied_weight,
    product_dtype,
    temperature_tensor,
)
from onchip.frontend.torch_labels import check_label_tensors, parts_of
from onchip.frontend.torch_register import Made, Operator, Wanted, needed
from onchip.frontend.torch_types import WithStats
from onchip.ops.linear_cross_entropy import fp8_op, triton_dense, triton_soft
from onchip.ops.linear_cross_entropy.soft_call import SoftCall
from onchip.ops.linear_cross_entropy.spec import OP, Options
from onchip.vocab import memory
from onchip.vocab.chunks import Config
from onchip.vocab.rows.launches import layout_refusal
from onchip.vocab.torch import soft, walk
from onchip.vocab.torch.loss import checked_class_weight, scaled_rows
from onchip.vocab.torch.soft import SoftOutputs
from onchip.vocab.torch.softmax import float16_scale
from onchip.vocab.torch.tiles import Tile, Tokens, apply, spans, temperature_of
from onchip.vocab.triton import setup


def run(
    hidden: Tensor,
    weight: Tensor | QuantizedWeight,
    target: Any,
    bias: Tensor | None,
    *,
    normalizer: float | Tensor | None,
    token_weight: Tensor | None,
    class_weight: Tensor | None,
    temperature: float | Tensor,
    scratch_bytes: int | float | str | None,
    backend: str,
    weight_grad_out: Tensor | None,
    **more: Any,
) -> Tensor | WithStats:
    """The loss, or with return_stats the loss and its statistics; arguments as of `linear_cross_entropy`, `more` being
    the other fields of its options."""
    precision, given = more["precision"], weight
    weight = given.weight if isinstance(given, QuantizedWeight) else given
    if precision == "full" and more["strategy"] == "stash":
        raise ValueError(f"{OP}: soft labels are computed by strategy 'recompute'; got 'stash'; pass 'auto'")
    per_token_temperature = temperature_tensor(OP, temperature)
    layer = {"hidden": hidden, "weight": weight, "bias": bias}
    tensors = check_label_tensors(OP, target, layer, token_weight, class_weight, per_token_temperature)
    vocab = check_head(OP, shapes_of(tensors))
    topk.check_label_shapes(OP, "target", shapes_of(tensors), "hidden", vocab)
    check_class_weight(OP, tensors, "weight")
    options = Options(
        **more,
        temperature=1.0 if isinstance(temperature, Tensor) else temperature,
        scratch_bytes=scratch_in_bytes(OP, scratch_bytes, hidden.shape[:-1].numel() * vocab),
    )
    topk.refuse_options(OP, options)
    check_shift(OP, options.shift, hidden.shape[:-1], "hidden of shape [..., S, H]")
    dtype = product_dtype(OP, tensors)
    fp8_op.check_dtypes(given, precision, dtype)
    normalizer = check_normalizer(OP, normalizer, options.reduction, "hidden", hidden)
    check_weight_grad_out(OP, weight_grad_out, weight)
    dense, copied, length = "target" in tensors, 0, hidden.shape[-2] if hidden.ndim > 1 else 0
    if options.shift:
        hidden, target = hidden[..., :-1, :], _after_the_first(target)
        token_weight = None if token_weight is None else token_weight[..., 1:]
        if per_token_temperature is not None and per_token_temperature.ndim > 0:
            per_token_temperature = per_token_temperature[..., :-1]
        # Hidden's gradient is made of these positions first.
        copied = hidden.numel() * hidden.element_size() if hidden.requires_grad else 0
    chosen = precision
    if precision == "full":
        chosen = choose_torch_backend(OP, backend, hidden.device, _refusal(hidden, target, dtype, options))
    ids, labels, kind = parts_of(target, hidden.shape[:-1])
    call = SoftCall(
        hidden=hidden,
        weight=weight,
        bias=bias,
        ids=ids,
        token_temperature=per_token_temperature,
        dtype=dtype,
        options=options,
        grads=needed(hidden, weight, bias),
        copied=copied + copied_rows(hidden) + (copied_weight(weight, dtype) if chosen == "triton" else 0),
        compiled=torch.compiler.is_compiling(),
        token_weight=token_weight,
        normalizer=normalizer,
        class_weight=None if class_weight is None else checked_class_weight(OP, options, class_weight, dtype),
        weight_grad_out=weight_grad_out,
        labels=labels,
        kind=kind,
        dense=dense,
    )
    if chosen == "fp8":
        out: Any = fp8_op.SOFT(fp8_op.arguments_of(call, given, backend)).out
    elif chosen == "triton":
        out = triton_dense.LOSS(call) if dense else triton_soft.LOSS(call).out
    else:
        strategy = "stash" if dense else "recompute" if any(call.grads) else "forward"
        memory.PLANNER.require(call.problem(compacted=False), strategy, call.budget)
        out = OPERATORS[dense](call).out
    # The last position of a sequence costs nothing.
    stats = None
    if options.return_stats:
        stats = fp8_op.soft_stats(out, call) if chosen == "fp8" else out.stats
    return soft.shaped(out.loss, stats, hidden.shape[:-1], length if options.shift else None)


def _after_the_first(target: Any) -> Any:
    """Soft labels without those of each sequence's first position, which nothing predicts; a view."""
    if isinstance(target, TopK):
        return target._replace(indices=target.indices[..., 1:, :], values=target.values[..., 1:, :])
    return target[..., 1:, :]


def _refusal(hidden: Tensor, target: Any, dtype: torch.dtype, options: Options) -> str | None:
    """Why the Triton kernels can't serve a call."""
    if isinstance(target, Tensor):
        unknown = "its labels of every entry have no return_stats; pass backend='torch', or leave it out"
        reason = unknown if options.return_stats else layout_refusal("target", target)
    else:
        smoothed = "its labels of K ids have no label_smoothing; pass backend='torch', or smooth the labels"
        reason = smoothed if options.label_smoothing > 0 else None
    return reason or setup.refusal(hidden.device.type, hidden.device.index, dtype)


class SoftMade(NamedTuple):
    """What the operators return."""

    out: SoftOutputs


class Kept(NamedTuple):
    """What backward is given."""

    call: SoftCall
    lse: Tensor
    log_prob: Tensor
    largest: Tensor | None


def _fake(call: SoftCall) -> SoftMade:
    return SoftMade(SoftOutputs.empty(call.options, call.hidden, call.labels, dense=call.dense))


def _save(call: SoftCall, made: SoftMade) -> Kept:
    return Kept(call, *made.out[1:4])


def _rows(call: SoftCall, tokens: Tokens, upstream: Made) -> tuple[Tensor, Tensor | None]:
    """[T]: the upstream gradient of each token's loss, and what it was multiplied by for float16's sake."""
    (grad_loss,) = upstream
    assert grad_loss is not None
    each = tokens.upstream(grad_loss) if call.options.reduction == "none" else grad_loss
    row, _ = scaled_rows(tokens, call.options, each * tokens.inverse_count, torch.float32)
    if call.operand != torch.float16:
        return row, None
    grad_scale = float16_scale(row * (1 + call.sums()), call.operand)
    return (row if grad_scale is None else row * grad_scale), grad_scale


# K ids.


def _forward(call: SoftCall) -> SoftMade:
    options, tokens = call.options, call.tokens(check_values=call.options.check_inputs)
    stats = walk.forward(
        call.layer, options, tokens, call.plan("forward", tokens), soft.asked_by(options, call.class_weight)
    )
    losses = soft.token_losses(options, stats.lse, stats.log_prob, stats.uniform, call.probs())
    loss = soft.reduced(options, losses, tokens, call.hidden.shape[:-1])
    known = stats.lse, stats.log_prob, stats.entropy, stats.argmax
    more = soft.id_stats(*known, call.probs(weighed=False), tokens.ids)
    return SoftMade(SoftOutputs(loss, stats.lse, stats.log_prob, None, *more))


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    call = replace(kept.call, grads=tuple(wanted))
    tokens = call.tokens(check_values=False)
    row, grad_scale = _rows(call, tokens, upstream)
    known = kept.lse, kept.log_prob, call.probs(), tokens
    gradient = soft.loss_gradient(call.options, row, *known, call.weight.shape[0], call.class_weight)
    config = call.plan("recompute", tokens)
    return walk.recompute(call, tokens, config, gradient, grad_scale=grad_scale, weight_grad_out=call.weight_grad_out)


# Every entry.


def _dense_forward(call: SoftCall) -> SoftMade:
    options, tokens = call.options, call.tokens(check_values=call.options.check_inputs)
    made = soft.dense_stats(call.layer, options, tokens, _dense_plan(call, tokens), call.labels, call.class_weight)
    loss = soft.reduced(options, made.loss, tokens, call.hidden.shape[:-1])
    return SoftMade(SoftOutputs(loss, *made[1:]))


def _dense_plan(call: SoftCall, tokens: Tokens) -> Config:
    """The same in forward and backward."""
    return call.plan("stash", tokens)


def _dense_gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    call, largest = kept.call, kept.largest
    assert largest is not None
    tokens, layer, options = call.tokens(check_values=False), call.layer, call.options
    row, grad_scale = _rows(call, tokens, upstream)
    config, vocab = _dense_plan(call, tokens), layer.vocab
    size = min(tokens.number, config.token_chunk) * vocab
    tile = Tile(size, tokens, slope=options.softcap is not None, like=layer.hidden)
    into = walk.Accumulated(layer, tokens, config.vocab_chunk, wanted)
    for t0, t1 in spans(tokens.number, config.token_chunk):
        z, slope, _ = tile.cut(t1 - t0, vocab)
        soft.read_logits(layer, tokens, t0, t1, z, config.vocab_chunk)
        apply(options, z, temperature_of(tokens, t0, t1), slope)
        known = (x[t0:t1] for x in (row, kept.lse, kept.log_prob, largest))
        q = soft.rows_of(call.labels, t0, t1)
        g = soft.dense_gradient(options, z, slope, q, call.class_weight, *known)
        into.add(g, tile.operand(g), tokens.rows(layer.hidden, t0, t1), t0, t1, 0, into.weight)
    made: list[Tensor | None] = []
    for x, dtype in zip((into.hidden, into.weight, into.bias), call.dtypes, strict=True):
        x = x if x is None or grad_scale is None else x.div_(grad_scale)
        made.append(x)
        if x is not None and (len(made) != 2 or call.weight_grad_out is None):
            made[-1] = x.to(dtype)
    if made[0] is not None:
        made[0] = made[0].view(call.hidden.shape)
    if made[1] is not None and call.weight_grad_out is not None:
        call.weight_grad_out.add_(made[1])
        made[1] = None
    return made


def _operator(name: str, forward: Any, gradients: Any) -> Operator[SoftCall, SoftMade]:
    return Operator(
        name,
        op=OP,
        forward=forward,
        fake=_fake,
        save=_save,
        gradients=gradients,
        fake_gradients=lambda kept, upstream, wanted: kept.call.empty_gradients(wanted),
        differentiable=("hidden", "weight", "bias"),
        adds_to={"weight": "weight_grad_out"},
    )


OPERATORS = {
    False: _operator("linear_cross_entropy_soft", _forward, _gradients),
    True: _operator("linear_cross_entropy_dense", _dense_forward, _dense_gradients),
}
