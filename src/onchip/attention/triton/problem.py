"""Which calls the kernels can serve, and the memory that they take.  No framework."""

import math
from collections.abc import Sequence

from onchip.attention.problem import AttentionProblem

# Tokens of a tile.
TILE = 128
# Rows of a program in the kernels that go row by row.
FEW_ROWS = 32
LARGEST_HEAD = 128
# Of q and k, in kernels for Hopper whose values have at most LARGEST_HEAD; and of all, in others for it.
LARGEST_WIDE_HEAD, LARGEST_HOPPER_HEAD = 192, 256
# Of all, in the kernels for Hopper that make all gradients: with any ranges, and where queries see most of the keys.
LARGEST_FUSED_HEAD, LARGEST_PAIRED_HEAD = 64, 128
# Numbers before those kernels' counters.
TICKETS = 4
# Rows of their sums for a block of queries and 64 of its numbers, and numbers of a row.
SUM_ROWS, SUM_COLUMNS = 16, 256
# Numbers of 4 bytes in a line of the cache.
_LINE = 32
# Offsets have 32 bits, and a grid's second dimension counts the heads of all sequences.
_MOST_TOKENS, _MOST_PLANES = 1 << 30, 65535


def is_wide(p: AttentionProblem) -> bool:
    """Whether heads have more numbers than any GPU's kernels take."""
    return max(p.size, p.value_size) > LARGEST_HEAD


def is_widest(p: AttentionProblem) -> bool:
    """Whether they have more than kernels for Hopper take whose values are narrow."""
    return p.size > LARGEST_WIDE_HEAD or p.value_size > LARGEST_HEAD


def tiles_of(tokens: int, tile: int = TILE) -> int:
    return -(-tokens // tile)


def key_tile(p: AttentionProblem) -> int:
    """Keys of a tile for the gradients of keys and values: two groups of warps have halves of it, or one half is it."""
    return TILE // 2 if is_widest(p) else TILE


def entries_of(tokens: int) -> int:
    """Entries in the table of query tiles."""
    return -(-tokens // (TILE // 2))


def padded(tokens: int) -> int:
    """The number of tokens, rounded up to whole tiles."""
    return TILE * tiles_of(tokens)


def refusal(
    p: AttentionProblem,
    scale: float,
    dtype: str,
    scratch_bytes: int | None,
    *,
    blocked: bool,
    backward: bool,
    sinks: bool,
) -> str | None:
    """Why the kernels can't serve a call, or None."""
    for name, size in (("head", p.size), ("value", p.value_size)):
        if size > LARGEST_HOPPER_HEAD or size % 8:
            remedy = "pass" if size > LARGEST_HOPPER_HEAD else "pad them with zeros, or pass"
            return (
                f"its {name} sizes are multiples of 8 up to {LARGEST_HOPPER_HEAD}, not {size}; {remedy} backend='plain'"
            )
    if dtype not in ("bfloat16", "float16"):
        return f"it takes bfloat16 and float16, not {dtype}; cast q, k and v, or pass backend='plain'"
    if blocked:
        return "it takes masks that are ranges, and Blocked is none; pass backend='plain'"
    if not scale > 0:
        return f"its scale is above 0, not {scale}; negate q and the scale, or pass backend='plain'"
    if p.queries * p.keys * p.batch == 0:
        return "there are no queries or no keys; pass backend='plain'"
    if max(p.queries, p.keys) > _MOST_TOKENS or p.batch * p.heads > _MOST_PLANES:
        return (
            f"it takes {_MOST_TOKENS} tokens and {_MOST_PLANES} heads, those of all sequences; pass fewer sequences at "
            "once"
        )
    least = least_memory(p, backward=backward, sinks=sinks)
    if scratch_bytes is not None and scratch_bytes < least:
        return f"scratch_bytes={scratch_bytes} is too small; the call needs {least} bytes"
    return None


def is_fused(
    p: AttentionProblem,
    sequences: int,
    scratch_bytes: int | None,
    wanted: Sequence[bool],
    *,
    stop: bool,
    sinks: bool,
    whole: bool,
) -> bool:
    """Whether on Hopper one kernel makes the gradients of q, k and v, rather than two: if all three are wanted, heads
    are small enough for the mask, it has no `stop`, and a bound leaves room for its sums.  `whole`: `masks.is_whole`.
    """
    # With larger heads one kernel is faster where tiles walk far, and slower under a window.
    largest = LARGEST_PAIRED_HEAD if whole else LARGEST_FUSED_HEAD
    if stop or max(p.size, p.value_size) > largest or not all(wanted[:3]):
        return False
    need = sum(memory_parts(p, sequences, backward=True, sinks=sinks, fused=True).values())
    return scratch_bytes is None or need <= scratch_bytes


def sum_parts(p: AttentionProblem) -> int:
    """Parts of 64 numbers in which such a kernel sums the gradient of a query."""
    return 1 if max(p.size, p.value_size) <= LARGEST_FUSED_HEAD else 2


def counters_of(p: AttentionProblem) -> int:
    """How many numbers it counts with: of each head one for each part of a block of queries, and those before."""
    return TICKETS + p.batch * p.heads * entries_of(p.queries) * sum_parts(p)


def sums_of(p: AttentionProblem) -> tuple[int, int]:
    """The shape of its sums: whole blocks, and whole parts."""
    return p.batch * p.heads * entries_of(p.queries) * sum_parts(p) * SUM_ROWS, SUM_COLUMNS


def held_numbers(p: AttentionProblem, sequences: int, *, stop: bool, lse: bool, band: bool = False) -> list[int]:
    """How many numbers of 4 bytes lie one after the other in what forward leaves beside its results, each part in lines
    of its own: forward's counter of tiles, each query tile's ranges of keys [sequences, entries, 8], each key tile's
    least and largest stop [sequences, tiles, 2], each query's lse [B, Hq, Tq], and, of a band, starts and ends [Tq].
    """
    ranges, stops = 8 * sequences * entries_of(p.queries), stop * 2 * sequences * tiles_of(p.keys)
    parts = 1, ranges, stops, lse * p.batch * p.heads * p.queries, band * p.queries, band * p.queries
    return [-(-n // _LINE) * _LINE for n in parts]


def memory_parts(
    p: AttentionProblem, sequences: int, *, backward: bool, sinks: bool, fused: bool = False
) -> dict[str, int]:
    """Bytes above inputs, results and returned gradients; the mask has ranges of its own for `sequences` sequences, and
    one kernel makes all gradients if `fused`.
    """
    planes = p.batch * p.heads
    kept = "kept until backward: " if backward else ""
    counter, of_tiles, of_stops, of_lse, *_ = held_numbers(p, sequences, stop=True, lse=True)
    parts = {
        f"{kept}lse": 4 * of_lse,
        f"{kept}ranges of keys": 4 * (of_tiles + of_stops),
        f"{kept}counter of tiles": 4 * counter,
    }
    if backward:
        parts["lse and delta of queries"] = 8 * planes * padded(p.queries)
        parts["ranges of queries"] = 16 * sequences * tiles_of(p.keys, key_tile(p))
    if backward and fused:
        parts["sums of queries' gradients"] = 4 * math.prod(sums_of(p))
        parts["counters"] = 4 * counters_of(p)
    if backward and sinks:
        parts["the sinks' gradient by rows"] = 4 * planes * (padded(p.queries) // FEW_ROWS)
    return parts


def least_memory(p: AttentionProblem, *, backward: bool, sinks: bool) -> int:
    """Bytes that suffice for a call."""
    return sum(memory_parts(p, p.batch, backward=backward, sinks=sinks).values())
