"""What kernels in Gluon share beyond tiles.py: barriers in shared memory, and a tile that is stored by way of it.

Gluon is Triton's language for kernels that state how data is laid out and what waits for what.  Names that differ
between versions of Triton come from here: see `versions.gluon_refusal`.
"""

from typing import Any

from triton import language  # type: ignore[import-untyped]
from triton.experimental import gluon  # type: ignore[import-untyped]
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]
from triton.experimental.gluon.language.nvidia.ampere import async_copy  # type: ignore[import-untyped]
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[import-untyped]
    fence_async_shared,
    mbarrier,
    tma,
)

from onchip.kernels.triton.tiles import halves


def _first_of(owner: Any, *names: str) -> Any:
    """The object of the newest of these names that exists; an old name may still exist, and raise."""
    return next(getattr(owner, name) for name in names if hasattr(owner, name))


def _adding_copy() -> Any:
    """`tma.async_atomic_add`, which Triton has from 3.8 on."""
    if hasattr(tma, "async_atomic_add"):
        return tma.async_atomic_add
    from triton.experimental.gluon.language._core import builtin, ir  # type: ignore[import-untyped]

    def add(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)

    return builtin(add)


aggregate = _first_of(language.core, "aggregate", "_aggregate")
barrier = _first_of(gl, "barrier", "thread_barrier")
"""A barrier for all threads of a group of warps."""
copy_in = _first_of(tma, "async_load", "async_copy_global_to_shared")
copy_out = _first_of(tma, "async_store", "async_copy_shared_to_global")
copy_elements = _first_of(async_copy, "async_load", "async_copy_global_to_shared")
"""Copy elements from their addresses to shared memory, in a group of copies that is waited for."""
add_out = _adding_copy()
"""Add a block in shared memory to what is in memory."""
reinterpret = _first_of(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")
"""Take shared memory as that of another dtype, shape and layout."""


@gluon.jit
def new_barriers(N: gl.constexpr, READERS: gl.constexpr = 1):
    """Two times N barriers: of what has come, and of what may be written again, once all READERS have arrived.

    A kernel has to use all that it makes: the compiler gives the memory of others to blocks, and a Hopper GPU writes to
    where a barrier was when it switches between processes.
    """
    full = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(N):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=READERS)
    return full, empty


# Of a block's 16 hardware barriers the first that Triton leaves free: the first warps meet at 0, groups of warps start
# by 1, and each group that `warp_specialize` adds, three at most here, has its own from 2 on: a test reads the PTX.
FIRST_NAMED = gl.constexpr(5)


@gluon.constexpr_function
def _named(how, threads):
    return f"bar.{how} $1, {threads}; mov.b32 $0, 0;"  # an instruction in Gluon has a result


@gluon.jit
def named_sync(i, N: gl.constexpr):
    """Wait at hardware barrier i until N threads have come, which `named_arrive` counts too; from `FIRST_NAMED` on.

    All threads of a warp come.  The compiler keeps the order of this, of products, of copies by TMA and of barriers in
    shared memory; other loads and stores it may move across, so what they touch another barrier has to guard.
    """
    SYNC: gl.constexpr = _named("sync", N)
    gl.inline_asm_elementwise(SYNC, "=r,r", [gl.to_tensor(i)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_arrive(i, N: gl.constexpr):
    """Come to hardware barrier i, and go on."""
    ARRIVE: gl.constexpr = _named("arrive", N)
    gl.inline_asm_elementwise(ARRIVE, "=r,r", [gl.to_tensor(i)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def send(value, into, staged, lead, column, R: gl.constexpr, C: gl.constexpr, WIDTH: gl.constexpr):
    """Store a tile [R, C] by way of `staged`, which has room for WIDTH columns, at the coordinates (*lead, column).

    The last piece may still be on its way at the end: whoever writes to `staged` next has to wait for it, as this does.
    """
    if C > WIDTH:
        left, right = halves(value, R, C)
        send(left, into, staged, lead, column, R, C // 2, WIDTH)
        send(right, into, staged, lead, column + C // 2, R, C // 2, WIDTH)
    else:
        tma.store_wait(0)
        barrier()
        staged.reshape([R, C]).store(value.to(into.dtype))
        fence_async_shared()
        barrier()
        copy_out(into, lead + (column,), staged)


@gluon.jit
def join_floats(first, digits):
    """`maths.join_float`, in 2 instructions each where the compiler takes 5."""
    return gl.inline_asm_elementwise(
        """
        prmt.b32 $0, $4, $6, 0x1040; and.b32 $0, $0, 0xffffff00;
        prmt.b32 $1, $4, $6, 0x3250; and.b32 $1, $1, 0xffffff00;
        prmt.b32 $2, $5, $6, 0x1060; and.b32 $2, $2, 0xffffff00;
        prmt.b32 $3, $5, $6, 0x3270; and.b32 $3, $3, 0xffffff00;
        """,
        "=&r,=&r,=&r,=&r,r,r,r", [first, digits], dtype=gl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def split_floats(x):
    """`maths.split_float`, in 3 instructions each where the compiler takes 10."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, d, low, high;
        min.s32 a, $3, 0x7fffff7f; add.s32 a, a, 0x80;
        min.s32 b, $4, 0x7fffff7f; add.s32 b, b, 0x80;
        min.s32 c, $5, 0x7fffff7f; add.s32 c, c, 0x80;
        min.s32 d, $6, 0x7fffff7f; add.s32 d, d, 0x80;
        prmt.b32 $0, a, b, 0x7632;
        prmt.b32 $1, c, d, 0x7632;
        prmt.b32 low, a, b, 0x0051;
        prmt.b32 high, c, d, 0x0051;
        prmt.b32 $2, low, high, 0x5410;
        }
        """,
        "=r,=r,=r,r,r,r,r", [x], dtype=(gl.int16, gl.uint8), is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def join_pairs(first_a, first_b, digits):
    """`maths.join_pair`."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 low;
        shl.b32 low, $12, 4;
        prmt.b32 $0, $8, low, 0x1040; and.b32 $0, $0, 0xfffff000;
        prmt.b32 $1, $8, low, 0x3250; and.b32 $1, $1, 0xfffff000;
        prmt.b32 $2, $9, low, 0x1060; and.b32 $2, $2, 0xfffff000;
        prmt.b32 $3, $9, low, 0x3270; and.b32 $3, $3, 0xfffff000;
        prmt.b32 $4, $10, $12, 0x1040; and.b32 $4, $4, 0xfffff000;
        prmt.b32 $5, $10, $12, 0x3250; and.b32 $5, $5, 0xfffff000;
        prmt.b32 $6, $11, $12, 0x1060; and.b32 $6, $6, 0xfffff000;
        prmt.b32 $7, $11, $12, 0x3270; and.b32 $7, $7, 0xfffff000;
        }
        """,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r", [first_a, first_b, digits],
        dtype=(gl.float32, gl.float32), is_pure=True, pack=4,
    )  # fmt: skip


def _split_pairs(*, rounded: bool) -> str:
    """The instructions of `split_pairs`."""
    first, second = [f"a{i}" for i in range(4)], [f"b{i}" for i in range(4)]
    lines = [f"min.s32 {x}, ${5 + i}, 0x7ffff7ff; add.s32 {x}, {x}, 0x800;" for i, x in enumerate(first + second)]
    for into, (w, x, y, z) in (("a", first), ("b", second)):
        lines.append(f"prmt.b32 low, {w}, {x}, 0x0051; prmt.b32 high, {y}, {z}, 0x0051;")
        lines.append(f"prmt.b32 {into}, low, high, 0x5410;")
    lines.append("shr.u32 a, a, 4; and.b32 a, a, 0x0f0f0f0f; and.b32 b, b, 0xf0f0f0f0; or.b32 $4, a, b;")
    if rounded:
        lines += [f"min.s32 {x}, {x}, 0x7fff7fff; add.s32 {x}, {x}, $13;" for x in first + second]
    for i, (w, x, y, z) in enumerate((first, second)):
        lines.append(f"prmt.b32 ${2 * i}, {w}, {x}, 0x7632; prmt.b32 ${2 * i + 1}, {y}, {z}, 0x7632;")
    return "{ .reg .b32 a0, a1, a2, a3, b0, b1, b2, b3, a, b, low, high; " + " ".join(lines) + " }"


_SPLIT = gl.constexpr(_split_pairs(rounded=False))
_SPLIT_AND_ROUND = gl.constexpr(_split_pairs(rounded=True))


@gluon.jit
def split_pairs(a, b, half):
    """`maths.split_pair`."""
    if half is None:
        return gl.inline_asm_elementwise(
            _SPLIT, "=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r", [a, b],
            dtype=(gl.int16, gl.int16, gl.uint8), is_pure=True, pack=4,
        )  # fmt: skip
    else:  # noqa: RET505 - Triton would compile what follows too
        halves = gl.full(a.shape, 0, gl.int32, a.type.layout) + half
        return gl.inline_asm_elementwise(
            _SPLIT_AND_ROUND, "=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r", [a, b, halves],
            dtype=(gl.int16, gl.int16, gl.uint8), is_pure=True, pack=4,
        )  # fmt: skip
