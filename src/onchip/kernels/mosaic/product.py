"""A persistent matrix product for Hopper in Pallas Mosaic GPU, on which ops' kernels are built.

`onchip.kernels.mosaic.program` runs it; this module has its description.

A block has three warpgroups.  The last one copies operand blocks from device to shared memory (TMA), `stages` steps
ahead and across tiles.  The other two multiply them (WGMMA), each for its part of the tile or for every other tile, and
hand the float32 accumulator to an epilogue.  Which blocks are copied, and what happens to the accumulator, are
arguments of `Product`: a function that issues the copies of each step, and an epilogue.  A third argument, `Promotion`,
is for products whose steps are scaled.

Tiles are numbered so that up to `group` rows of tiles are walked column by column: L2 then serves the operands of those
that run at the same time, as in Triton's matrix multiplication tutorial.  The roles and their barriers are those of
JAX's hopper_matmul_mgpu example; but here the pipeline is not drained between tiles, so copies for the next tile run
during an epilogue.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from onchip.kernels.mosaic.launch import Refs
from onchip.kernels.mosaic.tile_numbers import Broadcast, Counter

SHARED_BYTES = 232448
"""Bytes of shared memory that a block of an H100 may have."""
BOX = 64
"""Rows and columns of the blocks in which exponentials are kept.  Results leave in blocks of 64 rows and 128 bytes."""
MATH, ALL = 2, 3  # warpgroups that multiply; all of them


@dataclass(frozen=True)
class MosaicConfig:
    """How a product is cut: a tile [tile_m, tile_n] of the result per block, in steps of tile_k."""

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    stages: int = 4
    """How many steps' operands are in shared memory at a time."""
    group: int = 8
    """How many rows of tiles are walked together, at most."""
    split: Literal["m", "n"] = "m"
    """Which side of the tile the two warpgroups divide."""
    in_flight: int = 1
    """How many products a warpgroup leaves running when it starts the next one."""
    staging_slots: int = 2
    """How many blocks of results, [BOX, 128 bytes], a warpgroup sends off together."""
    alternate: bool = False
    """Whether the warpgroups take whole tiles in turns, so that one multiplies while the other sends its results off.
    A tile's two parts are then both one warpgroup's."""

    @staticmethod
    def from_numbers(numbers: Mapping[str, int]) -> "MosaicConfig":
        """The config that is stored as these numbers; `split_n` is 1 for split "n", and `alternate` is 0 or 1."""
        rest = {name: value for name, value in numbers.items() if name not in ("split_n", "alternate")}
        split: Literal["m", "n"] = "n" if numbers["split_n"] else "m"
        return MosaicConfig(**rest, split=split, alternate=bool(numbers.get("alternate", 0)))

    @property
    def part_m(self) -> int:
        return self.tile_m // 2 if self.split == "m" else self.tile_m

    @property
    def part_n(self) -> int:
        return self.tile_n // 2 if self.split == "n" else self.tile_n

    def parts(self, n: int) -> int:
        """How many parts of tiles there are along a side of length n."""
        return -(-n // self.tile_n) * (self.tile_n // self.part_n)

    def shared_bytes(self, stores: bool, operand_bytes: int = 2, brought: int = 0) -> int:
        """Bytes of shared memory for the operands, for `brought` float32 numbers that come with each step, and for
        results on their way out.
        """
        step = operand_bytes * self.tile_k * (self.tile_m + self.tile_n) + 4 * brought
        return self.stages * step + (MATH * self.staging_slots * BOX * 128 if stores else 0)


class ProductStep(NamedTuple):
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
    """The first step that was summed: not 0 in the second half of a tile."""
    found: Any
    """What `look_up` found for the tile."""


@dataclass(frozen=True)
class Promotion:
    """Sums on two levels: a step's product is summed from zero, and then enters the result, which `enter` makes.

    A warpgroup makes its part in waves of [BOX, wave_n], each with an accumulator of its own: the config's `in_flight`
    + 1 accumulators take registers besides the whole result.
    """

    brought: tuple[int, ...]
    """Lengths of the float32 vectors that `copies` brings with a step's operands."""
    load: Callable[[Sequence[Any], Any, Any], Any]
    """`load(vectors, m, n)`: from these vectors in shared memory, what enters with the wave at (m, n) of the tile."""
    enter: Callable[[Any, Any, Any], Any]
    """`enter(result, product, loaded)`: the new result [BOX, wave_n], from the one so far, the step's product, and what
    was loaded."""
    wave_n: int = 128


@dataclass(frozen=True)
class Addends:
    """What a tile's product is added to.  It comes to shared memory as the operands do, in one more step for each
    warpgroup; loads by the warpgroups themselves would wait for device memory.
    """

    copies: Callable[[Refs, ProductStep, int, Any, Any, Any], None]
    """As `copies` of `Product`, and as many; the third argument is the warpgroup that they are for."""
    add: Callable[[Refs, Any, Any, Any], Any]
    """What the epilogue is given, from the references, the product, and the shared memory of the left and the right
    operand."""
    alone: Callable[[Any], Any]
    """The same of a product that nothing is added to."""
    there: Callable[[Refs], Any]
    """From the references: whether there is something to add, in this launch."""


@dataclass(frozen=True)
class LookUp:
    """What is read from device memory for each tile.  The copying warpgroup reads it and tells the others."""

    found: Any
    """The class of what is found: a NamedTuple of int32."""
    of: Callable[[Refs, Any, Any], tuple[Any, Any]]
    """From the references and a tile's row and column: its number of steps, which may be 0, and what copies and the
    epilogue then have as `found`."""


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for blocks with rows of a multiple of 128 bytes, in the layout that WGMMA and TMA want."""
    columns = 128 // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def load_block(source: Any, row: Any, rows: int, column: Any, columns: int, into: Any, barrier: Any) -> None:
    plgpu.copy_gmem_to_smem(source.at[pl.ds(row, rows), pl.ds(column, columns)], into, barrier)


def send_to(
    target: Any, row: Any, column: Any, columns: int, reduction: Literal["add"] | None = None
) -> Callable[[Any, int, int], None]:
    """Returns a function that copies blocks of a part that begins at (row, column) to target, or adds them to what is
    there.
    """

    def send(block: Any, m: int, n: int) -> None:
        into = target.at[pl.ds(row + m, BOX), pl.ds(column + n, columns)]
        plgpu.copy_smem_to_gmem(block, into, commit_group=False, reduction_op=reduction)

    return send


@dataclass(frozen=True)
class Product:
    """A product of tiles: the layout of its operands, how they are copied, and what follows it."""

    config: MosaicConfig
    dtype: Any
    """The dtype of both operands, or a pair of dtypes."""
    left: Literal["mk", "km", "km boxes", "mk boxes"]
    """How the left operand lies in shared memory, by the names of its rows and columns; 'boxes': as tile_m / BOX
    matrices of BOX rows and columns each."""
    right: Literal["kn", "nk"]
    tiles: Callable[[Refs], tuple[Any, Any, Any]]
    """From the references: the numbers of rows of tiles, of columns of tiles, and of steps; each at least 1."""
    copies: Callable[..., None]
    """Called with (references, step, shared memory of the left operand, or a list of its boxes, of the right one,
    barrier), and the shared memory of the vectors of `promotion`.  It issues one copy for each of them, or for each
    box, and `right_copies` of the right operand."""
    epilogue: Callable[[Refs, Part, Any, Any], None]
    """Called by each of the two warpgroups with (references, its part, its accumulator [part_m, part_n] float32,
    `store`); store(strip, send) calls send(staging, m, n) for blocks [BOX, 128 bytes] at (m, n) of a value.
    strip(n, width) gives its columns [n, n + width), or, if the value has BOX rows, a list of their blocks; it is
    called in order, while earlier strips are on their way.  A value with other columns than the accumulator says how
    many in a third argument."""
    _: KW_ONLY
    stored: Any = None
    """The dtype that `store` is given; None if there is nothing to store, and then there is no `store`."""
    right_copies: int = 1
    halves: bool = False
    """Whether to cut the tiles of the last wave into two halves of the steps if that fills the device better."""
    look_up: LookUp | None = None
    """For tiles that differ from each other."""
    counter: bool = False
    """Whether each program takes its next tile from a counter, which needs `look_up`.  Otherwise it has a list: if all
    tiles take equally long, programs then go through memory together."""
    in_pairs: Callable[[Any], Any] | None = None
    """Says, for what was looked up, whether a tile's steps are copied two at a time."""
    clean: tuple[Callable[[Refs, ProductStep], Any], Callable[[Refs, ProductStep, Any, Any, Any], None]] | None = None
    """Two functions.  The first says, for the references and the step, whether the step's operands have to be cleaned
    before they are multiplied.  The second cleans a warpgroup's share, given these, the operands in shared memory and
    the warpgroup."""
    scratch: Mapping[str, tuple[tuple[int, ...], Any]] | None = None
    """Shapes and dtypes of shared memory for the epilogue, which finds it among the references."""
    barriers: Mapping[str, int] | None = None
    """How many barriers the epilogue needs for copies that it issues itself; it finds them there too."""
    promotion: Promotion | None = None
    """How a step's product enters the result, if it isn't just added.  Then the operands are "mk" and "nk", and the
    epilogue is called for each wave, with the wave's place and its result."""
    addends: Addends | None = None
    """What a tile's product is added to before the epilogue, which is given the sum."""

    def __post_init__(self) -> None:
        c = self.config
        assert (c.part_m, c.tile_k) == (BOX, BOX) or not self.boxes, "boxes are for one warpgroup each"
        assert all(x % 64 == 0 for x in (c.part_m, c.part_n, c.tile_k))
        assert c.in_flight < c.stages
        assert self.promotion is None or (self.left, self.right) == ("mk", "nk")
        assert not (self.halves and self.look_up)
        assert self.look_up or not self.counter
        assert self.addends is None or not (self.halves or self.promotion)
        assert self.clean is None or self.promotion is None
        assert not c.alternate or (self.addends, self.promotion, self.clean, self.look_up) == (None,) * 4

    @property
    def boxes(self) -> bool:
        return self.left.endswith("boxes")

    @property
    def brought(self) -> tuple[int, ...]:
        return () if self.promotion is None else self.promotion.brought

    @property
    def columns(self) -> int:
        """Columns of a block of results on its way out."""
        return 128 // jnp.dtype(self.stored).itemsize if self.stored is not None else 0

    def ring(self, name: str) -> list[Any]:
        """Shared memory for the operands of each stage, and two kinds of barriers: the operands have come, and they are
        free again.
        """
        c, k = self.config, self.config.tile_k
        left: tuple[int, ...] = (c.tile_m, k) if self.left == "mk" else (k, c.tile_m)
        left = (c.tile_m // BOX, BOX, BOX) if self.boxes else left
        right = (k, c.tile_n) if self.right == "kn" else (c.tile_n, k)
        of_left, of_right = self.dtype if isinstance(self.dtype, tuple) else (self.dtype, self.dtype)
        needed = c.shared_bytes(self.stored is not None, jnp.dtype(of_left).itemsize, sum(self.brought))
        needed += sum(math.prod(shape) * jnp.dtype(of).itemsize for shape, of in (self.scratch or {}).values())
        if needed > SHARED_BYTES:
            raise ValueError(f"{name}: {c} needs {needed} bytes of shared memory, of which a block has {SHARED_BYTES}")
        copies = (left[0] if self.boxes else 1) + self.right_copies + len(self.brought)
        return [
            swizzled((c.stages, *left), of_left),
            swizzled((c.stages, *right), of_right),
            plgpu.Barrier(num_arrivals=copies, num_barriers=c.stages * (MATH if c.alternate else 1)),
            plgpu.Barrier(num_arrivals=1 if c.alternate else MATH, num_barriers=c.stages),
        ]

    def shared(self, *, counted: bool) -> dict[str, Any]:
        """Further shared memory and barriers, by the names of the references."""
        c = self.config
        made: dict[str, Any] = {
            f"brought {i}": plgpu.SMEM((c.stages, x), jnp.float32) for i, x in enumerate(self.brought)
        }
        if self.stored is not None:
            made["stored"] = swizzled((MATH, c.staging_slots, BOX, self.columns), self.stored)
        made |= {name: plgpu.SMEM(*x) for name, x in (self.scratch or {}).items()}
        made |= {name: plgpu.Barrier(num_arrivals=1, num_barriers=x) for name, x in (self.barriers or {}).items()}
        if self.clean is not None:
            made["cleaned"] = plgpu.Barrier(num_arrivals=MATH)
        made |= Counter.shared() if counted else {}
        return made | (Broadcast.shared(4 + len(self.look_up.found._fields), MATH) if self.look_up else {})
