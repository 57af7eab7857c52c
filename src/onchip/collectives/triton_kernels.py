"""Triton kernels between ranks that map each other's memory: a product that waits for its rows, and a sum of blocks.

`gated_product` multiplies all ranks' blocks while they arrive.  Another rank's copy engine writes a piece of its block,
and then that piece's flag.  Before a tile reads its rows, it spins on the flag of its piece: with acquire semantics for
the whole system, so that what was written before the flag is seen after it.  TMA reads through another proxy, which a
fence orders behind that.

Programs are persistent and fewer than there are multiprocessors, and nothing that a flag depends on needs one of
theirs: see docs/internals/collective_matmul.md.

Sources: Wang et al., "Introducing Async Tensor Parallelism in PyTorch" (2024), for copies by the engines into mapped
memory; Chang et al., "FLUX: Fast Software-based Communication Overlap On GPUs Through Kernel Fusion" (arXiv:2406.06858)
and Zheng et al., "Triton-distributed" (arXiv:2504.19442), for tiles that wait for their own rows in order of arrival.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.tiles import INTERPRETED, load_block, place_tile, store_columns


@triton.jit
def is_set(flag, TMA: tl.constexpr):
    """A flag's value, which orders all that is read after it behind what was written before it."""
    if INTERPRETED:
        return tl.load(flag)
    elif TMA:  # noqa: RET505 - without it, Triton compiles what follows too
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1]; fence.proxy.async.global;",
            "=r,l,~{memory}", [flag], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];", "=r,l,~{memory}", [flag], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def wait_for(flag, TMA: tl.constexpr):
    there = is_set(flag, TMA)
    while there == 0:
        there = is_set(flag, TMA)


@triton.jit
def product_tile(
    x, weight, bias, out,
    x_stride, weight_stride, out_stride,
    x_row, x_end,  # the tile's first row of x, and where its block ends
    row, end,  # the same of out
    column, N, C,
    TURNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, PARTS: tl.constexpr,
    TMA_X: tl.constexpr, TMA_WEIGHT: tl.constexpr, TMA_OUT: tl.constexpr,
):  # fmt: skip
    """One tile of out = x @ weight + bias."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for c in range(0, C, BLOCK_C):
        a = load_block(x, x_stride, x_row, c, x_end, C, BLOCK_M, BLOCK_C, TMA_X)
        if TURNED:
            b = load_block(weight, weight_stride, column, c, N, C, BLOCK_N, BLOCK_C, TMA_WEIGHT).T
        else:
            b = load_block(weight, weight_stride, c, column, C, N, BLOCK_C, BLOCK_N, TMA_WEIGHT)
        acc = tl.dot(a, b, acc)
    if bias is not None:
        n = column + tl.arange(0, BLOCK_N)
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    rounded = acc.to(out.dtype if TMA_OUT else out.dtype.element_ty)
    store_columns(out, out_stride, row, column, end, N, rounded, BLOCK_M, BLOCK_N, PARTS, TMA_OUT)


@triton.jit(do_not_specialize=["rows", "piece_tiles"])
def gated_product(
    own,  # [rows, C]: this rank's block
    blocks,  # [ranks * rows, C]: where those of other ranks arrive
    weight,  # [C, N], or TURNED [N, C]
    bias,  # [N]
    out,  # [ranks * rows, N] out
    flags,  # [ranks, PIECES] int32: not 0 when that piece of a rank's block is there
    own_stride,
    weight_stride,
    out_stride,
    rank,
    ranks,
    rows,
    N,
    C,
    piece_tiles,  # tiles of rows in a piece; in a block's last piece there may be fewer
    PIECES: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    TMA_OWN: tl.constexpr,
    TMA_BLOCKS: tl.constexpr,
    TMA_WEIGHT: tl.constexpr,
    TMA_OUT: tl.constexpr,
):
    """out = all ranks' blocks @ weight + bias: one's own first, then that of the rank before, which comes first."""
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    of_block = tiles_m * tiles_n
    first_row = rank * rows
    for tile in tl.range(tl.program_id(0), of_block, PROGRAMS):
        i, j = place_tile(tile, tiles_m, tiles_n, GROUP)
        row = i * BLOCK_M
        product_tile(
            own, weight, bias, out, own_stride, weight_stride, out_stride,
            row, rows, first_row + row, first_row + rows, j * BLOCK_N, N, C,
            TURNED, BLOCK_M, BLOCK_N, BLOCK_C, PARTS, TMA_OWN, TMA_WEIGHT, TMA_OUT,
        )  # fmt: skip
    # Programs go on in turn: the first of these tiles falls to the one after that of the last tile above.
    first = of_block + (tl.program_id(0) + PROGRAMS - of_block % PROGRAMS) % PROGRAMS
    for tile in tl.range(first, ranks * of_block, PROGRAMS):
        sender = (rank + ranks - tile // of_block) % ranks
        within = tile % of_block
        piece = within // (piece_tiles * tiles_n)
        before = piece * piece_tiles
        i, j = place_tile(within - before * tiles_n, min(piece_tiles, tiles_m - before), tiles_n, GROUP)
        wait_for(flags + sender * PIECES + piece, TMA_BLOCKS)
        row = sender * rows + (before + i) * BLOCK_M
        end = sender * rows + rows
        product_tile(
            blocks, weight, bias, out, C, weight_stride, out_stride,
            row, end, row, end, j * BLOCK_N, N, C,
            TURNED, BLOCK_M, BLOCK_N, BLOCK_C, PARTS, TMA_BLOCKS, TMA_WEIGHT, TMA_OUT,
        )  # fmt: skip


@triton.jit
def add_blocks(
    blocks,  # [ranks, numbers] float32
    bias,  # [N]
    out,  # [numbers] out: rows of N
    rank,
    ranks,
    numbers,
    N,
    BLOCK: tl.constexpr,
):
    """The sum of all ranks' blocks in the order rank + 1, rank + 2, ..., rank, and bias; rounded once."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < numbers
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(1, ranks + 1):
        of = ((rank + step) % ranks).to(tl.int64)
        total += tl.load(blocks + of * numbers + i, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + i % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + i, total.to(out.dtype.element_ty), mask=inside)
