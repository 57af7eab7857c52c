"""cross_entropy for PyTorch with soft labels, on its own operations: the operator of backend "torch".

It takes chunks of rows; the maths is in `onchip.vocab.torch.soft`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.ops.cross_entropy.soft_call import SoftCall
from onchip.ops.cross_entropy.spec import OP
from onchip.vocab.chunks import Config
from onchip.vocab.rows import torch as torch_rows
from onchip.vocab.torch import soft, walk
from onchip.vocab.torch.loss import scaled_rows
from onchip.vocab.torch.soft import SoftOutputs
from onchip.vocab.torch.tiles import Tile, Tokens, apply, spans, temperature_of


class SoftMade(NamedTuple):
    """What the operators return."""

    out: SoftOutputs


class Kept(NamedTuple):
    """What backward is given."""

    call: SoftCall
    lse: Tensor
    log_prob: Tensor
    largest: Tensor | None


def _forward(call: SoftCall) -> SoftMade:
    options, tokens = call.options, call.tokens(check_values=call.options.check_inputs)
    rows, shape = torch_rows.Rows(call.logits), call.logits.shape[:-1]
    if call.dense:
        made = soft.dense_stats(rows, options, tokens, call.config(), call.labels, call.class_weight)
        return SoftMade(SoftOutputs(soft.reduced(options, made.loss, tokens, shape), *made[1:]))
    stats = walk.forward(rows, options, tokens, call.config(), soft.asked_by(options, call.class_weight))
    losses = soft.token_losses(options, stats.lse, stats.log_prob, stats.uniform, call.probs())
    known = stats.lse, stats.log_prob
    more = soft.id_stats(*known, stats.entropy, stats.argmax, call.probs(weighed=False), tokens.ids)
    return SoftMade(SoftOutputs(soft.reduced(options, losses, tokens, shape), *known, None, *more))


def _fake(call: SoftCall) -> SoftMade:
    return SoftMade(SoftOutputs.empty(call.options, call.logits, call.labels, dense=call.dense))


def _save(call: SoftCall, made: SoftMade) -> Kept:
    return Kept(call, *made.out[1:4])


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    call, options, (grad_loss,) = kept.call, kept.call.options, upstream
    assert grad_loss is not None
    tokens, config = call.tokens(check_values=False), call.config()
    each = tokens.upstream(grad_loss) if options.reduction == "none" else grad_loss
    row, _ = scaled_rows(tokens, options, each * tokens.inverse_count, torch.float32)
    (out,) = _fake_gradients(kept, upstream, wanted)
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


def _fake_gradients(kept: Kept, upstream: Made, wanted: Wanted) -> list[Tensor]:
    """Contiguous, whatever the logits' strides."""
    return [torch.empty_like(kept.call.logits, memory_format=torch.contiguous_format)]


LOSS = Operator(
    "cross_entropy_soft",
    op=OP,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=_fake_gradients,
    differentiable=("logits",),
)
