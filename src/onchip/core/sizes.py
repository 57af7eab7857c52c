"""Sizes that every part counts in."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MIB = 1 << 20


def up(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple."""
    return -(-size // multiple) * multiple
