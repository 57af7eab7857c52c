"""The weight's gradient as a sum over chunks of tokens, in 24 bits.

The first 16 bits of each float32 are a matrix like the weight, and may be in the memory of its gradient.  The next 8
are *digits*: in 16-bit words, of which one has those of neighbouring blocks of BOX columns, the first's in its lower
byte.  A tile of the product has WORDS columns of them.  Both are of the weight's dtype, since they come to shared
memory in the places of the product's operands, and stand for bits alone.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from onchip.kernels.mosaic.product import BOX, MosaicConfig
from onchip.kernels.mosaic.registers import Registers
from onchip.vocab.mosaic.bits import from_bits, join, split, to_bits

Send = Callable[[Any, int, int], None]
"""What copies a block from shared memory to a place in a matrix."""
WORDS = 128
"""Columns of digits that a tile has, of 192 or 256 columns."""


class Sum(NamedTuple):
    """A sum, or references to it."""

    first: Any  # [rows, columns]
    digits: Any  # [rows, WORDS for each tile of the columns]

    @staticmethod
    def empty(like: Array, config: MosaicConfig) -> "Sum":
        """Of a matrix like this one, not yet written."""
        rows, columns = like.shape
        digits = rows, -(-columns // config.tile_n) * WORDS
        return Sum(lax.empty(like.shape, like.dtype), lax.empty(digits, like.dtype))

    def value(self, config: MosaicConfig) -> Array:
        """[rows, columns] float32."""
        rows, columns = self.first.shape
        words = to_bits(self.digits).reshape(rows, -1, WORDS // BOX, 1, BOX)
        of_blocks = (words >> jnp.array([0, 8], jnp.uint32)[:, None]) & 0xFF
        digits = of_blocks.reshape(rows, -1, 2 * WORDS)[..., : config.tile_n].reshape(rows, -1)[:, :columns]
        made: Array = join(self.first, digits)
        return made


def added(product: Any, first: Any, words: Callable[[int], Any], begins: Any, registers: Registers) -> list[Any]:
    """The product [BOX, columns] of a tile, added to what lies in shared memory: blocks [BOX, BOX] of float32.

    words: of a number, the reference to that block of digits.  begins: whether nothing has been written there.
    """
    blocks: list[Any] = []
    for n in range(0, product.shape[1], BOX):
        pair, second = divmod(n // BOX, 2)
        if not second:
            word = to_bits(registers.load_box(words(pair)))
        old = join(registers.load_box(first.at[:, n : n + BOX]), word >> 8 if second else word & 0xFF)
        blocks.append(product[:, n : n + BOX] + jnp.where(begins, 0.0, old))
    return blocks


def store_sum(blocks: list[Any], first: Send, digits: Send, dtype: Any, store: Callable[..., None]) -> None:
    """Store what `added` returns: `first` and `digits` send blocks to the matrices of these names."""
    places: list[tuple[Send, int]] = []
    for pair in range(0, len(blocks), 2):
        places += [(first, n * BOX) for n in range(pair, min(pair + 2, len(blocks)))]
        places.append((digits, pair // 2 * BOX))
    made: list[Any] = []

    def strip(n: int, width: int) -> list[Any]:
        while len(made) * BOX < n + width:
            pair = len(made) // 3 * 2
            made.extend(as_stored(blocks[pair : pair + 2], dtype))
        return made[n // BOX : (n + width) // BOX]

    def send(block: Any, m: int, n: int) -> None:
        to, column = places[n // BOX]
        to(block, m, column)

    store(strip, send, len(places) * BOX)


def as_stored(blocks: list[Any], dtype: Any) -> list[Any]:
    """The first 16 bits of each of one or two blocks of float32, and their digits."""
    firsts, digits = zip(*(split(x, dtype) for x in blocks), strict=True)
    return [*firsts, from_bits(digits[0] | digits[1] << 8 if len(digits) > 1 else digits[0], dtype)]
