"""What every backend of grouped_matmul agrees on: options, sizes, and checks of values.  No framework."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from onchip.frontend.options import is_symbol, require_int, require_one_of

OP = "grouped_matmul"
WeightLayout = Literal["gnk", "gkn"]
Activation = Literal["swiglu"]
GateUp = Literal["concatenated", "interleaved"]
Precision = Literal["full", "fp8"]
LAYOUTS, ACTIVATIONS, GATE_UPS = get_args(WeightLayout), get_args(Activation), get_args(GateUp)
PRECISIONS = get_args(Precision)
ROWS = 128
"""Rows of a tile, in all Triton kernels that read a plan; in Pallas, where groups have that many."""


@dataclass(frozen=True)
class GroupedOptions:
    """The options that are plain words and numbers, checked when made."""

    weight_layout: WeightLayout = "gnk"
    activation: str | None = None
    gate_up: GateUp = "concatenated"
    num_rows: int | None = None
    precision: Precision = "full"

    def __post_init__(self) -> None:
        require_one_of(OP, "weight_layout", self.weight_layout, LAYOUTS)
        if self.activation is not None and self.activation not in ACTIVATIONS:
            raise ValueError(f"{OP}: activation must be None or 'swiglu'; got {self.activation!r}")
        require_one_of(OP, "gate_up", self.gate_up, GATE_UPS)
        if self.activation is None and self.gate_up != "concatenated":
            raise ValueError(f"{OP}: gate_up={self.gate_up!r} needs activation='swiglu'; pass that too")
        require_one_of(OP, "precision", self.precision, PRECISIONS)
        if self.num_rows is not None:
            require_int(OP, "num_rows", self.num_rows)
            if self.num_rows < 0:
                raise ValueError(f"{OP}: num_rows must be 0 or more; got {self.num_rows}")
            if not is_symbol(self.num_rows):
                object.__setattr__(self, "num_rows", int(self.num_rows))


class GroupedProblem(NamedTuple):
    """The sizes of a call."""

    tokens: int
    """T: rows of the product, with those past the last group's end."""
    source_rows: int
    """M: rows of x; T without `rows`."""
    groups: int
    n: int
    k: int
    columns: int
    """Columns of a result: n, or n / 2 with an activation."""
    out_rows: int
    """num_rows; T without `scatter_rows`."""


def check_one_of_two(sizes: Any, offsets: Any) -> tuple[str, Any]:
    """The name and the value of the argument that is given: group_sizes or group_offsets."""
    if sizes is not None and offsets is not None:
        raise TypeError(f"{OP}: group_offsets are the cumulative sums of group_sizes; pass one of them")
    if sizes is None and offsets is None:
        raise TypeError(f"{OP}: group_sizes is missing or None; pass it, or group_offsets")
    return ("group_sizes", sizes) if offsets is None else ("group_offsets", offsets)


def check_shapes(options: GroupedOptions, shapes: Mapping[str, Sequence[int]]) -> GroupedProblem:
    """The sizes of a call, from the shapes of the arguments that are given, by name.

    Raises:
        ValueError: shapes that don't go together.
        TypeError: one of scatter_rows and num_rows without the other.
    """
    x, weight = tuple(shapes["x"]), tuple(shapes["weight"])
    turned = options.weight_layout == "gkn"
    must = "weight must be [G, K, N] with weight_layout='gkn'" if turned else "weight must be [G, N, K]"
    if len(weight) != 3 or min(weight) < 1:
        raise ValueError(f"{OP}: {must}, with G, N, K >= 1; got shape {list(weight)}")
    if len(x) != 2:
        of = "[M, K]" if "rows" in shapes else "[T, K]"
        raise ValueError(f"{OP}: x must be {of}; got shape {list(x)}; pass x.reshape(-1, x.shape[-1])")
    groups, n, k = (weight[0], weight[2], weight[1]) if turned else weight
    if x[1] != k:
        other = f"; or pass weight_layout={'gnk' if turned else 'gkn'!r}" if x[1] == n else ""
        raise ValueError(f"{OP}: x has K={x[1]} but weight has K={k}; {must}{other}")
    for name in ("group_sizes", "group_offsets"):
        shape = tuple(shapes.get(name, (groups,)))
        if shape != (groups,):
            raise ValueError(f"{OP}: {name} has shape {list(shape)} but weight has G={groups}; {name} must be [G]")
    if len(shapes.get("rows", (0,))) != 1:
        raise ValueError(f"{OP}: rows must be [T]; got shape {list(shapes['rows'])}")
    tokens = shapes["rows"][0] if "rows" in shapes else x[0]
    if options.activation is not None and n % 2 != 0:
        raise ValueError(f"{OP}: weight has N={n}; activation='swiglu' needs an even N, gate and up")
    bias = tuple(shapes.get("bias", (groups, n)))
    if bias != (groups, n):
        raise ValueError(f"{OP}: bias has shape {list(bias)}; it must be [G, N], {[groups, n]}")
    of = "rows has" if "rows" in shapes else "x has"
    for name in ("row_scale", "scatter_rows"):
        shape = tuple(shapes.get(name, (tokens,)))
        if shape != (tokens,):
            raise ValueError(f"{OP}: {name} has shape {list(shape)} but {of} T={tokens}; {name} must be [T]")
    if "scatter_rows" in shapes and options.num_rows is None:
        raise TypeError(f"{OP}: scatter_rows needs num_rows, the number of rows of the result")
    if "scatter_rows" not in shapes and options.num_rows is not None:
        raise TypeError(f"{OP}: num_rows is the number of rows that scatter_rows writes to; pass both or neither")
    return GroupedProblem(
        tokens=tokens,
        source_rows=x[0],
        groups=groups,
        n=n,
        k=k,
        columns=n if options.activation is None else n // 2,
        out_rows=tokens if options.num_rows is None else options.num_rows,
    )


def check_values(p: GroupedProblem, which: str, groups: Any, rows: Any = None, scatter_rows: Any = None) -> None:
    """Raise ValueError for wrong numbers in these NumPy arrays; `which` names `groups`: group_sizes or group_offsets.

    Entries of `rows` and `scatter_rows` past the last group's end may be anything.  Where values can't be checked, a
    backend returns NaN instead: for all rows from the first wrong size on, or everywhere if an index is out of range.
    """
    of = [int(x) for x in groups]
    ends = of if which == "group_offsets" else [sum(of[: i + 1]) for i in range(len(of))]
    for i, (size, end) in enumerate(zip(sizes_of(which, of), ends, strict=True)):
        if size < 0 and which == "group_sizes":
            raise ValueError(f"{OP}: group_sizes[{i}] is {size}; sizes must be 0 or more")
        if size < 0:
            raise ValueError(f"{OP}: group_offsets[{i}] is {end}; offsets must be 0 or more and never decrease")
        if end > p.tokens:
            what = "sum of group_sizes up to" if which == "group_sizes" else "value of group_offsets at"
            ends_instead = which == "group_sizes" and of == sorted(of) and of[-1] == p.tokens
            remedy = "; if they are where groups end, pass them as group_offsets" if ends_instead else ""
            raise ValueError(f"{OP}: the {what} {i} is {end}, more than the T={p.tokens} rows of the product{remedy}")
    last = ends[-1]
    for name, indices, limit in (("rows", rows, p.source_rows), ("scatter_rows", scatter_rows, p.out_rows)):
        if indices is None:
            continue
        wrong = ((indices[:last] < 0) | (indices[:last] >= limit)).nonzero()[0]
        if len(wrong) > 0:
            i = int(wrong[0])
            has = f"x has {limit} rows" if name == "rows" else f"num_rows is {limit}"
            raise ValueError(f"{OP}: {name}[{i}] is {int(indices[i])} but {has}")


def sizes_of(which: str, values: Sequence[int]) -> list[int]:
    """Group sizes, from `values` that may be offsets."""
    if which == "group_sizes":
        return list(values)
    return [end - start for start, end in zip((0, *values), values, strict=False)]


def are_short(tokens: int, groups: int) -> bool:
    """Whether groups have one tile of rows on average, or less."""
    return tokens <= ROWS * groups


def tiles_together(tokens: int, groups: int) -> int:
    """Tiles of rows that kernels for Hopper take with all columns: as many as a group has on average, from 2 to 8.

    In PyTorch on an H100, with 128 rows a group, 2 took 3 to 11% less than 8 in five products of six and 4% more in the
    other; with 512 rows, 4 took 0 to 2% less than 8 in nine of ten; with 2048, 1% more.  In JAX with 128
    rows, 2 took 3 to 7% less on an H200; with 512, 4 took 1% less.
    """
    return max(2, min(8, -(-tokens // (ROWS * groups))))
