"""Checks that the ranks which share a vocabulary were given matching arguments, by comparing these over the ranks."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onchip.frontend.torch_refusals import all_gather, go_on_together
from onchip.vocab.torch.parallel import group_of

# 2**64 over the golden ratio, as int64 has it: spreads bits.
_ODD = 0x9E3779B97F4A7C15 - 2**64
# How many entries of a shard are compared.
_SAMPLES = 16
# Rows of hidden states that are widened at once.
_ROWS = 1024


def require_agreement(
    op: str,
    call: Any,
    sizes: Any,
    *values: Tensor | None,
    split: Mapping[str, Tensor | None],
    hidden: Mapping[str, Tensor | None] | None = None,
    ids: Tensor | None = None,
    check: Callable[[], Any] | None = None,
) -> None:
    """Raise if the ranks differ in what must be the same, or have the same where each must have its own part; this runs
    on the CPU and with check_inputs.

    sizes: those of hidden or the logits, and dtypes.  values: targets, ids and weights.  split: what is sharded, by
    name; weights by their first dimension, logits [..., V] by their last.  hidden: the hidden states, by name; those of
    tokens whose `ids`, [...] or [..., K], are ignored may be anything.  check: raises if this rank finds
    something wrong that the others may not.
    """
    options, shards = call.options, call.shards
    device = next(x.device for x in split.values() if x is not None)
    if shards.ranks == 1 or not (options.check_inputs or device.type == "cpu"):
        if check is not None:
            check()
        return
    go_on_together(op, group_of(shards), device, check)
    said = {
        "vocab_size": shards.vocab,
        "hidden_layout": shards.sequence,
        "reduce_hidden_grad": shards.reduce,
        "sizes or dtypes": sizes,
        "which gradients are wanted": call.grads,
        "options": replace(options, scratch_bytes=None),
        "shapes of targets, ids or weights": [None if x is None else x.shape for x in values],
    }
    parts = [torch.tensor([_number(x) for x in said.values()], dtype=torch.int64, device=device)]
    parts += [torch.zeros_like(parts[0][:1]) if x is None else _fingerprint(x).to(device) for x in values]
    own = {name: _of_shard(name, x) for name, x in split.items() if x is not None}
    out = _gathered(shards, torch.cat([*parts, *own.values()]))
    same, apart = out[:, : -len(own)], out[:, -len(own) :]
    differ = (same != same[0]).any(0).tolist()
    names = [*said, *["values of targets, ids or weights"] * len(values)]
    wrong = [name for name, x in zip(names, differ, strict=True) if x]
    if wrong:
        raise ValueError(
            f"{op}: the ranks of vocab_group differ in {', '.join(dict.fromkeys(wrong))}; pass the same on each"
        )
    for name, column in () if shards.stated else zip(own, apart.T.tolist(), strict=True):
        _require_parts(op, name, column)
    for name, x in (hidden or {}).items():
        if x is not None and x.numel() > 0 and shards.sequence < 0:
            _require_same_hidden(op, name, x, None if ids is None else ids == options.ignore_index, shards)


def _require_parts(op: str, name: str, of_ranks: list[int]) -> None:
    """Raise if two ranks have the same part of what is sharded, according to `_of_shard`."""
    for rank, x in enumerate(of_ranks):
        first = of_ranks.index(x)
        if x != 0 and first < rank:
            part = f"{name}.chunk({len(of_ranks)}{', -1' if name.endswith('logits') else ''})[rank]"
            raise ValueError(
                f"{op}: {name} is the same on ranks {first} and {rank} of vocab_group, each of which must have its own "
                f"entries of the vocabulary; pass {part} of a whole {name}, or leave vocab_group out where each rank "
                "has the whole vocabulary"
            )


def _require_same_hidden(op: str, name: str, hidden: Tensor, ignored: Tensor | None, shards: Any) -> None:
    """Raise for a token whose hidden states differ between ranks by more than rounding.

    Two numbers per token are compared: its product with a row of signs, and its norm.
    """
    flat = hidden.detach().reshape(-1, hidden.shape[-1])
    wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
    signs = _signs(flat.shape[1], wide, flat.device)
    made = [torch.stack([x @ signs, x.norm(dim=1)]) for x in (part.to(wide) for part in flat.split(_ROWS))]
    product, norm = _gathered(shards, torch.cat(made, 1).view(-1)).view(shards.ranks, 2, -1).unbind(1)
    # Ranks that computed the same in another order differ by less.
    most = torch.finfo(flat.dtype).eps ** 0.5 * torch.minimum(norm, norm[0])
    same = (product == product[0]) | ((product - product[0]).abs() <= most) | (product.isnan() & product[0].isnan())
    if ignored is not None:
        same = same | ignored.reshape(len(flat), -1).all(1)
    if not bool(same.all()):
        token, rank = (int(x) for x in (~same).T.nonzero()[0])
        place = torch.full((), token, dtype=torch.int64, device="cpu")
        where = ", ".join(str(int(x)) for x in torch.unravel_index(place, hidden.shape[:-1]))
        raise ValueError(
            f"{op}: {name}{f'[{where}]' if where else ''} differs between ranks 0 and {rank} of vocab_group; pass the "
            "same on each, as an all-reduce or all-gather gives it, or hidden_layout='sequence' where each rank has "
            "its own tokens"
        )


def _gathered(shards: Any, mine: Tensor) -> Tensor:
    """[ranks, n]: every rank's `mine` [n]."""
    out = mine.new_empty(shards.ranks, len(mine))
    all_gather(out.view(-1), mine, group=group_of(shards))
    return out


def _number(x: Any) -> int:
    """A number of 61 bits, the same in each process for equal `x`."""
    made = 0
    for letter in repr(x):
        made = (made * 1000003 + ord(letter)) % (2**61 - 1)
    return made


def _of_shard(name: str, x: Tensor) -> Tensor:
    """[1] int64 that tells a shard from others, made of a few entries; 0 if these are all the same number, such as
    zeros.
    """
    dim = -1 if name.endswith("logits") else 0
    step = max(1, x.shape[dim] // _SAMPLES)
    few = x.detach()[..., ::step] if dim else x.detach()[::step]
    bits = _bits(few.reshape(-1))
    return torch.where((bits == bits[:1]).all(), 0, _fingerprint(few))


def _fingerprint(x: Tensor) -> Tensor:
    """[1] int64 that other values most likely don't have."""
    bits = _bits(x.detach().reshape(-1))
    # Mixed before and after: plain floats differ in their highest bits alone, where sums of such products often agree.
    place = torch.arange(len(bits), dtype=torch.int64, device=x.device)
    mixed = (bits ^ (bits >> 32)) * (_ODD * (2 * place + 1))
    return (mixed ^ (mixed >> 32)).sum().view(1)


def _bits(flat: Tensor) -> Tensor:
    """Int64 that other numbers don't have."""
    return flat.to(torch.float64).view(torch.int64) if flat.is_floating_point() else flat.to(torch.int64)


def _signs(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[size] of 1 and -1 in no order, the same in each process."""
    mixed = torch.arange(size, dtype=torch.int64, device=device) * _ODD
    return ((mixed ^ (mixed >> 32)) & 1).to(dtype) * 2 - 1
