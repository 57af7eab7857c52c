"""The kernel of cross_entropy that reads each row of logits once: `losses_once` makes a row's loss and gradient.

In Gluon, for Hopper.  A program has a multiprocessor to itself, and takes one row after the other.  It keeps the row:
the first HELD tiles in registers, the others in a ring in shared memory, which `cp.async` fills.  When the row's
softmax is known, each tile's gradient is stored, and its place in the ring takes a tile of a later row.  So copies are
always under way, and each logit comes from memory once; `triton.losses` reads what registers don't hold a second time.

A tile is [R, LANES, UNIT], as in `blocks`.  Each thread copies, reads and replaces its own part of it.  RING tiles of a
row go through the ring, which has SLOTS places: RING for each of one or more rows, or fewer than RING.  If fewer, the
softmax gives the first AGAIN tiles' places to the last ones, and the first ones are copied again at the row's end.

Copies are counted in groups, in order: to read a tile, a thread waits until no more than so many groups are under way.
That number is a constant, because the softmax adds a group for each of its tiles, which is empty if it copies none.

x is a logit, or with a softcap its tanh; z = x * k is the final logit, and k2 = k * log2(e).
"""

from triton.experimental import gluon  # type: ignore[import-untyped]
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]
from triton.experimental.gluon.language.nvidia.ampere import async_copy  # type: ignore[import-untyped]

from onchip.kernels.triton.gluon import barrier, copy_elements
from onchip.kernels.triton.maths import LOG2E, LOWEST, gradient_terms, log1p, loss_of_lse, loss_of_target
from onchip.vocab.rows.blocks import NOTHING, part_in_units, squash


@gluon.jit
def _copy(ring, slot, row, first, V, kept, columns):
    """Begin to copy the tile of a row from column `first` on, zeros unless the row is `kept`; a group of its own."""
    copy_elements(
        ring.index(slot), row + (first + columns), mask=kept & (columns < V - first), eviction_policy="evict_first"
    )
    async_copy.commit_group()


@gluon.jit
def _absorb(raw, first, V, y, k2, inner_scale, columns, state, TILE: gl.constexpr, MASKED: gl.constexpr):
    """The running sums with another tile in them, but for the target."""
    top, others = state
    x = squash(raw, inner_scale)
    if MASKED:
        x = gl.where(columns < V - first, x, float("-inf"))
    if (y >= first) & (y < first + TILE):
        x = gl.where(columns == y - first, float("-inf"), x)
    new_top = gl.maximum(top, gl.max(gl.max(x, 2), 0))
    decay = gl.exp2(gl.maximum((top - new_top) * k2, NOTHING))
    e = gl.exp2((x - new_top[None, :, None]) * k2)
    return new_top, others * decay + gl.sum(gl.sum(e, 2), 0)


@gluon.jit
def _gradient(raw, k2, inner_scale, lse2, factor):
    """The gradient of a tile of logits, but for the target's."""
    x = squash(raw, inner_scale)
    g = gl.exp2(x * k2 - lse2) * factor
    if inner_scale is not None:
        g *= 1 - x * x
    return g.to(raw.dtype)


@gluon.jit(do_not_specialize=["T", "inner", "logits_outer"])
def losses_once(
    logits,  # [T, V] in rows of any place, their columns side by side
    target,  # [T] int64
    token_weight,  # [T] float32
    temperature,  # [T] float32
    divisor,  # [] float32: what the reduced loss is divided by
    loss,  # [T] float32 out, and so on; 0 for ignored tokens
    lse,
    log_prob,
    out,  # [T, V] out: gradient of the reduced loss, for an upstream gradient of 1, contiguous
    T,
    V_units,  # V / UNIT, or V with a LINE
    ignore_index,
    inner,  # rows of an outer one: see row_start
    logits_outer,  # strides of rows in units of UNIT elements, or in elements with a LINE
    logits_inner,
    out_inner,
    inner_scale,  # of the logits before tanh, with a softcap
    outer_scale,  # of what comes after, but for the temperature
    logit_scale,
    loss_terms,  # LossTerms
    UNIT: gl.constexpr,
    TILE: gl.constexpr,
    LANES: gl.constexpr,
    LINE: gl.constexpr,  # 0: rows begin at multiples of UNIT; see part_in_units
    PARTIAL: gl.constexpr,  # whether the last tile but one may be partial too
    HELD: gl.constexpr,
    RING: gl.constexpr,
    SLOTS: gl.constexpr,
):
    WARPS: gl.constexpr = LANES // 32
    R: gl.constexpr = TILE // (LANES * UNIT)
    TILES: gl.constexpr = gl.BlockedLayout([1, 1, UNIT], [1, 32, 1], [1, WARPS, 1], [2, 1, 0])
    BY_LANE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, TILES))
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    ROWS: gl.constexpr = (SLOTS + RING - 1) // RING  # that have begun to come
    AGAIN: gl.constexpr = RING * ROWS - SLOTS
    UNDER_WAY: gl.constexpr = RING - 1 + 2 * RING * (ROWS - 1) - AGAIN
    V = V_units if LINE else V_units * UNIT
    steps = gl.arange(0, R, gl.SliceLayout(1, gl.SliceLayout(2, TILES)))[:, None, None] * (LANES * UNIT)
    lanes = gl.arange(0, LANES, BY_LANE)[None, :, None] * UNIT
    columns = steps + lanes + gl.arange(0, UNIT, gl.SliceLayout(0, gl.SliceLayout(1, TILES)))[None, None, :]
    ring = gl.allocate_shared_memory(logits.dtype.element_ty, [SLOTS, R, LANES, UNIT], SHARED)

    step = gl.num_programs(0)
    start = gl.program_id(0)
    for ahead in gl.static_range(ROWS):
        row = start + ahead * step
        there = row < T
        of_row = gl.minimum(row, T - 1)
        kept = there & (gl.load(target + of_row) != ignore_index)
        from_row, _, length, _ = part_in_units(
            logits, of_row, inner, logits_outer, logits_inner, V, 0, UNIT, TILE, LINE
        )  # fmt: skip
        for n in range(RING):
            if ahead > 0:
                async_copy.commit_group()
        for n in range(RING - AGAIN):
            _copy(ring, ahead * RING + n, from_row, (HELD + n) * TILE, length, kept, columns)
    held = ()
    from_row, _, _, _ = part_in_units(logits, start, inner, logits_outer, logits_inner, V, 0, UNIT, TILE, LINE)
    for h in gl.static_range(HELD):
        held = held + (gl.load(from_row + (h * TILE + columns)),)  # type: ignore[assignment]

    place = 0  # of the row's first tile in the ring
    for row in range(start, T, step):
        label = gl.load(target + row)
        from_row, head, length, _ = part_in_units(
            logits, row, inner, logits_outer, logits_inner, V, 0, UNIT, TILE, LINE
        )  # fmt: skip
        into, _, _, _ = part_in_units(out, row, 1, out_inner, 0, V, 0, UNIT, TILE, LINE)
        if LINE:
            # A lane for each logit on either side of that part, and the logit's column.
            lane = gl.arange(0, LANES, gl.BlockedLayout([1], [32], [WARPS], [0]))
            of_ends, at_ends = lane < V - length, gl.where(lane < head, lane, length + lane)
        # What comes to this row's place, and to the registers.
        later = row + ROWS * step
        of_later = gl.minimum(later, T - 1)
        kept_later = (later < T) & (gl.load(target + of_later) != ignore_index)
        from_later, _, length_later, _ = part_in_units(
            logits, of_later, inner, logits_outer, logits_inner, V, 0, UNIT, TILE, LINE
        )  # fmt: skip
        from_next, _, _, _ = part_in_units(
            logits, gl.minimum(row + step, T - 1), inner, logits_outer, logits_inner, V, 0, UNIT, TILE, LINE
        )  # fmt: skip

        if label == ignore_index:
            gl.store(loss + row, 0.0)
            gl.store(lse + row, 0.0)
            gl.store(log_prob + row, 0.0)
            zeros = gl.zeros([R, LANES, UNIT], logits.dtype.element_ty, TILES)
            for n in range(RING):
                # The place is free when what came to it, or didn't, is no longer under way.
                async_copy.wait_group(UNDER_WAY)
                async_copy.commit_group()
            for n in range(HELD + RING):
                gl.store(into + (n * TILE + columns), zeros, mask=columns < length - n * TILE)
            if LINE:
                gl.store(into + (at_ends - head), gl.zeros_like(lane).to(logits.dtype.element_ty), mask=of_ends)
            for turn in range(AGAIN):
                async_copy.commit_group()
            for turn in range(RING - AGAIN):
                slot = (place + turn + 2 * AGAIN) % SLOTS
                _copy(ring, slot, from_later, (HELD + turn) * TILE, length_later, kept_later, columns)
            following = ()
            for h in gl.static_range(HELD):
                following = following + (gl.load(from_next + (h * TILE + columns)),)  # type: ignore[assignment]
            held = following
        else:
            good = (label >= 0) & (label < V)
            y = gl.where(good, label, -1).to(gl.int32)
            k = outer_scale
            if temperature is not None:
                k = k / gl.load(temperature + row)
            k2 = k * LOG2E
            if LINE:
                ends = gl.load(from_row + (at_ends - head), mask=of_ends, other=0.0)
            top = gl.full([LANES], LOWEST, gl.float32, BY_LANE)
            others = gl.zeros([LANES], gl.float32, BY_LANE)
            for h in gl.static_range(HELD):
                top, others = _absorb(
                    held[h], h * TILE, length, y - head, k2, inner_scale, columns, (top, others), TILE, False
                )  # fmt: skip
            for n in range(RING - 1):
                slot = (place + n) % SLOTS
                async_copy.wait_group(UNDER_WAY)
                top, others = _absorb(
                    ring.index(slot).load(TILES), (HELD + n) * TILE, length, y - head, k2, inner_scale, columns,
                    (top, others), TILE, PARTIAL,
                )  # fmt: skip
                if n < AGAIN:
                    _copy(ring, slot, from_row, (HELD + n + SLOTS) * TILE, length, True, columns)
                else:
                    async_copy.commit_group()
            slot = (place + RING - 1) % SLOTS
            async_copy.wait_group(UNDER_WAY)
            top, others = _absorb(
                ring.index(slot).load(TILES), (HELD + RING - 1) * TILE, length, y - head, k2, inner_scale, columns,
                (top, others), TILE, True,
            )  # fmt: skip
            async_copy.commit_group()

            x_y = squash(gl.load(from_row + (gl.maximum(y, 0) - head)), inner_scale)
            best = gl.max(top, 0)
            if LINE:
                x_ends = gl.where(of_ends & (at_ends != y), squash(ends, inner_scale), float("-inf"))
                best = gl.maximum(best, gl.max(x_ends, 0))
            rest = gl.sum(others * gl.exp2(gl.maximum((top - best) * k2, NOTHING)), 0)
            if LINE:
                rest += gl.sum(gl.exp2((x_ends - best) * k2), 0)
            # The target joins.
            lead = gl.maximum(best, gl.where(good, x_y, LOWEST))
            own = gl.where(good, gl.exp2((x_y - lead) * k2), 0.0)
            rest = rest * gl.exp2(gl.maximum((best - lead) * k2, NOTHING))
            # log1p where the target leads: there the loss is small, and 1 + rest would round it away.
            log_total = gl.where(good & (x_y >= best), log1p(rest), gl.log(rest + own))
            row_lse = lead * k + log_total
            row_log_prob = gl.where(good, (x_y - lead) * k - log_total, float("nan"))
            value = loss_of_target(loss_terms, row_log_prob) + loss_of_lse(loss_terms, row_lse)
            weight = 1.0
            if token_weight is not None:
                weight = gl.load(token_weight + row)
            gl.store(loss + row, gl.where(good, value * weight, float("nan")))
            gl.store(lse + row, row_lse)
            gl.store(log_prob + row, row_log_prob)
            row_factor = weight / gl.load(divisor) * logit_scale
            if temperature is not None:
                row_factor = row_factor / gl.load(temperature + row)
            row_factor = gl.where(good, row_factor, float("nan"))
            lse2, factor, even, at_target = gradient_terms(
                loss_terms, row_lse, row_log_prob, row_factor, None, None, V, False
            )
            if inner_scale is not None:
                at_target *= 1 - x_y * x_y

            following = ()
            for h in gl.static_range(HELD):
                gl.store(into + (h * TILE + columns), _gradient(held[h], k2, inner_scale, lse2, factor))
                following = following + (gl.load(from_next + (h * TILE + columns)),)  # type: ignore[assignment]
            held = following
            if LINE:
                gl.store(into + (at_ends - head), _gradient(ends, k2, inner_scale, lse2, factor), mask=of_ends)
            for turn in range(RING):
                # Those that are still there come first.
                n = turn + AGAIN
                slot = (place + n) % SLOTS
                if n >= RING:
                    async_copy.wait_group(UNDER_WAY)
                    n -= RING
                first = (HELD + n) * TILE
                raw = ring.index(slot).load(TILES)
                g = _gradient(raw, k2, inner_scale, lse2, factor)
                gl.store(into + (first + columns), g, mask=columns < length - first)
                again = turn < AGAIN
                source, wanted = gl.where(again, from_row, from_later), again | kept_later
                of_source = gl.where(again, length, length_later)
                _copy(ring, slot, source, (HELD + turn - gl.where(again, 0, AGAIN)) * TILE, of_source, wanted, columns)
            if good:
                barrier()  # behind what other threads have stored
                gl.store(into + (y - head), at_target.to(logits.dtype.element_ty))
        place = (place + RING + AGAIN) % SLOTS
