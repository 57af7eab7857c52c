"""Launches of the kernels in Gluon; launches.py decides where they replace Triton's.

Imported only where Gluon has what they need: see `launch.has_gluon`.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from onchip.kernels.triton.launch import ALL_REGISTERS, Launch, shared_descriptor
from onchip.kernels.triton.staggered import STEP
from onchip.vocab.triton import adding, apart, staggered, turns
from onchip.vocab.triton.records import VOCAB_TILE, End, LogitBuffer, Partials, PositionTerms, Run, Sum, Vectors
from onchip.vocab.triton.tiling import IN_TURNS


def softmax_in_turns(
    run: Run, rows: Tensor, partials: Partials, kept: LogitBuffer | None, first: int, vectors: Vectors
) -> Launch:
    steps = -(-run.hidden // turns.STEP.value)
    # Beside 32 columns on their way out there is room for 13 blocks.  All of H stays where four slots are left; of
    # more H fewer blocks do, since steps that need two slots need more of these: docs/internals/tried.md.
    still = steps if steps <= 9 else max(4, 11 - steps // 2)
    width = 32
    arguments = {
        "rows": _blocks(rows, IN_TURNS, turns.STEP.value),
        "weight": _blocks(run.weight, IN_TURNS, turns.STEP.value),
        "label": vectors.label,
        "factor": vectors.factor,
        "shift": vectors.shift,
        "maximum": partials.maximum,
        "others": partials.others,
        "exponentials": None if kept is None else _blocks(kept.matrix, IN_TURNS, width),
        "buffer": None if kept is None else kept.rows,
        "first": first,
        "stride": partials.stride,
        "T": len(rows),
        "STILL": still,
        "SLOTS": 13 - still,
        "PROGRAMS": run.programs,
        "WIDTH": width,
    }
    return Launch(turns.softmax_in_turns, (run.programs,), arguments, registers=ALL_REGISTERS, shared=run.known)


def softmax_staggered(
    run: Run, rows: Tensor, partials: Partials, kept: LogitBuffer | None, first: int, vectors: Vectors
) -> Launch:
    arguments = {
        **_staggered(run, rows, None if kept is None else kept.matrix),
        "vectors": vectors,
        "partials": partials,
        "buffer": None if kept is None else kept.rows,
        "first": first,
        "T": len(rows),
    }
    return Launch(staggered.softmax_staggered, (run.programs,), arguments, registers=ALL_REGISTERS, shared=run.known)


def gradient_staggered(
    run: Run,
    rows: Tensor,
    terms: PositionTerms,
    buffer: LogitBuffer,
    at_target: Tensor | None,
    first_tile: int,
    tiles: int,
) -> Launch:
    arguments = {
        **_staggered(run, rows, buffer.matrix),
        "buffer": buffer.rows,
        "terms": terms,
        "at_target": at_target,
        "first": buffer.kept,
        "first_tile": first_tile,
        "chunk_tiles": tiles,
    }
    return Launch(staggered.gradient_staggered, (run.programs,), arguments, registers=ALL_REGISTERS, shared=run.known)


def weight_added(
    run: Run,
    buffer: LogitBuffer,
    rows: Tensor,
    into: Sum,
    inverse_grad_scale: Tensor | None,
    even_sum: Tensor | None,
    first_tile: int,
    tiles: int,
    *,
    add: bool,
    end: End | None,
) -> Launch:
    assert into.digits is not None
    rows_of_digits = staggered.ROWS.value // (2 if into.paired else 1)
    arguments = {
        "exponentials": _blocks(buffer.matrix, STEP.value, staggered.ROWS.value),
        "rows": _blocks(rows, STEP.value, staggered.ROWS.value),
        "old_sum": None,
        "old_digits": None,
        "out": into.first,
        "digits": into.digits,
        "inverse_grad_scale": inverse_grad_scale,
        **(end or End(None, None))._asdict(),
        "even_sum": even_sum,
        "buffer": buffer.rows,
        "first_tile": first_tile,
        "chunk_tiles": tiles,
        "out_stride": into.first.stride(0),
        "GROUP": 4,
        "PROGRAMS": run.programs,
        "STAGES": 4,
        "PAIRED": into.paired,
    }
    if add:
        arguments["old_sum"] = _blocks(into.first, staggered.ROWS.value, adding.PIECE.value)
        arguments["old_digits"] = _blocks(into.digits, rows_of_digits, adding.PIECE.value)

    def launch(registers: int, few: int) -> Launch:
        given = {**arguments, "REGISTERS": registers, "FEW_REGISTERS": few}
        return Launch(adding.weight_added, (run.programs,), given, registers=ALL_REGISTERS, shared=run.known)

    made = launch(232, 40)
    # What each row lacks takes more of those that multiply than they have, by some compilers.
    return launch(240, 24) if even_sum is not None and made.spills(16) else made


def hidden_apart(run: Run, buffer: LogitBuffer, out: Tensor, common: Mapping[str, Any]) -> Launch:
    arguments = {
        **common,
        "exponentials": _blocks(buffer.matrix, apart.TILE.value, apart.STEP.value),
        "weight": _blocks(run.weight, apart.STEP.value, apart.TILE.value),
        "out": out,
        "PROGRAMS": run.programs,
    }
    return Launch(apart.hidden_apart, (run.programs,), arguments, warps=8, registers=ALL_REGISTERS, shared=run.known)


def _staggered(run: Run, rows: Tensor, exponentials: Tensor | None) -> dict[str, Any]:
    """The arguments that all kernels of staggered.py take."""
    half, step, width = staggered.HALF.value, STEP.value, 128
    return {
        "rows": _blocks(rows, half, step),
        "weight": _blocks(run.weight, VOCAB_TILE, step),
        "exponentials": None if exponentials is None else _blocks(exponentials, half, width),
        "GROUP": 16,
        "PROGRAMS": run.programs,
        "STAGES": 4,
        "WIDTH": width,
    }


def _blocks(x: Tensor, rows: int, columns: int) -> Any:
    """A matrix in blocks for a kernel in Gluon; as in `Run.operand`, that of exponentials has no stride."""
    return shared_descriptor(x, x.shape, (x.stride(0) or x.shape[1], 1), (rows, columns))
