"""The functions that masks need, for PyTorch."""

import torch
from torch import Tensor

from onchip.attention.masks import KNOWN, MaskArrays
from onchip.frontend.torch_inputs import has_values


def _count_not_above(x: Tensor, y: Tensor) -> Tensor:
    rows = max(len(x), len(y))
    x, y = (a.expand(rows, -1).contiguous() for a in (x, y))
    return torch.searchsorted(x, y, right=True, out_int32=True)


def _run_numbers(ids: Tensor, step: int) -> Tensor:
    # Over all rows, since what happens between them doesn't matter: a GPU sums one long row by many blocks of threads,
    # but has one for each of several rows, and for a running maximum.
    flat = ids.reshape(-1)
    grows = torch.ones(flat.shape, dtype=torch.int32, device=ids.device)
    torch.ne(flat[1:], flat[:-1] + step if step else flat[:-1], out=grows[1:])
    return grows.cumsum(0, dtype=torch.int32 if len(flat) < 2**31 else None).view(ids.shape)


def _runs(ids: Tensor) -> tuple[Tensor, Tensor]:
    number = _run_numbers(ids, 0)  # it never falls, so it can be searched
    start, end = (torch.searchsorted(number, number, right=right, out_int32=True) for right in (False, True))
    return start, end


KNOWN["torch"] = MaskArrays(
    torch,
    positions=lambda like, n, first: torch.arange(first, first + n, dtype=torch.int32, device=like.device),
    constants=lambda like, n, value: torch.full((n,), value, dtype=torch.int32, device=like.device),
    integers=lambda x: x.to(torch.int32),
    run_numbers=_run_numbers,
    runs=_runs,
    count_not_above=_count_not_above,
    values=lambda x: x.numpy(force=True) if has_values(x) else None,
    values_at_hand=lambda x: x.numpy(force=True) if has_values(x) and x.device.type == "cpu" else None,
)
