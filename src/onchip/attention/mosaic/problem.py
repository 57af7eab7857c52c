"""Which kernels make a call's gradients, and the memory that calls take.  No framework."""

from onchip.attention.problem import MOSAIC_SIZES, AttentionProblem

FUSED_SIZES = ((64, 64),)
"""Heads of so many numbers, and values of so many, whose gradients one kernel makes under masks without a `stop`."""
NUMBER_BYTES = 2
"""Bytes of a number of q, k and v."""
TILE = 128
"""Tokens of a tile: queries in forward and for their gradient, keys for the gradients of keys and values."""
BLOCK = 64
"""Queries of a block where one kernel makes all gradients."""


def sizes_of(p: AttentionProblem) -> tuple[int, int]:
    """The sizes of the kernels that a call takes."""
    return next(x for x in MOSAIC_SIZES if x[0] >= p.size and x[1] >= p.value_size)


def fits_one_kernel(p: AttentionProblem, scratch_bytes: int | None) -> bool:
    """Whether one kernel makes the gradients of such heads, and a bound leaves room for its sums and its table."""
    parts = memory_parts(p, backward=True, fused=True)
    return sizes_of(p) in FUSED_SIZES and (scratch_bytes is None or sum(parts.values()) <= scratch_bytes)


def memory_parts(p: AttentionProblem, *, backward: bool, fused: bool = False) -> dict[str, int]:
    """Bytes above inputs, results and returned gradients; one kernel makes all gradients if `fused`."""
    planes, kept = p.batch * p.heads, "kept until backward: " if backward else ""
    tiles, key_tiles, blocks = (-(-n // size) for n, size in ((p.queries, TILE), (p.keys, TILE), (p.queries, BLOCK)))
    padded = TILE * tiles
    parts = {
        f"{kept}lse": 4 * planes * padded,
        "ranges, and lists of tiles": p.batch * (8 * padded + 24 * tiles + 4 * tiles * key_tiles),
    }
    if backward:
        parts["lse and delta of queries"] = 8 * planes * padded
        parts["out's gradient, copied"] = NUMBER_BYTES * planes * p.queries * p.value_size
    sizes = sizes_of(p)
    if backward and fused:
        parts["sums of queries' gradients"] = 4 * planes * (p.queries + -p.queries % 8) * sizes[0]
        parts["turns of tiles"] = 4 * p.batch * key_tiles * blocks
        parts["counters"] = 4 * (1 + planes * blocks)
    if (p.size, p.value_size) != sizes or p.queries % 8:
        of_all = NUMBER_BYTES * sum(sizes) * p.batch * (p.queries * p.heads + p.keys * p.key_heads)
        parts["copies padded to whole blocks"] = of_all * (1 + backward)
    return parts
