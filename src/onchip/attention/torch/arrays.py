"""The functions that masks need, for PyTorch."""

import torch
from torch import Tensor

from onchip.attention.masks import KNOWN, MaskArrays
from onchip.frontend.torch_inputs import has_values


def _count_not_above(x: Tensor, y: Tensor) -> Tensor:
    rows = max(len(x), len(y))
    x, y = (a.expand(rows, -1).contiguous() for a in (x, y))
    return torch.searchsorted(x, y, right=True, out_int32=True)


KNOWN["torch"] = MaskArrays(
    torch,
    positions=lambda like, n, first: torch.arange(first, first + n, dtype=torch.int32, device=like.device),
    constants=lambda like, n, value: torch.full((n,), value, dtype=torch.int32, device=like.device),
    integers=lambda x: x.to(torch.int32),
    running_max=lambda x: x.cummax(-1).values,
    running_min=lambda x: x.flip(-1).cummin(-1).values.flip(-1),
    count_not_above=_count_not_above,
    values=lambda x: x.numpy(force=True) if has_values(x) else None,
    values_at_hand=lambda x: x.numpy(force=True) if has_values(x) and x.device.type == "cpu" else None,
)
