"""Operations in PTX that Pallas lacks.  Each is for a whole warpgroup."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

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
        run_ptx(_ADD_ONE, "l,r,r", [utils.memref_ptr(counter), utils.memref_ptr(before), last.registers.item()])

    add(counter, before, last)


# Until the counter is `turn`; what other programs' copies have added before is in memory then, for copies too.
_AWAIT_TURN = """{
.reg .pred other; .reg .b32 seen;
again:
ld.acquire.gpu.global.b32 seen, [$0];
setp.ne.s32 other, seen, $1;
@other bra again;
fence.proxy.async.global;
}"""
# Once what this warp has sent is in memory, as a wait before has seen to.
_PASS_TURN = """{
.reg .pred first; .reg .b32 lane;
fence.proxy.async.global;
bar.warp.sync 0xffffffff;
mov.u32 lane, %laneid;
setp.eq.u32 first, lane, 0;
@first st.release.gpu.global.b32 [$0], $1;
}"""


def _of_turn(lines: str, counter: Any, turn: Any) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))
    def run(_: Any, counter: Any, turn: Any) -> None:
        run_ptx(lines, "l,r", [utils.memref_ptr(counter), turn.registers.item()])

    run(counter, turn)


def await_turn(counter: Any, turn: Any) -> None:
    """Wait, in a warp, until a counter, int32 of device memory, is `turn`."""
    _of_turn(_AWAIT_TURN, counter, turn)


def pass_turn(counter: Any, turn: Any) -> None:
    """Let the counter be `turn`, after a wait until what this warp has copied to device memory is there."""
    _of_turn(_PASS_TURN, counter, turn)


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
        run_ptx("{" + "\n".join([_FIRST, *lines]) + "}", ",".join("r" * len(arguments)), arguments)

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
        run_ptx("{" + "\n".join(lines) + "}", "r,r,r,r", pointers)

    zero(ref, warpgroup, begin, end)


# Of a box [64, 128 bytes], as `product.swizzled` lays it out: eight rows after the other, and of each row parts of 16
# bytes, whose order is another in each of the eight.
_ROW = """shr.u32 at, row, 3; mad.lo.u32 at, at, {stride}, {box}; and.b32 row, row, 7; mad.lo.u32 at, row, 128, at;
xor.b32 part, part, row; mad.lo.u32 at, part, 16, at;"""
# Matrices of 16 bits go four blocks of 8 x 8 at a time: both halves of a warp's rows, and two neighbours.  A lane gives
# the address of one of their 32 rows.
_MATRIX = """.reg .b32 at, row, part; mov.u32 part, %tid.x;
and.b32 row, part, 15; shr.u32 at, part, 1; and.b32 at, at, 48; or.b32 row, row, at;
shr.u32 part, part, 4; and.b32 part, part, 1;"""
# Of 32 bits a lane has two neighbours.  Odd rows take blocks in another order, so that no bank is asked for twice.
_PAIRS = """.reg .pred odd; .reg .b32 at, row, part, x; .reg .b64 pair; mov.u32 x, %tid.x;
shr.u32 row, x, 1; and.b32 row, row, 48; shr.u32 part, x, 2; and.b32 part, part, 7; or.b32 row, row, part;
and.b32 part, part, 1; setp.ne.u32 odd, part, 0; shr.u32 part, x, 1; and.b32 part, part, 1;"""


def _matrix(operation: str, first: int, box: str, stride: int) -> str:
    """An operation on the 16 words of 32 bits from operand `first` on; `stride` is that of eight rows, in bytes."""
    lines = [_MATRIX, _ROW.format(box=box, stride=stride)]
    for i in range(4):
        words = ", ".join(f"${first + 4 * i + j}" for j in range(4))
        lines.append(f"xor.b32 at, at, {(0, 32, 96, 32)[i]}; " + operation.format(words=f"{{{words}}}"))
    return "\n".join(lines)


def _pairs() -> str:
    """Store the 8 words of 64 bits from operand 1 on."""
    lines = [_PAIRS, _ROW.format(box="$0", stride=1024)]
    lines.append("and.b32 x, x, 1; mad.lo.u32 at, x, 8, at; @odd xor.b32 at, at, 64;")
    for block, step in zip((0, 2, 1, 3), (0, 64, 96, 64), strict=True):
        lines.append(f"xor.b32 at, at, {step};")
        for half in range(2):
            mine, other = (f"${1 + 2 * x + half}" for x in (block, block ^ 2))
            lines.append(f"selp.b64 pair, {other}, {mine}, odd; st.shared.b64 [at + {1024 * half}], pair;")
    return "\n".join(lines)


def store_boxes(ref: Any, values: Sequence[Any], interpret: Any) -> None:
    """Write matrices [64, 128 bytes] to the first of so many in shared memory, as `product.swizzled` lays it out; in
    registers they are laid out as accumulators.

    An assignment would load what was there, too, and all threads would wait for each other before and after each.
    """
    if interpret is not None:
        for i, x in enumerate(values):
            ref[i] = x
        return
    columns = values[0].shape[1]
    bits, kind, lines = {
        64: (32, "r", _matrix("stmatrix.sync.aligned.m8n8.x4.shared.b16 [at], {words};", 1, "$0", 1024)),
        32: (64, "l", _pairs()),
    }[columns]

    @plgpu.inline_mgpu(arg_types=(_swizzled(columns), *[plgpu.Layout.WGMMA] * len(values)))
    def store(_: Any, ref: Any, *values: Any) -> None:
        word = ir.IntegerType.get_signless(bits)
        for i, x in enumerate(values):
            words = [utils.bitcast(x, word) for x in x.registers.flat]
            at = utils.memref_ptr(utils.memref_slice(ref, i))
            run_ptx("{" + lines + "}", ",".join(["r"] + [kind] * len(words)), [at, *words])

    store(ref, *values)


def load_box(ref: Any) -> Any:
    """A matrix [64, 64] of 16 bits from shared memory, as `product.swizzled` lays it out, like an accumulator."""
    made = plgpu.ShapeDtypeStruct(ref.shape, ref.dtype, plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(_swizzled(64),), return_type=made)
    def load(_: Any, ref: Any) -> Any:
        strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
        lines = _matrix("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {words}, [at];", 0, "$16", 2 * strides[0])
        words = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * 16)})>")
        found = run_ptx("{" + lines + "}", ",".join([*["=r"] * 16, "r"]), [utils.memref_ptr(ref)], words)
        word, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.MemRefType(ref.type).element_type)
        layout = fragmented_array.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((64, 64)), object)
        for i in range(16):
            registers.flat[i] = utils.bitcast(llvm.extractvalue(word, found, [i]), pair)
        return fragmented_array.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(ref)


def _swizzled(columns: int) -> Any:
    return plgpu.RefType((plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)))


def run_ptx(lines: str, constraints: str, arguments: Sequence[Any], result: Any = None) -> Any:
    """PTX with these operands, inside of an inline operation; it stays where it is."""
    result = ir.Type.parse("!llvm.void") if result is None else result
    return llvm.inline_asm(result, arguments, lines, constraints + ",~{memory}", has_side_effects=True)


# Never true, which nobody can know before the number is there: results of arithmetic are no such NaN.
_ONCE_KNOWN = """{ .reg .pred never; .reg .b32 x; mov.b32 x, 0; setp.eq.b32 never, $0, 0xFFFFFFFF;
@never ld.volatile.shared.b32 x, [x]; }"""


def once_known(x: Any, interpret: Any) -> None:
    """Keep what follows from being moved before x is computed: float32, laid out as an accumulator, of which the last
    numbers stand for all, or a vector with a value per row.

    Else ptxas moves a wait for products up, ahead of arithmetic that should run beside them.
    """
    if interpret is not None:
        return
    matrix = x.ndim == 2

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA if matrix else plgpu.Layout.WGMMA.reduce(1),))
    def wait(_: Any, x: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        for register in x.registers.flat[-2:]:
            number = vector.extract(register, [], [1]) if matrix else register
            run_ptx(_ONCE_KNOWN, "r", [utils.bitcast(number, i32)])

    wait(x)
