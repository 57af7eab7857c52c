"""The running softmax of the forward kernels, in Gluon.

A row of a block of scores lies in the four threads of a quad.  Each thread keeps the sum of its own exponentials, and a
tile's end adds the four: no block has to exchange sums.  Which of its columns a row sees, a thread knows as bits of one
number, where the row's range is all that hides.
"""

from triton.experimental import gluon  # type: ignore[import-untyped]
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]

from onchip.attention.triton.common import HALF, LN2, LOG2E, LOWEST, are_seen, capped, products_layout
from onchip.kernels.triton.gluon import send


@gluon.constexpr_function
def quad_layout():
    """Of [HALF, 4], a number for each thread and row of a product's layout."""
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0]], lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warp_bases=[[16, 0], [32, 0]],
        block_bases=[], shape=[64, 4],
    )  # fmt: skip


@gluon.constexpr_function
def _spread_layout(keys):
    """Of a product's [HALF, keys] as [HALF, keys / 8, 4, 2]: of each eight columns a thread has two."""
    registers, n = [[0, 0, 0, 1], [8, 0, 0, 0]], 1
    while n < keys // 8:
        registers.append([0, n, 0, 0])
        n *= 2
    return gl.DistributedLinearLayout(
        reg_bases=registers,
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]], block_bases=[], shape=[64, keys // 8, 4, 2],
    )  # fmt: skip


@gluon.jit
def _by_row(total, change):
    """[HALF, 4] times [HALF]."""
    return total * gl.convert_layout(change, gl.SliceLayout(1, quad_layout()))[:, None]


@gluon.jit
def begin(sinks, h, rows: gl.constexpr):
    """The largest score and the sums of exponentials before the first block; a quad shares the sink's."""
    most = gl.full((HALF,), LOWEST, gl.float32, rows)
    total = gl.zeros((HALF,), gl.float32, rows)
    if sinks is not None:
        sink = gl.load(sinks + h).to(gl.float32) * LOG2E
        most = gl.maximum(most, sink)
        total = gl.exp2(sink - most)
    return most, _by_row(gl.full((HALF, 4), 0.25, gl.float32, quad_layout()), total)


@gluon.jit
def softmax(s, factor, most, total):
    """Exponentials of a block less the largest score until now, the sums, and what earlier sums are multiplied by."""
    now = gl.maximum(most, gl.max(s, 1) * factor)
    p = gl.exp2(s * factor - now[:, None])
    change = gl.exp2(most - now)
    of_threads = gl.sum(gl.sum(p.reshape([HALF, p.shape[1] // 8, 4, 2]), 3), 1)
    return p, now, _by_row(total, change) + gl.convert_layout(of_threads, quad_layout()), change


@gluon.jit
def whole_sum(total, rows: gl.constexpr):
    """The sums of rows, of those of threads."""
    return gl.convert_layout(gl.sum(total, 1), rows)


@gluon.jit
def rows_of(start_p, end_p, of_mask, first_row, queries, keys, rows: gl.constexpr):
    """A group's queries, and their ranges."""
    row = first_row + gl.arange(0, HALF, rows)
    at = of_mask.to(gl.int64) * queries + row
    start = gl.load(start_p + at, mask=row < queries, other=0)
    return row, start, gl.minimum(gl.load(end_p + at, mask=row < queries, other=0), keys)


@gluon.jit
def _bits_before(x):
    """Of a thread's columns of a row, a bit for each that lies before column x; [HALF] to [HALF, 4]."""
    layout: gl.constexpr = quad_layout()
    own = 2 * gl.arange(0, 4, gl.SliceLayout(0, layout))
    x = gl.convert_layout(x, gl.SliceLayout(1, layout))[:, None] - own[None, :]
    n = 2 * (x >> 3) + gl.minimum(x & 7, 2)
    n = gl.minimum(gl.maximum(n, 0), 32)
    some = (0 - (n > 0).to(gl.int32)).to(gl.uint32, bitcast=True)  # all bits, if there are any
    return (some >> ((32 - n) & 31).to(gl.uint32, bitcast=True)) & some


@gluon.jit
def _in_range(j, start, end, KEYS: gl.constexpr):
    """Of each pair of a query and a key of block j, whether the query's range has the key; KEYS is 128 at most."""
    layout: gl.constexpr = products_layout(KEYS)
    spread: gl.constexpr = _spread_layout(KEYS)
    bits = _bits_before(end - j * KEYS) & ~_bits_before(start - j * KEYS)
    bits = gl.convert_layout(bits, gl.SliceLayout(1, gl.SliceLayout(3, spread))).expand_dims(1).expand_dims(3)
    bits, _ = gl.broadcast(bits, gl.full((HALF, KEYS // 8, 4, 2), 0, gl.uint32, spread))
    bits = gl.convert_layout(bits.reshape([HALF, KEYS]), layout, assert_trivial=True)
    c = gl.arange(0, KEYS, gl.SliceLayout(0, layout))
    which = ((c >> 3) * 2 + (c & 1)).to(gl.uint32, bitcast=True)
    return (bits & (1 << which)[None, :].to(gl.uint32)) != 0


@gluon.jit
def masked(s, scale, softcap, j, start, end, stop, row, of_mask, keys, hidden, KEYS: gl.constexpr):
    """Scores of a block, but for a factor: -inf where they are hidden, if `hidden` says that some are.  Without a stop,
    bits say where.
    """
    if softcap is not None:
        s = capped(s, scale, softcap)
    if hidden:
        if stop is None:
            s = gl.where(_in_range(j, start, end, KEYS), s, float("-inf"))
        else:
            s = gl.where(are_seen(j, start, end, stop, row, of_mask, keys, KEYS), s, float("-inf"))
    return s


@gluon.jit
def write_lse(most, total, lse, plane, first_row, queries, rows: gl.constexpr):
    """Of a group's half of a tile."""
    row = first_row + gl.arange(0, HALF, rows)
    gl.store(lse + plane.to(gl.int64) * queries + row, (most + gl.log2(total)) * LN2, mask=row < queries)


@gluon.jit
def write_out(acc, total, out, staged, plane, heads, first_row, COLUMNS: gl.constexpr):
    """Of a group's half of a tile, so many columns together."""
    VALUES: gl.constexpr = acc.shape[1]
    of_out: gl.constexpr = products_layout(VALUES)
    nothing = gl.convert_layout(total == 0, gl.SliceLayout(1, of_out))
    inverse = gl.convert_layout(1 / total, gl.SliceLayout(1, of_out))
    acc = gl.where(nothing[:, None], 0.0, acc * inverse[:, None])
    send(acc, out, staged, (plane // heads, plane % heads, first_row), 0, HALF, VALUES, COLUMNS)
