"""The kernels of backward: one for the gradient of queries, tile by tile, and one for those of keys and values.

Both compute probabilities again, from products and lse, so neither waits for the other, and all sums have a fixed
order.  A tile of keys sums over the queries of all heads that share it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from onchip.attention.mosaic.problem import TILE
from onchip.attention.mosaic.products import ProductSums, Scores, Seen, rows_of, send, where_seen
from onchip.attention.mosaic.work import HALF, L2_BYTES, TileWork, each_item, heads_together, programs_of
from onchip.kernels.mosaic.launch import Refs, launch
from onchip.kernels.mosaic.product import swizzled
from onchip.kernels.mosaic.ptx import once_known, store_boxes
from onchip.kernels.mosaic.registers import Registers, fit

Array = jax.Array


@dataclass(frozen=True)
class BackwardConfig:
    """The sizes of a kernel of backward."""

    block: int
    """Tokens in a block that a tile meets."""
    stages: int = 2
    """How many blocks are in shared memory at a time."""
    value_stages: int | None = None
    """How many of values, if others."""
    tile: int = TILE
    """Tokens of a tile."""
    registers: tuple[int, int] = (240, 24)
    """Registers of a thread that multiplies, and of one that copies."""
    l2_bytes: int = L2_BYTES
    persistent: bool = True
    """Whether there are as many programs as multiprocessors; else each tile has one."""
    sent: int | None = None
    """Columns of a result that are in shared memory at a time; None: all; 0: all, in place of the tile's queries."""
    free_early: bool = False
    """Whether the product that adds a block to the keys' gradients is awaited, and the block of queries freed, before
    the next block's second product starts."""

    def __post_init__(self) -> None:
        multiplies, copies = self.registers
        assert fit((multiplies, multiplies, copies)), self

    def stages_of(self, name: str) -> int:
        return self.value_stages or self.stages if name == "v" else self.stages


BY_QUERY = {
    (64, 64): BackwardConfig(128),
    (128, 128): BackwardConfig(128),
    (192, 128): BackwardConfig(64, sent=64),
    (256, 256): BackwardConfig(64, value_stages=1, sent=0),
}
BY_KEY = {
    (64, 64): BackwardConfig(64, stages=3, persistent=False),
    (128, 128): BackwardConfig(64, stages=3, persistent=False, free_early=True),
    (192, 128): BackwardConfig(64, stages=3, tile=HALF, persistent=False, sent=64),
    (256, 256): BackwardConfig(64, tile=HALF, persistent=False, sent=64),
}
"""For heads of so many numbers, and values of so many."""


class GradientInputs(NamedTuple):
    """What both kernels read."""

    q: Array  # [B, Tq, Hq, D] or [B, Hq, Tq, D]
    k: Array  # likewise, Tk and Hk
    v: Array  # Dv
    grad_out: Array  # like q, Dv
    start: Array  # [B, Tq rounded up to whole tiles] int32
    end: Array
    stop: Array | None  # [B, Tk rounded up] int32
    numbers: Array  # [B, Hq, 2, Tq rounded up] float32: lse times log2(e), +inf where a query sees nothing; and
    # delta less the gradient of lse


class _Gradient:
    """What both kernels have in common."""

    name: str
    own: tuple[str, ...]
    """The inputs of a tile, and those of the blocks that it meets."""
    met: tuple[str, ...]

    def __init__(self, refs: Refs, config: BackwardConfig, layout: str, heads: tuple[int, int], scores: Scores,
                 interpret: Any) -> None:  # fmt: skip
        self.refs, self.c, self.layout, self.scores = refs, config, layout, scores
        self.group = heads[0] // heads[1]
        self.sums, self.registers = ProductSums(interpret), Registers(interpret)
        self.interpret = interpret
        self.warpgroup = lax.axis_index("warpgroup")
        self.size, self.value_size = refs["q"].shape[-1], refs["v"].shape[-1]

    @classmethod
    def launch(
        cls, given: GradientInputs, items: Array, outputs: dict[str, Any], *, layout: str, heads: tuple[int, int],
        scores: Scores, config: BackwardConfig, interpret: Any,
    ) -> dict[str, Array]:  # fmt: skip
        of_items = heads[0 if cls is ByQuery else 1]
        programs = len(items) * of_items
        if config.persistent:
            programs = programs_of(programs, interpret)
        read = 2 * (given.k if cls is ByQuery else given.q).nbytes
        together = heads_together(heads[1], read // heads[1], config.l2_bytes) * (of_items // heads[1])
        shared = cls.shared(config, given)

        def body(refs: Refs, *more: Any) -> None:
            kernel = cls({**refs, **dict(zip(shared, more, strict=True))}, config, layout, heads, scores, interpret)
            run = partial(each_item, refs, of_items, together, programs)
            lax.cond(lax.axis_index("warpgroup") == 2, lambda: kernel.copy(run), lambda: kernel.multiply(run))

        return launch(
            body, {**given._asdict(), "items": items}, outputs, [*shared.values()], grid={"program": programs},
            warpgroups=3, name=cls.name, interpret=interpret,
        )  # fmt: skip

    @classmethod
    def shared(cls, c: BackwardConfig, given: GradientInputs) -> dict[str, Any]:
        barrier, dtype = plgpu.Barrier, given.q.dtype
        of = {x: getattr(given, x).shape[-1] for x in (*cls.own, *cls.met)}
        made = {f"{x}_block": swizzled((c.tile, of[x]), dtype) for x in cls.own}
        made |= {f"{x}_block": swizzled((c.stages_of(x), c.block, of[x]), dtype) for x in cls.met}
        if c.sent != 0:
            made["staging"] = swizzled((2, HALF, c.sent or max(of.values())), dtype)
        made |= {
            "own_full": barrier(num_arrivals=2),
            "own_free": barrier(num_arrivals=2),
        }
        for x in cls.met:
            made[f"{x}_full"] = barrier(num_arrivals=cls.copies(x), num_barriers=c.stages_of(x))
            made[f"{x}_free"] = barrier(num_arrivals=2, num_barriers=c.stages_of(x))
        return made

    @staticmethod
    def copies(name: str) -> int:
        """How many copies come with a block of this input."""
        return 1

    def slot(self, number: Any, name: str = "") -> Any:
        return lax.rem(number, jnp.int32(self.c.stages_of(name)))

    def each_free(self, do: Callable[[Any], None]) -> None:
        do(self.refs["own_free"])
        for x in self.met:
            for slot in range(self.c.stages_of(x)):
                do(self.refs[f"{x}_free"].at[slot])

    def steps(self, item: TileWork) -> Any:
        return item.last - item.first

    def of_step(self, item: TileWork, i: Any) -> tuple[Any, Any]:
        """The block of a step, and its head."""
        raise NotImplementedError

    # ----------------------------------------------------------------------------------------- the copying warpgroup

    def copy(self, run: Any) -> None:
        plgpu.set_max_registers(self.c.registers[1], action="decrease")
        run(self.copy_tile, jnp.int32(0))
        self.each_free(plgpu.barrier_wait)  # until the last products have read theirs

    def copy_tile(self, item: TileWork, turn: Any, before: Any) -> Any:
        refs, c = self.refs, self.c

        def step(i: Any, _: None) -> None:
            block, head = self.of_step(item, i)
            for x in self.met:
                slot = self.slot(before + i, x)
                plgpu.barrier_wait(refs[f"{x}_free"].at[slot])
                source = rows_of(refs[x], self.layout, item.batch, block * c.block, c.block, head)
                plgpu.copy_gmem_to_smem(source, refs[f"{x}_block"].at[slot], refs[f"{x}_full"].at[slot])
                self.copy_beside(x, item, block * c.block, head, slot)

        steps = self.steps(item)
        # The tile's own are in use until all of the tile before is done.
        pl.when(steps > 0)(lambda: step(jnp.int32(0), None))
        plgpu.barrier_wait(refs["own_free"])
        for x in self.own:
            source = rows_of(refs[x], self.layout, item.batch, item.tile * c.tile, c.tile, item.head)
            plgpu.copy_gmem_to_smem(source, refs[f"{x}_block"], refs["own_full"])
        lax.fori_loop(1, steps, step, None)
        return before + steps

    def copy_beside(self, name: str, item: TileWork, first: Any, head: Any, slot: Any) -> None:
        """Copy what comes with a block of this input."""

    # ------------------------------------------------------------------------------------------- those that multiply

    def multiply(self, run: Any) -> None:
        plgpu.set_max_registers(self.c.registers[0], action="increase")
        self.each_free(plgpu.barrier_arrive)
        run(self.tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def tile(self, item: TileWork, turn: Any, before: Any) -> Any:
        raise NotImplementedError

    def mine(self, name: str) -> Any:
        """This warpgroup's half of an input of the tile."""
        return self.refs[f"{name}_block"].at[pl.ds(self.warpgroup * HALF, HALF)]

    def send(self, name: str, value: Any, item: TileWork, row: Any) -> None:
        into = rows_of(self.refs[name], self.layout, item.batch, row, HALF, item.head)
        staging = self.refs["staging"].at[self.warpgroup] if "staging" in self.refs else self.mine("q")
        send(value.astype(self.refs["q"].dtype), staging, into)

    def start(self, own: str, met: str, slot: Any) -> Any:
        """Start the product of inputs of the tile and of a block."""
        plgpu.barrier_wait(self.refs[f"{met}_full"].at[slot])
        return self.sums.start(self.mine(own), self.refs[f"{met}_block"].at[slot])

    def add(self, total: Any, value: Any, x: Any, met: str, slot: Any) -> Any:
        """The sum's value after x @ a block is added; on a GPU it still runs, and is `total`."""
        return self.sums.add((total[0], value), x, self.sums.block(self.refs[f"{met}_block"].at[slot]))[1]


class ByQuery(_Gradient):
    """The gradient of queries: tiles of queries with blocks of keys."""

    name = "attention_queries_gradient"
    own, met = ("q", "grad_out"), ("k", "v")

    def of_step(self, item: TileWork, i: Any) -> tuple[Any, Any]:
        return item.first + i, lax.div(item.head, jnp.int32(self.group))

    def tile(self, item: TileWork, turn: Any, before: Any) -> Any:
        refs, c, sums, registers, shape = self.refs, self.c, self.sums, self.registers, (HALF, self.c.block)
        row, seen = item.tile * TILE + self.warpgroup * HALF, Seen(registers, refs, item.batch)
        over = pl.ds(row, HALF)
        limits = [registers.load(refs[x].at[item.batch, over], 1) for x in ("start", "end")]
        log_sum, delta = (registers.load(refs["numbers"].at[item.batch, item.head, i, over], 1) for i in range(2))
        plgpu.barrier_wait(refs["own_full"])

        def run(total: Any) -> Any:
            def step(i: Any, value: Any) -> Any:
                slot, v_slot, column = self.slot(before + i), self.slot(before + i, "v"), (item.first + i) * c.block
                edge = (column < item.full_first) | (column + c.block > item.full_last)

                s, d = self.start("q", "k", slot), self.start("grad_out", "v", v_slot)
                x, slope = self.scores.of(sums.known(s, running=1))
                p = jnp.exp2(x * self.scores.factor - registers.spread(log_sum, shape, 1))
                p = seen.hide(edge, p, row, column, limits, 0.0)
                ds = p * (sums.known(d) - registers.spread(delta, shape, 1))
                ds = ds if slope is None else ds * slope
                plgpu.barrier_arrive(refs["v_free"].at[v_slot])
                if c.sent != 0:
                    pl.when(i == self.steps(item) - 1)(lambda: plgpu.barrier_arrive(refs["own_free"]))
                value = self.add(total, value, ds.astype(refs["q"].dtype), "k", slot)
                sums.wait(0)
                plgpu.barrier_arrive(refs["k_free"].at[slot])
                return value

            value = lax.fori_loop(0, self.steps(item), step, total[1])
            return sums.value((total[0], value))

        made = sums.begin(run, (HALF, self.size))
        # The upstream gradient of a query that sees nothing may be anything.
        sees = (limits[0] < limits[1]) & (log_sum < jnp.inf)
        factor = registers.spread(jnp.where(sees, jnp.float32(self.scores.scale), 0.0), made.shape, 1)
        self.send("grad_q", jnp.where(factor == 0, 0.0, made * factor), item, row)
        if c.sent == 0:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(refs["own_free"])
        return before + self.steps(item)


class ByKey(_Gradient):
    """The gradients of keys and values: tiles of keys with blocks of queries, of all heads that share the keys."""

    name = "attention_keys_gradient"
    own, met = ("k", "v"), ("q", "grad_out")

    @classmethod
    def shared(cls, c: BackwardConfig, given: GradientInputs) -> dict[str, Any]:
        beside = {
            "numbers_block": plgpu.SMEM((c.stages, 2, c.block), jnp.float32),
            "start_block": plgpu.SMEM((c.stages, c.block), jnp.int32),
            "end_block": plgpu.SMEM((c.stages, c.block), jnp.int32),
        }
        return super().shared(c, given) | beside

    @staticmethod
    def copies(name: str) -> int:
        return 4 if name == "q" else 1

    def steps(self, item: TileWork) -> Any:
        return (item.last - item.first) * self.group

    def of_step(self, item: TileWork, i: Any) -> tuple[Any, Any]:
        blocks = item.last - item.first
        head = lax.div(i, lax.max(blocks, jnp.int32(1)))
        return item.first + i - head * blocks, item.head * self.group + head

    def copy_beside(self, name: str, item: TileWork, first: Any, head: Any, slot: Any) -> None:
        if name != "q":
            return
        refs, over, barrier = self.refs, pl.ds(first, self.c.block), self.refs["q_full"].at[slot]
        plgpu.copy_gmem_to_smem(refs["numbers"].at[item.batch, head, :, over], refs["numbers_block"].at[slot], barrier)
        for x in ("start", "end"):
            plgpu.copy_gmem_to_smem(refs[x].at[item.batch, over], refs[f"{x}_block"].at[slot], barrier)

    def tile(self, item: TileWork, turn: Any, before: Any) -> Any:
        plgpu.barrier_wait(self.refs["own_full"])
        row = item.tile * TILE + self.warpgroup * HALF
        run = partial(self.walk, item, before, row)
        of_k, of_v = self.sums.begin(run, (HALF, self.size), (HALF, self.value_size))
        plgpu.barrier_arrive(self.refs["own_free"])
        self.send("grad_k", of_k * self.scores.scale, item, row)
        self.send("grad_v", of_v, item, row)
        return before + self.steps(item)

    def walk(self, item: TileWork, before: Any, row: Any, of_k: Any, of_v: Any) -> tuple[Any, Any]:
        """Both sums.  What a block adds to the keys' is multiplied beside the next block's scores."""
        refs, c, sums, registers, shape = self.refs, self.c, self.sums, self.registers, (HALF, self.c.block)
        seen, dtype, steps = Seen(registers, refs, item.batch), refs["q"].dtype, self.steps(item)

        def step(i: Any, state: Any) -> Any:
            value_k, value_v, gradient, block = state
            slot, column = self.slot(before + i), block * c.block
            last = self.slot(before + lax.max(i - 1, jnp.int32(0)))
            edge = (column < item.full_first) | (column + c.block > item.full_last)

            def number(which: int) -> Any:
                return registers.spread(registers.load_columns(refs["numbers_block"].at[slot, which]), shape, 0)

            def inside() -> Any:
                limits = [registers.load_columns(refs[f"{x}_block"].at[slot]) for x in ("start", "end")]
                return seen.by_key(shape, row, column, limits)

            def free(name: str) -> None:
                pl.when(i > 0)(lambda: plgpu.barrier_arrive(refs[f"{name}_free"].at[last]))

            s = self.start("k", "q", slot)
            value_k = self.add(of_k, value_k, gradient, "q", last)  # zeros in the first step
            x, slope = self.scores.of(sums.known(s, running=1))
            free("grad_out")
            p = where_seen(edge, inside, jnp.exp2(x * self.scores.factor - number(0)), 0.0)
            if c.free_early:
                once_known(p, self.interpret)
                sums.wait(0)
                free("q")
            d = self.start("v", "grad_out", slot)
            value_v = self.add(of_v, value_v, p.astype(dtype), "grad_out", slot)
            d = sums.known(d, running=1)
            if not c.free_early:
                free("q")
            ds = p * (d - number(1))
            block = block + 1
            block = jnp.where(block == item.last, item.first, block)  # the next head's first
            return value_k, value_v, (ds if slope is None else ds * slope).astype(dtype), block

        state = of_k[1], of_v[1], registers.zeros(shape).astype(dtype), item.first
        value_k, value_v, gradient, _ = lax.fori_loop(0, steps, step, state)
        last = self.slot(before + steps - 1)

        def end(_: Any, value: Any) -> Any:
            value = self.add(of_k, value, gradient, "q", last)
            sums.wait(0)
            for x in self.met:
                plgpu.barrier_arrive(refs[f"{x}_free"].at[last])
            return value

        value_k = lax.fori_loop(0, jnp.where(steps > 0, jnp.int32(1), jnp.int32(0)), end, value_k)
        return sums.value((of_k[0], value_k)), sums.value((of_v[0], value_v))


class PairedByKey(ByKey):
    """The same with heads whose sums are too large for one warpgroup: both have the same 64 keys, one sums for values,
    the other for keys.  The first passes probabilities on, times the cap's derivative and rounded."""

    @classmethod
    def shared(cls, c: BackwardConfig, given: GradientInputs) -> dict[str, Any]:
        barrier = plgpu.Barrier
        passed = {
            "p_block": swizzled((c.stages - 1, 1, c.tile, c.block), given.q.dtype),
            "p_full": barrier(num_arrivals=1, num_barriers=c.stages - 1),
            "p_free": barrier(num_arrivals=1, num_barriers=c.stages - 1),
        }
        return super().shared(c, given) | passed

    def mine(self, name: str) -> Any:
        return self.refs[f"{name}_block"]

    def multiply(self, run: Any) -> None:
        def each_passed(do: Callable[[Any], None]) -> None:
            for slot in range(self.c.stages - 1):
                do(self.refs["p_free"].at[slot])

        pl.when(self.warpgroup == 1)(lambda: each_passed(plgpu.barrier_arrive))
        super().multiply(run)
        pl.when(self.warpgroup == 0)(lambda: each_passed(plgpu.barrier_wait))

    def tile(self, item: TileWork, turn: Any, before: Any) -> Any:
        plgpu.barrier_wait(self.refs["own_full"])
        lax.cond(self.warpgroup == 0, lambda: self.send_values(item, before), lambda: self.send_keys(item, before))
        return before + self.steps(item)

    def summed(self, item: TileWork, before: Any, total: Any, step: Callable[..., Any], met: str) -> Any:
        """A sum over blocks.  step(i, slot, block, add, added) returns the sum's value and the factor of the block's
        `met`.  It calls add(), which adds the block before beside this block's product, and added(x) before it rounds
        the factor x, for whose registers that product must be done."""
        refs, factor = self.refs, self.registers.zeros((self.c.tile, self.c.block)).astype(self.refs["q"].dtype)

        def one(i: Any, state: Any) -> Any:
            value, factor, block = state
            last = self.slot(before + lax.max(i - 1, jnp.int32(0)))

            def add() -> Any:
                return self.add(total, value, factor, met, last)  # zeros in the first step

            def added(x: Any) -> None:
                """Wait until it is added, but first compute x."""
                once_known(x, self.interpret)
                self.sums.wait(0)
                pl.when(i > 0)(lambda: plgpu.barrier_arrive(refs[f"{met}_free"].at[last]))

            plgpu.barrier_wait(refs[f"{met}_full"].at[self.slot(before + i)])
            value, factor = step(i, self.slot(before + i), block, add, added)
            block = block + 1
            return value, factor, jnp.where(block == item.last, item.first, block)  # the next head's first

        steps = self.steps(item)
        value, factor, _ = lax.fori_loop(0, steps, one, (total[1], factor, item.first))
        last = self.slot(before + steps - 1)

        def end(_: Any, value: Any) -> Any:
            value = self.add(total, value, factor, met, last)
            self.sums.wait(0)
            plgpu.barrier_arrive(refs[f"{met}_free"].at[last])
            return value

        value = lax.fori_loop(0, jnp.where(steps > 0, jnp.int32(1), jnp.int32(0)), end, value)
        return self.sums.value((total[0], value))

    def number(self, slot: Any, which: int) -> Any:
        numbers = self.registers.load_columns(self.refs["numbers_block"].at[slot, which])
        return self.registers.spread(numbers, (self.c.tile, self.c.block), 0)

    def send_values(self, item: TileWork, before: Any) -> None:
        refs, c, sums, shape = self.refs, self.c, self.sums, (self.c.tile, self.c.block)
        seen, row, dtype = Seen(self.registers, refs, item.batch), item.tile * c.tile, refs["q"].dtype

        def run(total: Any) -> Any:
            def step(i: Any, slot: Any, block: Any, add: Any, added: Any) -> Any:
                column = block * c.block
                edge = (column < item.full_first) | (column + c.block > item.full_last)

                def inside() -> Any:
                    limits = [self.registers.load_columns(refs[f"{x}_block"].at[slot]) for x in ("start", "end")]
                    return seen.by_key(shape, row, column, limits)

                s = self.start("k", "q", slot)
                value = add()
                x, slope = self.scores.of(sums.known(s, running=1))
                p = where_seen(edge, inside, jnp.exp2(x * self.scores.factor - self.number(slot, 0)), 0.0)
                plgpu.barrier_arrive(refs["q_free"].at[slot])
                at = lax.rem(before + i, jnp.int32(c.stages - 1))
                plgpu.barrier_wait(refs["p_free"].at[at])
                added(p)
                factor = p.astype(dtype)
                passed = factor if slope is None else (p * slope).astype(dtype)
                store_boxes(refs["p_block"].at[at], [passed], self.interpret)
                plgpu.barrier_arrive(refs["p_full"].at[at])
                return value, factor

            return self.summed(item, before, total, step, "grad_out")

        made = sums.begin(run, (c.tile, self.value_size))
        plgpu.barrier_arrive(refs["own_free"])
        self.send("grad_v", made, item, row)

    def send_keys(self, item: TileWork, before: Any) -> None:
        refs, c, sums = self.refs, self.c, self.sums

        def run(total: Any) -> Any:
            def step(i: Any, slot: Any, block: Any, add: Any, added: Any) -> Any:
                d = self.start("v", "grad_out", slot)
                value = add()
                at = lax.rem(before + i, jnp.int32(c.stages - 1))
                plgpu.barrier_wait(refs["p_full"].at[at])
                p = self.registers.load_box(refs["p_block"].at[at, 0]).astype(jnp.float32)
                plgpu.barrier_arrive(refs["p_free"].at[at])
                ds = p * (sums.known(d, running=1) - self.number(slot, 1))
                plgpu.barrier_arrive(refs["grad_out_free"].at[slot])
                added(ds)
                return value, ds.astype(refs["q"].dtype)

            return self.summed(item, before, total, step, "q")

        made = sums.begin(run, (c.tile, self.size))
        plgpu.barrier_arrive(refs["own_free"])
        self.send("grad_k", made * self.scores.scale, item, item.tile * c.tile)


def by_query(
    given: GradientInputs, items: Array, *, config: BackwardConfig, interpret: Any = None, **how: Any
) -> Array:
    """q's gradient; `items` come from `query_items`."""
    outputs = {"grad_q": jax.ShapeDtypeStruct(given.q.shape, given.q.dtype)}
    return ByQuery.launch(given, items, outputs, config=config, interpret=interpret, **how)["grad_q"]


def by_key(
    given: GradientInputs, items: Array, *, config: BackwardConfig, interpret: Any = None, **how: Any
) -> tuple[Array, Array]:
    """k's and v's gradients; `items` come from `key_items`."""
    outputs = {f"grad_{x}": jax.ShapeDtypeStruct(getattr(given, x).shape, given.k.dtype) for x in "kv"}
    kernel = ByKey if config.tile == TILE else PairedByKey
    made = kernel.launch(given, items, outputs, config=config, interpret=interpret, **how)
    return made["grad_k"], made["grad_v"]
