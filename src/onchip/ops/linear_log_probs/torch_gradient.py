"""The gradient of log-probabilities, entropy and log-sum-exp by the logits, of each token's softmax statistics."""

import torch
from torch import Tensor

from onchip.vocab.torch.loss import factor_to_product
from onchip.vocab.torch.softmax import VANISHED, TokenGradient, float16_scale
from onchip.vocab.torch.tiles import NOWHERE, Ids, Transform


def gradient_of_log_probs(
    tokens: Ids,
    transform: Transform,
    operand: torch.dtype,
    *,
    log_prob: Tensor,  # [n, K] float32
    lse: Tensor,  # [n] float32
    mean: Tensor | None,  # [n] float32
    entropy: Tensor | None,  # [n] float32
    grad_log_prob: Tensor | None,  # [n, K] float32
    grad_entropy: Tensor | None,  # [n] float32
    grad_lse: Tensor | None,  # [n] float32
) -> tuple[TokenGradient, Tensor | None]:
    """The gradient of each token's logits, and what it was multiplied by for float16's sake (None: nothing)."""
    kept, factor = tokens.kept, factor_to_product(tokens, transform)

    def scaled(grad: Tensor | None) -> Tensor | None:
        # A NaN that is sent to an ignored token must not leak.
        return None if grad is None else tokens.mask(grad) * factor

    g_entropy, g_lse = scaled(grad_entropy), scaled(grad_lse)
    g = torch.zeros_like(log_prob)
    if grad_log_prob is not None:
        g = grad_log_prob.masked_fill(tokens.ids == NOWHERE, 0)
        g = g * (factor[:, None] if isinstance(factor, Tensor) else factor)
    if tokens.bad is not None:
        g = g.masked_fill(tokens.bad, float("nan"))

    size = g.abs().sum(1)
    for more in (g_entropy, g_lse):
        size = size if more is None else size + more.abs()
    grad_scale = float16_scale(size, operand)
    if grad_scale is not None:
        g = g * grad_scale
        g_entropy = None if g_entropy is None else g_entropy * grad_scale
        g_lse = None if g_lse is None else g_lse * grad_scale

    same, rest = _shares(tokens.ids, g)
    common = g.sum(1)
    if g_lse is not None:
        common, rest = common - g_lse, rest - g_lse[:, None]
    center, width = lse, None
    if g_entropy is not None:
        assert mean is not None
        assert entropy is not None
        center, width = mean, entropy
        rest = rest + g_entropy[:, None] * (log_prob + entropy[:, None]).clamp(min=VANISHED)
    # exp(z - inf) is 0 for ignored tokens, whatever their logits are.
    if kept is not None and width is None:
        center = center.masked_fill(~kept, float("inf"))
    elif kept is not None and width is not None:
        center, width = center.masked_fill(~kept, 0), width.masked_fill(~kept, float("inf"))
    # 1 - p as -expm1(log p): 1 minus a rounded p would lose all digits of a p near 1.
    at_ids = -(same * torch.expm1(log_prob)) - log_prob.exp() * rest
    return TokenGradient(
        center, -common, at_ids, width=width, entropy_row=None if g_entropy is None else -g_entropy
    ), grad_scale


def _shares(ids: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """For each id of a token the sum of `g` over its occurrences, and the sum over the other ids; [n, K] each."""
    if ids.shape[1] == 1:
        return g, torch.zeros_like(g)
    same, rest = torch.empty_like(g), torch.empty_like(g)
    for k in range(ids.shape[1]):  # not all at once: that would be [n, K, K]
        equal = ids == ids[:, k : k + 1]
        same[:, k] = torch.where(equal, g, 0).sum(1)
        rest[:, k] = torch.where(equal, 0, g).sum(1)
    return same, rest
