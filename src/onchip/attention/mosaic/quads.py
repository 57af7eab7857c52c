"""What a thread has of a matrix that is laid out as an accumulator: of each row, two of each eight columns.

The four threads that share a row keep sums of their own until a tile ends, so that no block has to exchange them; and
where a range is all that hides, a thread has the columns that its row sees as the bits of one number.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

_ROWS = plgpu.Layout.WGMMA.reduce(1)


def sums_by_thread(x: Any, interpret: Any) -> Any:
    """For each row of a matrix, laid out as an accumulator, the sums of the columns that each thread has: a vector with
    other values in each of the four threads that share a row, of which `sums_of_threads` makes the sums of rows."""
    if interpret is not None:
        return x.sum(1)
    made = plgpu.ShapeDtypeStruct(x.shape[:1], jnp.float32, _ROWS)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=made)
    def add(_: Any, x: Any) -> Any:
        pairs = x.registers.reshape(-1, 2)  # of each eight columns, those of two rows
        return _vector(x.shape[:1], [_summed(pairs[:, i]) for i in range(2)])

    return add(x)


def sums_of_threads(x: Any, interpret: Any) -> Any:
    """The sums of rows, of those by `sums_by_thread`."""
    if interpret is not None:
        return x

    @plgpu.inline_mgpu(arg_types=(_ROWS,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, _ROWS))
    def add(_: Any, x: Any) -> Any:
        found = []
        for value in map(_number, x.registers.flat):
            for lanes in (1, 2):
                value = arith.addf(value, utils.shfl_bfly(value, lanes))
            found.append(value)
        return _vector(x.shape, found)

    return add(x)


def part_of_thread(x: Any, interpret: Any) -> Any:
    """What each of the threads begins with, so that `sums_of_threads` adds x, a number, to each row's sum."""
    return x if interpret is not None else x * 0.25


def _summed(pairs: Any) -> Any:
    """The sum of vectors of two, in four chains."""
    chains = list(pairs[:4])
    for i, pair in enumerate(pairs[4:]):
        chains[i % 4] = arith.addf(chains[i % 4], pair)
    while len(chains) > 1:
        chains = [arith.addf(*chains[i : i + 2]) for i in range(0, len(chains), 2)]
    first, second = (vector.extract(chains[0], [], [i]) for i in range(2))
    return arith.addf(first, second)


def _number(register: Any) -> Any:
    return vector.extract(register, [], [0]) if isinstance(register.type, ir.VectorType) else register


def _vector(shape: Any, numbers: Sequence[Any]) -> Any:
    """A thread's numbers of two rows as a vector with a value per row."""
    layout = fragmented_array.WGMMA_LAYOUT.reduce((1,))
    of_register = layout.registers_element_type(ir.F32Type.get())
    registers = np.empty(layout.registers_shape(shape), object)
    for i, x in enumerate(numbers):
        registers.flat[i] = vector.broadcast(of_register, x) if isinstance(of_register, ir.VectorType) else x
    return fragmented_array.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


# Of a row's columns [$1, $2), those of this thread: bit 2 i + j for column 8 i + j of its own.
_BITS = """{ .reg .b32 own, a, b, t;
mov.u32 own, %tid.x; and.b32 own, own, 3; shl.b32 own, own, 1; sub.s32 a, $1, own; sub.s32 b, $2, own;
and.b32 t, a, 7; min.s32 t, t, 2; shr.s32 a, a, 3; mad.lo.s32 a, a, 2, t; max.s32 a, a, 0; shl.b32 a, -1, a;
and.b32 t, b, 7; min.s32 t, t, 2; shr.s32 b, b, 3; mad.lo.s32 b, b, 2, t; max.s32 b, b, 0; shl.b32 b, -1, b;
not.b32 b, b; and.b32 $0, a, b; }"""


def hide_outside(x: Any, start: Any, end: Any, hidden: float) -> Any:
    """A matrix [64, at most 128] with `hidden` outside of columns [start, end), vectors with a value per row."""
    made = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, _ROWS, _ROWS), return_type=made)
    def hide(_: Any, x: Any, start: Any, end: Any) -> Any:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        limits = zip(map(_number, start.registers.flat), map(_number, end.registers.flat), strict=True)
        bits = [llvm.inline_asm(i32, [*pair], _BITS, "=r,r,r", has_side_effects=False) for pair in limits]
        zero, other = utils.c(0, i32), utils.c(hidden, f32)
        registers = np.empty_like(x.registers)
        for n, pair in enumerate(x.registers.flat):
            eight, row = divmod(n, 2)
            for i in range(2):
                bit = arith.andi(bits[row], utils.c(_signed(1 << (2 * eight + i)), i32))
                seen = arith.cmpi(arith.CmpIPredicate.ne, bit, zero)
                kept = arith.select(seen, vector.extract(pair, [], [i]), other)
                pair = vector.insert(kept, pair, [], [i])
            registers.flat[n] = pair
        return fragmented_array.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return hide(x, start, end)


def _signed(bits: int) -> int:
    return bits - (1 << 32) if bits >> 31 else bits
