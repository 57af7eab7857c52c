"""float32 numbers in 24 bits: the first 16 as a number of a dtype that has 16, whatever it is, and the next 8."""

from typing import Any

import jax.numpy as jnp
from jax import lax


def join(first: Any, digits: Any) -> Any:
    """`digits` are uint32 below 256."""
    return lax.bitcast_convert_type(to_bits(first) << 16 | digits << 8, jnp.float32)


def split(x: Any, dtype: Any) -> tuple[Any, Any]:
    """x rounded to 24 bits; NaN stays NaN."""
    rounded = jnp.minimum(lax.bitcast_convert_type(x, jnp.int32), 0x7FFFFF7F) + 0x80
    bits = lax.bitcast_convert_type(rounded, jnp.uint32)
    return from_bits(bits >> 16, dtype), (bits >> 8) & 0xFF


def to_bits(x: Any) -> Any:
    """Of 16-bit numbers, as uint32."""
    return lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)


def from_bits(bits: Any, dtype: Any) -> Any:
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), dtype)
