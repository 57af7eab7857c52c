"""Triton kernels between ranks that map each other's memory: products that wait for rows or addends, and a barrier.

`gated_product` multiplies all ranks' blocks while they arrive.  Another rank's copy engine writes a piece of its block,
and then that piece's flag.  Before a tile reads its rows, it spins on the flag of its piece, with acquire semantics for
the whole system, so that it sees everything that was written before the flag.  TMA reads through another proxy, so a
fence orders its reads behind the flag.  `adding_product` multiplies a rank's own block and adds the addends of other
ranks; its tiles wait before they add.

Programs are persistent, and there are fewer than multiprocessors; nothing that sets a flag needs one of the
multiprocessors that they occupy: see docs/internals/collective_matmul.md.

A rank that waits has a deadline.  After it, the rank writes to every rank's memory, and to its host's, that a rank is
lost.  A rank that reads this waits no more, and its results are NaN.

Sources: Wang et al., "Introducing Async Tensor Parallelism in PyTorch" (2024), for copies by the engines into mapped
memory; Chang et al., "FLUX: Fast Software-based Communication Overlap On GPUs Through Kernel Fusion" (arXiv:2406.06858)
and Zheng et al., "Triton-distributed" (arXiv:2504.19442), for tiles that wait for their own rows in order of arrival.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.tiles import INTERPRETED, halves, load_block, place_tile, store_columns

# A head, in int32: two sets of flags of pieces, each rank's count when it came to a barrier, this rank's count, whether
# a rank is lost, and a 1.
SET = tl.constexpr(512)
MET = tl.constexpr(1024)
COUNT = tl.constexpr(2045)
LOST = tl.constexpr(2046)
HEAD = tl.constexpr(2048)


@triton.jit
def now():
    """Nanoseconds; under the interpreter none pass."""
    if INTERPRETED:
        return tl.cast(0, tl.int64)
    else:  # noqa: RET505 - without it, Triton compiles what follows too
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )  # fmt: skip


@triton.jit
def is_set(flag, TMA: tl.constexpr):
    """A flag's value, which orders all that is read after it behind what was written before it."""
    if INTERPRETED:
        return tl.load(flag)
    elif TMA:  # noqa: RET505
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1]; fence.proxy.async.global;",
            "=r,l,~{memory}", [flag], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];", "=r,l,~{memory}", [flag], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def put(there, value):
    """Write an int32 in any rank's memory, behind all that was written before."""
    if INTERPRETED:
        tl.store(there, value)
    else:
        tl.inline_asm_elementwise(
            "st.release.sys.global.b32 [$1], $2; mov.b32 $0, $2;",
            "=r,l,r,~{memory}", [there, value], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def give_up(addresses, ranks, LANES: tl.constexpr):
    """Tell every rank, and this one's host, that a rank is lost."""
    lane = tl.arange(0, LANES)
    of = tl.where(lane < ranks, lane, 0)
    heads = tl.load(addresses + of).to(tl.pointer_type(tl.int32))
    put(heads + LOST, tl.full((LANES,), 1, tl.int32))
    put(tl.load(addresses + ranks).to(tl.pointer_type(tl.int32)), tl.cast(1, tl.int32))


@triton.jit
def wait_for(flag, head, addresses, ranks, patience, TMA: tl.constexpr, LANES: tl.constexpr):
    """Whether a flag was set in time; not 0 if it was."""
    there = is_set(flag, TMA)
    if there == 0:
        lost = is_set(head + LOST, TMA)
        began = now()
        while (there == 0) & (lost == 0):
            there = is_set(flag, TMA)
            lost = is_set(head + LOST, TMA)
            if now() - began >= tl.cast(patience, tl.int64) * 1000:
                lost += 1
        if there == 0:
            give_up(addresses, ranks, LANES)
    return there


@triton.jit
def absent(head, of, count):
    """How many ranks haven't come to the barrier of this count, and whether one is lost."""
    missing = tl.sum((is_set(head + MET + of, False) - count < 0).to(tl.int32), 0)
    return missing, tl.max(is_set(head + LOST + 0 * of, False), 0)


@triton.jit(do_not_specialize=["patience"])
def meet(
    addresses,  # [ranks + 1] int64: each rank's head, and a word of this rank's host
    head,  # [HEAD] int32: this rank's
    rank,
    ranks,
    patience,  # microseconds
    LANES: tl.constexpr,  # ranks, or more
    CLEAR: tl.constexpr,  # whether this rank's flags are cleared before it comes
):
    """Wait until all ranks have come here."""
    count = tl.load(head + COUNT) + 1
    if CLEAR:
        tl.store(head + tl.arange(0, MET), tl.zeros((MET,), tl.int32))
    tl.debug_barrier()
    lane = tl.arange(0, LANES)
    of = tl.where(lane < ranks, lane, rank)
    theirs = tl.load(addresses + of).to(tl.pointer_type(tl.int32))
    put(theirs + MET + rank, tl.zeros((LANES,), tl.int32) + count)
    missing, lost = absent(head, of, count)
    began = now()
    # What decides is the same for all lanes, which a reduction in this loop needs.
    while (missing != 0) & (lost == 0):
        missing, lost = absent(head, of, count)
        late = tl.zeros((LANES,), tl.int64) + (now() - began)
        lost += tl.max((late >= tl.cast(patience, tl.int64) * 1000).to(tl.int32), 0)
    tl.store(head + COUNT, count)
    if (missing != 0) | (lost != 0):
        give_up(addresses, ranks, LANES)  # this rank's host doesn't know of it where another rank told


@triton.jit(do_not_specialize=["patience", "first", "last", "numbers"])
def arrive(
    addresses, head, flags, rank, ranks, patience,
    first, last,  # of whose blocks are waited for, this rank's left out
    row,  # [numbers] int16, which are made NaN if somebody is lost
    numbers,
    pieces,  # of each block; 0: nothing is waited for
    PIECES: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Wait until these ranks' blocks are there: of what follows, all numbers have one of this row."""
    for i in range(first * pieces, last * pieces):
        if i // pieces != rank:
            wait_for(flags + i // pieces * PIECES + i % pieces, head, addresses, ranks, patience, False, LANES)
    if is_set(head + LOST, False) != 0:
        for begin in range(0, numbers, BLOCK):
            n = begin + tl.arange(0, BLOCK)
            tl.store(row + n, tl.full((BLOCK,), 0x7FFF, tl.int16), mask=n < numbers)


@triton.jit
def multiplied(
    x, weight, x_stride, weight_stride, row, end, column, N, C,
    TURNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    TMA_X: tl.constexpr, TMA_WEIGHT: tl.constexpr,
):  # fmt: skip
    """One tile of x @ weight: x's rows from `row` on, of a block that ends at `end`."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for c in range(0, C, BLOCK_C):
        a = load_block(x, x_stride, row, c, end, C, BLOCK_M, BLOCK_C, TMA_X)
        if TURNED:
            b = load_block(weight, weight_stride, column, c, N, C, BLOCK_N, BLOCK_C, TMA_WEIGHT).T
        else:
            b = load_block(weight, weight_stride, c, column, C, N, BLOCK_C, BLOCK_N, TMA_WEIGHT)
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def finish_tile(
    acc, there, bias, out, out_stride, row, end, column, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, TMA_OUT: tl.constexpr,
):  # fmt: skip
    """out = acc + bias, or NaN if what was waited for isn't there."""
    if bias is not None:
        n = column + tl.arange(0, BLOCK_N)
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    # Not a choice between them: with that, ptxas lets each wgmma end before the next.
    acc *= tl.where(there != 0, 1.0, float("nan"))
    rounded = acc.to(out.dtype if TMA_OUT else out.dtype.element_ty)
    store_columns(out, out_stride, row, column, end, N, rounded, BLOCK_M, BLOCK_N, PARTS, TMA_OUT)


@triton.jit(do_not_specialize=["rows", "piece_tiles", "patience"])
def gated_product(
    own,  # [rows, C]: this rank's block
    blocks,  # [ranks * rows, C]: where those of other ranks arrive
    weight,  # [C, N], or TURNED [N, C]
    bias,  # [N]
    out,  # [ranks * rows, N] out
    head,  # [HEAD] int32
    flags,  # [ranks, PIECES] int32: not 0 when that piece of a rank's block is there
    addresses,  # as in `meet`
    patience,
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
    LANES: tl.constexpr,
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
    all_came = 1 - is_set(head + LOST, False)
    for tile in tl.range(tl.program_id(0), of_block, PROGRAMS):
        i, j = place_tile(tile, tiles_m, tiles_n, GROUP)
        row = i * BLOCK_M
        acc = multiplied(
            own, weight, own_stride, weight_stride, row, rows, j * BLOCK_N, N, C,
            TURNED, BLOCK_M, BLOCK_N, BLOCK_C, TMA_OWN, TMA_WEIGHT,
        )  # fmt: skip
        finish_tile(
            acc, all_came, bias, out, out_stride, first_row + row, first_row + rows, j * BLOCK_N, N,
            BLOCK_M, BLOCK_N, PARTS, TMA_OUT,
        )  # fmt: skip
    # Programs go on in turn: the first of these tiles falls to the one after that of the last tile above.
    first = of_block + (tl.program_id(0) + PROGRAMS - of_block % PROGRAMS) % PROGRAMS
    for tile in tl.range(first, ranks * of_block, PROGRAMS):
        sender = (rank + ranks - tile // of_block) % ranks
        within = tile % of_block
        piece = within // (piece_tiles * tiles_n)
        before = piece * piece_tiles
        i, j = place_tile(within - before * tiles_n, min(piece_tiles, tiles_m - before), tiles_n, GROUP)
        there = wait_for(
            flags + sender * PIECES + piece, head, addresses, ranks, patience, TMA_BLOCKS, LANES
        )  # fmt: skip
        row = sender * rows + (before + i) * BLOCK_M
        end = sender * rows + rows
        acc = multiplied(
            blocks, weight, C, weight_stride, row, end, j * BLOCK_N, N, C,
            TURNED, BLOCK_M, BLOCK_N, BLOCK_C, TMA_BLOCKS, TMA_WEIGHT,
        )  # fmt: skip
        finish_tile(
            acc, there * all_came, bias, out, out_stride, row, end, j * BLOCK_N, N,
            BLOCK_M, BLOCK_N, PARTS, TMA_OUT,
        )  # fmt: skip


@triton.jit
def add_columns(
    acc, there, addends, block, bias, out, out_stride, rank, ranks, row, column, rows, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, TMA_OUT: tl.constexpr,
):  # fmt: skip
    """out = the other ranks' addends in the order rank + 1, rank + 2, ..., then acc, and bias."""
    if PARTS > 1:
        left, right = halves(acc, BLOCK_M, BLOCK_N)
        add_columns(
            left, there, addends, block, bias, out, out_stride, rank, ranks, row, column, rows, N,
            BLOCK_M, BLOCK_N // 2, PARTS // 2, TMA_OUT,
        )  # fmt: skip
        add_columns(
            right, there, addends, block, bias, out, out_stride, rank, ranks, row, column + BLOCK_N // 2, rows, N,
            BLOCK_M, BLOCK_N // 2, PARTS // 2, TMA_OUT,
        )  # fmt: skip
    else:
        m = row + tl.arange(0, BLOCK_M)
        n = column + tl.arange(0, BLOCK_N)
        inside = (m < rows)[:, None] & (n < N)[None, :]
        where = m.to(tl.int64)[:, None] * N + n[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(1, ranks):
            of = ((rank + step) % ranks).to(tl.int64)
            total += tl.load(addends + of * block + where, mask=inside, other=0.0).to(tl.float32)
        finish_tile(total + acc, there, bias, out, out_stride, row, rows, column, N, BLOCK_M, BLOCK_N, 1, TMA_OUT)


@triton.jit(do_not_specialize=["rows", "patience"])
def adding_product(
    own,  # [rows, C]
    weight,  # [C, N], or TURNED [N, C]
    bias,  # [N]
    addends,  # [ranks, rows, N]: other ranks' for this one; its own block is not read
    out,  # [rows, N] out
    head,  # [HEAD] int32
    flags,  # [ranks, PIECES] int32: the first not 0 when a rank's addend is there
    addresses,  # as in `meet`
    patience,
    own_stride,
    weight_stride,
    out_stride,
    rank,
    ranks,
    rows,
    N,
    C,
    PIECES: tl.constexpr,
    LANES: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    TMA_OWN: tl.constexpr,
    TMA_WEIGHT: tl.constexpr,
    TMA_OUT: tl.constexpr,
):
    """out = the sum of all ranks' addends, of which this rank's is own @ weight, and bias; rounded once."""
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    all_came = 1 - is_set(head + LOST, False)
    block = tl.cast(rows, tl.int64) * N
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS):
        i, j = place_tile(tile, tiles_m, tiles_n, GROUP)
        row = i * BLOCK_M
        acc = multiplied(
            own, weight, own_stride, weight_stride, row, rows, j * BLOCK_N, N, C,
            TURNED, BLOCK_M, BLOCK_N, BLOCK_C, TMA_OWN, TMA_WEIGHT,
        )  # fmt: skip
        there = all_came
        for step in range(1, ranks):
            sender = (rank + step) % ranks
            there *= wait_for(
                flags + sender * PIECES, head, addresses, ranks, patience, False, LANES
            )  # fmt: skip
        add_columns(
            acc, there, addends, block, bias, out, out_stride, rank, ranks, row, j * BLOCK_N, rows, N,
            BLOCK_M, BLOCK_N, PARTS, TMA_OUT,
        )  # fmt: skip
