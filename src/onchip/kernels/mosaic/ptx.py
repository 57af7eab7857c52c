"""Operations in PTX that Pallas lacks.  Each is for a whole warpgroup."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

_FIRST = ".reg .pred first; .reg .b32 x; mov.u32 x, %tid.x; and.b32 x, x, 127; setp.eq.u32 first, x, 0;"
_ADD_ONE = f"""{{
{_FIRST}
@first atom.global.inc.u32 x, [$0], $2;
@first st.shared.u32 [$1], x;
}}"""


def add_one(counter: Any, before: Any, last: Any) -> None:
    """Add 1 to the counter, [1] int32 of device memory, or set it to 0 if it was `last`; `before`, [1] int32 of shared
    memory, is what it was."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT))
    def add(_: Any, counter: Any, before: Any, last: Any) -> None:
        _run(_ADD_ONE, "l,r,r", [utils.memref_ptr(counter), utils.memref_ptr(before), last.registers.item()])

    add(counter, before, last)


def put(into: Any, numbers: Sequence[Any], interpret: Any) -> None:
    """Write numbers [N] int32 to shared memory."""
    if interpret is not None:
        for i, x in enumerate(numbers):
            into[i] = x
        return
    lines = [f"@first st.shared.b32 [$0 + {4 * i}], ${i + 1};" for i in range(len(numbers))]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * len(numbers)))
    def write(_: Any, into: Any, *numbers: Any) -> None:
        arguments = [utils.memref_ptr(into), *(x.registers.item() for x in numbers)]
        _run("{" + "\n".join([_FIRST, *lines]) + "}", ",".join("r" * len(arguments)), arguments)

    write(into, *numbers)


def zero_rows(ref: Any, warpgroup: Any, begin: Any, end: Any, interpret: Any) -> None:
    """Set rows before `begin` and from `end` on to zero: warpgroups 0 and 1 half of it each.

    ref: shared memory [64, 128 or 256] of 16 bits, as `product.swizzled` lays it out: in boxes of 8 x 64, where a row's
        numbers are 128 bytes in an order of their own.  Read and written by way of registers, qwen3-30b-a3b's weight
        gradient with sizes of 1/rank took an H100 0.43 ms instead of 0.40.
    """
    rows, columns = ref.shape
    if interpret is not None:
        half = ref.at[:, pl.ds(warpgroup * (columns // 2), columns // 2)]
        row = lax.broadcasted_iota(jnp.int32, (rows, columns // 2), 0)
        half[...] = jnp.where((begin <= row) & (row < end), half[...], 0)
        return
    assert rows == 64
    assert columns in (128, 256)
    boxes = columns // 64
    lines = [
        ".reg .pred some, late; .reg .b32 thread, row, box, at, zero; mov.b32 zero, 0; mov.u32 thread, %tid.x;",
        # Of each eight rows a warp has one, and a lane 16 bytes of it.
        "shr.u32 row, thread, 5; and.b32 row, row, 3; mad.lo.u32 row, $1, 4, row; mad.lo.u32 at, row, 128, $0;",
        "and.b32 box, thread, 7; mad.lo.u32 at, box, 16, at;",
        "shr.u32 box, thread, 3; and.b32 box, box, 3; mad.lo.u32 at, box, 1024, at;",
    ]
    for eighth in range(8):
        lines.append("setp.lt.s32 some, row, $2; setp.ge.s32 late, row, $3; or.pred some, some, late;")
        lines.append(f"setp.lt.and.u32 some, box, {boxes}, some;")
        lines.append(f"@some st.shared.v4.b32 [at + {eighth * boxes * 1024}], {{zero, zero, zero, zero}};")
        lines.append("add.u32 row, row, 8;")
    layout = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    number = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(layout), number, number, number))
    def zero(_: Any, ref: Any, *numbers: Any) -> None:
        pointers = [utils.memref_ptr(ref), *(x.registers.item() for x in numbers)]
        _run("{" + "\n".join(lines) + "}", "r,r,r,r", pointers)

    zero(ref, warpgroup, begin, end)


def _run(lines: str, constraints: str, arguments: Sequence[Any]) -> None:
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, arguments, lines, constraints + ",~{memory}", has_side_effects=True)
