"""cross_entropy for PyTorch with soft labels: checks, and the operators, which take chunks of rows.

The maths is in `onchip.vocab.torch.soft`.
"""

from typing import Any

import torch
from torch import Tensor

from onchip.frontend import topk
from onchip.frontend.options import check_logits, scratch_in_bytes, shapes_of
from onchip.frontend.topk import TopK
from onchip.frontend.torch_inputs import (
    check_class_weight,
    check_normalizer,
    choose_torch_backend,
    temperature_tensor,
)
from onchip.frontend.torch_labels import check_label_tensors, parts_of
from onchip.frontend.torch_register import Made, Operator, Wanted, needed
from onchip.frontend.torch_types import WithStats
from onchip.ops.cross_entropy import triton_dense, triton_soft
from onchip.ops.cross_entropy.soft_call import Kept, SoftCall, SoftMade, fake, fake_gradients, save
from onchip.ops.cross_entropy.spec import OP, Options
from onchip.vocab.chunks import Config
from onchip.vocab.rows import launches
from onchip.vocab.rows import torch as torch_rows
from onchip.vocab.torch import soft, walk
from onchip.vocab.torch.loss import checked_class_weight, scaled_rows
from onchip.vocab.torch.soft import SoftOutputs
from onchip.vocab.torch.tiles import Tile, Tokens, apply, spans, temperature_of


def run(
    logits: Tensor,
    target: Any,
    *,
    normalizer: float | Tensor | None,
    token_weight: Tensor | None,
    class_weight: Tensor | None,
    temperature: float | Tensor,
    scratch_bytes: int | float | str | None,
    backend: str,
    **more: Any,
) -> Tensor | WithStats:
    """The loss, or with return_stats the loss and its statistics; arguments as of `cross_entropy`, `more` being the
    other fields of its options."""
    per_token_temperature = temperature_tensor(OP, temperature)
    tensors = check_label_tensors(OP, target, {"logits": logits}, token_weight, class_weight, per_token_temperature)
    check_logits(OP, shapes_of(tensors))
    topk.check_label_shapes(OP, "target", shapes_of(tensors), "logits", logits.shape[-1])
    check_class_weight(OP, tensors, "logits")
    options = Options(
        **more,
        temperature=1.0 if isinstance(temperature, Tensor) else temperature,
        scratch_bytes=scratch_in_bytes(OP, scratch_bytes, logits.numel()),
    )
    topk.refuse_options(OP, options)
    topk.refuse_shift(OP, options.shift, "target")
    if options.inplace_backward:
        raise ValueError(f"{OP}: inplace_backward=True takes targets that are ids; pass inplace_backward=False")
    normalizer = check_normalizer(OP, normalizer, options.reduction, "logits", logits)
    chosen = choose_torch_backend(OP, backend, logits.device, _refusal(logits, target))
    ids, labels, kind = parts_of(target, logits.shape[:-1])
    call = SoftCall(
        logits=logits,
        ids=ids,
        labels=labels,
        token_weight=token_weight,
        class_weight=None if class_weight is None else checked_class_weight(OP, options, class_weight, logits.dtype),
        token_temperature=per_token_temperature,
        normalizer=normalizer,
        options=options,
        kind=kind,
        dense="target" in tensors,
        grads=needed(logits),
    )
    if chosen == "triton":
        out: Any = triton_dense.LOSS(call) if call.dense else triton_soft.LOSS(call).out
    else:
        out = LOSS(call).out
    return soft.shaped(out.loss, out.stats.of(out.lse) if options.return_stats else None, logits.shape[:-1])


def _refusal(logits: Tensor, target: Any) -> str | None:
    """Why the Triton kernels can't serve a call."""
    reason = launches.refusal(logits)
    return reason if isinstance(target, TopK) else reason or launches.layout_refusal("target", target)


def _forward(call: SoftCall) -> SoftMade:
    options, tokens = call.options, call.tokens(check_values=call.options.check_inputs)
    rows, shape = torch_rows.Rows(call.logits), call.logits.shape[:-1]
    if call.dense:
        made = soft.dense_stats(rows, options, tokens, call.config(), call.labels, call.class_weight)
        return SoftMade(SoftOutputs(soft.reduced(options, made.loss, tokens, shape), *made[1:]))
    stats = walk.forward(rows, options, tokens, call.config(), soft.asked_by(options, call.class_weight))
    losses = soft.token_losses(options, stats.lse, stats.log_prob, stats.uniform, call.probs())
    known = stats.lse, stats.log_prob
    of = soft.id_stats(*known, stats.entropy, stats.argmax, call.probs(weighed=False), tokens.ids)
    return SoftMade(SoftOutputs(soft.reduced(options, losses, tokens, shape), *known, None, of))


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    call, options, (grad_loss,) = kept.call, kept.call.options, upstream
    assert grad_loss is not None
    tokens, config = call.tokens(check_values=False), call.config()
    each = tokens.upstream(grad_loss) if options.reduction == "none" else grad_loss
    row, _ = scaled_rows(tokens, options, each * tokens.inverse_count, torch.float32)
    (out,) = fake_gradients(kept, upstream, wanted)
    if call.dense:
        _write_dense(kept, tokens, row, config, out)
    else:
        known = kept.lse, kept.log_prob, call.probs(), tokens
        gradient = soft.loss_gradient(options, row, *known, config.vocab_chunk, call.class_weight)
        torch_rows.write_gradient(call.logits, options, tokens, config.token_chunk, gradient, out)
    return [out]


def _write_dense(kept: Kept, tokens: Tokens, row: Tensor, config: Config, out: Tensor) -> None:
    call, options, vocab = kept.call, kept.call.options, config.vocab_chunk
    assert kept.largest is not None
    source, into = torch_rows.Rows(call.logits), torch_rows.Rows(out)
    tile = Tile(min(tokens.number, config.token_chunk) * vocab, tokens, slope=options.softcap is not None)
    for start, stop in spans(tokens.number, config.token_chunk):
        z, slope, _ = tile.cut(stop - start, vocab)
        source.read(tokens, start, stop, z)
        apply(options, z, temperature_of(tokens, start, stop), slope)
        known = (x[start:stop] for x in (row, kept.lse, kept.log_prob, kept.largest))
        q = soft.rows_of(call.labels, start, stop)
        g = soft.dense_gradient(options, z, slope, q, call.class_weight, *known)
        into.write(tokens, start, stop, g)


LOSS = Operator(
    "cross_entropy_soft",
    op=OP,
    forward=_forward,
    fake=fake,
    save=save,
    gradients=_gradients,
    fake_gradients=fake_gradients,
    differentiable=("logits",),
)
