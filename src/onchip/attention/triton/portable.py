"""Attention's kernels in plain Triton, for GPUs that aren't Hopper.

A program has a tile of a head's queries or of keys, and walks over the tokens that the tile's tokens may see, or that
may see them.  The tables are those of the kernels in Gluon: they have a row for each 64 queries or 128 keys, with
ranges in tokens, from which tiles of other sizes are made.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.maths import LOG2E, LOWEST, tanh

LN2 = tl.constexpr(0.6931471805599453)
# Queries and keys of an entry in the tables.
ENTRY_ROWS = tl.constexpr(64)
ENTRY_KEYS = tl.constexpr(128)


def _strides(*names):
    return [f"{name}_{dim}" for name in names for dim in ("batch", "head", "row")]


@triton.jit
def _block(x, token, tokens, stride, SIZE: tl.constexpr, D: tl.constexpr):
    """Numbers of a head's tokens [tokens, D], with zeros for what there isn't."""
    column = tl.arange(0, D)
    there = (token < tokens)[:, None]
    if SIZE < D:
        there = there & (column < SIZE)[None, :]
    return tl.load(x + token.to(tl.int64)[:, None] * stride + column[None, :], mask=there, other=0)


@triton.jit
def _write(x, into, token, tokens, stride, SIZE: tl.constexpr, D: tl.constexpr):
    column = tl.arange(0, D)
    there = (token < tokens)[:, None] & (column < SIZE)[None, :]
    at = into + token.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(at, x.to(into.dtype.element_ty), mask=there)


@triton.jit
def _query_entry(table, t, of_mask, entries, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """The range of blocks of keys that a tile of queries sees, and that of those which all of them see."""
    entry = tl.minimum(t * ROWS // ENTRY_ROWS + tl.arange(0, ROWS // ENTRY_ROWS), entries - 1)
    at = table + (of_mask * entries + entry) * 8
    first, last = tl.min(tl.load(at + 4), 0) // KEYS, tl.cdiv(tl.max(tl.load(at + 5), 0), KEYS)
    return first, last, tl.cdiv(tl.max(tl.load(at + 6), 0), KEYS), tl.min(tl.load(at + 7), 0) // KEYS


@triton.jit
def _ranges(start, end, row, of_mask, queries, keys):
    at = of_mask * queries + row
    first = tl.load(start + at, mask=row < queries, other=0)
    return first, tl.minimum(tl.load(end + at, mask=row < queries, other=0), keys)


@triton.jit
def _stops(stops, of_mask, keys, j, KEYS: tl.constexpr):
    """The least and the largest stop of the entry that a block of keys is in."""
    at = stops + 2 * (of_mask * tl.cdiv(keys, ENTRY_KEYS) + j * KEYS // ENTRY_KEYS)
    return tl.load(at), tl.load(at + 1)


@triton.jit
def _seen(start, end, stop, row, key, of_mask, keys):
    """[queries, keys]; each is [queries, 1] or [1, keys], or turned."""
    seen = (key >= start) & (key < end)
    if stop is not None:
        seen = seen & (row < tl.load(stop + of_mask * keys + key, mask=key < keys, other=0))
    return seen


@triton.jit(
    do_not_specialize=[
        "queries", "keys", "heads", "group", "planes", "entries", "own", *_strides("q", "k", "v", "out"),
    ]
)  # fmt: skip
def attend_by_tiles(
    q, k, v, out, lse, start, end, stop, table, stops, sinks, scale, softcap,
    queries, keys, heads, group, planes, entries, own,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Forward.  Strides are counted in 8 numbers, as in all of these."""
    n = tl.program_id(0)
    t, plane = tl.num_programs(0) // planes - 1 - n // planes, (n % planes).to(tl.int64)
    b, h = plane // heads, plane % heads
    of_mask = b * own
    first, last, full_first, full_last = _query_entry(table, t, of_mask, entries, ROWS, KEYS)
    row = t * ROWS + tl.arange(0, ROWS)
    row_start, row_end = _ranges(start, end, row, of_mask, queries, keys)
    queries_at = q + 8 * (b * q_batch + h * q_head)
    keys_at, values_at = k + 8 * (b * k_batch + h // group * k_head), v + 8 * (b * v_batch + h // group * v_head)
    rows = _block(queries_at, row, queries, 8 * q_row, SIZE, D)
    factor = (scale if softcap is None else softcap) * LOG2E
    most = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + h).to(tl.float32) * LOG2E
        most = tl.maximum(most, sink)
        total = tl.exp2(sink - most)
    acc = tl.zeros([ROWS, D], tl.float32)
    for j in range(first, last):
        hidden = (j < full_first) | (j >= full_last)
        sees = True
        if stop is not None:
            least, largest = _stops(stops, of_mask, keys, j, KEYS)
            hidden = hidden | (least < (t + 1) * ROWS)
            sees = largest > t * ROWS
        if sees:
            key = j * KEYS + tl.arange(0, KEYS)
            z = tl.dot(rows, _block(keys_at, key, keys, 8 * k_row, SIZE, D).T)
            if softcap is not None:
                z = tanh(z * (scale / softcap))
            if hidden:
                z = tl.where(
                    _seen(row_start[:, None], row_end[:, None], stop, row[:, None], key[None, :], of_mask, keys),
                    z, float("-inf"),
                )  # fmt: skip
            now = tl.maximum(most, tl.max(z, 1) * factor)
            p = tl.exp2(z * factor - now[:, None])
            change = tl.exp2(most - now)
            total = total * change + tl.sum(p, 1)
            values = _block(values_at, key, keys, 8 * v_row, VALUE_SIZE, D)
            acc = tl.dot(p.to(values.dtype), values, acc * change[:, None])
            most = now
    acc = tl.where((total == 0)[:, None], 0.0, acc / total[:, None])
    tl.store(lse + plane * queries + row, (most + tl.log2(total)) * LN2, mask=row < queries)
    _write(acc, out + 8 * (b * out_batch + h * out_head), row, queries, 8 * out_row, VALUE_SIZE, D)


@triton.jit(
    do_not_specialize=[
        "queries", "keys", "padded", "heads", "group", "planes", "entries", "own",
        *_strides("q", "k", "v", "d_out", "grad_q"),
    ]
)  # fmt: skip
def query_gradient_by_tiles(
    q, d_out, k, v, grad_q, of_rows, start, end, stop, table, stops, scale, softcap,
    queries, keys, padded, heads, group, planes, entries, own,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, d_out_batch, d_out_head, d_out_row,
    grad_q_batch, grad_q_head, grad_q_row,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """`of_rows`: of `gradient_rows`."""
    n = tl.program_id(0)
    t, plane = tl.num_programs(0) // planes - 1 - n // planes, (n % planes).to(tl.int64)
    b, h = plane // heads, plane % heads
    of_mask = b * own
    first, last, full_first, full_last = _query_entry(table, t, of_mask, entries, ROWS, KEYS)
    row = t * ROWS + tl.arange(0, ROWS)
    row_start, row_end = _ranges(start, end, row, of_mask, queries, keys)
    keys_at, values_at = k + 8 * (b * k_batch + h // group * k_head), v + 8 * (b * v_batch + h // group * v_head)
    rows = _block(q + 8 * (b * q_batch + h * q_head), row, queries, 8 * q_row, SIZE, D)
    upstream_at = d_out + 8 * (b * d_out_batch + h * d_out_head)
    upstream = _block(upstream_at, row, queries, 8 * d_out_row, VALUE_SIZE, D)
    at_row = of_rows + plane * (2 * padded) + row
    row_lse, delta = tl.load(at_row), tl.load(at_row + padded)
    factor = (scale if softcap is None else softcap) * LOG2E
    acc = tl.zeros([ROWS, D], tl.float32)
    for j in range(first, last):
        hidden = (j < full_first) | (j >= full_last)
        sees = True
        if stop is not None:
            least, largest = _stops(stops, of_mask, keys, j, KEYS)
            hidden = hidden | (least < (t + 1) * ROWS)
            sees = largest > t * ROWS
        if sees:
            key = j * KEYS + tl.arange(0, KEYS)
            of_keys = _block(keys_at, key, keys, 8 * k_row, SIZE, D)
            z = tl.dot(rows, of_keys.T)
            if softcap is not None:
                z = tanh(z * (scale / softcap))
            p = tl.exp2(z * factor - row_lse[:, None])
            if hidden:
                p = tl.where(
                    _seen(row_start[:, None], row_end[:, None], stop, row[:, None], key[None, :], of_mask, keys), p, 0.0
                )
            d_scores = p * (tl.dot(upstream, _block(values_at, key, keys, 8 * v_row, VALUE_SIZE, D).T) - delta[:, None])
            if softcap is not None:
                d_scores = d_scores * (1 - z * z)
            acc = tl.dot(d_scores.to(of_keys.dtype), of_keys, acc)
    acc = tl.where((row_start < row_end)[:, None], acc * scale, 0.0)
    _write(acc, grad_q + 8 * (b * grad_q_batch + h * grad_q_head), row, queries, 8 * grad_q_row, SIZE, D)


@triton.jit(
    do_not_specialize=[
        "queries", "keys", "padded", "heads", "group", "tiles", "own",
        *_strides("q", "k", "v", "d_out", "grad_k", "grad_v"),
    ]
)  # fmt: skip
def key_gradient_by_tiles(
    q, d_out, k, v, grad_k, grad_v, of_rows, start, end, stop, table, scale, softcap,
    queries, keys, padded, heads, group, tiles, own,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, d_out_batch, d_out_head, d_out_row,
    grad_k_batch, grad_k_head, grad_k_row, grad_v_batch, grad_v_head, grad_v_row,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Scores are turned, [keys, queries].  The heads of a group are summed in the walk, in their order.

    `table`: of key tiles.
    """
    n, planes = tl.program_id(0), tl.num_programs(0) // tl.cdiv(keys, KEYS)
    t, plane = n // planes, (n % planes).to(tl.int64)
    b, h = plane // (heads // group), plane % (heads // group)
    of_mask = b * own
    at = table + (of_mask * tiles + t * KEYS // ENTRY_KEYS) * 4
    MANY: tl.constexpr = ENTRY_ROWS // ROWS
    first, last = tl.load(at) * MANY, tl.minimum(tl.load(at + 1) * MANY, tl.cdiv(queries, ROWS))
    full_first, full_last = tl.load(at + 2) * MANY, tl.load(at + 3) * MANY
    key = t * KEYS + tl.arange(0, KEYS)
    of_keys = _block(k + 8 * (b * k_batch + h * k_head), key, keys, 8 * k_row, SIZE, D)
    values = _block(v + 8 * (b * v_batch + h * v_head), key, keys, 8 * v_row, VALUE_SIZE, D)
    factor = (scale if softcap is None else softcap) * LOG2E
    sum_k, sum_v = tl.zeros([KEYS, D], tl.float32), tl.zeros([KEYS, D], tl.float32)
    many = tl.maximum(last - first, 0)
    for i in range(group * many):
        head, j = h * group + i // many, first + i % many
        row = j * ROWS + tl.arange(0, ROWS)
        rows = _block(q + 8 * (b * q_batch + head * q_head), row, queries, 8 * q_row, SIZE, D)
        at_upstream = d_out + 8 * (b * d_out_batch + head * d_out_head)
        upstream = _block(at_upstream, row, queries, 8 * d_out_row, VALUE_SIZE, D)
        at_row = of_rows + (b * heads + head) * (2 * padded) + row
        row_lse, delta = tl.load(at_row), tl.load(at_row + padded)
        z = tl.dot(of_keys, rows.T)
        if softcap is not None:
            z = tanh(z * (scale / softcap))
        p = tl.exp2(z * factor - row_lse[None, :])
        if (j < full_first) | (j >= full_last):
            row_start, row_end = _ranges(start, end, row, of_mask, queries, keys)
            seen = _seen(row_start[None, :], row_end[None, :], stop, row[None, :], key[:, None], of_mask, keys)
            p = tl.where(seen, p, 0.0)
        sum_v = tl.dot(p.to(upstream.dtype), upstream, sum_v)
        d_scores = p * (tl.dot(values, upstream.T) - delta[None, :])
        if softcap is not None:
            d_scores = d_scores * (1 - z * z)
        sum_k = tl.dot(d_scores.to(rows.dtype), rows, sum_k)
    _write(sum_k * scale, grad_k + 8 * (b * grad_k_batch + h * grad_k_head), key, keys, 8 * grad_k_row, SIZE, D)
    _write(sum_v, grad_v + 8 * (b * grad_v_batch + h * grad_v_head), key, keys, 8 * grad_v_row, VALUE_SIZE, D)
