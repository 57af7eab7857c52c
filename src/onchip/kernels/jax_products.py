"""XLA's own matrix products, summed in float32 whatever their operands' dtype."""

from jax import Array, lax

from onchip.frontend.jax_inputs import accumulator, platform


def product(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """The product over dimension contract[0] of `a` and contract[1] of `b`, in the dtype of sums."""
    # Float32 operands are not to be rounded to tf32 or bfloat16, which is the default on GPU and TPU.
    total = accumulator(a.dtype)
    precision = lax.Precision.HIGHEST if a.dtype == total else None
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=total)


def rounded_product(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """The same, rounded once to the operands' dtype; on GPUs the product itself rounds, and stores half as many
    bytes.
    """
    if platform() != "gpu" or a.dtype == accumulator(a.dtype):
        return product(a, b, contract).astype(a.dtype)
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, preferred_element_type=a.dtype)
