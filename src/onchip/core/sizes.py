"""Sizes that every part counts in."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MIB = 1 << 20
UNITS = {"KiB": 1 << 10, "MiB": MIB, "GiB": 1 << 30}


def up(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple."""
    return -(-size // multiple) * multiple
