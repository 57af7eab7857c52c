"""What the comparisons of PyTorch ops with their oracles share."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.oracle import checks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def as_array(x: Tensor) -> Any:
    """Floats as float64."""
    x = x.detach()
    return (x.double() if x.is_floating_point() else x).cpu().numpy()


def relative_error(out: Tensor, ref: Any) -> float:
    """||out - ref|| / ||ref||, as `checks.relative_error`."""
    return checks.relative_error(as_array(out), ref)


def linear_arguments(inputs: Any, ids: Any, dtype: torch.dtype, device: str) -> list[Any]:
    """(hidden, weight, ids, bias): floats as leaves that need gradients."""

    def leaf(x: Any) -> Tensor | None:
        return None if x is None else torch.from_numpy(x).to(device=device, dtype=dtype).requires_grad_()

    return [leaf(inputs.hidden), leaf(inputs.weight), torch.from_numpy(ids).to(device), leaf(inputs.bias)]


def detached(arguments: list[Any]) -> list[Any]:
    """Leaves of their own, which need gradients where `arguments` do."""
    return [None if x is None else x.detach().clone().requires_grad_(x.requires_grad) for x in arguments]


def for_oracle(x: Any) -> Any:
    """Tensors as arrays; anything else as it is."""
    return as_array(x) if isinstance(x, Tensor) else x


def plain_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: float | None = None,
    token_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
) -> Tensor:
    """The loss of cross_entropy written with the framework's own functions in logits' dtype."""
    z = logits * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z / (temperature[..., None].to(z) if isinstance(temperature, Tensor) else temperature)
    kept = target != ignore_index
    y = target.masked_fill(~kept, 0)
    log_p = F.log_softmax(z, -1)
    loss = -(1 - label_smoothing) * log_p.gather(-1, y[..., None])[..., 0]
    if z_loss > 0:
        loss = loss + z_loss * torch.logsumexp(z, -1) ** 2
    if label_smoothing > 0:
        loss = loss - label_smoothing * log_p.mean(-1)
    if token_weight is not None:
        loss = loss * token_weight.to(z)
    loss = loss.masked_fill(~kept, 0)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (kept.sum().clamp(min=1) if normalizer is None else normalizer)
