"""All gradients in one kernel, of five products, for heads of up to 64 numbers.

A tile of keys walks over the blocks of queries that see it, as in `backward.ByKey`, and also multiplies the gradients
of scores by its keys.  What that gives is added to float32 sums for queries in device memory, in the order of the
kernel's items, so that sums have the same bits each time: each head has counters for each block of queries, and a tile
waits until one says that all items before it that meet the block have added.  The first one stores.

A program takes the number of its item when it starts, and waits for lower numbers alone, whose programs have started
before.  So of the numbers that aren't done the lowest waits for nobody.
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

from onchip.attention.masks import Intervals
from onchip.attention.mosaic.backward import GradientInputs
from onchip.attention.mosaic.problem import BLOCK, TILE
from onchip.attention.mosaic.products import ProductSums, Scores, Seen, rows_of, send, where_seen
from onchip.attention.mosaic.work import HALF, TileWork, key_items_in_order
from onchip.frontend.jax_call import vary_alike
from onchip.kernels.mosaic.launch import Refs, launch
from onchip.kernels.mosaic.product import swizzled
from onchip.kernels.mosaic.ptx import await_turn, once_known, pass_turn, store_boxes
from onchip.kernels.mosaic.registers import Registers, fit
from onchip.kernels.mosaic.tile_numbers import Counter

Array = jax.Array

WIDTH = 32
"""Numbers of a query in a row of 128 bytes of float32."""


@dataclass(frozen=True)
class FusedConfig:
    """The sizes of the kernel."""

    stages: dict[str, int]
    """How many blocks of queries, of out's gradients, and of scores' gradients are in shared memory at a time."""
    pieces: int
    """How many pieces of sums are on their way at a time."""
    registers: tuple[int, int, int]
    """Registers of a thread that makes probabilities, of one that multiplies for queries, and of one that copies."""

    def __post_init__(self) -> None:
        multiplies, *others = self.registers
        assert fit((multiplies, multiplies, *others)), self
        assert self.pieces < 4  # a warp adds each, and another one copies


FUSED = {(64, 64): FusedConfig({"q": 3, "grad_out": 3, "ds": 2}, 3, (192, 96, 32))}
"""For heads of so many numbers, and values of so many."""


def all_gradients(
    given: GradientInputs, mask: Intervals, keys: int, *, layout: str, heads: tuple[int, int], scores: Scores,
    config: FusedConfig, interpret: Any = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """The gradients of q, k and v."""
    items, turns = key_items_in_order(mask, keys, BLOCK)
    c, programs = config, len(items) * heads[1]
    planes, blocks = given.q.shape[0] * heads[0], turns.shape[2]
    outputs = {
        "sums": jax.ShapeDtypeStruct(given.q.shape, jnp.float32),
        "grad_k": jax.ShapeDtypeStruct(given.k.shape, given.k.dtype),
        "grad_v": jax.ShapeDtypeStruct(given.v.shape, given.k.dtype),
    }
    shared = _shared(c, given)

    def body(refs: Refs, *more: Any) -> None:
        refs = {**refs, **dict(zip(shared, more, strict=True))}
        _Fused(refs, c, layout, heads, scores, programs, interpret).run()

    inputs = {**given._asdict(), "items": items, "turns": turns}
    run = partial(
        launch, body, scratch=[*shared.values()], grid={"program": programs}, warpgroups=4,
        name="attention_gradients", interpret=interpret,
    )  # fmt: skip
    if interpret is not None:
        made = run(inputs, outputs)
    else:

        def counting(state: Any) -> None:
            for name, x in run({**inputs, "ticket": state[0], "counters": state[1]}, outputs).items():
                state[2][name][...] = x

        counters = jnp.zeros(planes * blocks, jnp.int32)
        empty = {name: lax.empty(x.shape, x.dtype) for name, x in outputs.items()}
        made = pl.run_state(counting)(vary_alike((jnp.zeros(1, jnp.int32), counters, empty), inputs))[2]
    return _rounded(given, made["sums"], layout, scores.scale), made["grad_k"], made["grad_v"]


def _rounded(given: GradientInputs, sums: Array, layout: str, scale: float) -> Array:
    """q's gradient, from its sums; the upstream gradient of a query that sees nothing may be anything."""
    queries = sums.shape[1 if layout == "bthd" else 2]
    sees = (given.start < given.end)[:, None] & (given.numbers[:, :, 0] < jnp.inf)
    sees = sees[..., :queries]
    sees = jnp.swapaxes(sees, 1, 2) if layout == "bthd" else sees
    return jnp.where(sees[..., None], sums * scale, 0).astype(given.q.dtype)


def _shared(c: FusedConfig, given: GradientInputs) -> dict[str, Any]:
    barrier, dtype = plgpu.Barrier, given.q.dtype
    size, value_size = given.q.shape[-1], given.v.shape[-1]
    made = {
        "k_block": swizzled((TILE, size), dtype),
        "v_block": swizzled((TILE, value_size), dtype),
        "q_block": swizzled((c.stages["q"], BLOCK, size), dtype),
        "grad_out_block": swizzled((c.stages["grad_out"], BLOCK, value_size), dtype),
        "ds_block": swizzled((c.stages["ds"], 2, HALF, BLOCK), dtype),
        "piece": swizzled((c.pieces, size // WIDTH, BLOCK, WIDTH), jnp.float32),
        "numbers_block": plgpu.SMEM((c.stages["grad_out"], 2, BLOCK), jnp.float32),
        "start_block": plgpu.SMEM((c.stages["grad_out"], BLOCK), jnp.int32),
        "end_block": plgpu.SMEM((c.stages["grad_out"], BLOCK), jnp.int32),
        "own_full": barrier(num_arrivals=2),
        "q_full": barrier(num_arrivals=1, num_barriers=c.stages["q"]),
        "q_free": barrier(num_arrivals=2, num_barriers=c.stages["q"]),
        "grad_out_full": barrier(num_arrivals=4, num_barriers=c.stages["grad_out"]),
        "grad_out_free": barrier(num_arrivals=2, num_barriers=c.stages["grad_out"]),
        "ds_full": barrier(num_arrivals=2, num_barriers=c.stages["ds"]),
        "ds_free": barrier(num_arrivals=1, num_barriers=c.stages["ds"]),
        "piece_full": barrier(num_arrivals=1, num_barriers=c.pieces),
        "piece_free": barrier(num_arrivals=1, num_barriers=c.pieces),
    }
    return made | Counter.shared()


class _Fused:
    """What the warpgroups of a program do."""

    def __init__(
        self, refs: Refs, config: FusedConfig, layout: str, heads: tuple[int, int], scores: Scores, programs: int,
        interpret: Any,
    ) -> None:  # fmt: skip
        self.refs, self.c, self.layout, self.scores, self.programs = refs, config, layout, scores, programs
        self.heads, self.group = heads, heads[0] // heads[1]
        self.sums, self.registers, self.interpret = ProductSums(interpret), Registers(interpret), interpret
        self.warpgroup = lax.axis_index("warpgroup")
        self.size, self.value_size = refs["q"].shape[-1], refs["v"].shape[-1]

    def run(self) -> None:
        """All roles: two warpgroups multiply for keys and values, a third for queries, a last one copies and adds."""
        pl.when(self.warpgroup < 2)(lambda: self.multiply(self.item()))
        pl.when(self.warpgroup == 2)(lambda: self.multiply_for_queries(self.item()))
        pl.when(self.warpgroup == 3)(self.copy_and_add)

    def item(self, draw: bool = False) -> TileWork:
        """This program's: a tile's heads come one after the other."""
        if self.interpret is not None:
            number = lax.convert_element_type(lax.axis_index("program"), jnp.int32)
        else:
            counter = Counter(*(self.refs[x] for x in ("ticket", *Counter.shared())))
            number = counter.take(jnp.int32(self.programs)) if draw else counter.taken_number()
        row = lax.div(number, jnp.int32(self.heads[1]))
        head = number - row * self.heads[1]
        return TileWork(*(*(self.refs["items"][row, i] for i in range(6)), head))

    def steps(self, item: TileWork) -> Any:
        return (item.last - item.first) * self.group

    def of_step(self, item: TileWork, i: Any) -> tuple[Any, Any]:
        """The block of a step, from the last to the first, and its head: tiles that start together reach a block one
        after the other."""
        at = lax.div(i, jnp.int32(self.group))
        return item.last - 1 - at, item.head * self.group + i - at * self.group

    def slot(self, number: Any, name: str) -> Any:
        return lax.rem(number, jnp.int32(self.c.stages[name]))

    # ------------------------------------------------------------------------------------ the last warpgroup: copying

    def copy_and_add(self) -> None:
        if self.interpret is not None:
            self.copy(self.item())
            return
        plgpu.set_max_registers(self.c.registers[-1], action="decrease")
        item = self.item(draw=True)

        def of_warp(warp: Any) -> None:
            pl.when(warp == 3)(lambda: self.copy(item))
            pl.when(warp < self.c.pieces)(lambda: self.add_pieces(item, warp))

        plgpu.warp_map(of_warp)

    def copy(self, item: TileWork) -> None:
        refs = self.refs
        for x in "kv":
            source = rows_of(refs[x], self.layout, item.batch, item.tile * TILE, TILE, item.head)
            plgpu.copy_gmem_to_smem(source, refs[f"{x}_block"], refs["own_full"])

        def step(i: Any, _: None) -> None:
            block, head = self.of_step(item, i)
            over = pl.ds(block * BLOCK, BLOCK)
            for x in ("q", "grad_out"):
                slot = self.slot(i, x)
                plgpu.barrier_wait(refs[f"{x}_free"].at[slot])
                source = rows_of(refs[x], self.layout, item.batch, block * BLOCK, BLOCK, head)
                plgpu.copy_gmem_to_smem(source, refs[f"{x}_block"].at[slot], refs[f"{x}_full"].at[slot])
            full = refs["grad_out_full"].at[slot]
            source = refs["numbers"].at[item.batch, head, :, over]
            plgpu.copy_gmem_to_smem(source, refs["numbers_block"].at[slot], full)
            for x in ("start", "end"):
                plgpu.copy_gmem_to_smem(refs[x].at[item.batch, over], refs[f"{x}_block"].at[slot], full)

        lax.fori_loop(0, self.steps(item), step, None)
        for x in ("q", "grad_out"):  # until the last products have read theirs
            self.each(x, plgpu.barrier_wait)

    def each(self, name: str, do: Callable[[Any], None]) -> None:
        """Arrive at each barrier that says that memory is free, at first, or wait for it, at last."""
        for slot in range(self.c.stages[name]):
            do(self.refs[f"{name}_free"].at[slot])

    # ------------------------------------------------------------------------------------- the last warpgroup: adding

    def place(self, item: TileWork, block: Any, head: Any) -> Any:
        """A block's sums."""
        return rows_of(self.refs["sums"], self.layout, item.batch, block * BLOCK, BLOCK, head)

    def add_pieces(self, item: TileWork, warp: Any) -> None:
        """A warp adds every so-manyth piece, each in its turn."""
        refs, pieces, steps = self.refs, self.c.pieces, self.steps(item)
        blocks = refs["turns"].shape[2]

        def turn_of(i: Any) -> Any:
            block, _ = self.of_step(item, lax.min(i, steps - 1))
            return refs["turns"][item.batch, item.tile, block]

        def one(m: Any, turn: Any) -> Any:
            i = m * pieces + warp
            block, head = self.of_step(item, i)
            counter = refs["counters"].at[(item.batch * self.heads[0] + head) * blocks + block]
            number = lax.div(turn, jnp.int32(2))
            meets, first, last = turn >= 0, number == 0, turn - 2 * number == 1
            following = turn_of(i + pieces)
            pl.when(meets)(lambda: await_turn(counter, number))
            plgpu.barrier_wait(refs["piece_full"].at[warp])

            def send(reduction: Any) -> None:
                for box in range(self.size // WIDTH):
                    into = self.place(item, block, head).at[:, pl.ds(box * WIDTH, WIDTH)]
                    plgpu.copy_smem_to_gmem(refs["piece"].at[warp, box], into, reduction_op=reduction)

            pl.when(meets & first)(lambda: send(None))
            pl.when(meets & ~first)(lambda: send("add"))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(refs["piece_free"].at[warp])
            plgpu.wait_smem_to_gmem(0)
            # After the last one the counter is as before the first one.
            pl.when(meets)(lambda: pass_turn(counter, jnp.where(last, 0, number + 1)))
            return following

        plgpu.barrier_arrive(refs["piece_free"].at[warp])
        rounds = lax.div(lax.max(steps - warp + pieces - 1, jnp.int32(0)), jnp.int32(pieces))
        lax.fori_loop(0, rounds, one, turn_of(lax.convert_element_type(warp, jnp.int32)))

    # ------------------------------------------------------------------------------------------- those that multiply

    def multiply(self, item: TileWork) -> None:
        if self.interpret is None:
            plgpu.set_max_registers(self.c.registers[0], action="increase")
        row = item.tile * TILE + self.warpgroup * HALF
        for x in ("q", "grad_out"):
            self.each(x, plgpu.barrier_arrive)
        plgpu.barrier_wait(self.refs["own_full"])
        run = partial(self.walk, item, row)
        of_k, of_v = self.sums.begin(run, (HALF, self.size), (HALF, self.value_size))
        self.each("ds", plgpu.barrier_wait)
        self.send("grad_v", of_v, item, row)
        self.send("grad_k", of_k * self.scores.scale, item, row)
        plgpu.wait_smem_to_gmem(0)

    def send(self, name: str, value: Any, item: TileWork, row: Any) -> None:
        into = rows_of(self.refs[name], self.layout, item.batch, row, HALF, item.head)
        send(value.astype(self.refs["q"].dtype), self.mine("v"), into)

    def mine(self, name: str) -> Any:
        """This warpgroup's half of the tile's keys or values."""
        return self.refs[f"{name}_block"].at[pl.ds(self.warpgroup * HALF, HALF)]

    def start(self, own: str, met: str, slot: Any) -> Any:
        return self.sums.start(self.mine(own), self.refs[f"{met}_block"].at[slot])

    def add_to(self, total: Any, value: Any, x: Any, met: str, slot: Any) -> Any:
        """The sum's value after x @ a block is added; on a GPU it still runs, and is `total`."""
        return self.sums.add((total[0], value), x, self.sums.block(self.refs[f"{met}_block"].at[slot]))[1]

    def start_for_queries(self, slot: Any) -> Any:
        """Start a piece's product, of all keys."""
        ks = [self.refs["k_block"].at[pl.ds(w * HALF, HALF)] for w in range(2)]
        return self.sums.start_over_rows([self.refs["ds_block"].at[slot, w] for w in range(2)], ks)

    def leave_piece(self, item: TileWork, piece: Any, i: Any) -> None:
        """Hand the piece of step i to the warps that add.  The interpreter has programs one after the other: there it
        is added here.
        """
        refs = self.refs
        if self.interpret is not None:
            block, head = self.of_step(item, i)
            into, turn = self.place(item, block, head), refs["turns"][item.batch, item.tile, block]
            into[...] = jnp.where(turn < 0, into[...], piece + jnp.where(turn < 2, 0.0, into[...]))
            return
        slot = lax.rem(i, jnp.int32(self.c.pieces))
        plgpu.barrier_wait(refs["piece_free"].at[slot])
        boxes = [piece[:, box * WIDTH : (box + 1) * WIDTH] for box in range(self.size // WIDTH)]
        store_boxes(refs["piece"].at[slot], boxes, self.interpret)
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs["piece_full"].at[slot])

    def multiply_for_queries(self, item: TileWork) -> None:
        """The third warpgroup."""
        refs = self.refs
        if self.interpret is None:
            plgpu.set_max_registers(self.c.registers[1], action="decrease")
        plgpu.barrier_wait(refs["own_full"])
        self.each("ds", plgpu.barrier_arrive)

        def step(i: Any, _: None) -> None:
            slot = self.slot(i, "ds")
            plgpu.barrier_wait(refs["ds_full"].at[slot])
            piece = self.sums.known(self.start_for_queries(slot))
            plgpu.barrier_arrive(refs["ds_free"].at[slot])
            self.leave_piece(item, piece, i)

        lax.fori_loop(0, self.steps(item), step, None)
        if self.interpret is None:
            for slot in range(self.c.pieces):
                plgpu.barrier_wait(refs["piece_free"].at[slot])

    def of_block(self, item: TileWork, row: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Two functions: from products probabilities, rounded, and these times the cap's derivative; and a block's
        numbers."""
        refs, registers, shape = self.refs, self.registers, (HALF, BLOCK)
        seen = Seen(registers, refs, item.batch)

        def number(which: int, slot: Any) -> Any:
            return registers.spread(registers.load_columns(refs["numbers_block"].at[slot, which]), shape, 0)

        def probabilities(product: Any, block: Any, slot: Any) -> tuple[Any, Any]:
            column = block * BLOCK
            edge = (column < item.full_first) | (column + BLOCK > item.full_last)

            def inside() -> Any:
                limits = [registers.load_columns(refs[f"{x}_block"].at[slot]) for x in ("start", "end")]
                return seen.by_key(shape, row, column, limits)

            x, slope = self.scores.of(product)
            p = jnp.exp2(x * self.scores.factor - number(0, slot))
            if slope is None:
                p = where_seen(edge, inside, p, 0.0)
                return p.astype(refs["q"].dtype), p

            def hidden(*of_all: Any) -> tuple[Any, ...]:
                there = inside()
                return tuple(jnp.where(there, x, jnp.zeros((), x.dtype)) for x in of_all)

            rounded, of_scores = lax.cond(edge, hidden, lambda *x: x, p.astype(refs["q"].dtype), p * slope)
            return rounded, of_scores

        return probabilities, number

    def following(self, block: Any, head: Any) -> tuple[Any, Any]:
        """Those of the next step."""
        head = head + 1
        ends = head == self.group
        return jnp.where(ends, block - 1, block), jnp.where(ends, 0, head)

    def leave_gradients(self, ds: Any, i: Any) -> None:
        """Hand the scores' gradients of a step to the warpgroup that multiplies them for queries."""
        refs, slot = self.refs, self.slot(i, "ds")
        plgpu.barrier_wait(refs["ds_free"].at[slot])
        store_boxes(refs["ds_block"].at[slot, pl.ds(self.warpgroup, 1)], [ds], self.interpret)
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs["ds_full"].at[slot])

    def walk(self, item: TileWork, row: Any, of_k: Any, of_v: Any) -> tuple[Any, Any]:
        """Both sums.  What a block adds to that of keys is multiplied beside the next block's scores."""
        refs, sums, steps = self.refs, self.sums, self.steps(item)
        dtype, (probabilities, number) = refs["q"].dtype, self.of_block(item, row)

        def step(i: Any, state: Any) -> Any:
            value_k, value_v, gradient, block, head = state
            slot, out_slot, before = self.slot(i, "q"), self.slot(i, "grad_out"), lax.max(i - 1, jnp.int32(0))

            plgpu.barrier_wait(refs["q_full"].at[slot])
            s = self.start("k", "q", slot)
            value_k = self.add_to(of_k, value_k, gradient, "q", self.slot(before, "q"))  # zeros in the first step
            s = sums.known(s, running=1)
            pl.when(i > 0)(lambda: plgpu.barrier_arrive(refs["grad_out_free"].at[self.slot(before, "grad_out")]))
            plgpu.barrier_wait(refs["grad_out_full"].at[out_slot])
            p, slope = probabilities(s, block, out_slot)
            once_known(slope, self.interpret)
            sums.wait(0)
            pl.when(i > 0)(lambda: plgpu.barrier_arrive(refs["q_free"].at[self.slot(before, "q")]))
            d = self.start("v", "grad_out", out_slot)
            value_v = self.add_to(of_v, value_v, p, "grad_out", out_slot)
            ds = (slope * (sums.known(d, running=1) - number(1, out_slot))).astype(dtype)
            self.leave_gradients(ds, i)
            return value_k, value_v, ds, *self.following(block, head)

        zeros = self.registers.zeros((HALF, BLOCK)).astype(dtype)
        state = of_k[1], of_v[1], zeros, item.last - 1, jnp.int32(0)
        value_k, value_v, gradient, *_ = lax.fori_loop(0, steps, step, state)

        def end(_: Any, value: Any) -> Any:
            value = self.add_to(of_k, value, gradient, "q", self.slot(steps - 1, "q"))
            sums.wait(0)
            for x in ("q", "grad_out"):
                plgpu.barrier_arrive(refs[f"{x}_free"].at[self.slot(steps - 1, x)])
            return value

        value_k = lax.fori_loop(0, jnp.where(steps > 0, jnp.int32(1), jnp.int32(0)), end, value_k)
        return sums.value((of_k[0], value_k)), sums.value((of_v[0], value_v))
