"""float32 numbers in 24 or 20 bits: the first 16 as a number of a dtype that has 16, whatever it is, and the rest as
digits, of 8 bits or 4.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax


def join(first: Any, digits: Any, number: int = 8) -> Any:
    """`digits` are uint32 of so many bits."""
    return lax.bitcast_convert_type(to_bits(first) << 16 | digits << (16 - number), jnp.float32)


def split(x: Any, dtype: Any, number: int = 8) -> tuple[Any, Any]:
    """x rounded to so many bits more than 16; NaN stays NaN."""
    half = 1 << (15 - number)
    rounded = jnp.minimum(lax.bitcast_convert_type(x, jnp.int32), 0x7FFFFFFF - half) + half
    bits = lax.bitcast_convert_type(rounded, jnp.uint32)
    return from_bits(bits >> 16, dtype), (bits >> (16 - number)) & ((1 << number) - 1)


def to_bits(x: Any) -> Any:
    """Of 16-bit numbers, as uint32."""
    return lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)


def from_bits(bits: Any, dtype: Any) -> Any:
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), dtype)
