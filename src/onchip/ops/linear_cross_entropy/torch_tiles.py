"""The computation of linear_cross_entropy with PyTorch's own matrix products, tile by tile, on CPU and CUDA.

Three walks over the [tokens, vocab] matrix: `forward_only`, `stash` and `recompute`.  A walk holds one tile of logits
at a time and works in it in place.  Nothing here synchronises a GPU, unless values are to be checked.
"""

from functools import partial

import torch
from torch import Tensor

from onchip.frontend import torch_autograd
from onchip.ops.linear_cross_entropy.spec import OP
from onchip.vocab.chunks import Config
from onchip.vocab.torch import tiles as torch_tiles
from onchip.vocab.torch.tiles import (
    Head,
    Softmax,
    Tile,
    Tokens,
    add_hidden_gradient,
    final_logits,
    gradient_rows,
    operand_dtype,
    product,
    recompute_walk,
    shrink,
    spans,
    temperature_of,
    to_gradient,
)

__all__ = ["Head", "Tokens", "forward_only", "recompute", "stash"]

# What both backends call in this op's name.
select_tokens = partial(torch_tiles.select_tokens, OP)
divisor = partial(torch_tiles.divisor, OP)
differentiable_once = partial(torch_autograd.differentiable_once, OP)


def forward_only(hidden: Tensor, head: Head, tokens: Tokens, config: Config, *, stats: bool) -> Softmax:
    """The softmax of every token; one product."""
    n = tokens.label.numel()
    softmax = Softmax.empty(n, hidden.device)
    tile = Tile(min(n, config.token_chunk) * config.vocab_chunk, hidden, spare=stats)
    for t0, t1 in spans(n, config.token_chunk):
        h = tokens.rows(hidden, t0, t1, masked=False)
        part, label = softmax.part(t0, t1), tokens.label[t0:t1]
        for v0, v1 in spans(head.vocab, config.vocab_chunk):
            z, _, spare = tile.cut(t1 - t0, v1 - v0)
            final_logits(z, h, head, v0, temperature_of(tokens, t0, t1), None)
            part.absorb(z, v0, label, smoothing=head.label_smoothing > 0, spare=spare)
    return softmax


def stash(
    hidden: Tensor,  # [T, H]
    head: Head,
    tokens: Tokens,
    config: Config,
    *,
    grads: tuple[bool, bool, bool],
    stats: bool,
) -> tuple[Softmax, Tensor | None, Tensor | None, Tensor | None]:
    """The softmax, and the gradients of hidden, weight and bias in float32, for an upstream gradient of 1."""
    n, vocab = tokens.label.numel(), head.vocab
    softmax = Softmax.empty(n, hidden.device)
    row, too_large = gradient_rows(tokens, tokens.inverse_count * head.logit_scale, operand_dtype(hidden))
    tile = Tile(min(n, config.token_chunk) * vocab, hidden, slope=head.softcap is not None, spare=stats, narrow=True)
    grad_hidden = hidden.new_zeros(hidden.shape, dtype=torch.float32) if grads[0] else None
    grad_weight = hidden.new_empty(head.weight.shape, dtype=torch.float32) if grads[1] else None
    if grad_weight is not None and n == 0:
        grad_weight.zero_()
    grad_bias = hidden.new_zeros(vocab, dtype=torch.float32) if grads[2] else None
    for t0, t1 in spans(n, config.token_chunk):
        h = tokens.rows(hidden, t0, t1)
        part, label = softmax.part(t0, t1), tokens.label[t0:t1]
        z, slope, spare = tile.cut(t1 - t0, vocab)
        for v0, v1 in spans(vocab, config.vocab_chunk):
            part_slope = None if slope is None else slope[:, v0:v1]
            final_logits(z[:, v0:v1], h, head, v0, temperature_of(tokens, t0, t1), part_slope)
        e = part.absorb(z, 0, label, smoothing=head.label_smoothing > 0, spare=spare)
        r, lse = row[t0:t1], part.lse
        factor = r * (1 + 2 * head.z_loss * lse) / part.total
        g = to_gradient(e, factor, r, lse, part.target_log_prob, label, 0, head, slope)
        if grad_bias is not None:
            grad_bias.add_(g.sum(0))
        g = tile.operand(g)
        if grad_hidden is not None:
            add_hidden_gradient(grad_hidden, g, head, config.vocab_chunk, tokens, t0, t1)
        if grad_weight is not None:
            product(grad_weight, g.t(), h, accumulate=t0 > 0)
    return softmax, shrink(grad_hidden, too_large), shrink(grad_weight, too_large), shrink(grad_bias, too_large)


def recompute(
    hidden: Tensor,  # [T, H]
    head: Head,
    tokens: Tokens,
    config: Config,
    *,
    lse: Tensor,  # [T] float32
    log_prob: Tensor,  # [T] float32
    scale: Tensor,  # 0-d float32: the upstream gradient over what the mean divides by
    grads: tuple[bool, bool, bool],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    weight_grad_out: Tensor | None = None,  # [V, H] float32
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of hidden, weight and bias in `dtypes`; weight's is added to `weight_grad_out` if that is given."""
    row, too_large = gradient_rows(tokens, scale * head.logit_scale, operand_dtype(hidden))
    if tokens.index is not None:
        lse, log_prob = lse[tokens.index], log_prob[tokens.index]
    factor = row * (1 + 2 * head.z_loss * lse)
    # exp(z - inf) is 0 for ignored tokens, whatever their logits are.
    shift = lse if tokens.kept is None else lse.masked_fill(~tokens.kept, float("inf"))

    def gradient(z: Tensor, slope: Tensor | None, _: Tensor | None, t0: int, t1: int, v0: int) -> Tensor:
        part = slice(t0, t1)
        e = z.sub_(shift[part, None]).exp_()
        return to_gradient(e, factor[part], row[part], lse[part], log_prob[part], tokens.label[part], v0, head, slope)

    return recompute_walk(
        hidden,
        head,
        tokens,
        config,
        gradient,
        too_large=too_large,
        grads=grads,
        dtypes=dtypes,
        weight_grad_out=weight_grad_out,
    )
