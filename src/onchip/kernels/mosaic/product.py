"""A persistent matrix product for Hopper in Pallas Mosaic GPU, on which ops' kernels are built.

A block has three warpgroups.  The last one copies operand blocks from device to shared memory (TMA), `stages` steps
ahead and across tiles; the other two multiply them (WGMMA), each for its part of the tile, and hand the float32
accumulator to an epilogue.  Which blocks, and what happens to the accumulator, are arguments: one function that issues
the copies of each step, and one epilogue.  A third, `Promotion`, is for products whose steps are scaled.

Tiles are numbered so that up to `group` rows of tiles are walked column by column: L2 serves the operands of those that
run at a time, as in Triton's matrix multiplication tutorial.  The roles and their barriers are those of JAX's
hopper_matmul_mgpu example; here the pipeline is not drained between tiles, so copies for the next tile run during an
epilogue.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from onchip.frontend.jax_call import vary_alike
from onchip.kernels.mosaic.launch import Refs, launch, multiprocessors
from onchip.kernels.mosaic.order import Item, Work
from onchip.kernels.mosaic.registers import Registers
from onchip.kernels.mosaic.tile_numbers import Broadcast, Counter

SHARED_BYTES = 232448
"""Shared memory that one block of an H100 may have."""
BOX = 64
"""Rows and columns of the blocks in which exponentials are kept.  Results leave in blocks of 64 rows and 128 bytes."""
_MATH, _ALL = 2, 3  # warpgroups that multiply; all of them


@dataclass(frozen=True)
class MosaicConfig:
    """How a product is cut: a tile [tile_m, tile_n] of the result per block, in steps of tile_k."""

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    stages: int = 4
    """Steps whose operands are in shared memory at a time."""
    group: int = 8
    """Rows of tiles that are walked together, at most."""
    split: Literal["m", "n"] = "m"
    """Which side of the tile the two warpgroups share out."""
    in_flight: int = 1
    """Products that a warpgroup leaves running when it starts the next one."""
    staging_slots: int = 2
    """Blocks of results, [BOX, 128 bytes], that a warpgroup sends off together."""

    @staticmethod
    def from_numbers(numbers: Mapping[str, int]) -> "MosaicConfig":
        """The config that is stored as these numbers; `split_n` is 1 for split "n"."""
        rest = {name: value for name, value in numbers.items() if name != "split_n"}
        return MosaicConfig(**rest, split="n" if numbers["split_n"] else "m")

    @property
    def part_m(self) -> int:
        return self.tile_m // 2 if self.split == "m" else self.tile_m

    @property
    def part_n(self) -> int:
        return self.tile_n // 2 if self.split == "n" else self.tile_n

    def parts(self, n: int) -> int:
        """Parts of tiles along a side of n."""
        return -(-n // self.tile_n) * (self.tile_n // self.part_n)

    def shared_bytes(self, stores: bool, operand_bytes: int = 2, brought: int = 0) -> int:
        """Shared memory for operands of so many bytes, for `brought` float32 numbers of each step beside them, and for
        results on their way out."""
        step = operand_bytes * self.tile_k * (self.tile_m + self.tile_n) + 4 * brought
        return self.stages * step + (_MATH * self.staging_slots * BOX * 128 if stores else 0)


class Step(NamedTuple):
    """What a copy is for: row and column of tiles, the step, and what `look_up` found."""

    i: Any
    j: Any
    k: Any
    found: Any


class Part(NamedTuple):
    """What an epilogue is for: row and column of tiles, and of the first element of the warpgroup's part."""

    i: Any
    j: Any
    m: Any
    n: Any
    warpgroup: Any
    step: Any
    """The first that was summed: not 0 in the second half of a tile."""
    found: Any
    """What `look_up` found for the tile."""


@dataclass(frozen=True)
class Promotion:
    """Sums of two levels: a step's product is summed from zero, and then enters the result, which `enter` makes.

    A warpgroup makes its part in waves of [BOX, wave_n], each with an accumulator of its own: of those, `in_flight` + 1
    of the config take registers beside the whole result.
    """

    brought: tuple[int, ...]
    """Lengths of the float32 vectors that `copies` brings beside a step's operands."""
    load: Callable[[Sequence[Any], Any, Any], Any]
    """Of these vectors in shared memory, what enters with the wave at (m, n) of the tile."""
    enter: Callable[[Any, Any, Any], Any]
    """The result [BOX, wave_n] so far, the step's product, and what was loaded; returns the result."""
    wave_n: int = 128


@dataclass(frozen=True)
class Addends:
    """What a tile's product is added to: it comes to shared memory as the operands do, in one more step for each
    warpgroup.  Loads by the warpgroups themselves would wait for device memory."""

    copies: Callable[[Refs, Step, int, Any, Any, Any], None]
    """As `copies` of `persistent_product`, and as many of them; the third is the warpgroup that they are for."""
    add: Callable[[Refs, Any, Any, Any], Any]
    """Of the references, the product, and the shared memory of the left and of the right operand, what the epilogue is
    given."""


@dataclass(frozen=True)
class LookUp:
    """What is read from device memory for each tile.  The copying warpgroup does so, and tells the others."""

    found: Any
    """The class of what is found: a NamedTuple of int32."""
    of: Callable[[Refs, Any, Any], tuple[Any, Any]]
    """Of the references and a tile's row and column, its number of steps, 0 too, and what copies and the epilogue then
    have as `found`."""


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for blocks with rows of a multiple of 128 bytes, laid out as WGMMA and TMA want it."""
    columns = 128 // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def load_block(source: Any, row: Any, rows: int, column: Any, columns: int, into: Any, barrier: Any) -> None:
    plgpu.copy_gmem_to_smem(source.at[pl.ds(row, rows), pl.ds(column, columns)], into, barrier)


def send_to(
    target: Any, row: Any, column: Any, columns: int, reduction: Literal["add"] | None = None
) -> Callable[[Any, int, int], None]:
    """What copies blocks of a part that begins at (row, column) of target, or adds them to what is there."""

    def send(block: Any, m: int, n: int) -> None:
        into = target.at[pl.ds(row + m, BOX), pl.ds(column + n, columns)]
        plgpu.copy_smem_to_gmem(block, into, commit_group=False, reduction_op=reduction)

    return send


def persistent_product(
    config: MosaicConfig,
    dtype: Any | tuple[Any, Any],
    left: Literal["mk", "km", "km boxes", "mk boxes"],
    right: Literal["kn", "nk"],
    tiles: Callable[[Refs], tuple[Any, Any, Any]],
    copies: Callable[..., None],
    epilogue: Callable[[Refs, Part, Any, Any], None],
    *,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    stored: Any = None,
    right_copies: int = 1,
    halves: bool = False,
    look_up: LookUp | None = None,
    counter: bool = False,
    in_pairs: Callable[[Any], Any] | None = None,
    clean: tuple[Callable[[Refs, Step], Any], Callable[[Refs, Step, Any, Any, Any], None]] | None = None,
    scratch: Mapping[str, tuple[tuple[int, ...], Any]] | None = None,
    barriers: Mapping[str, int] | None = None,
    promotion: Promotion | None = None,
    addends: Addends | None = None,
    name: str,
    interpret: Any = None,
) -> dict[str, Any]:
    """Launch a kernel over `inputs` and `outputs` as `launch` does.

    dtype: of the operands, or of each.
    left, right: how the operands lie in shared memory, by the names of rows and columns; 'boxes': as tile_m / BOX
        matrices with BOX rows and columns each.
    tiles: of the references, the numbers of rows and of columns of tiles and of steps; each at least 1.
    copies: called with (references, step, shared memory of the left operand, of the right one, barrier), and that of
        the vectors of `promotion`; it issues one copy for each of them, or for each box, and `right_copies` of the
        right operand.
    epilogue: called by each of the two warpgroups with (references, its part, its accumulator [part_m, part_n] float32,
        `store`); store(strip, send) calls send(staging, m, n) for blocks [BOX, 128 bytes] at (m, n) of a value.
        strip(n, width) gives its columns [n, n + width), or, if the value has BOX rows, a list of their blocks; it is
        called in order, while earlier strips are on their way.  A value with other columns than the accumulator says
        how many in a third argument.
    stored: dtype of what `store` is given; None if there is nothing to store, and then no `store`.
    halves: cut the tiles of the last wave into two halves of the steps where that fills the device better.
    look_up: where tiles differ.
    counter: each program takes its next tile from a counter; with `look_up` only.  Otherwise it has a list: where all
        tiles take as long, programs then go through memory together.
    in_pairs: of what was looked up, whether a tile's steps are copied two at a time.
    clean: whether a step's operands have to be cleaned before they are multiplied, of the references and the step; and
        what does a warpgroup's share of that, of these, the operands in shared memory and the warpgroup.
    scratch: shapes and dtypes of shared memory for the epilogue, which finds it among the references.
    barriers: numbers of barriers for copies that the epilogue issues, which it finds there too.
    promotion: how a step's product enters the result, where it isn't just added.  The operands are "mk" and "nk" then,
        and the epilogue is called for each wave, with the wave's place and its result.
    addends: what a tile's product is added to before the epilogue, which is given the sum.
    """
    c = config
    stores = stored is not None
    boxes = left.endswith("boxes")
    shape_a: tuple[int, ...]
    if boxes:
        shape_a = (c.tile_m // BOX, BOX, BOX)
        assert (c.part_m, c.tile_k) == (BOX, BOX), "boxes are for one warpgroup each"
    else:
        shape_a = (c.tile_m, c.tile_k) if left == "mk" else (c.tile_k, c.tile_m)
    shape_b = (c.tile_k, c.tile_n) if right == "kn" else (c.tile_n, c.tile_k)
    assert all(x % 64 == 0 for x in (c.part_m, c.part_n, c.tile_k))
    assert c.in_flight < c.stages
    dtype_a, dtype_b = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    brought = () if promotion is None else promotion.brought
    assert promotion is None or (left, right) == ("mk", "nk")
    assert not (halves and look_up)
    assert look_up or not counter
    assert addends is None or not (halves or promotion)
    assert clean is None or promotion is None
    own = dict(scratch or {})
    needed = c.shared_bytes(stores, jnp.dtype(dtype_a).itemsize, sum(brought))
    needed += sum(math.prod(shape) * jnp.dtype(of).itemsize for shape, of in own.values())
    if needed > SHARED_BYTES:
        raise ValueError(f"{name}: {c} needs {needed} bytes of shared memory, of which a block has {SHARED_BYTES}")
    columns = 128 // jnp.dtype(stored).itemsize if stores else 0
    copies_per_step = (shape_a[0] if boxes else 1) + right_copies + len(brought)
    programs = multiprocessors() if interpret is None else 2
    counted = counter and interpret is None  # the interpreter has no such operation

    def body(refs: Refs, a_smem: Any, b_smem: Any, full: Any, free: Any, *more: Any) -> None:
        refs = {**refs, **dict(zip(shared, more, strict=True))}
        vectors = [refs[f"brought {i}"] for i in range(len(brought))]
        warpgroup = lax.axis_index("warpgroup")
        program = lax.axis_index("multiprocessor")
        tiles_m, tiles_n, all_steps = (jnp.asarray(x, jnp.int32) for x in tiles(refs))
        # Numbers of tiles are divided by before it is known whether there are any.
        work = Work(
            lax.max(tiles_m, jnp.int32(1)), lax.max(tiles_n, jnp.int32(1)), all_steps, programs, c.group, halves
        )
        items = jnp.where((tiles_m > 0) & (tiles_n > 0), work.items, 0)
        shared_counter = Counter(*(refs[x] for x in ("counter", *Counter.shared()))) if counted else None
        broadcast = Broadcast(refs["said"], refs["told"], refs["heard"], interpret) if look_up else None

        def slot_of(number: Any) -> Any:
            return lax.rem(number, jnp.int32(c.stages))

        def find(x: Any, number: Any = None) -> tuple[Any, Item]:
            """The x-th tile of this program, of this number if it is known; numbers from `items` on are no tiles."""
            if number is None:
                # As many are taken as there are tiles: one after each.
                number = work.number(x, program) if shared_counter is None else programs + shared_counter.take(items)
            of = work.item(number)
            if look_up is None or broadcast is None:
                return number, of
            steps, found = look_up.of(refs, of.i, of.j)
            broadcast.tell(x, (number, of.i, of.j, steps, *found))
            return number, of._replace(steps=steps, found=found)

        def hear(x: Any) -> tuple[Any, Item]:
            assert look_up is not None
            assert broadcast is not None
            number, i, j, steps, *found = broadcast.hear(x)
            return number, Item(i, j, jnp.int32(0), steps, look_up.found(*found))

        def each_tile(do: Callable[[Item, Any], Any], first: tuple[Any, Item], following: Callable[..., Any]) -> None:
            """Call `do` with each tile of this program, the first and what follows, and the number of steps before
            it."""

            def one(state: tuple[Any, Any, Any, Item]) -> tuple[Any, Any, Any, Item]:
                x, before, _, of = state
                do(of, before)
                return x + 1, before + of.steps + (0 if addends is None else _MATH), *following(x + 1)

            lax.while_loop(lambda state: state[2] < items, one, (jnp.int32(0), jnp.int32(0), *first))

        own_first = partial(find, jnp.int32(0), lax.convert_element_type(program, jnp.int32))

        def copy() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def tile(of: Item, before: Any) -> None:
                def several(k: Any, count: int) -> None:
                    slots = [slot_of(before + k + i) for i in range(count)]
                    for slot in slots:
                        plgpu.barrier_wait(free.at[slot])
                    for i, slot in enumerate(slots):
                        beside = [x.at[slot] for x in vectors]
                        which = Step(of.i, of.j, of.first + k + i, of.found)
                        copies(refs, which, a_smem.at[slot], b_smem.at[slot], full.at[slot], *beside)

                pairs = 0 if in_pairs is None else jnp.where(in_pairs(of.found), lax.div(of.steps, jnp.int32(2)), 0)
                if in_pairs is not None:
                    lax.fori_loop(0, pairs, lambda k, _: several(2 * k, 2), None)
                lax.fori_loop(2 * pairs, of.steps, lambda k, _: several(k, 1), None)
                if addends is not None:
                    which = Step(of.i, of.j, of.first + of.steps, of.found)
                    for w in range(_MATH):
                        slot = slot_of(before + of.steps + w)
                        plgpu.barrier_wait(free.at[slot])
                        addends.copies(refs, which, w, a_smem.at[slot], b_smem.at[slot], full.at[slot])

            each_tile(tile, own_first(), find)
            if broadcast is not None:
                broadcast.end()
            for slot in range(c.stages):  # until the last products have read theirs
                plgpu.barrier_wait(free.at[slot])

        def multiply() -> None:
            plgpu.set_max_registers(232, action="increase")
            for slot in range(c.stages):
                plgpu.barrier_arrive(free.at[slot])
            over_m = pl.ds(warpgroup * c.part_m, c.part_m) if c.split == "m" else slice(None)
            over_n = pl.ds(warpgroup * c.part_n, c.part_n) if c.split == "n" else slice(None)

            def operands(slot: Any, interpreted: bool = False) -> tuple[Any, Any]:
                if boxes:
                    a = a_smem.at[slot, warpgroup]
                else:
                    a = a_smem.at[slot, over_m] if left == "mk" else a_smem.at[slot, :, over_m]
                b = b_smem.at[slot, :, over_n] if right == "kn" else b_smem.at[slot, over_n]
                a, b = (a[...], b[...]) if interpreted else (a, b)
                return a.T if left.startswith("km") else a, b.T if right == "nk" else b

            def place(of: Item) -> Part:
                m = of.i * c.tile_m + (warpgroup * c.part_m if c.split == "m" else 0)
                n = of.j * c.tile_n + (warpgroup * c.part_n if c.split == "n" else 0)
                return Part(of.i, of.j, m, n, warpgroup, of.first, of.found)

            def cleaned(which: Step, slot: Any) -> None:
                assert clean is not None
                unclean, share = clean

                @pl.when(unclean(refs, which))
                def _() -> None:
                    share(refs, which, a_smem.at[slot], b_smem.at[slot], warpgroup)
                    plgpu.commit_smem()
                    # Each multiplies what the other one has cleaned.
                    plgpu.barrier_arrive(refs["cleaned"])
                    plgpu.barrier_wait(refs["cleaned"])

            def tile(of: Item, before: Any) -> None:
                steps = of.steps

                def step(k: Any, product: Callable[[Any], Any]) -> Any:
                    plgpu.barrier_wait(full.at[slot_of(before + k)])
                    if clean is not None:
                        cleaned(Step(of.i, of.j, of.first + k, of.found), slot_of(before + k))
                    result = product(slot_of(before + k))

                    # What the products before those in flight have read is free.
                    @pl.when(k >= c.in_flight)
                    def _() -> None:
                        plgpu.barrier_arrive(free.at[slot_of(before + k - c.in_flight)])

                    return result

                def accumulate(acc: Any) -> Any:
                    def product(slot: Any) -> None:
                        plgpu.wgmma(acc, *operands(slot))
                        plgpu.wgmma_wait(c.in_flight)

                    lax.fori_loop(0, steps, lambda k, _: step(k, product), None)
                    return acc[...]

                def interpreted() -> Any:  # whose WGMMA takes no transposed operands
                    def product(acc: Any, slot: Any) -> Any:
                        a, b = operands(slot, interpreted=True)
                        return acc + jnp.dot(a, b, preferred_element_type=jnp.float32)

                    zeros = jnp.zeros((c.part_m, c.part_n), jnp.float32)
                    return lax.fori_loop(0, steps, lambda k, acc: step(k, lambda slot: product(acc, slot)), zeros)

                if interpret is None:
                    value = pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((c.part_m, c.part_n), jnp.float32))
                else:
                    value = interpreted()
                for late in range(c.in_flight, 0, -1):

                    @pl.when(steps >= late)
                    def _(late: int = late) -> None:
                        plgpu.barrier_arrive(free.at[slot_of(before + steps - late)])

                if addends is not None:
                    value = added(addends, value, before + steps)
                epilogue(refs, place(of), value, storing(c.part_m, c.part_n))

            def added(addends: Addends, value: Any, first: Any) -> Any:
                """With the addends in the stages of the steps from number `first` on, of which each warpgroup frees
                the other's too, in order."""

                def pass_by(slot: Any) -> None:
                    # Before it has come this would count for what was there.
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.barrier_arrive(free.at[slot])

                pl.when(warpgroup == 1)(lambda: pass_by(slot_of(first)))
                slot = slot_of(first + warpgroup)
                plgpu.barrier_wait(full.at[slot])
                total = addends.add(refs, value, a_smem.at[slot], b_smem.at[slot])
                plgpu.commit_smem()  # copies would overtake loads that a barrier alone doesn't wait for
                plgpu.barrier_arrive(free.at[slot])
                pl.when(warpgroup == 0)(lambda: pass_by(slot_of(first + 1)))
                return total

            def promoted_tile(promotion: Promotion, of: Item, before: Any) -> None:
                step = _promoted_step(c, promotion, warpgroup, (a_smem, b_smem), vectors, interpret)

                def one(k: Any, results: Any) -> Any:
                    slot = slot_of(before + k)
                    plgpu.barrier_wait(full.at[slot])
                    return step(slot, results, lambda: plgpu.barrier_arrive(free.at[slot]))

                zeros = Registers(interpret).zeros((BOX, promotion.wave_n))
                waves = _waves(c, promotion)
                results = lax.fori_loop(0, of.steps, one, (zeros,) * len(waves))
                at = place(of)
                for (m, n), result in zip(waves, results, strict=True):
                    epilogue(refs, at._replace(m=at.m + m, n=at.n + n), result, storing(BOX, promotion.wave_n))

            def storing(m: int, n: int) -> Any:
                return _storing(refs["stored"].at[warpgroup], c, m, n, columns) if stores else None

            of_tile = tile if promotion is None else partial(promoted_tile, promotion)
            if broadcast is None:
                each_tile(of_tile, own_first(), find)
            else:
                broadcast.begin()
                each_tile(of_tile, hear(jnp.int32(0)), hear)
            if stores:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        lax.cond(warpgroup == _MATH, copy, multiply)

    shared: dict[str, Any] = {f"brought {i}": plgpu.SMEM((c.stages, x), jnp.float32) for i, x in enumerate(brought)}
    if stores:
        shared["stored"] = swizzled((_MATH, c.staging_slots, BOX, columns), stored)
    shared |= {name: plgpu.SMEM(*x) for name, x in own.items()}
    shared |= {name: plgpu.Barrier(num_arrivals=1, num_barriers=x) for name, x in (barriers or {}).items()}
    if clean is not None:
        shared["cleaned"] = plgpu.Barrier(num_arrivals=_MATH)
    shared |= Counter.shared() if counted else {}
    shared |= Broadcast.shared(4 + len(look_up.found._fields), _MATH) if look_up else {}
    assert not shared.keys() & {*inputs, *outputs, "counter"}
    ring = [
        swizzled((c.stages, *shape_a), dtype_a),
        swizzled((c.stages, *shape_b), dtype_b),
        plgpu.Barrier(num_arrivals=copies_per_step, num_barriers=c.stages),
        plgpu.Barrier(num_arrivals=_MATH, num_barriers=c.stages),
    ]
    grid = {"multiprocessor": programs}
    memory = [*ring, *shared.values()]
    run = partial(launch, body, scratch=memory, grid=grid, warpgroups=_ALL, name=name, interpret=interpret)
    if not counted:
        return run(inputs, outputs)

    def counting(state: Any) -> None:
        made = run({**inputs, "counter": state[0]}, outputs)
        for name, x in made.items():
            state[1][name][...] = x

    empty = {name: lax.empty(x.shape, x.dtype) for name, x in outputs.items()}
    made: dict[str, Any] = pl.run_state(counting)(vary_alike((jnp.zeros(1, jnp.int32), empty), inputs))[1]
    return made


def _waves(c: MosaicConfig, promotion: Promotion) -> list[tuple[int, int]]:
    """Where the waves of a part are."""
    return [(m, n) for m in range(0, c.part_m, BOX) for n in range(0, c.part_n, promotion.wave_n)]


def _promoted_step(
    c: MosaicConfig, promotion: Promotion, warpgroup: Any, operands: tuple[Any, Any], vectors: Any, interpret: Any
) -> Callable[..., Any]:
    """A step of a product with promotion: of the stage, the waves' results, and what is called when the stage is free;
    it returns the results."""
    a_smem, b_smem = operands
    waves = _waves(c, promotion)
    shape = (BOX, promotion.wave_n)

    def step(slot: Any, results: tuple[Any, ...], release: Callable[[], None]) -> tuple[Any, ...]:
        def place(wave: int) -> tuple[Any, Any]:
            m, n = waves[wave]
            return (warpgroup * c.part_m + m, n) if c.split == "m" else (m, warpgroup * c.part_n + n)

        def blocks(wave: int) -> tuple[Any, Any]:
            m, n = place(wave)
            return a_smem.at[slot, pl.ds(m, BOX)], b_smem.at[slot, pl.ds(n, promotion.wave_n)]

        def loaded(wave: int) -> Any:
            return promotion.load([x.at[slot] for x in vectors], *place(wave))

        def proceed(started: int, running: tuple[Any, ...], results: tuple[Any, ...]) -> tuple[Any, ...]:
            """From there on: `running` has accumulators of the last of the waves that are started."""
            if started < len(waves) and len(running) <= c.in_flight:

                def start(accumulator: Any) -> tuple[Any, ...]:
                    a, b = blocks(started)
                    plgpu.wgmma(accumulator, a, b.T)
                    return proceed(started + 1, (*running, (accumulator, loaded(started))), results)

                out: tuple[Any, ...] = pl.run_scoped(start, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
                return out
            if not running:
                return results
            (accumulator, with_it), *rest = running
            product = plgpu.wgmma_accumulator_load(accumulator, wait_n=len(rest))
            wave = started - len(running)
            if wave + 1 == len(waves):
                release()
            entered = promotion.enter(results[wave], product, with_it)
            return proceed(started, tuple(rest), (*results[:wave], entered, *results[wave + 1 :]))

        if interpret is None:
            return proceed(0, (), results)
        made = []
        for wave, result in enumerate(results):  # interpreted, WGMMA takes no transposed operands
            a, b = (x[...].astype(jnp.float32) for x in blocks(wave))
            made.append(promotion.enter(result, jnp.dot(a, b.T), loaded(wave)))
        release()
        return tuple(made)

    return step


def _storing(staging: Any, c: MosaicConfig, rows: int, width: int, columns: int) -> Callable[..., None]:
    """What sends blocks of a value [rows, width] off by way of `staging` [slots, BOX, columns]."""
    together = c.staging_slots * columns

    def store(strip: Callable[[int, int], Any], send: Callable[[Any, int, int], None], width: int = width) -> None:
        for n in range(0, width, together):
            size = min(together, width - n)
            value = strip(n, size)
            for m in range(0, rows, BOX):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                blocks = [(staging.at[i // columns], i) for i in range(0, size, columns)]
                for block, i in blocks:
                    listed = isinstance(value, list)
                    block[...] = value[i // columns] if listed else value[m : m + BOX, i : i + columns]
                # Once for all of them: it waits for every store of the warpgroup.
                plgpu.commit_smem()
                for block, i in blocks:
                    send(block, m, n + i)
                plgpu.commit_smem_to_gmem_group()

    return store
