"""cross_entropy for PyTorch with soft labels, on its own operations: the operator of backend "torch".

It takes chunks of rows; the maths is in `onchip.vocab.torch.soft`.
"""

from typing import Any

import torch
from torch import Tensor

from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.ops.cross_entropy.soft_call import Kept, SoftCall, SoftMade, fake, fake_gradients, save
from onchip.ops.cross_entropy.spec import OP
from onchip.vocab.chunks import Config
from onchip.vocab.rows import torch as torch_rows
from onchip.vocab.torch import soft, walk
from onchip.vocab.torch.loss import scaled_rows
from onchip.vocab.torch.soft import DenseStats, SoftOutputs
from onchip.vocab.torch.softmax import TokenGradient, TokenStats
from onchip.vocab.torch.tiles import Tile, Tokens, apply, spans, temperature_of


def _forward(call: SoftCall) -> SoftMade:
    options, tokens = call.options, call.tokens(check_values=call.options.check_inputs)
    rows, config = torch_rows.Rows(call.logits), call.config()
    if call.dense:
        made = soft.dense_stats(rows, options, tokens, config, call.labels, call.class_weight)
        return made_of_dense(call, tokens, made)
    return made_of(call, tokens, walk.forward(rows, options, tokens, config, soft.asked_by(options, call.class_weight)))


def made_of(call: SoftCall, tokens: Tokens, stats: TokenStats) -> SoftMade:
    """The outputs of K ids, given the statistics of the whole vocabulary."""
    losses = soft.token_losses(call.options, stats.lse, stats.log_prob, stats.uniform, call.probs())
    known = stats.lse, stats.log_prob
    of = soft.id_stats(*known, stats.entropy, stats.argmax, call.probs(weighed=False), tokens.ids)
    loss = soft.reduced(call.options, losses, tokens, call.logits.shape[:-1])
    return SoftMade(SoftOutputs(loss, *known, None, None, of))


def made_of_dense(call: SoftCall, tokens: Tokens, made: DenseStats) -> SoftMade:
    """The outputs of every entry."""
    return SoftMade(SoftOutputs(soft.reduced(call.options, made.loss, tokens, call.logits.shape[:-1]), *made[1:]))


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    call, (out,) = kept.call, fake_gradients(kept, upstream, wanted)
    tokens, config = call.tokens(check_values=False), call.config()
    if call.dense:
        write_dense(kept, call, soft.Whole.of(config.vocab_chunk, call.class_weight), tokens, config, upstream, out)
    else:
        gradient = gradient_of_ids(kept, call, tokens, upstream, config.vocab_chunk)
        torch_rows.write_gradient(call.logits, call.options, tokens, config.token_chunk, gradient, out)
    return [out]


def gradient_of_ids(kept: Any, call: SoftCall, tokens: Tokens, upstream: Made, vocab: int) -> TokenGradient:
    """That of the tokens' logits, of K ids."""
    row = _rows(call, tokens, upstream)
    return soft.loss_gradient(
        call.options, row, kept.lse, kept.log_prob, call.probs(), tokens, vocab, call.class_weight
    )


def write_dense(
    kept: Any, mine: SoftCall, whole: soft.Whole, tokens: Tokens, config: Config, upstream: Made, out: Tensor
) -> None:
    """Write the gradient of the logits of `mine` to `out`: all of them or, where other ranks have other parts of the
    vocabulary, this rank's."""
    row, options, vocab = _rows(mine, tokens, upstream), mine.options, config.vocab_chunk
    source, into = torch_rows.Rows(mine.logits), torch_rows.Rows(out)
    tile = Tile(min(tokens.number, config.token_chunk) * vocab, tokens, slope=options.softcap is not None)
    for start, stop in spans(tokens.number, config.token_chunk):
        z, slope, _ = tile.cut(stop - start, vocab)
        source.read(tokens, start, stop, z)
        apply(options, z, temperature_of(tokens, start, stop), slope)
        known = (x[start:stop] for x in (row, kept.lse, kept.log_prob, kept.largest, kept.mass))
        q = soft.rows_of(mine.labels, start, stop)
        g = soft.dense_gradient(options, z, slope, q, mine.class_weight, whole, *known)
        into.write(tokens, start, stop, g)


def _rows(call: SoftCall, tokens: Tokens, upstream: Made) -> Tensor:
    """[T]: the upstream gradient of each token's loss."""
    options, (grad_loss,) = call.options, upstream
    assert grad_loss is not None
    each = tokens.upstream(grad_loss, options.reduction)
    return scaled_rows(tokens, options, each, torch.float32)[0]


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
