"""The kernel of forward: tiles of queries, each with its blocks of keys and a running softmax.

Two or three warpgroups have 64 queries each, and one more copies.  A warpgroup multiplies its queries with a block of
keys while it multiplies the previous block's probabilities with values.  They take turns: one computes its softmax
while another's products run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from onchip.attention.mosaic.products import LOWEST, ProductSums, Scores, Seen, rows_of, send
from onchip.attention.mosaic.quads import part_of_thread, sums_by_thread, sums_of_threads
from onchip.attention.mosaic.work import HALF, L2_BYTES, TileWork, each_item, heads_together, programs_of
from onchip.kernels.mosaic.launch import Refs, launch
from onchip.kernels.mosaic.maths import LN2, LOG2E
from onchip.kernels.mosaic.product import swizzled
from onchip.kernels.mosaic.ptx import once_known
from onchip.kernels.mosaic.registers import Registers, fit

Array = jax.Array


@dataclass(frozen=True)
class ForwardConfig:
    """The sizes of forward's kernel."""

    block: int = 128
    """Keys of a block."""
    stages: int = 2
    """How many blocks are in shared memory at a time."""
    warpgroups: int = 2
    """How many warpgroups multiply, each 64 queries of a tile."""
    pinned: bool = True
    """Whether the wait for the sum of values is kept after the next softmax."""
    registers: tuple[int, int] = (240, 24)
    """Registers of a thread that multiplies, and of one that copies."""
    tiles: int = 2
    """How many tiles of queries are in shared memory at a time."""
    sent: int | None = None
    """Columns of out that are in shared memory at a time; None: all."""
    l2_bytes: int = L2_BYTES

    def __post_init__(self) -> None:
        multiplies, copies = self.registers
        assert fit((*[multiplies] * self.warpgroups, copies)), self

    @property
    def tile(self) -> int:
        """Queries of a tile."""
        return self.warpgroups * HALF


FORWARD = {
    (64, 64): ForwardConfig(warpgroups=3, pinned=False, registers=(160, 32)),
    (128, 128): ForwardConfig(),
    (192, 128): ForwardConfig(tiles=1, sent=64),
    (256, 256): ForwardConfig(block=64, tiles=1, sent=64),
}
"""For heads of so many numbers, and values of so many."""


def forward(
    q: Array,  # [B, Tq, Hq, D] or [B, Hq, Tq, D]
    k: Array,  # likewise, Tk and Hk
    v: Array,  # Dv
    start: Array,  # [B, Tq rounded up to whole tiles] int32
    end: Array,
    stop: Array | None,  # [B, Tk rounded up] int32
    sinks: Array | None,  # [B, Hq] float32
    items: Array,  # from `query_items`
    *,
    layout: str,
    heads: tuple[int, int],
    scores: Scores,
    config: ForwardConfig,
    interpret: Any = None,
) -> tuple[Array, Array]:
    """out, laid out like q, and lse [B, Hq, Tq rounded up] float32."""
    c, size, value_size, dtype = config, q.shape[-1], v.shape[-1], q.dtype
    (of_q, of_k), batch = heads, q.shape[0]
    programs = programs_of(len(items) * of_q, interpret)
    together = heads_together(of_k, 2 * k.nbytes // of_k, c.l2_bytes) * (of_q // of_k)
    barrier = plgpu.Barrier
    shared: dict[str, Any] = {
        "q_block": swizzled((c.tiles, c.tile, size), dtype),
        "k_block": swizzled((c.stages, c.block, size), dtype),
        "v_block": swizzled((c.stages, c.block, value_size), dtype),
        "staging": swizzled((c.warpgroups, HALF, c.sent or value_size), dtype),
        "q_full": barrier(num_arrivals=1, num_barriers=c.tiles),
        "q_free": barrier(num_arrivals=c.warpgroups, num_barriers=c.tiles),
        "k_full": barrier(num_arrivals=1, num_barriers=c.stages),
        "k_free": barrier(num_arrivals=c.warpgroups, num_barriers=c.stages),
        "v_full": barrier(num_arrivals=1, num_barriers=c.stages),
        "v_free": barrier(num_arrivals=c.warpgroups, num_barriers=c.stages),
        "turn": barrier(num_arrivals=1, num_barriers=c.warpgroups),
    }

    def body(refs: Refs, *more: Any) -> None:
        refs = {**refs, **dict(zip(shared, more, strict=True))}
        kernel = _Forward(refs, c, layout, value_size, of_q // of_k, scores, interpret)
        run = partial(each_item, refs, of_q, together, programs)
        lax.cond(lax.axis_index("warpgroup") == c.warpgroups, lambda: kernel.copy(run), lambda: kernel.multiply(run))

    inputs = {"q": q, "k": k, "v": v, "start": start, "end": end, "stop": stop, "sinks": sinks, "items": items}
    outputs = {
        "out": jax.ShapeDtypeStruct((*q.shape[:-1], value_size), dtype),
        "lse": jax.ShapeDtypeStruct((batch, of_q, start.shape[1]), jnp.float32),
    }
    made = launch(
        body, inputs, outputs, [*shared.values()], grid={"program": programs}, warpgroups=c.warpgroups + 1,
        name="attention", interpret=interpret,
    )  # fmt: skip
    return made["out"], made["lse"]


class _Forward:
    """What the warpgroups of a program do: `copy`, or `multiply`."""

    def __init__(
        self, refs: Refs, config: ForwardConfig, layout: str, size: int, group: int, scores: Scores,
        interpret: Any,
    ) -> None:  # fmt: skip
        self.refs, self.c, self.layout, self.size, self.group = refs, config, layout, size, group
        self.scores, self.sums, self.registers = scores, ProductSums(interpret), Registers(interpret)
        self.interpret = interpret
        self.warpgroup = lax.axis_index("warpgroup")

    def slot(self, number: Any) -> Any:
        return lax.rem(number, jnp.int32(self.c.stages))

    def q_slot(self, turn: Any) -> Any:
        return lax.rem(turn, jnp.int32(self.c.tiles))

    def each_free(self, do: Callable[[Any], None]) -> None:
        for x, slots in (("q", self.c.tiles), ("k", self.c.stages), ("v", self.c.stages)):
            for slot in range(slots):
                do(self.refs[f"{x}_free"].at[slot])

    # ----------------------------------------------------------------------------------------- the copying warpgroup

    def copy(self, run: Any) -> None:
        plgpu.set_max_registers(self.c.registers[1], action="decrease")
        run(self.copy_tile, jnp.int32(0))
        self.each_free(plgpu.barrier_wait)  # until the last products have read theirs

    def copy_tile(self, item: TileWork, turn: Any, before: Any) -> Any:
        refs, c, slot = self.refs, self.c, self.q_slot(turn)
        plgpu.barrier_wait(refs["q_free"].at[slot])
        source = rows_of(refs["q"], self.layout, item.batch, item.tile * c.tile, c.tile, item.head)
        plgpu.copy_gmem_to_smem(source, refs["q_block"].at[slot], refs["q_full"].at[slot])
        of_keys = lax.div(item.head, jnp.int32(self.group))

        def step(i: Any, _: None) -> None:
            slot = self.slot(before + i - item.first)
            for x in ("k", "v"):
                plgpu.barrier_wait(refs[f"{x}_free"].at[slot])
                source = rows_of(refs[x], self.layout, item.batch, i * c.block, c.block, of_keys)
                plgpu.copy_gmem_to_smem(source, refs[f"{x}_block"].at[slot], refs[f"{x}_full"].at[slot])

        lax.fori_loop(item.first, item.last, step, None)
        return before + item.last - item.first

    # ------------------------------------------------------------------------------------------- those that multiply

    def multiply(self, run: Any) -> None:
        plgpu.set_max_registers(self.c.registers[0], action="increase")
        first = self.refs["turn"].at[0]
        self.each_free(plgpu.barrier_arrive)
        pl.when(self.warpgroup == self.c.warpgroups - 1)(lambda: plgpu.barrier_arrive(first))
        run(self.tile, jnp.int32(0))
        pl.when(self.warpgroup == 0)(lambda: plgpu.barrier_wait(first))
        plgpu.wait_smem_to_gmem(0)

    def tile(self, item: TileWork, turn: Any, before: Any) -> Any:
        slot = self.q_slot(turn)
        plgpu.barrier_wait(self.refs["q_full"].at[slot])
        q = self.refs["q_block"].at[slot, pl.ds(self.warpgroup * HALF, HALF)]
        row = item.tile * self.c.tile + self.warpgroup * HALF
        acc, most, total = self.sums.begin(lambda out: self.softmax(item, before, row, q, slot, out), (HALF, self.size))
        self.store(item, row, acc, most, total)
        return before + item.last - item.first

    def softmax(self, item: TileWork, before: Any, row: Any, q: Any, q_slot: Any, out: Any) -> Any:
        """The sum of values, the largest exponent and the sum of exponentials of each query."""
        refs, c, sums, shape = self.refs, self.c, self.sums, (HALF, self.c.block)
        registers, factor, seen = self.registers, self.scores.factor, Seen(self.registers, refs, item.batch)
        over = item.batch, pl.ds(row, HALF)
        limits = [registers.load(refs[name].at[over], 1) for name in ("start", "end")]
        most, total = self.begin(item)

        def of_block(i: Any, most: Any, total: Any, beside: Any) -> Any:
            """Of the products of block i, `beside` which others are started."""
            slot, column = self.slot(before + i - item.first), i * c.block
            plgpu.barrier_wait(refs["k_full"].at[slot])
            plgpu.barrier_wait(refs["turn"].at[self.warpgroup])
            s = sums.start(q, refs["k_block"].at[slot])
            made = beside()
            plgpu.barrier_arrive(refs["turn"].at[lax.rem(self.warpgroup + 1, jnp.int32(c.warpgroups))])
            s = sums.known(s, running=0 if made is None else 1)
            plgpu.barrier_arrive(refs["k_free"].at[slot])
            x, _ = self.scores.of(s)
            edge = (column < item.full_first) | (column + c.block > item.full_last)
            x = seen.hide(edge, x, row, column, limits, -jnp.inf)
            top = jnp.maximum(most, jnp.max(x, axis=1) * factor)
            e = jnp.exp2(x * factor - registers.spread(top, shape, 1))
            decay = jnp.exp2(most - top)
            of_out = None if made is None else made[1]
            return of_out, e, top, total * decay + sums_by_thread(e, self.interpret), decay

        def values_of(i: Any) -> Any:
            slot = self.slot(before + i - item.first)
            plgpu.barrier_wait(refs["v_full"].at[slot])
            return sums.block(refs["v_block"].at[slot])

        def step(i: Any, state: Any) -> Any:
            of_out, p, most, total = state

            def beside() -> Any:
                return sums.add((out[0], of_out), p, values_of(i - 1))

            of_out, e, most, total, decay = of_block(i, most, total, beside)
            if c.pinned:
                once_known(total, self.interpret)
            acc = sums.value((out[0], of_out))
            plgpu.barrier_arrive(refs["v_free"].at[self.slot(before + i - 1 - item.first)])
            _, of_out = sums.put((out[0], of_out), acc * registers.spread(decay, acc.shape, 1))
            return of_out, e.astype(refs["q"].dtype), most, total

        _, e, most, total, _ = of_block(item.first, most, total, lambda: None)
        state = out[1], e.astype(refs["q"].dtype), most, total
        of_out, p, most, total = lax.fori_loop(item.first + 1, item.last, step, state)
        plgpu.barrier_arrive(refs["q_free"].at[q_slot])
        acc = sums.value(sums.add((out[0], of_out), p, values_of(item.last - 1)))
        plgpu.barrier_arrive(refs["v_free"].at[self.slot(before + item.last - 1 - item.first)])
        return acc, most, sums_of_threads(total, self.interpret)

    def begin(self, item: TileWork) -> tuple[Any, Any]:
        """The largest exponent and a thread's sum of exponentials before the first block, which has a sink's."""
        if "sinks" not in self.refs:
            return self.registers.vector(HALF, LOWEST), self.registers.vector(HALF, 0.0)
        sink = self.refs["sinks"][item.batch, item.head] * LOG2E
        most = lax.max(sink, jnp.float32(LOWEST))
        total = part_of_thread(jnp.exp2(sink - most), self.interpret)
        return self.registers.vector(HALF, most), self.registers.vector(HALF, total)

    def store(self, item: TileWork, row: Any, acc: Any, most: Any, total: Any) -> None:
        refs = self.refs
        nothing = total == 0
        divisor = jnp.where(nothing, 1.0, total)
        refs["lse"][item.batch, item.head, pl.ds(row, HALF)] = jnp.where(
            nothing, -jnp.inf, most * LN2 + jnp.log(divisor)
        )
        acc = acc * self.registers.spread(1 / divisor, acc.shape, 1)
        into = rows_of(refs["out"], self.layout, item.batch, row, HALF, item.head)
        send(acc.astype(refs["q"].dtype), refs["staging"].at[self.warpgroup], into)
