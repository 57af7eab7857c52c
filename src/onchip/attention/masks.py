r"""Masks as data: which keys each query sees, in two or three integers per token.

In the normal form, `Intervals`, query i sees key j if

    start[i] <= j < end[i],    and with `stop`    i < stop[j]

Every mask here is lowered to that in O(T) operations on the device; only `Blocked` adds an array of tiles.  Nothing is
read on the host and nothing has the size of [queries, keys], so another mask needs no compilation, and all layers can
share one lowered mask.  Under `a & b` a query sees what both masks let it see: the larger start, the smaller end and
stop.

Masks are frozen dataclasses of integers and arrays, PyTorch's or JAX's; in JAX they are pytrees whose integers are
static.  Arrays are [B, T], or [T] for all rows of a batch.  Positions begin at 0 in each row.

Sources: FlashMask (arXiv:2410.01359), for masks as ranges by column; tokamax's `Mask(k_start, k_end)`, for ranges by
row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from importlib import import_module
from numbers import Integral
from typing import Any, NamedTuple, cast

OP = "attention"

# What is further away than any query or key, but far from the largest int32 even with a position added.
_FAR = 1 << 30

Array = Any
Band = tuple[int | None, int | None]
"""A start and an end; None: no such bound."""


class MaskArrays(NamedTuple):
    """The functions that masks need from a framework."""

    xp: Any
    """The module of functions that have the same names in both frameworks."""
    positions: Callable[[Array, int, int], Array]
    """`positions(like, n, first)`: [n] int32, `first`, `first` + 1 and so on, on the device of `like`."""
    constants: Callable[[Array, int, int], Array]
    """`constants(like, n, value)`: [n] int32, all of them `value`, on the device of `like`."""
    integers: Callable[[Array], Array]
    """The same in int32."""
    run_numbers: Callable[[Array, int], Array]
    """`run_numbers(ids, step)`, [B, T] or [T]: int32 that grow in a row, from one token to the next, where the next
    one's id isn't the token's own plus `step`, and nowhere else."""
    runs: Callable[[Array], tuple[Array, Array]]
    """`runs(ids)`, [B, T]: where each token's run of equal ids starts and ends in its row, int32."""
    count_not_above: Callable[[Array, Array], Array]
    """`count_not_above(x, y)`, x [B, N] that never falls, y [B, M]: how many of a row's x are at most y, int32."""
    values: Callable[[Array], Any]
    """A NumPy array of the numbers, or None where there are none yet."""
    values_at_hand: Callable[[Array], Any]
    """The same, also None where reading them would wait for a GPU."""


KNOWN: dict[str, MaskArrays] = {}
"""By engine, those that were imported."""


def arrays_of(like: Array) -> MaskArrays:
    """The functions of an array's framework."""
    # Subclasses of Tensor are defined elsewhere; of a plain one, which torch.compile sees, the first class says it all.
    of_torch = any(kind.__module__.partition(".")[0] == "torch" for kind in type(like).__mro__)
    name = "torch" if of_torch else "xla"
    if name not in KNOWN:  # torch.compile can't trace an import
        import_module(f"onchip.attention.{name}.arrays")
    return KNOWN[name]


class MaskSizes(NamedTuple):
    """The sizes for which a mask is lowered."""

    of: MaskArrays
    like: Array
    batch: int
    queries: int
    keys: int

    @property
    def rows(self) -> Array:
        """[1, Tq] int32: each query's position."""
        return self.rows_from(0)

    def rows_from(self, first: int) -> Array:
        """[1, Tq] int32: each query's position plus `first`."""
        return self.of.positions(self.like, self.queries, _bounded(first))[None]

    def all_rows(self, value: int) -> Array:
        """[1, Tq] int32: the same value for each query."""
        return self.of.constants(self.like, self.queries, value)[None]

    def given(self, name: str, x: Array, *lengths: int) -> Array:
        """An array that a mask has, [1 or B, length] of its own dtype, of one of these lengths."""
        shape = tuple(x.shape)
        if len(shape) == 1:
            x, shape = x[None], (1, *shape)
        # Sizes may be symbols, of which torch.compile knows what they equal but not what they are in.
        if len(shape) != 2 or not (shape[0] == 1 or shape[0] == self.batch) or all(shape[1] != n for n in lengths):
            must = " or ".join(f"[{self.batch}, {n}] or [{n}]" for n in dict.fromkeys(lengths))
            raise ValueError(f"{OP}: {name} must be {must}; got shape {list(x.shape)}")
        return x

    def clipped(self, x: Array, most: int) -> Array:
        """`x` in int32, from 0 to `most`, which x's own dtype may not have."""
        return self.of.integers(x.clip(0, min(most, self.of.xp.iinfo(x.dtype).max)))

    def given_bound(self, name: str, x: Array, length: int, most: int) -> Array:
        """As `given`; what no signed number may hold, and `&` would wrap, is clipped."""
        x = self.given(name, x, length)
        return self.clipped(x, most) if "uint32" in str(x.dtype) or "uint64" in str(x.dtype) else x

    def alike(self, mask: str) -> None:
        """Raise unless queries and keys are the same tokens."""
        if self.queries != self.keys:
            raise ValueError(
                f"{OP}: {mask} needs tokens that are both queries and keys; got {self.queries} queries and {self.keys} "
                "keys; pass Intervals"
            )


@dataclass(frozen=True, eq=False)
class Mask:
    """The base of all masks: lowering, and `&`.

    Masks are equal if they are of the same kind, with equal numbers and the same arrays.
    """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        values = (getattr(self, field.name) for field in fields(self))
        return type(self), *(x if isinstance(x, Integral | Mask | None) else id(x) for x in values)

    def lower(self, batch: int, queries: int, keys: int, like: Array) -> "Intervals":
        """The normal form for a batch with these numbers of queries and keys, in `like`'s framework and on its device.

        Make it once in a step, and pass it to each layer.
        """
        sizes = MaskSizes(arrays_of(like), like, batch, queries, keys)
        made = self._ranges(sizes)._within(sizes)
        if is_whole(self):
            object.__setattr__(made, "_whole", True)
        return made

    def ranges(self, batch: int, queries: int, keys: int, like: Array) -> "Intervals":
        """As `lower`, but with integers of any dtype, which may lie beyond the queries and keys that there are."""
        return self._ranges(MaskSizes(arrays_of(like), like, batch, queries, keys))

    def band(self) -> Band | None:
        """The start and end of query 0, if each query's lie one key after those of the query before."""
        return None

    def _ranges(self, sizes: MaskSizes) -> "Intervals":
        """Of a mask that has a band; others say it by themselves."""
        band = self.band()
        assert band is not None
        start, end = band
        return Intervals(
            sizes.all_rows(0) if start is None else sizes.rows_from(start),
            sizes.all_rows(sizes.keys) if end is None else sizes.rows_from(end),
        )

    def __and__(self, other: "Mask") -> "Mask":
        if not isinstance(other, Mask):
            return NotImplemented
        return Both(self, other)


@dataclass(frozen=True, eq=False)
class Intervals(Mask):
    """Query i sees key j if start[i] <= j < end[i], and with `stop` also i < stop[j].

    `stop[j]` is the first query that doesn't see key j any more.  It describes a tree of answers in depth-first order,
    a prompt that several answers share, or sink tokens before a window.
    """

    start: Array  # [B, Tq] or [Tq]
    end: Array  # [B, Tq] or [Tq]
    stop: Array | None = None  # [B, Tk] or [Tk]
    blocks: Array | None = None  # [B, Tq / tile, Tk / tile] bool, of `Blocked`
    tile: int = 0

    _whole = False  # what `is_whole` said of the mask that was lowered; as a field, JAX would compile for either

    def _ranges(self, sizes: MaskSizes) -> "Intervals":
        of_rows, of_keys = (sizes.queries, sizes.keys), (sizes.keys, sizes.queries)
        start = sizes.given_bound("Intervals.start", self.start, *of_rows)
        end = sizes.given_bound("Intervals.end", self.end, *of_rows)
        stop = None if self.stop is None else sizes.given_bound("Intervals.stop", self.stop, *of_keys)
        return Intervals(start, end, stop, self.blocks, self.tile)

    def _within(self, sizes: MaskSizes) -> "Intervals":
        """In int32, of queries and keys that there are."""
        start, end = (sizes.clipped(x, sizes.keys) for x in (self.start, self.end))
        stop = None if self.stop is None else sizes.clipped(self.stop, sizes.queries)
        return Intervals(start, end, stop, self.blocks, self.tile)

    def _and(self, other: "Intervals", xp: Any) -> "Intervals":
        if self.blocks is not None and other.blocks is not None:
            raise ValueError(f"{OP}: only one Blocked can be combined with &; pass the blocks that both see")
        blocks = self if other.blocks is None else other
        stop = other.stop if self.stop is None else self.stop
        if self.stop is not None and other.stop is not None:
            stop = xp.minimum(self.stop, other.stop)
        return Intervals(
            xp.maximum(self.start, other.start), xp.minimum(self.end, other.end), stop, blocks.blocks, blocks.tile
        )


@dataclass(frozen=True, eq=False)
class Both(Mask):
    """The mask `a & b`."""

    a: Mask
    b: Mask

    def band(self) -> Band | None:
        a, b = self.a.band(), self.b.band()
        if a is None or b is None:
            return None
        starts, ends = ([x for x in side if x is not None] for side in zip(a, b, strict=True))
        return max(starts, default=None), min(ends, default=None)

    def _ranges(self, sizes: MaskSizes) -> Intervals:
        return self.a._ranges(sizes)._and(self.b._ranges(sizes), sizes.of.xp)


@dataclass(frozen=True, eq=False)
class Full(Mask):
    """Every query sees every key."""

    def band(self) -> Band:
        return None, None


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    """Query i sees the keys up to i + offset.  With offset = Tk - Tq the last query sees the last key."""

    offset: int = 0

    def band(self) -> Band:
        return None, self.offset + 1


@dataclass(frozen=True, eq=False)
class Window(Mask):
    """Query i sees the keys from i + offset - left to i + offset + right; None means all keys on that side.

    `Window(left=w - 1)` is causal, with w keys: transformers calls it `sliding_window=w`.
    """

    left: int | None
    right: int | None = 0
    offset: int = 0

    def band(self) -> Band:
        left, right, offset = self.left, self.right, self.offset
        return None if left is None else offset - left, None if right is None else offset + right + 1


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Tokens see the tokens of their own document, which is a run of equal `ids`.  Tokens with the id `padding` see
    nothing, and nothing sees them.

    An id that comes back after another one begins another document; where values are checked, it raises.
    """

    ids: Array  # [B, T] or [T]
    padding: int | None = None

    @staticmethod
    def from_position_ids(position_ids: Array) -> "Documents":  # [B, T] or [T]
        """Documents that begin where a position isn't one more than the one before."""
        return Documents(arrays_of(position_ids).run_numbers(position_ids, 1))

    @staticmethod
    def from_cu_seqlens(cu_seqlens: Array, tokens: int) -> "Documents":  # [N + 1]
        """Documents that end at cu_seqlens[1:], in one row of `tokens` tokens; those after the last end are padding.

        Raises ValueError, where the numbers can be read without waiting for a GPU, unless they begin with 0 and never
        fall.
        """
        of = arrays_of(cu_seqlens)
        known = of.values_at_hand(cu_seqlens)
        if known is not None and known.size and (known[0] != 0 or (known[1:] < known[:-1]).any()):
            raise ValueError(
                f"{OP}: cu_seqlens must begin with 0 and never fall; got {known[:8].tolist()}"
                f"{'...' if known.size > 8 else ''}; from lengths pass [0, *accumulate(lengths)]"
            )
        ends = of.integers(cu_seqlens)[None, 1:]
        ids = of.count_not_above(ends, of.positions(cu_seqlens, tokens, 0)[None])
        return Documents(ids, padding=ends.shape[1])

    def _ranges(self, sizes: MaskSizes) -> Intervals:
        sizes.alike("Documents")
        of, ids = sizes.of, sizes.given("Documents.ids", self.ids, sizes.keys)
        start, end = of.runs(ids)
        if self.padding is not None and _holds(of, ids, self.padding):  # else it would be taken for another id
            end = of.xp.where(ids == self.padding, start, end)
        return Intervals(start, end)


@dataclass(frozen=True, eq=False)
class Chunked(Mask):
    """Tokens see the tokens of their own chunk of `size`.  With documents, chunks start at each document's start.

    `Chunked(size) & Causal()` is the local attention of Llama 4.
    """

    size: int
    within: Documents | None = None
    offset: int = 0

    def _ranges(self, sizes: MaskSizes) -> Intervals:
        rows, size = sizes.rows + _bounded(self.offset), min(self.size, _FAR // 2)  # their sum has 32 bits
        if self.within is None:
            start = rows - rows % size
            return Intervals(start, start + size)
        mine = self.within._ranges(sizes)
        start = rows - (rows - mine.start) % size
        return Intervals(start, start + size)._and(mine, sizes.of.xp)


@dataclass(frozen=True, eq=False)
class PrefixLM(Mask):
    """Causal, except that all tokens see the first `lengths` tokens, even those among them.

    With documents, each token's length is that of its document's prefix.
    """

    lengths: Array  # [B], or by token [B, T]
    within: Documents | None = None

    def _ranges(self, sizes: MaskSizes) -> Intervals:
        sizes.alike("PrefixLM")
        xp, rows = sizes.of.xp, sizes.rows
        shape = tuple(self.lengths.shape)
        if len(shape) == 1 and shape != (sizes.batch,):
            raise ValueError(
                f"{OP}: PrefixLM.lengths must be [{sizes.batch}], or by token [{sizes.batch}, {sizes.keys}]; got shape "
                f"{list(shape)}"
            )
        by_row = self.lengths[:, None] if len(shape) == 1 else self.lengths
        lengths = sizes.given("PrefixLM.lengths", by_row, 1, sizes.keys)
        if self.within is None:
            return Intervals(sizes.all_rows(0), xp.maximum(rows + 1, lengths))
        mine = self.within._ranges(sizes)
        return Intervals(mine.start, xp.maximum(rows + 1, mine.start + sizes.clipped(lengths, sizes.keys)))._and(
            mine, xp
        )


@dataclass(frozen=True, eq=False)
class Blocks(Mask):
    """Causal, except that the tokens of a run of equal `ids`, 0 or more, all see each other, such as the tokens of an
    image, or a block in a model that is causal by blocks.  A token with an id below 0 is a block of its own.
    """

    ids: Array  # [B, T] or [T]

    def _ranges(self, sizes: MaskSizes) -> Intervals:
        sizes.alike("Blocks")
        of, ids = sizes.of, sizes.given("Blocks.ids", self.ids, sizes.keys)
        _, end = of.runs(of.xp.where(ids < 0, sizes.rows_from(-sizes.keys), ids))
        return Intervals(end * 0, end)


@dataclass(frozen=True, eq=False)
class Tree(Mask):
    """Tokens of a tree in depth-first order see themselves and their ancestors: `stop[j]` is the position after the
    last descendant of token j.
    """

    stop: Array  # [B, T] or [T]

    def _ranges(self, sizes: MaskSizes) -> Intervals:
        sizes.alike("Tree")
        return Intervals(sizes.all_rows(0), sizes.rows_from(1), sizes.given("Tree.stop", self.stop, sizes.keys))


@dataclass(frozen=True, eq=False)
class Blocked(Mask):
    """Query i sees key j if blocks[i // tile, j // tile] is True: for masks that aren't ranges, such as blocks that a
    router chose."""

    blocks: Array  # [B, Tq / tile, Tk / tile] bool, or without B
    tile: int

    def _ranges(self, sizes: MaskSizes) -> Intervals:
        blocks = self.blocks[None] if len(self.blocks.shape) == 2 else self.blocks
        must = (-(-sizes.queries // self.tile), -(-sizes.keys // self.tile))
        if tuple(blocks.shape) not in ((1, *must), (sizes.batch, *must)):
            raise ValueError(
                f"{OP}: Blocked.blocks must be {[sizes.batch, *must]} or {list(must)} for {sizes.queries} queries and "
                f"{sizes.keys} keys in tiles of {self.tile}; got shape {list(self.blocks.shape)}"
            )
        return Intervals(sizes.all_rows(0), sizes.all_rows(sizes.keys), None, blocks, self.tile)


MASKS = (Full, Causal, Window, Documents, Chunked, PrefixLM, Blocks, Tree, Blocked, Intervals, Both)
STATIC = ("offset", "left", "right", "size", "padding", "tile")
"""Names of the fields that are plain integers."""


def bounded(band: Band | None) -> tuple[int, ...]:
    """Its start and end as numbers that see the same, and to which a position can be added in 32 bits; or none."""
    if band is None:
        return ()
    start, end = band
    return -_FAR if start is None else _bounded(start), _FAR if end is None else _bounded(end)


def _holds(of: MaskArrays, x: Array, value: int) -> bool:
    """Whether x's dtype has this value."""
    if "bool" in str(x.dtype):
        return value in (0, 1)
    kept = of.xp.iinfo(x.dtype)
    return bool(kept.min <= value <= kept.max)


def _bounded(first: int) -> int:
    return max(-_FAR, min(first, _FAR))


def check_mask(mask: Any, is_array: Callable[[Any], bool]) -> None:
    """Raise unless `mask` is a mask whose fields have the right types, dtypes and ranges; reads no array."""
    if not isinstance(mask, Mask):
        raise TypeError(
            f"{OP}: mask must be one of {', '.join(x.__name__ for x in MASKS[:-1])}, or several combined by &; got "
            f"{type(mask).__name__}{_instead_of(mask)}"
        )
    name = type(mask).__name__
    for field in fields(mask):
        value = getattr(mask, field.name)
        if isinstance(value, Mask) and (field.name != "within" or isinstance(value, Documents)):
            check_mask(value, is_array)
        elif field.name in STATIC:
            optional = value is None and field.name in ("left", "right", "padding")
            if not optional and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{OP}: {name}.{field.name} must be an int; got {type(value).__name__}")
            if field.name in ("size", "tile") and value < (getattr(mask, "blocks", mask) is not None):
                raise ValueError(f"{OP}: {name}.{field.name} must be above 0; got {value}")
        elif value is not None or field.name not in ("stop", "blocks", "within"):
            if field.name == "within" or not is_array(value):
                must = "a Documents" if field.name == "within" else "an array of q's framework"
                raise TypeError(f"{OP}: {name}.{field.name} must be {must}; got {type(value).__name__}")
            dtype, kind = str(value.dtype).removeprefix("torch."), "bool" if field.name == "blocks" else "int"
            if kind not in dtype:
                must = "bool" if kind == "bool" else "integers"
                raise TypeError(f"{OP}: {name}.{field.name} must be {must}; got {dtype}")
    if isinstance(mask, Window) and mask.left is not None and mask.right is not None and mask.left + mask.right < 0:
        raise ValueError(
            f"{OP}: Window(left={mask.left}, right={mask.right}) sees nothing; pass None, not -1, for no bound"
        )


def _instead_of(mask: Any) -> str:
    """What to pass in place of what is no mask, as a remedy for an error."""
    if isinstance(mask, type) and issubclass(mask, Mask):
        return f"; pass one of it, as {mask.__name__}()"
    if hasattr(mask, "shape"):
        return (
            "; for an attention_mask [B, T] of 1 and 0 pass Documents(attention_mask, padding=0) & Causal(); a matrix "
            "[Tq, Tk] is none of them, unless it is made of tiles (Blocked)"
        )
    return ""


def mask_arrays(mask: Mask) -> list[Array]:
    """The arrays that a mask has, in the order of its fields."""
    made: list[Array] = []
    for value in vars(mask).values():
        if isinstance(value, Mask):
            made += mask_arrays(value)
        elif hasattr(value, "dtype"):
            made.append(value)
    return made


def with_arrays(mask: Mask, arrays: Iterator[Array]) -> Mask:
    """The same mask of other arrays, in the order of `mask_arrays`; of `...`, it may be filled later."""
    made: Any = object.__new__(type(mask))
    for name, value in vars(mask).items():
        if isinstance(value, Mask):
            made.__dict__[name] = with_arrays(value, arrays)
        else:
            made.__dict__[name] = next(arrays) if value is ... or hasattr(value, "dtype") else value
    return cast(Mask, made)


def sees_blocks(mask: Mask) -> bool:
    """Whether it is no range, or combined with what is none."""
    if isinstance(mask, Both):
        return sees_blocks(mask.a) or sees_blocks(mask.b)
    return getattr(mask, "blocks", None) is not None


def is_whole(mask: Mask) -> bool:
    """Whether its class says that queries see all keys, or all before them: `Full`, `Causal`, these combined, and these
    lowered.
    """
    if isinstance(mask, Both):
        return is_whole(mask.a) and is_whole(mask.b)
    return mask._whole if isinstance(mask, Intervals) else isinstance(mask, Full | Causal)


def check_mask_values(mask: Mask, values: Callable[[Array], Any] | None = None) -> None:
    """Raise for an id that comes back after another one, if `values`, or else the framework, can read them."""
    for field in fields(mask):
        value = getattr(mask, field.name)
        if isinstance(value, Mask):
            check_mask_values(value, values)
    if not isinstance(mask, Documents):
        return
    ids = (arrays_of(mask.ids).values if values is None else values)(mask.ids)
    for row in () if ids is None or not ids.size else ids.reshape(-1, ids.shape[-1]):
        firsts = [*row[:1].tolist(), *row[1:][row[1:] != row[:-1]].tolist()]
        known: set[int] = set()
        for x in firsts:
            if x in known and x != mask.padding:
                raise ValueError(
                    f"{OP}: Documents.ids has {x} in two places; a document's tokens must be next to each other; sort "
                    "them, or give each run its own id"
                )
            known.add(x)
