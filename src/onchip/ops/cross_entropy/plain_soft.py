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
from onchip.vocab.torch import dense, walk
from onchip.vocab.torch.loss import Outputs, asked_by, loss_gradient, scaled_rows
from onchip.vocab.torch.softmax import TokenGradient
from onchip.vocab.torch.tiles import Tile, Tokens, apply, spans, temperature_of


def _forward(call: SoftCall) -> SoftMade:
    options, tokens = call.options, call.tokens(check_values=call.options.check_inputs)
    rows, config = torch_rows.Rows(call.logits), call.config()
    if call.dense:
        made = dense.dense_stats(OP, rows, options, call.shards, tokens, config, call.labels, call.class_weight)
        return SoftMade(dense.outputs_of(call, made, tokens))
    stats = walk.forward(rows, options, tokens, config, asked_by(options, call.class_weight))
    return SoftMade(Outputs.of(call, stats, tokens))


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    call, (out,) = kept.call, fake_gradients(kept, upstream, wanted)
    tokens, config = call.tokens(check_values=False), call.config()
    if call.dense:
        write_dense(kept, call, dense.Whole.of(config.vocab_chunk, call.class_weight), tokens, config, upstream, out)
    else:
        gradient = gradient_of_ids(kept, call, tokens, upstream, config.vocab_chunk)
        torch_rows.write_gradient(call.logits, call.options, tokens, config.token_chunk, gradient, out)
    return [out]


def gradient_of_ids(kept: Any, call: SoftCall, tokens: Tokens, upstream: Made, vocab: int) -> TokenGradient:
    """That of the tokens' logits, of K ids."""
    row, n = _rows(call, tokens, upstream), tokens.number
    return loss_gradient(call.options, row, kept.lse.reshape(-1), kept.log_prob.reshape(n, -1), vocab, tokens)


def write_dense(
    kept: Any, mine: SoftCall, whole: dense.Whole, tokens: Tokens, config: Config, upstream: Made, out: Tensor
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
        known = (x[start:stop] for x in (row, *dense.known_of(kept)))
        q = dense.rows_of(mine.labels, start, stop)
        g = dense.dense_gradient(options, z, slope, q, mine.class_weight, whole, *known)
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
