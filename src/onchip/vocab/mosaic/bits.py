"""float32 numbers in 24 or 20 bits: the first 16 are stored as a number of any 16-bit dtype, the rest as digits of 8 or
4 bits.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

HALF_A_PLACE = 0x8000
"""Half of the last place of a float32's first 16 bits."""


def join(first: Any, digits: Any, number: int = 8, *, nearest: bool = False) -> Any:
    """The float32 of what `split` made.  `digits` are uint32 of so many bits.

    nearest: the first bits are those of the nearest number, so 1 of their last place more where the first digit is set.
    """
    bits = to_bits(first) << 16 | digits << (16 - number)
    bits = bits - (digits >> (number - 1) << 16) if nearest else bits
    return lax.bitcast_convert_type(bits, jnp.float32)


def split(x: Any, dtype: Any, number: int = 8, half: Any = None) -> tuple[Any, Any]:
    """x rounded to `number` bits more than 16; NaN stays NaN.

    half: HALF_A_PLACE makes the first bits those of the nearest number that has 16, half of the last place rounded up;
        0 or None leaves them.
    """
    bits = _plus(lax.bitcast_convert_type(x, jnp.int32), 1 << (15 - number), 1 << (15 - number))
    digits = (lax.bitcast_convert_type(bits, jnp.uint32) >> (16 - number)) & ((1 << number) - 1)
    if half is not None:
        bits = _plus(bits, half, HALF_A_PLACE)
    return from_bits(lax.bitcast_convert_type(bits, jnp.uint32) >> 16, dtype), digits


def _plus(bits: Any, more: Any, most: int) -> Any:
    """Add `more`, at most `most`, to a float's bits; without the limit a NaN of all ones would become a zero."""
    return jnp.minimum(bits, 0x7FFFFFFF - most) + more


def to_bits(x: Any) -> Any:
    """The bits of 16-bit numbers, as uint32."""
    return lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)


def from_bits(bits: Any, dtype: Any) -> Any:
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), dtype)
