"""A kernel in Gluon that is compiled but never run, by `versions.gluon_refusal`: it uses everything that the others
use.
"""

import triton  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.compiler.compiler import make_backend  # type: ignore[import-untyped]
from triton.experimental import gluon  # type: ignore[import-untyped]
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]
from triton.experimental.gluon._runtime import GluonASTSource  # type: ignore[import-untyped]
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[import-untyped]
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from onchip.kernels.triton.gluon import add_out, aggregate, barrier, copy_in, new_barriers, reinterpret, send
from onchip.kernels.triton.recalled import find, note
from onchip.kernels.triton.versions import hashing

LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@aggregate
class Memory:
    blocks: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, blocks, full, STAGES):
        self.blocks, self.full, self.STAGES = blocks, full, gl.constexpr(STAGES)


@gluon.constexpr_function
def products_layout():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])


@gluon.jit
def copy(memory, x):
    for s in gl.static_range(memory.STAGES):
        mbarrier.expect(memory.full.index(s), 64 * 64 * 2)
        copy_in(x, [64 * s, 0], memory.full.index(s), memory.blocks.index(s), pred=s >= 0)


@gluon.jit
def multiply(memory, x):
    acc = gl.zeros((64, 64), gl.float32, products_layout())
    for s in gl.static_range(memory.STAGES):
        mbarrier.wait(memory.full.index(s), 0)
        a, b = memory.blocks.index(s), memory.blocks.index(s).permute((1, 0))
        acc = warpgroup_mma(a, b, acc, use_acc=s > 0, is_async=True)
        acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
        mbarrier.arrive(memory.full.index(s), count=1, pred=s == 0)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    send(acc, x, memory.blocks.index(0), (0,), 0, 64, 64, 64)
    add_out(x, [0, 0], memory.blocks.index(0))
    tma.store_wait(0)


@gluon.jit
def product(x):
    blocks = gl.allocate_shared_memory(x.dtype, [2] + x.block_shape, x.layout)
    blocks = reinterpret(blocks, x.dtype, [2] + x.block_shape, x.layout)
    full, _ = new_barriers(2)
    fence_async_shared()
    barrier()
    memory = Memory(blocks, full, 2)
    gl.warp_specialize([(multiply, (memory, x)), (copy, (memory, x))], [1], [24])


def compile_for_hopper() -> None:
    source = GluonASTSource(product, {"x": f"tensordesc<bf16[64, 64],{LAYOUT!r}>"}, {}, {})
    target, options = GPUTarget("cuda", 90, 32), {"num_warps": 4, "enable_fp_fusion": True}
    key, found = find(source, target, make_backend(target).parse_options(dict(options)))
    if found is None:
        hashing().join()
        note(key, triton.compile(source, target=target, options=options))
