"""The Hopper kernel of fp8_linear in Pallas Mosaic GPU: a product A B^T of scaled FP8 numbers, with its launcher.

It is the persistent product of `onchip.kernels.mosaic.product` in steps of 128, one scale's block of the sum each.
A step's product is summed in an accumulator that starts from zero, multiplied with the scales of its rows and columns,
and added to the result in float32 registers: WGMMA itself sums FP8 products with fewer bits than float32 has.  Scales
arrive in shared memory together with the numbers that they belong to.

Matrices in device memory have a multiple of 8 rows, and rows of a multiple of 128 numbers.  TMA reads zeros past their
ends.

Source: DeepSeek-V3 (arXiv:2412.19437), section 3.3.2, for sums on two levels.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from onchip.fp8.jax_quantize import ROWS, JaxQuantized
from onchip.fp8.numbers import BLOCK, up
from onchip.kernels.mosaic.launch import Refs
from onchip.kernels.mosaic.product import (
    BOX,
    MosaicConfig,
    Part,
    Product,
    ProductStep,
    Promotion,
    load_block,
    send_to,
)
from onchip.kernels.mosaic.program import persistent_product
from onchip.kernels.mosaic.registers import Registers

CONFIG = MosaicConfig(tile_m=256, tile_n=128, tile_k=BLOCK, stages=4, in_flight=0, staging_slots=1)
# The config depends on whether B has scales of blocks.  On an H200 at M = N = K = 8192 two accumulators reach 988
# TFLOP/s with scales of blocks and 814 with scales of rows, which take registers for the columns' scales too; one
# accumulator reaches 706 and 872.  Tiles of 128x256 were no faster.
_CONFIGS = {True: replace(CONFIG, in_flight=1), False: CONFIG}


def scaled_product(
    a: JaxQuantized,  # [M, K]
    b: JaxQuantized,  # [N, K]
    bias: Array | None = None,  # [N] float32
    *,
    by_block: bool,  # b has scales of 128x128 blocks
    dtype: Any,  # of the result
    config: MosaicConfig | None = None,
    interpret: Any = None,
) -> Array:
    """A B^T + bias, each element rounded once: [M, N rounded up to a multiple of 128 bytes, at least 256 bytes]."""
    c = config or _CONFIGS[by_block]
    # The accumulators that are in use at a time take 64 registers together.
    wave_n = BLOCK // (1 + c.in_flight)
    (m, k), n = a.data.shape, b.data.shape[0]
    assert b.data.shape[1] == k
    assert k % BLOCK == m % ROWS == n % ROWS == 0
    assert c.tile_k == BLOCK
    columns = 128 // jnp.dtype(dtype).itemsize
    # Mosaic cuts a matrix into columns of 128 bytes; with a single one, what is copied beyond it would land in it.
    width = max(up(n, columns), 2 * columns)
    shape = (BOX, wave_n)
    # A block's scale is repeated for each row of a wave, as if rows had scales: copying and loading single numbers ends
    # in an illegal instruction (JAX 0.11.2).
    scales_of_b = c.tile_n // BLOCK * BOX if by_block else c.tile_n
    registers = Registers(interpret)

    def tiles(refs: Refs) -> tuple[int, int, int]:
        return -(-m // c.tile_m), -(-n // c.tile_n), k // BLOCK

    def copies(refs: Refs, s: ProductStep, a: Any, b: Any, barrier: Any, a_scales: Any, b_scales: Any) -> None:
        rows, columns = s.i * c.tile_m, s.j * c.tile_n
        load_block(refs["a"], rows, c.tile_m, s.k * BLOCK, BLOCK, a, barrier)
        load_block(refs["b"], columns, c.tile_n, s.k * BLOCK, BLOCK, b, barrier)
        plgpu.copy_gmem_to_smem(refs["a_scales"].at[s.k, pl.ds(rows, c.tile_m)], a_scales, barrier)
        plgpu.copy_gmem_to_smem(refs["b_scales"].at[s.k, pl.ds(s.j * scales_of_b, scales_of_b)], b_scales, barrier)

    def load(brought: Sequence[Any], m: Any, n: Any) -> tuple[Any, Any]:
        a_scales, b_scales = brought
        of_a = registers.load(a_scales.at[pl.ds(m, BOX)], 1)
        if by_block:
            return of_a * registers.load(b_scales.at[pl.ds(n // BLOCK * BOX, BOX)], 1), None
        return of_a, registers.load(b_scales.at[pl.ds(n, wave_n)], 0)

    def enter(total: Any, product: Any, scales: tuple[Any, Any]) -> Any:
        of_rows, of_columns = scales
        if of_columns is not None:
            product = product * registers.spread(of_columns, shape, 0)
        return total + product * registers.spread(of_rows, shape, 1)

    def epilogue(refs: Refs, p: Part, total: Any, store: Callable[..., None]) -> None:
        if bias is not None:
            total = total + registers.spread(registers.load(refs["bias"].at[pl.ds(p.n, wave_n)], 0), shape, 0)
        store(lambda n, width: total[:, n : n + width].astype(dtype), send_to(refs["out"], p.m, p.n, columns))

    b_scales = jnp.repeat(b.scales, BOX, axis=1) if by_block else b.scales
    padded = None if bias is None else jnp.pad(bias, (0, up(n, c.tile_n) - bias.shape[0]))
    p = Product(
        c,
        (a.data.dtype, b.data.dtype),
        "mk",
        "nk",
        tiles,
        copies,
        epilogue,
        stored=dtype,
        promotion=Promotion((c.tile_m, scales_of_b), load, enter, wave_n),
    )
    made = persistent_product(
        p,
        inputs={"a": a.data, "a_scales": a.scales, "b": b.data, "b_scales": b_scales, "bias": padded},
        outputs={"out": jax.ShapeDtypeStruct((m, width), dtype)},
        name="scaled_product",
        interpret=interpret,
    )
    out: Array = made["out"]
    return out
