"""A product that begins a sum.  Pallas adds products to sums in registers only, which are zeros at first: these zeros
take an instruction for each of a thread's numbers."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

ROWS, SLICE, STEP = 64, 64, 16
"""Rows of a product; numbers that a row of a block has in 128 bytes; those that an instruction sums."""
# Addresses of more steps are made anew for each product: where a block stays for a loop, they would stay in registers.
_KEPT_STEPS = 4
_BLOCK = plgpu.RefType((plgpu.TilingTransform((8, SLICE)), plgpu.SwizzleTransform(128)))


def begin_product(a: Any, b: Any) -> Any:
    """a @ b.T, [64, N] float32, which still runs: it is there after a `wgmma_wait`.

    a: shared memory [64, K] of 16 bits, b: [N, K], as `product.swizzled` lays them out.
    """
    n = b.shape[0]
    made = plgpu.ShapeDtypeStruct((ROWS, n), jnp.float32, plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(_BLOCK, _BLOCK), return_type=made)
    def multiply(_: Any, a: Any, b: Any) -> Any:
        (a_at, (_, (a_step, *_))), (_, a_slice), _ = mma_utils.create_descriptor(
            a, swizzle=128, large_tile=(ROWS, SLICE), group_size=(ROWS, SLICE), logical_k_major=False
        )
        (b_at, (_, (b_step, *_))), (_, b_slice), _ = mma_utils.create_descriptor(
            utils.memref_transpose(b, (1, 0, 3, 2)), swizzle=128, large_tile=(SLICE, SLICE), group_size=(SLICE, n),
            logical_k_major=True,
        )  # fmt: skip
        kind = {ir.BF16Type: "bf16", ir.F16Type: "f16"}[type(ir.MemRefType(a.type).element_type)]
        f32, i64 = ir.F32Type.get(), ir.IntegerType.get_signless(64)
        if _steps(a) > _KEPT_STEPS:
            anew = partial(llvm.inline_asm, asm_string="mov.b64 $0, $1;", constraints="=l,l", has_side_effects=True)
            a_at, b_at = (anew(i64, [x]) for x in (a_at, b_at))
        numbers = [f"${i}" for i in range(n // 2)]
        result = ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * len(numbers))})>")
        sums: list[Any] = []
        _fence()
        for i in range(_steps(a)):
            slice_, step = divmod(i, SLICE // STEP)
            at = [
                llvm.add(x, utils.c((slice_ * of_slice + step * of_step) >> 4, i64), llvm.IntegerOverflowFlags.none)
                for x, of_slice, of_step in ((a_at, a_slice, a_step), (b_at, b_slice, b_step))
            ]
            first = len(numbers) * (2 if sums else 1)
            lines = (
                f"{{ .reg .pred more; setp.ne.b32 more, {int(bool(sums))}, 0; wgmma.mma_async.sync.aligned.m64n{n}k16"
                f".f32.{kind}.{kind} {{{', '.join(numbers)}}}, ${first}, ${first + 1}, more, 1, 1, 0, 0; }}"
            )
            before = [str(i) for i in range(len(sums))]
            constraints = ",".join([*["=f"] * len(numbers), *before, "l", "l"])
            made = llvm.inline_asm(result, [*sums, *at], lines, constraints, has_side_effects=True)
            sums = [llvm.extractvalue(f32, made, [i]) for i in range(len(numbers))]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "wgmma.commit_group.sync.aligned;", "", has_side_effects=True)
        layout = fragmented_array.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((ROWS, n)), object)
        pair = ir.VectorType.get((2,), f32)
        for i in range(registers.size):
            x = llvm.mlir_undef(pair)
            for j in range(2):
                x = vector.insert(sums[2 * i + j], x, [], [j])
            registers.flat[i] = x
        return fragmented_array.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return multiply(a, b)


def _steps(a: Any) -> int:
    _, slices, _, columns = ir.MemRefType(a.type).shape
    return int(slices * columns // STEP)


def _fence() -> None:
    """Accesses to registers before come first."""
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "wgmma.fence.sync.aligned;", "", has_side_effects=True)
