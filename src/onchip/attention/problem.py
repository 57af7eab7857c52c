"""What every backend of attention agrees on: options, shapes and memory.  No framework."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from onchip.attention.masks import OP
from onchip.frontend.options import (
    require_bool,
    require_number,
    require_one_of,
    require_positive,
    require_positive_int,
)

MOSAIC_SIZES = (64, 64), (128, 128), (192, 128), (256, 256)
"""The sizes of heads, and of their values, that JAX's kernels have; others are padded with zeros."""
Layout = Literal["bthd", "bhtd"]
LAYOUTS = get_args(Layout)
DEFAULT_SCRATCH = 256 << 20
XLA_ROWS, XLA_COLUMNS = 128, 256
"""Queries and keys of a tile in plain JAX."""
# Queries of a block: more of them share few ranges of keys.
MOST_ROWS = 256


@dataclass(frozen=True)
class AttentionOptions:
    """The options that are plain words and numbers, checked when made."""

    scale: float | None = None
    softcap: float | None = None
    layout: Layout = "bthd"
    scratch_bytes: int | None = None
    check_inputs: bool = False
    return_lse: bool = False

    def __post_init__(self) -> None:
        if self.scale is not None:
            require_number(OP, "scale", self.scale)
        if self.softcap is not None:
            require_positive(OP, "softcap", self.softcap, remedy="; pass None for no softcap")
        require_one_of(OP, "layout", self.layout, LAYOUTS)
        require_positive_int(OP, "scratch_bytes", self.scratch_bytes)
        require_bool(OP, "check_inputs", self.check_inputs)
        require_bool(OP, "return_lse", self.return_lse)


class AttentionProblem(NamedTuple):
    """The sizes of a call."""

    batch: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    size: int  # D, of q and k
    value_size: int  # of v

    @property
    def group(self) -> int:
        """Heads of q that share one of k and v."""
        return self.heads // self.key_heads


def check_shapes(layout: str, shapes: Mapping[str, Sequence[int]]) -> AttentionProblem:
    """The sizes of a call, from the shapes of q, k, v and sinks, if there are any.

    Raises:
        ValueError: shapes that don't go together.
    """
    found = {name: _named(layout, name, tuple(shapes[name]), len(shapes["q"])) for name in ("q", "k", "v")}
    (batch, queries, heads, size), (key_batch, keys, key_heads, key_size) = found["q"], found["k"]
    value_batch, values, value_heads, value_size = found["v"]
    if not batch == key_batch == value_batch:
        raise ValueError(
            f"{OP}: q, k and v have {batch}, {key_batch} and {value_batch} sequences; the numbers must be the same"
        )
    if keys != values or key_heads != value_heads:
        raise ValueError(
            f"{OP}: k has {keys} tokens and {key_heads} heads but v has {values} and {value_heads}; the numbers must "
            "be the same"
        )
    if size != key_size:
        raise ValueError(f"{OP}: q has head size {size} but k has {key_size}; they must be the same")
    if min(size, value_size, heads, key_heads) < 1:
        raise ValueError(
            f"{OP}: heads and their sizes must be 1 or more; got q {list(shapes['q'])}, v {list(shapes['v'])}"
        )
    if heads % key_heads:
        raise ValueError(f"{OP}: q has {heads} heads, which isn't a multiple of the {key_heads} heads of k and v")
    sinks = tuple(shapes.get("sinks", (heads,)))
    if sinks != (heads,):
        raise ValueError(f"{OP}: sinks must be [{heads}], a number for each head of q; got shape {list(sinks)}")
    return AttentionProblem(batch, queries, keys, heads, key_heads, size, value_size)


def _named(layout: str, name: str, shape: tuple[int, ...], ndim: int) -> tuple[int, int, int, int]:
    """(batch, tokens, heads, head size)."""
    letters = {"bthd": "B, T, H, D", "bhtd": "B, H, T, D"}[layout]
    if len(shape) not in (3, 4) or len(shape) != ndim:
        raise ValueError(
            f"{OP}: {name} must be [{letters}], or without B in all of q, k and v, with layout={layout!r}; got shape "
            f"{list(shape)}"
        )
    batch, *rest = shape if len(shape) == 4 else (1, *shape)
    tokens, heads, size = rest if layout == "bthd" else (rest[1], rest[0], rest[2])
    return batch, tokens, heads, size


def scale_of(options: AttentionOptions, p: AttentionProblem) -> float:
    """By default one over the root of the head size."""
    return 1 / math.sqrt(p.size) if options.scale is None else float(options.scale)


def flops(p: AttentionProblem) -> int:
    """Operations of the two products, as if every query saw every key, since a mask's numbers aren't read."""
    return 2 * p.batch * p.heads * p.queries * p.keys * (p.size + p.value_size)


def gradient_flops(p: AttentionProblem, wanted: Sequence[bool]) -> int:
    """Operations of backward's four products, without the one that is computed again."""
    each = 2 * p.batch * p.heads * p.queries * p.keys
    return each * ((wanted[0] + wanted[1]) * p.size + (wanted[2] + 1) * p.value_size)


def scratch_parts(p: AttentionProblem, dtype_bytes: int, rows: int, *, backward: bool, softcap: bool) -> dict[str, int]:
    """Bytes above inputs and results that PyTorch's plain path takes with blocks of `rows` queries."""
    total = max(4, dtype_bytes)
    scores = 2 + backward + softcap
    of_keys = total * p.keys * p.key_heads
    parts = {
        "a block's scores": scores * rows * total * p.heads * p.keys,
        "a block's mask": 3 * rows * p.keys,
        "a block's rows": 3 * rows * total * p.heads * (p.size + p.value_size),
        "ranges": 32 * (p.queries + p.keys),
        "keys and values of one sequence": of_keys * (p.size + p.value_size),
    }
    if backward:
        parts["their gradients"] = of_keys * (p.size + p.value_size)
        parts["what a block adds to one of them"] = of_keys * max(p.size, p.value_size)
    return parts


def rows_of_block(
    p: AttentionProblem, dtype_bytes: int, scratch_bytes: int | None, *, backward: bool, softcap: bool
) -> int:
    """How many queries a block has, whichever results are wanted.

    Raises:
        ValueError: not even one query fits into the budget.
    """

    def need(rows: int) -> int:
        return sum(scratch_parts(p, dtype_bytes, rows, backward=backward, softcap=softcap).values())

    budget = max(DEFAULT_SCRATCH, need(16)) if scratch_bytes is None else scratch_bytes
    fixed, least = need(0), least_scratch(p, dtype_bytes, backward=backward, softcap=softcap)
    rows = (budget - fixed) // max(1, need(1) - fixed)
    if budget < least and p.queries * p.keys > 0:
        raise ValueError(f"{OP}: scratch_bytes={budget} is too small; the call needs at least {least} bytes")
    return int(max(1, min(rows, MOST_ROWS, p.queries)))


def least_scratch(p: AttentionProblem, dtype_bytes: int, *, backward: bool, softcap: bool) -> int:
    """Bytes in which one query fits."""
    return sum(scratch_parts(p, dtype_bytes, 1, backward=backward, softcap=softcap).values())


def xla_parts(p: AttentionProblem, total: int, *, backward: bool) -> dict[str, int]:
    """Bytes above inputs, results and gradients that plain JAX takes, whose sums have `total` bytes for a number.

    On the CPU within 10% of what XLA says, or half above it where the gradients that come are constant.
    """
    rows, columns = min(XLA_ROWS, p.queries), min(XLA_COLUMNS, p.keys)
    queries, scores = p.batch * p.queries * p.heads, total * p.batch * p.heads * rows * columns
    every = queries * p.size + p.batch * p.keys * p.key_heads * (p.size + p.value_size)
    parts = {
        "lse": total * queries,
        "q, k and v, with 0 for NaN and infinity": total * every,
        "a tile's scores": (5 if backward else 3) * scores,
        "a tile's rows": 2 * total * p.batch * p.heads * rows * (p.size + p.value_size),
    }
    if backward:
        parts["gradients in float32"] = total * every
        parts["out and its gradient in float32"] = 2 * total * queries * p.value_size
    return parts
