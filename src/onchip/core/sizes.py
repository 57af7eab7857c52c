"""Sizes of dtypes, and units of memory."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# The losses take float64 too, by the framework's own operations.
LOSS_DTYPE_BYTES = DTYPE_BYTES | {"float64": 8}
MIB = 1 << 20
# With fewer elements in a result, cuBLAS may add up parts of a sum apart, each rounded to 16 bits; more of them fill
# the GPU as they are.  So results of 16 bits with fewer are made in float32 first.
FEW_ELEMENTS = 1 << 22
UNITS = {"KiB": 1 << 10, "MiB": MIB, "GiB": 1 << 30}


def accumulator(dtype: str) -> str:
    """The dtype of losses and of sums over numbers in `dtype`: float64 for float64, float32 for all others."""
    return "float64" if dtype == "float64" else "float32"


def up(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple of `multiple`."""
    return -(-size // multiple) * multiple
