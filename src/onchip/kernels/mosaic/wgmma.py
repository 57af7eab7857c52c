"""A product that begins a sum.  Pallas adds products to sums in registers only, which are zeros at first: these zeros
take an instruction for each of a thread's numbers."""

from collections.abc import Sequence
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

    def descriptors(a: Any, b: Any) -> Any:
        return _descriptor(a, (ROWS, SLICE), left=True), _descriptor(_turned(b), (SLICE, b_rows), left=False)

    b_rows = b.shape[0]
    return _begin([a], [b], b_rows, a.shape[1], descriptors, "0, 0")


def begin_product_over_rows(a: Sequence[Any], b: Sequence[Any]) -> Any:
    """The sum of a.T @ b for pairs of blocks, [64, N] float32, which still runs likewise.

    a: shared memory [K, 64] of 16 bits each, b: [K, N], as `product.swizzled` lays them out.
    """

    def descriptors(a: Any, b: Any) -> Any:
        return _descriptor(_turned(a), (ROWS, SLICE), left=True), _descriptor(b, (SLICE, columns), left=False)

    columns = b[0].shape[1]
    return _begin(a, b, columns, a[0].shape[0], descriptors, "1, 1")


def _turned(x: Any) -> Any:
    return utils.memref_transpose(x, (1, 0, 3, 2))


def _descriptor(x: Any, group: tuple[int, int], *, left: bool) -> Any:
    """That of a factor, and how many bytes further it is for the next slice and for the next step."""
    large = (ROWS, SLICE) if left else (SLICE, SLICE)
    (at, (_, (step, *_))), strides, _ = mma_utils.create_descriptor(
        x, swizzle=128, large_tile=large, group_size=group, logical_k_major=not left
    )
    return at, strides[1], step


def _begin(a: Sequence[Any], b: Sequence[Any], n: int, k: int, descriptors: Any, turned: str) -> Any:
    """The sum of products of pairs, whose factors have `descriptors`, over k numbers each."""
    made = plgpu.ShapeDtypeStruct((ROWS, n), jnp.float32, plgpu.Layout.WGMMA)
    pairs, steps = len(a), k // STEP

    @plgpu.inline_mgpu(arg_types=tuple([_BLOCK] * (2 * pairs)), return_type=made)
    def multiply(_: Any, *blocks: Any) -> Any:
        kind = {ir.BF16Type: "bf16", ir.F16Type: "f16"}[type(ir.MemRefType(blocks[0].type).element_type)]
        f32, i64 = ir.F32Type.get(), ir.IntegerType.get_signless(64)
        found = [descriptors(*pair) for pair in zip(blocks[:pairs], blocks[pairs:], strict=True)]
        if pairs * steps > _KEPT_STEPS:
            anew = partial(llvm.inline_asm, asm_string="mov.b64 $0, $1;", constraints="=l,l", has_side_effects=True)
            found = [tuple((anew(i64, [at]), *strides) for at, *strides in pair) for pair in found]
        numbers = [f"${i}" for i in range(n // 2)]
        result = ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * len(numbers))})>")
        sums: list[Any] = []
        _fence()
        for pair in found:
            for i in range(steps):
                slice_, step = divmod(i, SLICE // STEP)
                at = [
                    llvm.add(x, utils.c((slice_ * of_slice + step * of_step) >> 4, i64), llvm.IntegerOverflowFlags.none)
                    for x, of_slice, of_step in pair
                ]
                first = len(numbers) * (2 if sums else 1)
                lines = (
                    f"{{ .reg .pred more; setp.ne.b32 more, {int(bool(sums))}, 0; "
                    f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} "
                    f"{{{', '.join(numbers)}}}, ${first}, ${first + 1}, more, 1, 1, {turned}; }}"
                )
                before = [str(i) for i in range(len(sums))]
                constraints = ",".join([*["=f"] * len(numbers), *before, "l", "l"])
                made = llvm.inline_asm(result, [*sums, *at], lines, constraints, has_side_effects=True)
                sums = [llvm.extractvalue(f32, made, [i]) for i in range(len(numbers))]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "wgmma.commit_group.sync.aligned;", "", has_side_effects=True)
        layout = fragmented_array.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((ROWS, n)), object)
        pair_type = ir.VectorType.get((2,), f32)
        for i in range(registers.size):
            x = llvm.mlir_undef(pair_type)
            for j in range(2):
                x = vector.insert(sums[2 * i + j], x, [], [j])
            registers.flat[i] = x
        return fragmented_array.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return multiply(*a, *b)


def _fence() -> None:
    """Accesses to registers before come first."""
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "wgmma.fence.sync.aligned;", "", has_side_effects=True)
