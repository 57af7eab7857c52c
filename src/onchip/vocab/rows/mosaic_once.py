"""The Mosaic GPU kernel that reads each row of logits once: `losses` makes a row's statistics and its gradient.

A program works on a multiprocessor of its own, one row after the other.  Each warp has a ring of chunks of the row
(`WarpRings`).  As they come, each thread keeps a running softmax.  When the row's is known, the gradient takes each
chunk's place and is sent, and what was sent makes room for a chunk of the next row.  The first round of a row doesn't
go through rings, but is held in registers.  Two multiprocessors share a row that one can't hold.  What they can't hold
either is read a second time.

x is a logit; z = x * k is the final logit, and k2 = k * log2(e).
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

from onchip.kernels.mosaic.launch import Refs, launch, multiprocessors
from onchip.kernels.mosaic.maths import LN2, LOG2E
from onchip.kernels.mosaic.ptx import run_ptx
from onchip.kernels.mosaic.ring import WARP, WarpRings, lane_of_warp, shared_address
from onchip.kernels.mosaic.strips import Strips, number, part
from onchip.vocab.rows.mosaic import LEADING, LOWEST

_LEAST = 64000  # bytes of a row, of the shortest that were timed
_HELD = 1  # rounds that registers hold
_BEHIND = 1  # how many chunks may be sent and not yet read, before room is made for another
_NUMBER = plgpu.Layout.WG_SPLAT


def ring_of(vocab: int, dtype: Any) -> WarpRings:
    """The fastest that was tried: of as many multiprocessors, up to two, as hold a row."""
    alone = WarpRings(dtype, warpgroups=4, strips=4, slots=7)
    return alone if vocab <= (alone.slots + _HELD) * alone.width else replace(alone, cluster=2)


def serves(vocab: int, dtype: Any) -> bool:
    """Whether the kernel takes rows of so many logits: copies move 16 bytes, or a multiple."""
    size = jnp.dtype(dtype).itemsize
    return size in (2, 4) and vocab * size % 16 == 0 and vocab * size >= _LEAST


class RowLoss(NamedTuple):
    """What each row's loss is made of."""

    ids: Array  # [T] int32, negative for none
    scale: Array  # [T] float32: what the gradient of logits is multiplied by
    slope: Array | None = None  # [1] float32: 2 z-loss


def losses(
    logits: Array,  # [T, V] float32, bfloat16 or float16, for which `serves`
    kept: Array,  # [T] int32: rows with 0 aren't read; their gradient is 0, and nothing is written of the rest
    factor: Array,  # [T] or [1] float32: k
    loss: RowLoss,
) -> tuple[dict[str, Array], Array]:
    """`best`, `total` and `below`, as `mosaic.statistics` makes them; and the gradient of lse - z[id], plus the z-loss,
    by the logits, times `scale`, in their dtype.
    """
    tokens, vocab = logits.shape
    ring = ring_of(vocab, logits.dtype)
    rounds = -(-vocab // ring.width)
    assert rounds > _HELD
    programs = multiprocessors() // ring.cluster
    names = "best", "total", "below"
    outputs = {x: jax.ShapeDtypeStruct((tokens,), jnp.float32) for x in names}
    outputs["out"] = jax.ShapeDtypeStruct(logits.shape, logits.dtype)
    inputs = {"logits": logits, "kept": kept, "factor": factor, "ids": loss.ids, "scale": loss.scale}
    walk = _Walk(ring, tokens, vocab, programs, rounds - _HELD)

    # Barriers, and what warps tell each other.
    numbers = 2 * ring.warps * ring.slots + 2 * 4 * ring.warps * ring.cluster
    scratch = [plgpu.SMEM((ring.words(),), jnp.float32), plgpu.SMEM((numbers,), jnp.float32)]
    made = launch(
        walk.run, inputs | {"slope": loss.slope}, outputs, scratch, grid={"place": programs},
        cluster={"part": ring.cluster} if ring.cluster > 1 else None, warpgroups=ring.warpgroups, name="row_losses",
        interpret=None,
    )  # fmt: skip
    return {name: made[name] for name in names}, made["out"]


def row_terms(p: Any, total: Any, below: Any, by: Any, more: Any = None) -> tuple[Any, Any]:
    """What a row's gradient is made of: the factor of each exp(z - largest z), and the gradient at its id, whose own
    exponential is `p`; `more` is the derivative of the z-loss by lse."""
    # `below` has all the others' digits if the id leads, and leads alone: beside others that do, they are missing.
    others = jnp.where((p > LEADING) & (total < 2 * LEADING), below, total - p)
    of_p = by / total
    return (of_p, -others * of_p) if more is None else (of_p * (1 + more), (more * p - others) * of_p)


class _Walk(NamedTuple):
    """How the rows of a program go through its rings.

    A row's copies are numbered: those of the rounds that go through rings; then once more the first `again` of them,
    which were overwritten.  The copy of number n of the program's i-th row is its (i * reads + n)-th.
    """

    ring: WarpRings
    tokens: int
    vocab: int
    programs: int
    own: int
    """Rounds that go through rings."""

    @property
    def again(self) -> int:
        return max(0, self.own - self.ring.slots)

    @property
    def reads(self) -> int:
        return self.own + self.again

    @property
    def tight(self) -> bool:
        """Whether a row needs all of what the row before it had."""
        return self.own > self.ring.slots - _BEHIND

    def run(self, refs: Refs, memory: Any, barriers: Any) -> None:
        program = lax.convert_element_type(lax.axis_index("place"), jnp.int32)
        count = lax.div(self.tokens + self.programs - 1 - program, jnp.int32(self.programs))
        of = _RowsOfProgram(self, self.ring, self.ring.of_strips(), refs, memory, barriers, program, count)
        self.ring.begin(barriers)
        _meet(self.ring)
        lax.fori_loop(0, self.ring.slots, lambda n, _: of.fetch(jnp.int32(0), n), None)
        lax.fori_loop(0, count, of.one, of.hold(jnp.int32(0)))
        self.ring.sent(0)
        _meet(self.ring)


class _RowsOfProgram(NamedTuple):
    walk: _Walk
    ring: WarpRings
    strips: Strips
    refs: Refs
    memory: Any
    barriers: Any
    program: Any
    count: Any
    """Its rows."""

    # -------------------------------------------------------------------------------------------------------- copies

    def row(self, i: Any) -> Any:
        return self.program + i * self.walk.programs

    def slot(self, i: Any, n: Any) -> Any:
        return lax.rem(i * self.walk.reads + n, jnp.int32(self.ring.slots))

    def start(self, n: Any) -> Any:
        """The first column of a copy's round."""
        w = self.walk
        return (_HELD + jnp.where(n < w.own, n, n - w.own)) * self.ring.width

    def fetch(self, i: Any, n: Any) -> None:
        """Begin a copy, whose number may be beyond the row's; none behind the last row."""
        reads = jnp.int32(self.walk.reads)
        i, n = i + lax.div(n, reads), lax.rem(n, reads)

        @pl.when(i < self.count)
        def _() -> None:
            row, start = self.row(i), self.start(n)
            left = jnp.where(self.refs["kept"][row] != 0, self.walk.vocab - start, 0)
            self.ring.fetch(self.memory, self.barriers, self.refs["logits"].at[row], start, left, self.slot(i, n))

    def wait(self, i: Any, n: Any) -> None:
        before = lax.div(i * self.walk.reads + n, jnp.int32(self.ring.slots))
        self.ring.wait(self.barriers, self.slot(i, n), lax.rem(before, jnp.int32(2)))

    def hold(self, i: Any) -> list[Any]:
        """The strips that are held of a row; behind the last one any."""
        return self.ring.load_far(self.refs["logits"].at[self.row(lax.min(i, self.count - 1))], jnp.int32(0))

    def free(self, i: Any, n: Any) -> None:
        """A chunk that is read again will be overwritten."""
        self.ring.done()
        self.fetch(i, n + self.ring.slots)

    def send(self, i: Any, turn: Any, n: Any, out: Any) -> None:
        """Send the gradient that took a chunk's place, the row's turn-th, and make room for one behind it."""
        w, start = self.walk, self.start(n)
        self.ring.send(self.memory, out, start, w.vocab - start, self.slot(i, n))
        self.ring.sent(_BEHIND)
        some = turn >= _BEHIND if w.tight else (i > 0) | (turn >= _BEHIND)
        pl.when(some)(lambda: self.fetch(i, n - _BEHIND + self.ring.slots))

    def finish(self, i: Any) -> None:
        """Nothing of the row's is under way any more, if the next one can't do without."""
        if self.walk.tight:
            self.ring.sent(0)
            self.fetch(i, jnp.int32(self.walk.reads - _BEHIND + self.ring.slots))

    # ---------------------------------------------------------------------------------------------------------- rows

    def one(self, i: Any, held: list[Any]) -> list[Any]:
        """The program's i-th row, of which some is held; returns what is held of the next one."""
        of_row, ignored = partial(self.of_row, i), partial(self.ignored, i)
        made: list[Any] = lax.cond(self.refs["kept"][self.row(i)] != 0, of_row, ignored, held)
        return made

    def ignored(self, i: Any, held: list[Any]) -> list[Any]:
        w, out = self.walk, self.refs["out"].at[self.row(i)]
        zeros = [self.strips.full(0.0, self.ring.dtype)] * self.ring.strips
        self.ring.store_far(out, jnp.int32(0), zeros)
        following = self.hold(i + 1)
        if w.again:
            lax.fori_loop(0, w.again, lambda n, _: self.fetch(i, n + self.ring.slots), None)

        def clear(turn: Any, _: Any) -> None:
            n = w.again + turn
            self.ring.store(self.memory, self.slot(i, n), zeros)
            self.send(i, turn, n, out)

        lax.fori_loop(0, w.own, clear, None)
        self.finish(i)
        return following

    def of_row(self, i: Any, held: list[Any]) -> list[Any]:
        w, ring, strips, refs, row = self.walk, self.ring, self.strips, self.refs, self.row(i)
        k = refs["factor"][row if refs["factor"].shape[0] > 1 else 0]
        k2, y, by = k * LOG2E, refs["ids"][row], refs["scale"][row]
        x_y = refs["logits"][row, lax.max(y, jnp.int32(0))].astype(jnp.float32)

        def absorb(raw: list[Any], state: Any) -> Any:
            top, total, below = state
            xs = [strips.floats(x) for x in raw]
            new = jnp.maximum(top, strips.most(xs))
            drop = (top - new) * k2
            decay, at = strips.spread(jnp.exp2(drop)), strips.spread(new)
            total, below = total * decay, jnp.where(strips.spread(drop) < 0, total, below) * decay
            for x in xs:
                e = jnp.exp2((x - at) * k2)
                total, below = total + e, below + jnp.where(e > LEADING, 0.0, e)
            return new, total, below

        def forth(n: Any, state: Any, *, ragged: bool = False) -> Any:
            self.wait(i, n)
            left = w.vocab - self.start(n) if ragged else None
            state = absorb(ring.load(self.memory, self.slot(i, n), left), state)
            if w.again:
                pl.when(n < w.again)(partial(self.free, i, n))
            return state

        lowest = strips.of_threads.full(LOWEST)
        ragged = w.vocab % ring.width != 0
        state = lax.fori_loop(0, w.own - ragged, forth, (lowest, strips.full(0.0), strips.full(0.0)))
        if ragged:
            state = forth(jnp.int32(w.own - 1), state, ragged=True)
        state = absorb(held, state)
        told = 8 * ring.warps * ring.slots + 16 * ring.warps * ring.cluster * lax.rem(i, jnp.int32(2))
        top, total, below = _joined(ring, self.barriers, told, state, k2)
        for name, x in (("best", top), ("total", total), ("below", below)):
            _write_once(strips, refs[name].at[pl.ds(row, 1)], x)

        p = jnp.exp2((x_y - top) * k2)
        more = refs["slope"][0] * (top * k + _log2(strips, total) * LN2) if "slope" in refs else None
        of_p, at_id = row_terms(p, total, below, by, more)
        at_id = at_id.astype(ring.dtype)

        def gradient(raw: list[Any]) -> list[Any]:
            return [(jnp.exp2((strips.floats(x) - top) * k2) * of_p).astype(ring.dtype) for x in raw]

        out = refs["out"].at[row]
        first = jnp.int32(0)
        ring.store_far(out, first, gradient(held))
        ring.put_far(out, first, y, at_id)
        following = self.hold(i + 1)

        def back(turn: Any, _: Any) -> None:
            n = w.again + turn
            if w.again:
                pl.when(n >= w.own)(partial(self.wait, i, n))
            ring.store(self.memory, self.slot(i, n), gradient(ring.load(self.memory, self.slot(i, n))))
            ring.put(self.memory, self.slot(i, n), y - self.start(n), at_id)
            self.send(i, turn, n, out)

        lax.fori_loop(0, w.own, back, None)
        self.finish(i)
        return following


# ----------------------------------------------------------------------------------------------------------- numbers


def _log2(strips: Strips, x: Any) -> Any:
    """Of a number that all threads have, as `Strips.log2`."""
    splat = plgpu.Layout.WG_SPLAT((strips.size,))

    @plgpu.inline_mgpu(arg_types=(splat,), return_type=plgpu.ShapeDtypeStruct((strips.size,), jnp.float32, splat))
    def run(_: Any, x: Any) -> Any:
        return x.log2(approx=True)

    return run(x)


def _parts(x: Any) -> list[Any]:
    """The numbers of a thread that has one vector."""
    (register,) = x.registers.flat
    return [part(register, i) for i in range(ir.VectorType(register.type).shape[0])]


def _tree(two: Any, parts: list[Any]) -> Any:
    while len(parts) > 1:
        parts = [two(*parts[i : i + 2]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]


def _joined(ring: WarpRings, shared: Any, at: Any, state: Any, k2: Any) -> list[Any]:
    """(best, total, below) of the program's threads together, of each a number; warps tell each other theirs from byte
    `at` of shared memory on, where nobody reads what was told two rows ago."""
    shape = (ring.of_strips().size,)
    made = [plgpu.ShapeDtypeStruct(shape, jnp.float32, plgpu.Layout.WG_SPLAT(shape))] * 3
    layout, of_threads = ring.of_strips().layout, ring.of_strips().of_threads.layout

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _NUMBER, of_threads, layout, layout, _NUMBER), return_type=made)
    def run(_: Any, shared: Any, at: Any, top: Any, total: Any, below: Any, k2: Any) -> list[Any]:
        f32, k2, zero = ir.F32Type.get(), k2.registers.item(), arith.constant(ir.F32Type.get(), 0.0)

        def met(lanes: int, top: Any, total: Any, below: Any) -> tuple[Any, Any, Any]:
            distances = [d for d in (16, 8, 4, 2, 1) if d < lanes]
            best = top
            for d in distances:
                best = arith.maximumf(best, utils.shfl_bfly(best, d))
            drop = arith.mulf(arith.subf(top, best), k2)
            decay = llvm.inline_asm(f32, [drop], "ex2.approx.ftz.f32 $0, $1;", "=f,f", has_side_effects=False)
            led = arith.cmpf(arith.CmpFPredicate.OLT, drop, zero)
            below = arith.mulf(arith.select(led, total, below), decay)
            total = arith.mulf(total, decay)
            for d in distances:
                total = arith.addf(total, utils.shfl_bfly(total, d))
                below = arith.addf(below, utils.shfl_bfly(below, d))
            return best, total, below

        mine = met(WARP, _tree(arith.maximumf, _parts(top)), *(_tree(arith.addf, _parts(x)) for x in (total, below)))
        start = arith.addi(shared_address(shared), at.registers.item())
        lane, all_warps = lane_of_warp(), ring.warps * ring.cluster
        to, numbers = arith.addi(start, arith.muli(ring.warp(), number(16))), "{$1, $2, $3, $3}"
        if ring.cluster == 1:
            tell = f"@mine st.shared.v4.f32 [$0], {numbers};"
        else:  # a lane for each program
            tell = (
                f".reg .b32 part, to; and.b32 part, $4, {ring.cluster - 1}; mapa.shared::cluster.u32 to, $0, part; "
                f"@mine st.shared::cluster.v4.f32 [to], {numbers};"
            )
        tell = f"{{.reg .pred mine; setp.lt.s32 mine, $4, {ring.cluster}; {tell}}}"
        run_ptx(tell, "r,f,f,f,r", [to, *mine, lane])
        _barrier(ring)
        theirs = arith.muli(arith.andi(lane, number(all_warps - 1)), number(16))
        hear, struct = "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>")
        found = run_ptx(hear, "=f,=f,=f,=f,r", [arith.addi(start, theirs)], struct)
        each = [llvm.extractvalue(f32, found, [i]) for i in range(3)]
        splat = fragmented_array.WGSplatFragLayout(shape)
        return [fragmented_array.FragmentedArray.splat(x, shape, splat) for x in met(all_warps, *each)]

    found: list[Any] = run(shared, at, *state, k2)
    return found


def _barrier(ring: WarpRings) -> None:
    """All threads that share rows meet here."""
    if ring.cluster == 1:
        gpu.barrier()
    else:
        run_ptx("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;", "", [])


def _meet(ring: WarpRings) -> None:
    """Programs that share rows have all come here: none writes to the memory of one that isn't there."""
    if ring.cluster > 1:
        plgpu.inline_mgpu()(lambda _: _barrier(ring))()


def _write_once(strips: Strips, ref: Any, value: Any) -> None:
    """A number that all threads have, to device memory [1]."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT((strips.size,))))
    def run(_: Any, ref: Any, value: Any) -> None:
        lines = "{.reg .pred first; setp.eq.u32 first, $0, 0; @first st.global.f32 [$1], $2;}"
        run_ptx(lines, "r,l,f", [utils.thread_idx(), utils.memref_ptr(ref), value.registers.item()])

    run(ref, value)
