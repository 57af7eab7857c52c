"""The weight's gradient as a sum over chunks of tokens, in 20 bits if it is bfloat16, in 24 if it is float16.

The first 16 bits of each float32 form a matrix like the weight, which may be in the memory of its gradient: the last
chunk of tokens leaves the nearest bfloat16 there, which is that gradient.  The next 4 or 8 bits are *digits*.  They are
in 16-bit words: one word has the digits of 4 or 2 neighbouring blocks of BOX columns, the first block's in its lowest
bits.  Both matrices have the weight's dtype, since they come to shared memory in the places of the product's operands,
but they stand for bits alone.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from onchip.kernels.mosaic.product import BOX, MosaicConfig
from onchip.kernels.mosaic.registers import Registers
from onchip.vocab.memory import digit_bits
from onchip.vocab.mosaic.bits import HALF_A_PLACE, from_bits, join, split, to_bits

Send = Callable[[Any, int, Any], None]
"""Copies a block from shared memory to a place in a matrix."""
_COLUMNS = 256
"""The most columns that a tile has."""


def bits_of(dtype: Any) -> int:
    """`digit_bits` of a dtype of JAX's."""
    return digit_bits(jnp.dtype(dtype).name)


def rounds_in_forward(dtype: Any) -> bool:
    """Whether the first bits of a complete sum are those of the nearest number of that dtype.  That number is the
    gradient for an upstream gradient of 1; only other upstream gradients then need the digits.
    """
    return bool(jnp.dtype(dtype) == jnp.bfloat16)


def half_a_place(last: Array, dtype: Any) -> Array | None:
    """[1]: the argument `half` of `split` if the sum rounds in forward: not 0 for the `last` chunk that has any
    tokens.
    """
    return jnp.where(last, HALF_A_PLACE, 0).reshape(1).astype(jnp.int32) if rounds_in_forward(dtype) else None


def word_columns(dtype: Any) -> int:
    """The columns that a tile's digits take."""
    return _COLUMNS * bits_of(dtype) // 16


class MosaicSum(NamedTuple):
    """A sum, or references to it."""

    first: Any  # [rows, columns]
    digits: Any  # [rows, `word_columns` for each tile of the columns]

    @staticmethod
    def empty(like: Array, config: MosaicConfig) -> "MosaicSum":
        """A sum for a matrix like this one, not yet written."""
        rows, columns = like.shape
        digits = rows, -(-columns // config.tile_n) * word_columns(like.dtype)
        return MosaicSum(lax.empty(like.shape, like.dtype), lax.empty(digits, like.dtype))

    def value(self, config: MosaicConfig) -> Array:
        """[rows, columns] float32, if the first bits aren't those of the nearest number."""
        rows, columns = self.first.shape
        bits = bits_of(self.first.dtype)
        of_words = (
            to_bits(self.digits).reshape(rows, -1, 1, BOX) >> jnp.arange(0, 16, bits, jnp.uint32)[None, None, :, None]
        )
        of_tiles = (of_words & ((1 << bits) - 1)).reshape(rows, -1, _COLUMNS)
        made: Array = join(self.first, of_tiles[..., : config.tile_n].reshape(rows, -1)[:, :columns], bits)
        return made


def blocks_of(product: Any) -> list[Any]:
    """A tile's product [BOX, columns] in blocks [BOX, BOX]."""
    return [product[:, n : n + BOX] for n in range(0, product.shape[1], BOX)]


def added(product: Any, first: Any, words: Callable[[int], Any], registers: Registers) -> list[Any]:
    """The same, added to what lies in shared memory.

    words: of a number, the reference to that block of digits.
    """
    blocks: list[Any] = []
    bits = bits_of(first.dtype)
    for n in range(0, product.shape[1], BOX):
        block, shift = divmod(n // BOX * bits, 16)
        if shift == 0:
            word = to_bits(registers.load_box(words(block)))
        old = join(registers.load_box(first.at[:, n : n + BOX]), (word >> shift) & ((1 << bits) - 1), bits)
        blocks.append(product[:, n : n + BOX] + old)
    return blocks


def store_sum(blocks: list[Any], first: Send, digits: Send, dtype: Any, half: Any, store: Callable[..., None]) -> None:
    """Store what `added` returns: `first` and `digits` send blocks to the matrices of these names; `half` as of
    `split`."""
    together = 16 // bits_of(dtype)
    last = len(blocks) + -(-len(blocks) // together) - 1
    made: list[Any] = []

    def strip(n: int, width: int) -> list[Any]:
        while len(made) * BOX < n + width:
            start = len(made) // (together + 1) * together
            made.extend(as_stored(blocks[start : start + together], dtype, half))
        return made[n // BOX : (n + width) // BOX]

    def send(block: Any, m: int, n: Any) -> None:
        number = lax.div(jnp.asarray(n, jnp.int32), jnp.int32(BOX))
        group, place = (f(number, jnp.int32(together + 1)) for f in (lax.div, lax.rem))
        lax.cond(
            (place == together) | (number == last),
            lambda: digits(block, m, group * BOX),
            lambda: first(block, m, (group * together + place) * BOX),
        )

    store(strip, send, (last + 1) * BOX)


def as_stored(blocks: list[Any], dtype: Any, half: Any = None) -> list[Any]:
    """The first 16 bits of each of the float32 blocks whose digits share words, and these words; `half` as in
    `split`.
    """
    bits = bits_of(dtype)
    firsts, digits = zip(*(split(x, dtype, bits, half) for x in blocks), strict=True)
    word = digits[0]
    for i, more in enumerate(digits[1:], 1):
        word = word | more << (i * bits)
    return [*firsts, from_bits(word, dtype)]
