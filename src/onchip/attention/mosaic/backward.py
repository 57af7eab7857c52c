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

from onchip.attention.mosaic.products import ProductSums, Scores, Seen, rows_of, where_seen
from onchip.attention.mosaic.work import HALF, L2_BYTES, TILE, TileWork, each_item, heads_together, programs_of
from onchip.kernels.mosaic.launch import Refs, launch
from onchip.kernels.mosaic.product import swizzled
from onchip.kernels.mosaic.registers import Registers

Array = jax.Array


@dataclass(frozen=True)
class BackwardConfig:
    """The sizes of a kernel of backward."""

    block: int
    """Tokens in a block that a tile meets."""
    stages: int = 2
    """How many blocks are in shared memory at a time."""
    registers: tuple[int, int] = (240, 24)
    """Registers of a thread that multiplies, and of one that copies."""
    l2_bytes: int = L2_BYTES
    persistent: bool = True
    """Whether there are as many programs as multiprocessors; else each tile has one."""


BY_QUERY, BY_KEY = BackwardConfig(128), BackwardConfig(64, persistent=False)


class GradientInputs(NamedTuple):
    """What both kernels read."""

    q: Array  # [B, Tq, Hq, D] or [B, Hq, Tq, D]
    k: Array  # likewise, Tk and Hk
    v: Array
    grad_out: Array  # like q
    start: Array  # [B, Tq rounded up to 128] int32
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
        self.warpgroup = lax.axis_index("warpgroup")
        self.size = refs["q"].shape[-1]

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
        shared = cls.shared(config, given.q.shape[-1], given.q.dtype)

        def body(refs: Refs, *more: Any) -> None:
            kernel = cls({**refs, **dict(zip(shared, more, strict=True))}, config, layout, heads, scores, interpret)
            run = partial(each_item, refs, of_items, together, programs)
            lax.cond(lax.axis_index("warpgroup") == 2, lambda: kernel.copy(run), lambda: kernel.multiply(run))

        return launch(
            body, {**given._asdict(), "items": items}, outputs, [*shared.values()], grid={"program": programs},
            warpgroups=3, name=cls.name, interpret=interpret,
        )  # fmt: skip

    @classmethod
    def shared(cls, c: BackwardConfig, size: int, dtype: Any) -> dict[str, Any]:
        barrier = plgpu.Barrier
        made = {f"{x}_block": swizzled((TILE, size), dtype) for x in cls.own}
        made |= {f"{x}_block": swizzled((c.stages, c.block, size), dtype) for x in cls.met}
        made |= {
            "staging": swizzled((2, HALF, size), dtype),
            "own_full": barrier(num_arrivals=2),
            "own_free": barrier(num_arrivals=2),
        }
        for x in cls.met:
            made[f"{x}_full"] = barrier(num_arrivals=cls.copies(x), num_barriers=c.stages)
            made[f"{x}_free"] = barrier(num_arrivals=2, num_barriers=c.stages)
        return made

    @staticmethod
    def copies(name: str) -> int:
        """How many copies come with a block of this input."""
        return 1

    def slot(self, number: Any) -> Any:
        return lax.rem(number, jnp.int32(self.c.stages))

    def each_free(self, do: Callable[[Any], None]) -> None:
        do(self.refs["own_free"])
        for x in self.met:
            for slot in range(self.c.stages):
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
            slot, (block, head) = self.slot(before + i), self.of_step(item, i)
            for x in self.met:
                plgpu.barrier_wait(refs[f"{x}_free"].at[slot])
                source = rows_of(refs[x], self.layout, item.batch, block * c.block, c.block, head)
                plgpu.copy_gmem_to_smem(source, refs[f"{x}_block"].at[slot], refs[f"{x}_full"].at[slot])
                self.copy_beside(x, item, block * c.block, head, slot)

        steps = self.steps(item)
        # The tile's own are in use until all of the tile before is done.
        pl.when(steps > 0)(lambda: step(jnp.int32(0), None))
        plgpu.barrier_wait(refs["own_free"])
        for x in self.own:
            source = rows_of(refs[x], self.layout, item.batch, item.tile * TILE, TILE, item.head)
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
        block = self.refs["staging"].at[self.warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        block[...] = value.astype(self.refs["q"].dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(block, rows_of(self.refs[name], self.layout, item.batch, row, HALF, item.head))

    def of_scores(
        self, slot: Any, s: Any, d: Any, pairs: tuple[tuple[str, str], tuple[str, str]],
        log_sum: Callable[[], Any], delta: Callable[[], Any], masked: Callable[[Any], Any],
        start: Callable[[Any], Any] | None = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        """For a block: what `start` returns for the probabilities, which starts a product while the second one of
        these runs; and the gradient of the products, without the scale."""
        sums, refs = self.sums, self.refs

        def product(total: Any, own: str, met: str) -> Any:
            plgpu.barrier_wait(refs[f"{met}_full"].at[slot])
            return sums.add(total, self.mine(own), sums.block(refs[f"{met}_block"].at[slot]).T)

        s, d = (product(total, *pair) for total, pair in zip((s, d), pairs, strict=True))
        x, slope = self.scores.of(sums.value(s, running=1))
        p = masked(jnp.exp2(x * self.scores.factor - log_sum()))
        started = None if start is None else start(p)
        y = sums.value(d, running=0 if start is None else 1)
        of_product = p * (y - delta())
        return started, of_product if slope is None else of_product * slope


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
                slot, column = self.slot(before + i), (item.first + i) * c.block
                edge = (column < item.full_first) | (column + c.block > item.full_last)

                def masked(p: Any) -> Any:
                    return where_seen(edge, lambda: seen.by_query(shape, row, column, limits), p, 0.0)

                def of_block(s: Any, d: Any) -> Any:
                    _, made = self.of_scores(
                        slot, s, d, (("q", "k"), ("grad_out", "v")), lambda: registers.spread(log_sum, shape, 1),
                        lambda: registers.spread(delta, shape, 1), masked,
                    )  # fmt: skip
                    plgpu.barrier_arrive(refs["v_free"].at[slot])
                    return made

                ds = sums.begin(of_block, shape, shape).astype(refs["q"].dtype)
                _, value = sums.add((total[0], value), ds, sums.block(refs["k_block"].at[slot]))
                sums.wait(0)
                plgpu.barrier_arrive(refs["k_free"].at[slot])
                return value

            value = lax.fori_loop(0, self.steps(item), step, total[1])
            return sums.value((total[0], value))

        made = sums.begin(run, (HALF, self.size))
        plgpu.barrier_arrive(refs["own_free"])
        # The upstream gradient of a query that sees nothing may be anything.
        sees = (limits[0] < limits[1]) & (log_sum < jnp.inf)
        factor = registers.spread(jnp.where(sees, jnp.float32(self.scores.scale), 0.0), made.shape, 1)
        self.send("grad_q", jnp.where(factor == 0, 0.0, made * factor), item, row)
        return before + self.steps(item)


class ByKey(_Gradient):
    """The gradients of keys and values: tiles of keys with blocks of queries, of all heads that share the keys."""

    name = "attention_keys_gradient"
    own, met = ("k", "v"), ("q", "grad_out")

    @classmethod
    def shared(cls, c: BackwardConfig, size: int, dtype: Any) -> dict[str, Any]:
        beside = {
            "numbers_block": plgpu.SMEM((c.stages, 2, c.block), jnp.float32),
            "start_block": plgpu.SMEM((c.stages, c.block), jnp.int32),
            "end_block": plgpu.SMEM((c.stages, c.block), jnp.int32),
        }
        return super().shared(c, size, dtype) | beside

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
        refs, c, sums, registers, shape = self.refs, self.c, self.sums, self.registers, (HALF, self.c.block)
        row, seen, dtype = item.tile * TILE + self.warpgroup * HALF, Seen(registers, refs, item.batch), refs["q"].dtype
        plgpu.barrier_wait(refs["own_full"])

        def run(of_k: Any, of_v: Any) -> Any:
            def step(i: Any, values: Any) -> Any:
                slot, column = self.slot(before + i), self.of_step(item, i)[0] * c.block
                edge = (column < item.full_first) | (column + c.block > item.full_last)

                def number(which: int) -> Any:
                    x = registers.load_columns(refs["numbers_block"].at[slot, which])
                    return registers.spread(x, shape, 0)

                def masked(p: Any) -> Any:
                    def inside() -> Any:
                        limits = [registers.load_columns(refs[f"{x}_block"].at[slot]) for x in ("start", "end")]
                        return seen.by_key(shape, row, column, limits)

                    return where_seen(edge, inside, p, 0.0)

                def start(p: Any) -> Any:
                    block = sums.block(refs["grad_out_block"].at[slot])
                    return sums.add((of_v[0], values[1]), p.astype(dtype), block)[1]

                def of_block(s: Any, d: Any) -> Any:
                    pairs = ("k", "q"), ("v", "grad_out")
                    return self.of_scores(slot, s, d, pairs, lambda: number(0), lambda: number(1), masked, start)

                of_v_now, ds = sums.begin(of_block, shape, shape)
                _, of_k_now = sums.add((of_k[0], values[0]), ds.astype(dtype), sums.block(refs["q_block"].at[slot]))
                sums.wait(1)
                plgpu.barrier_arrive(refs["grad_out_free"].at[slot])
                sums.wait(0)
                plgpu.barrier_arrive(refs["q_free"].at[slot])
                return of_k_now, of_v_now

            values = lax.fori_loop(0, self.steps(item), step, (of_k[1], of_v[1]))
            return sums.value((of_k[0], values[0])), sums.value((of_v[0], values[1]))

        of_k, of_v = sums.begin(run, (HALF, self.size), (HALF, self.size))
        plgpu.barrier_arrive(refs["own_free"])
        self.send("grad_k", of_k * self.scores.scale, item, row)
        self.send("grad_v", of_v, item, row)
        return before + self.steps(item)


def by_query(
    given: GradientInputs, items: Array, *, config: BackwardConfig = BY_QUERY, interpret: Any = None, **how: Any
) -> Array:
    """q's gradient; `items` come from `query_items`."""
    outputs = {"grad_q": jax.ShapeDtypeStruct(given.q.shape, given.q.dtype)}
    return ByQuery.launch(given, items, outputs, config=config, interpret=interpret, **how)["grad_q"]


def by_key(
    given: GradientInputs, items: Array, *, config: BackwardConfig = BY_KEY, interpret: Any = None, **how: Any
) -> tuple[Array, Array]:
    """k's and v's gradients; `items` come from `key_items`."""
    outputs = {f"grad_{x}": jax.ShapeDtypeStruct(given.k.shape, given.k.dtype) for x in "kv"}
    made = ByKey.launch(given, items, outputs, config=config, interpret=interpret, **how)
    return made["grad_k"], made["grad_v"]
