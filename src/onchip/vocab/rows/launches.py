"""Launches of the Triton kernels over rows of existing logits."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.options import LossTerms, possessive
from onchip.frontend.torch_inputs import DTYPES, leading_dimensions
from onchip.kernels.triton.launch import Launch, describe, device_refusal, has_gluon
from onchip.kernels.triton.versions import interpreted
from onchip.vocab.rows.memory import ONCE_WARPS, RowTiles, heuristic_tiles, row_rings

_LINE = 128
"""Bytes that the device reads and writes together."""
_LONG = 8192
"""Logits of a row from which on it matters how many lines are written in part."""


def refusal(logits: Tensor) -> str | None:
    """Why the kernels can't serve a call with these logits, or None."""
    reason = device_refusal(logits.device.type, logits.device.index, logits.dtype)
    return reason or layout_refusal("logits", logits)


def layout_refusal(name: str, x: Tensor | None) -> str | None:
    """Why the kernels can't read the rows of `x`, or None."""
    if x is None or x.numel() == 0 or len(leading_dimensions(x)) <= 2:
        return None
    return (
        f"its {possessive(name)} leading dimensions must reduce to two with a constant stride each; got shape "
        f"{list(x.shape)} with strides {list(x.stride())}"
    )


def launch_rows(
    kernel: str,
    logits: Tensor,  # [..., V]
    out: Tensor | None,  # [..., V]: the gradient, contiguous but for padding of its rows, or `logits`
    target: Tensor,  # [...]
    token_weight: Tensor | None,  # [...]
    token_temperature: Tensor | None,  # [...] or []
    options: Any,
    class_weight: Tensor | None = None,  # [V] float32, contiguous
    **more: Any,
) -> None:
    """Launch a kernel of onchip.vocab.rows.triton, with an op's `options`; `more` are its other arguments."""
    from onchip.vocab.rows import triton as triton_rows

    both, entropy = kernel == "losses" and out is not None, more.get("entropy") is not None
    light = kernel == "losses" and not both and not entropy
    tiles = heuristic_tiles(logits.shape[-1], DTYPES[logits.dtype], light=light, twice=both)
    given = {
        "target": _flat_ids(target),
        "token_weight": flat(token_weight),
        **_of_rows(kernel, logits, out, token_temperature, options, class_weight, tiles),
        **more,
    }
    plain = options.label_smoothing == 0 and class_weight is None
    if both and plain and not entropy and _launch_once(given):
        return
    arguments = {
        "class_total": _total(class_weight),
        **dict.fromkeys(("target_logit", "top_out", "low_out", "uniform", "terms_out", "start", "whole")),
        "SMOOTHING": options.label_smoothing > 0,
        **given,
    }
    _launch(getattr(triton_rows, kernel), tiles, arguments)


def launch_soft(
    kernel: str,
    logits: Tensor,  # [..., V]
    labels: Tensor,  # [..., V]
    out: Tensor | None,  # [..., V]: the gradient, contiguous
    token_temperature: Tensor | None,  # [...] or []
    options: Any,
    class_weight: Tensor | None,  # [V] float32, contiguous
    **more: Any,
) -> None:
    """Launch a kernel of onchip.vocab.rows.soft; `more` are its other arguments."""
    from onchip.vocab.rows import soft as soft_kernels

    tiles = heuristic_tiles(logits.shape[-1], DTYPES[logits.dtype], light=True)
    # Labels take as many registers as logits do, and their statistics as many again: of tiles for light kernels a half
    # or a quarter.
    share = 2 if more.get("entropy") is None else 4
    arguments = _of_rows(kernel, logits, out, token_temperature, options, class_weight, tiles, labels, share)
    _launch(getattr(soft_kernels, kernel), tiles, arguments | more)


def launch_ids(
    kernel: str,
    logits: Tensor,  # [..., V]
    out: Tensor | None,  # [..., V]: the gradient, contiguous
    ids: Tensor,  # [...] or [..., K]
    token_temperature: Tensor | None,  # [...] or []
    options: Any,
    class_weight: Tensor | None = None,  # [V] float32, contiguous
    **more: Any,
) -> None:
    """Launch a kernel of onchip.vocab.rows.ids; `more` are its other arguments."""
    from onchip.vocab.rows import ids as id_kernels

    tokens = logits.shape[:-1].numel()
    ids = stated.converted(ids, lambda x: x.reshape(tokens, -1).to(torch.int64).contiguous())
    light = kernel == "log_probs" and more.get("entropy") is None
    tiles = heuristic_tiles(logits.shape[-1], DTYPES[logits.dtype], light=light)
    several = ids.shape[1]
    arguments = {
        "ids": ids,
        "kept": stated.call(_any_counts, ids, options.ignore_index),
        "class_total": _total(class_weight),
        **dict.fromkeys(("top_out", "low_out", "uniform")),
        "K": several,
        "BLOCK_K": min(1 << (several - 1).bit_length(), 256),
        "BLOCK": 256,
        **_of_rows(kernel, logits, out, token_temperature, options, class_weight, tiles),
    }
    if kernel == "write_ids":
        Launch(id_kernels.write_ids, (-(-ids.numel() // 256),), arguments | more).run()
    else:
        _launch(getattr(id_kernels, kernel), tiles, arguments | more)


def _of_rows(
    kernel: str,
    logits: Tensor,
    out: Tensor | None,
    token_temperature: Tensor | None,
    options: Any,
    class_weight: Tensor | None,
    tiles: RowTiles,
    labels: Tensor | None = None,  # [..., V]
    share: int = 1,
) -> dict[str, Any]:
    """The arguments that all these kernels have.  A tile is `share` times smaller than in `tiles`."""
    shape, vocab, lanes = logits.shape[:-1], logits.shape[-1], 32 * tiles.warps
    given = {name: x for name, x in (("logits", logits), ("out", out), ("labels", labels)) if x is not None}
    columns = {f"{name}_stride": x.stride(-1) if vocab > 1 else 1 for name, x in given.items()}
    rows = {name: rows_of(x) for name, x in given.items()}
    inner, *_ = rows["logits"]
    if out is not logits:
        width = vocab if out is None or out.ndim < 2 else out.stride(-2)  # more than V where columns are padding
        rows["out"] = inner, inner * width, width
    units = _units([*given.values()], [rows[name] for name in given], lanes, writes="gradients" in kernel)
    unit, line = units if {*columns.values()} == {1} else (1, 0)
    by, tile = 1 if line else unit, max(tiles.tile // share, unit * lanes)
    return {
        **{f"{name}_outer": outer // by for name, (_, outer, _) in rows.items()},
        **{f"{name}_inner": row // by for name, (_, _, row) in rows.items()},
        **columns,
        **transform_scales(options),
        "logits": logits,
        "labels": labels,
        "class_weight": class_weight,
        "temperature": None if token_temperature is None else flat(token_temperature.expand(shape)),
        "out": out,
        "T": shape.numel(),
        "V_units": vocab // by,
        "loops": None if line else (vocab - 1) // tile,
        "ignore_index": options.ignore_index,
        "inner": inner,
        "labels_rows": None if labels is None else rows["labels"][0],
        "loss_terms": LossTerms.of(options),
        "LOOP": vocab > tile,
        "UNIT": unit,
        "TILE": tile,
        "LANES": lanes,
        "LINE": line,
        "STAGES": tiles.stages,
    }


def _units(
    given: Sequence[Tensor], rows: Sequence[tuple[int, int, int]], lanes: int, *, writes: bool
) -> tuple[int, int]:
    """How many elements of these matrices, whose columns lie side by side, are read and written at a time; and the
    kernels' LINE.

    Unaligned rows that lie alike in all matrices have a line: all but their ends is read and written 16 bytes at a
    time.  So have long rows that begin within lines, if a gradient is all that is made of them: with 8192 rows of
    128264 numbers `reduction="none"` takes 1.84 ms in place of 3.26; other kernels gain nothing.
    """
    vocab, sizes = given[0].shape[-1], [x.element_size() for x in given]
    whole, line = 16 // max(sizes), min(lanes, _LINE // min(sizes))
    if any(x.data_ptr() % 16 for x in given):
        return 1, 0
    unit = math.gcd(whole, vocab, *[stride for _, *strides in rows for stride in strides])
    several = any(inner < x.shape[:-1].numel() for x, (inner, _, _) in zip(given, rows, strict=True))
    # Kernels take from one matrix how far a row begins before a line, and use it for all.
    places = {(inner, row % line, outer % line if several else 0) for inner, outer, row in rows}
    within = writes and vocab > _LONG and any(row % line for _, _, row in rows)
    has_line = len(places) == 1 and vocab > 2 * line and (unit < whole or within)
    return (whole, line) if has_line else (unit, 0)


def _launch_once(arguments: dict[str, Any]) -> bool:
    """Launch `once.losses_once`, if it serves rows like these."""
    logits, unit = arguments["logits"], arguments["UNIT"]
    device, vocab = describe(logits.device), logits.shape[-1]
    rings = row_rings(vocab, logits.element_size())
    if rings is None or unit * logits.element_size() != 16 or not has_gluon(device.capability) or interpreted():
        return False
    from onchip.vocab.rows import once

    given = {name: arguments[name] for name in once.losses_once.arg_names if name in arguments}
    # With a line, fewer columns are in whole units.
    least = vocab - (arguments["LINE"] + unit - 2 if arguments["LINE"] else 0)
    partial = least <= (rings.HELD + rings.RING - 1) * rings.TILE
    given |= {**rings._asdict(), "LANES": 32 * ONCE_WARPS, "PARTIAL": partial}
    Launch(once.losses_once, (min(arguments["T"], device.programs),), given, ONCE_WARPS, registers=128).run()
    return True


def _launch(function: Any, tiles: RowTiles, arguments: dict[str, Any]) -> None:
    """Launch with as many programs as there are rows, or as many as the device has room for."""
    grid = (min(arguments["T"], tiles.programs * describe(arguments["logits"].device).programs),)
    Launch(function, grid, arguments, tiles.warps, registers=tiles.registers).run()


def _total(class_weight: Tensor | None) -> Tensor | None:
    return None if class_weight is None else stated.call(torch.sum, class_weight)


def shares_of_ids(ids: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """As the function of this name in onchip.vocab.torch.softmax, with one launch for any number of ids."""
    from onchip.vocab.rows import ids as id_kernels

    ids, g = (stated.converted(x, Tensor.contiguous) for x in (ids, g))
    same, rest = stated.empty_like(g), stated.empty_like(g)
    if g.numel() > 0:
        given = {"ids": ids, "g": g, "same": same, "rest": rest, "N": g.numel(), "K": g.shape[1], "BLOCK": 256}
        Launch(id_kernels.share_ids, (-(-g.numel() // 256),), given).run()
    return same, rest


def rows_of(x: Tensor) -> tuple[int, int, int]:
    """For [..., V]: how many rows lie in an outer one, and the strides of outer and inner rows."""
    leading = leading_dimensions(x)
    # With one row the stride says nothing, but the compiler would make another kernel for 0.
    (_, outer), (inner, row) = [(1, 0), (1, x.stride(-2) if x.ndim > 1 else x.shape[-1]), *leading][-2:]
    return x.shape[:-1].numel() if len(leading) < 2 else inner, outer, row


def transform_scales(options: Any) -> dict[str, float | None]:
    """What logits are multiplied by: altogether, if there is no softcap; after tanh, or altogether; and before tanh."""
    scale, softcap, temperature = options.logit_scale, options.softcap, options.temperature
    return {
        "logit_scale": scale / temperature,
        "outer_scale": (scale if softcap is None else softcap) / temperature,
        "inner_scale": None if softcap is None else scale / softcap,
    }


def flat(x: Tensor | None) -> Tensor | None:
    """[...] as kernels take it: [T] float32."""
    return None if x is None else stated.converted(x, _flat_numbers)


def _flat_numbers(x: Tensor) -> Tensor:
    return x.reshape(-1).to(torch.float32).contiguous()


def _flat_ids(x: Tensor) -> Tensor:
    """The ids as int64, since ignore_index may not fit in their own dtype."""
    return stated.converted(x, lambda x: x.reshape(-1).to(torch.int64).contiguous())


def _any_counts(ids: Tensor, ignore_index: int) -> Tensor:
    return (ids != ignore_index).any(1).to(torch.int32)


def count_targets(target: Tensor, ignore_index: int) -> Tensor:
    """[] float32: how many tokens are not ignored, but at least 1."""
    from onchip.vocab.rows import triton as triton_rows

    target = _flat_ids(target)
    out = stated.empty((), torch.float32, target.device)
    given = {"target": target, "divisor": out, "T": len(target), "ignore_index": ignore_index}
    Launch(triton_rows.count_targets, (1,), {**given, "BLOCK": 4096}, warps=8).run()
    return out


def reduce_losses(losses: Tensor, number: Tensor | None, divisor: Tensor | None, reduction: str) -> Tensor:
    """[] float32: the sum of losses, or their mean: divided by `divisor` or else by `number`, [1] int32, if that is not
    0; with "none" the losses.
    """
    if reduction == "none":
        return losses
    from onchip.vocab.rows import triton as triton_rows

    losses, out = losses.reshape(-1), stated.empty((), torch.float32, losses.device)
    given = {
        "loss": losses,
        "number": number,
        "divisor": divisor,
        "out": out,
        "T": len(losses),
        "MEAN": reduction == "mean",
    }
    Launch(triton_rows.reduce_losses, (1,), {**given, "BLOCK": 4096}, warps=8).run()
    return out
