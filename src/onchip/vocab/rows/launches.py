"""The launch of a Triton kernel over rows of logits that exist."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from onchip.frontend.torch_inputs import DTYPES, leading_dimensions
from onchip.kernels.triton.launch import Launch
from onchip.vocab.rows import memory as row_memory
from onchip.vocab.rows.arguments import Arguments
from onchip.vocab.rows.memory import RowTiles


def launch_rows(a: Arguments, kernel: str, out: Tensor, more: dict[str, Any]) -> None:
    """Launch a kernel of triton.py on the rows of the logits and of their gradient."""
    from onchip.vocab.rows import triton as triton_rows

    tokens, vocab, element = a.target.numel(), a.logits.shape[-1], a.logits.element_size()
    tiles = tiles_of(vocab, DTYPES[a.logits.dtype], twice=a.fused and kernel == "losses")
    inner, *rows = _rows(a.logits, out)
    strides = [x.stride(-1) if vocab > 1 and x.numel() > 0 else 1 for x in (a.logits, out)]
    # So many elements are read and written at a time.
    whole = all(x.data_ptr() % 16 == 0 for x in (a.logits, out)) and strides == [1, 1]
    unit = math.gcd(16 // element, vocab, *rows) if whole else 1
    logits_outer, logits_inner, out_outer, out_inner = (x // unit for x in rows)
    temperature = a.token_temperature
    loops = (vocab - 1) // tiles.tile
    arguments = {
        "logits": a.logits,
        "target": a.target.reshape(-1).to(torch.int64).contiguous(),
        "token_weight": None if a.token_weight is None else _flat(a.token_weight),
        "temperature": None if temperature is None else _flat(temperature.expand(a.target.shape)),
        "out": out,
        "T": tokens,
        "V_units": vocab // unit,
        "loops": loops,
        "ignore_index": a.ignore_index,
        "inner": inner,
        "logits_outer": logits_outer,
        "logits_inner": logits_inner,
        "logits_stride": strides[0],
        "out_inner": out_inner,
        "inner_scale": 1.0 if a.softcap is None else a.logit_scale / a.softcap,
        "outer_scale": (a.logit_scale if a.softcap is None else a.softcap) / a.temperature,
        "logit_scale": a.logit_scale / a.temperature,
        "label_smoothing": a.label_smoothing,
        "z_loss": a.z_loss,
        "TOKEN_WEIGHT": a.token_weight is not None,
        "TEMPERATURE": temperature is not None,
        "SMOOTHING": a.label_smoothing > 0,
        "SOFTCAP": a.softcap is not None,
        "UNIT": unit,
        "TILE": tiles.tile,
        "LANES": 32 * tiles.warps,
        "STAGES": tiles.stages,
    }
    if kernel == "losses":
        arguments |= {"LOOP": loops > 0, "target_logit": None, "TARGET_LOGIT": False}
    else:
        arguments |= {"out_outer": out_outer, "out_stride": strides[1]}
    grid = (min(tokens, tiles.programs * _multiprocessors(a.logits)),)
    Launch(getattr(triton_rows, kernel), grid, arguments | more, warps=tiles.warps, registers=tiles.registers).run()


# By this name, so that it can be replaced where tiles are compared.
tiles_of: Callable[..., RowTiles] = row_memory.heuristic_tiles


def _rows(logits: Tensor, out: Tensor) -> tuple[int, int, int, int, int]:
    """How many rows lie in an outer one, and the strides of outer and inner rows, of `logits` and `out`."""
    vocab, tokens = logits.shape[-1], logits.shape[:-1].numel()
    leading = leading_dimensions(logits)
    (_, outer), (inner, row) = ([(1, 0)] * 2 + leading)[-2:]
    if len(leading) < 2:
        inner = tokens
    if out is logits:  # in place
        return inner, outer, row, outer, row
    return inner, outer, row, inner * vocab, vocab


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1).to(torch.float32).contiguous()


def _multiprocessors(x: Tensor) -> int:
    return _count_multiprocessors(x.device.index) if x.is_cuda else 4


@lru_cache(maxsize=64)
def _count_multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
