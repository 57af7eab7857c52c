"""What both front ends agree on: names, sizes, memory, and the bytes that ranks send.  No framework."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from onchip.core.sizes import FEW_ELEMENTS

GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
WeightLayout = Literal["nk", "kn"]
LAYOUTS = get_args(WeightLayout)


class CollectiveSizes(NamedTuple):
    """The sizes of a call on one rank."""

    ranks: int
    rows: int
    """Rows of a block: T / n, all leading dimensions multiplied."""
    n: int
    k: int


def check_shapes(op: str, shapes: Mapping[str, Sequence[int]], ranks: int, layout: str = "nk") -> CollectiveSizes:
    """The sizes of a call, from the shapes of its arguments by name; the first is that of the tokens.

    Raises:
        ValueError: shapes that don't go together.
    """
    name = next(iter(shapes))
    x, weight = tuple(shapes[name]), tuple(shapes["weight"])
    must = "weight must be [N, K]" if layout == "nk" else "weight must be [K, N] with weight_layout='kn'"
    if len(weight) != 2 or min(weight) < 1:
        raise ValueError(f"{op}: {must}, N, K >= 1; got shape {list(weight)}")
    first = "T/n" if op == GATHER else "T"
    if len(x) < 2:
        raise ValueError(f"{op}: {name} must be [{first}, K] or [{first}, ..., K]; got shape {list(x)}")
    n, k = weight if layout == "nk" else weight[::-1]
    if x[-1] != k:
        raise ValueError(f"{op}: {name} has K={x[-1]} but weight has K={k}; {must}")
    bias = tuple(shapes.get("bias", (n,)))
    if bias != (n,):
        raise ValueError(f"{op}: bias has shape {list(bias)} but weight has N={n}; bias must be [N]")
    if op == SCATTER and x[0] % ranks != 0:
        missing = -x[0] % ranks
        raise ValueError(
            f"{op}: {name} has {x[0]} rows in its first dimension, which {ranks} ranks can't share evenly; pad it by "
            f"{missing} {'row' if missing == 1 else 'rows'}, and leave out their results"
        )
    rows = 1
    for size in x[:-1]:
        rows *= size
    return CollectiveSizes(ranks, rows if op == GATHER else rows // ranks, n, k)


# ------------------------------------------------------------------------------------------------ memory and messages


class Cost(NamedTuple):
    """The memory of a call in PyTorch on a GPU; on the CPU, copies of 16-bit operands in float32 come on top."""

    kept: dict[str, int]
    """Bytes that are kept until backward, above inputs and results."""
    forward: dict[str, int]
    """Bytes at the peak of forward, above inputs, results and what is kept."""
    backward: dict[str, int]
    """The same for backward, above returned gradients too."""
    sent: int
    """Bytes that each rank sends."""


def cost(
    op: str, s: CollectiveSizes, bytes_each: int, *, gradients: bool, weight_bytes: int, keep_gathered: bool = False
) -> Cost:
    """The memory of a call; a number takes `bytes_each`, and one of the weight's gradient `weight_bytes`."""
    total = max(bytes_each, 4)
    steps = s.ranks - 1
    weight_sum = {"the weight's gradient in float32": total * s.n * s.k} if weight_bytes < total else {}
    if op == SCATTER:
        backward = blocks(s, s.n, bytes_each) | weight_sum | wide(s.rows * s.k, bytes_each)
        sent = steps * s.rows * s.n * (total + (bytes_each if gradients else 0))
        return Cost({}, sums(s, s.n, total), backward if gradients else {}, sent)
    of_x = s.rows * s.k
    keeps = gradients and keep_gathered and s.ranks > 1
    kept = {"the gathered x": s.ranks * bytes_each * of_x} if keeps else {}
    forward = ({} if keeps else blocks(s, s.k, bytes_each)) | wide(s.rows * s.n, bytes_each)
    gather = weight_sum if keeps else blocks(s, s.k, bytes_each) | weight_sum
    backward = max(sums(s, s.k, total), gather, key=lambda parts: sum(parts.values()))
    gathers = 1 if keeps else 2
    sent = steps * of_x * (bytes_each * (gathers if gradients else 1) + (total if gradients else 0))
    return Cost(kept, forward, backward if gradients else {}, sent)


HEAD, SMALLEST = 8192, 1 << 21


def buffer_bytes(arriving: int) -> int:
    """The bytes of a buffer that peers map: those that arrive and its head, rounded up to a power of two."""
    return max(SMALLEST, 1 << (arriving + HEAD - 1).bit_length())


def cost_at_once(
    op: str, s: CollectiveSizes, bytes_each: int, *, gradients: bool, mapped: bool, sum_bytes: int = 0
) -> Cost:
    """The memory of a call with backend "symmetric" (`mapped`) or "collective"; a number of a sum takes `sum_bytes`.

    Buffers are outside of PyTorch's allocator, and one of each size serves all calls of a group.
    """
    total, steps = sum_bytes or max(bytes_each, 4), s.ranks - 1
    columns = s.n if op == SCATTER else s.k
    block = s.rows * columns
    gathered, summed = (each * s.ranks * block if steps else 0 for each in (bytes_each, total))
    leaving = {"sums of blocks that leave": min(2, steps) * total * block} if steps else {}

    def gather() -> dict[str, int]:
        return {"a buffer of the group": buffer_bytes(gathered)} if mapped else {"rows of all ranks": gathered}

    def reduce(other: int) -> dict[str, int]:
        if mapped:
            return {"a buffer of the group": buffer_bytes(summed + other), **leaving}
        return {"sums of all ranks' rows": summed + total * block} | ({"rows of all ranks": other} if other else {})

    forward = (reduce(0) if op == SCATTER else gather()) if steps else {}
    backward = (gather() if op == SCATTER else reduce(gathered)) if steps and gradients else {}
    of_rows = {} if mapped else wide(s.ranks * s.rows * (s.k if op == SCATTER else s.n), bytes_each)
    if op == GATHER:
        forward |= of_rows
    if gradients:
        backward |= (of_rows if op == SCATTER else {}) or wide(s.n * s.k, bytes_each)
    sent = steps * block * (total if op == SCATTER else bytes_each)
    if gradients:
        sent += steps * block * (bytes_each if op == SCATTER else bytes_each + total)
    return Cost({}, forward, backward, sent)


def wide(elements: int, bytes_each: int) -> dict[str, int]:
    """A result of 16 bits that is made in float32 first, since it is small."""
    return {"a small result in float32": 4 * elements} if bytes_each == 2 and elements < FEW_ELEMENTS else {}


def blocks(s: CollectiveSizes, columns: int, bytes_each: int) -> dict[str, int]:
    """One block that is worked on, and one that arrives."""
    count = min(s.ranks - 1, 2)
    return {"blocks of other ranks": count * bytes_each * s.rows * columns} if count else {}


def sums(s: CollectiveSizes, columns: int, bytes_each: int) -> dict[str, int]:
    """A block's sum that leaves, one that arrives, and the product that is computed."""
    count = 3 if s.ranks > 1 else 1
    return {"sums of blocks in float32": count * bytes_each * s.rows * columns}
