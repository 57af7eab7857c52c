"""The weight's gradient as the Mosaic GPU kernels sum it, on the CPU: interpreted, and lowered for CUDA."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_mosaic import (
    HIDDEN,
    INTERPRETER,
    PADDED,
    SHIFT,
    SPLIT,
    TOKENS,
    Small,
    at,
    compile_only,
    of,
    reference_to,
    relative,
)

from numbers_kept import assert_rounds
from onchip.kernels.mosaic.product import MosaicConfig
from onchip.vocab.mosaic import products
from onchip.vocab.mosaic.bits import HALF_A_PLACE, join, split
from onchip.vocab.mosaic.blocks import KeptBlocks
from onchip.vocab.mosaic.sums import MosaicSum

ADDING = MosaicConfig(stages=2, group=2)
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("vocab_major", "tile_n", "dtype", "bound"),
    [
        pytest.param(True, 192, jnp.bfloat16, 2**-13, marks=SLOW),
        pytest.param(True, 256, jnp.bfloat16, 2**-13, marks=SLOW),
        pytest.param(False, 256, jnp.bfloat16, 2**-13, marks=SLOW),
        pytest.param(True, 192, jnp.float16, 2**-17, marks=SLOW),
        pytest.param(False, 256, jnp.float16, 2**-17, marks=SLOW),
    ],
)
def test_sums(vocab_major, tile_n, dtype, bound):
    """Of two chunks of tokens, in a matrix of no whole tiles: twice rounded to 12 binary digits, or 16.  NaN stays."""
    s, config = Small(vocab_major, vocab=448, dtype=dtype), replace(ADDING, tile_n=tile_n)
    values = np.zeros((TOKENS, PADDED))
    values[: s.n] = s.exponentials / s.exponentials.max()
    in_scratch = s.matrix(values, (PADDED, TOKENS), 0)
    rows = s.rows.at[0, 3].set(jnp.nan)

    @jax.jit
    def run():
        total = MosaicSum(*(reference_to(jnp.full_like(x, jnp.nan)) for x in MosaicSum.empty(s.weight, config)))
        for scale in (1, 2):
            products.weight_product(
                total, rows * scale, s.count, vocab_major=vocab_major, first=at(0), chunks=of(PADDED), kept_tokens=0,
                in_scratch=in_scratch, begins=jnp.full(1, scale == 1), config=config, interpret=INTERPRETER,
            )  # fmt: skip
        return MosaicSum(*(jax.freeze(x) for x in total)).value(config)

    made = np.asarray(run(), np.float64)
    made = made if vocab_major else made.T
    values = np.asarray(jnp.asarray(values[: s.n, : s.vocab], dtype), np.float64)
    expected = 3 * values.T @ s.rows64
    assert np.isnan(made[:, 3]).all()
    made, expected = np.delete(made, 3, 1), np.delete(expected, 3, 1)
    assert bound / 100 < relative(made, expected) < bound


@pytest.mark.parametrize(
    ("vocab_major", "dtype", "bound"),
    [
        pytest.param(True, jnp.bfloat16, 2**-13, marks=SLOW),
        pytest.param(False, jnp.bfloat16, 2**-13, marks=SLOW),
        pytest.param(True, jnp.float16, 2**-17, marks=SLOW),
        pytest.param(False, jnp.float16, 2**-17, marks=SLOW),
    ],
)
def test_sums_that_begin_in_the_memory_of_exponentials(vocab_major, dtype, bound):
    """Of the first 128 tokens' exponentials, with the others' in scratch: a chunk of entries after the other, of which
    each overwrites the previous one's.  Then the others' are added once more, by the same kernel: it doesn't touch
    those before, which are NaN.
    """
    s, kept = Small(vocab_major, vocab=448, dtype=dtype), 128
    values = np.zeros((TOKENS, PADDED))
    values[: s.n] = s.exponentials / s.exponentials.max()
    stash = s.matrix(values[:kept, :SPLIT], (s.vocab, HIDDEN), SHIFT)
    spare = s.matrix(values[:kept, SPLIT:], (PADDED - SPLIT, kept), 0)
    in_scratch = s.matrix(values[kept:], (PADDED, TOKENS - kept), 0)
    config = replace(ADDING, tile_n=192 if vocab_major else 128)
    common = {"vocab_major": vocab_major, "config": config, "interpret": INTERPRETER}

    @jax.jit
    def run():
        first, digits = MosaicSum.empty(s.weight, config)
        total = MosaicSum(reference_to(stash.astype(first.dtype)), reference_to(jnp.full_like(digits, jnp.nan)))

        def product(rows, spare, begin, **chunk):
            products.weight_product(
                total, rows, s.count, begin=at(begin), kept=KeptBlocks(None, spare, SHIFT, SPLIT), kept_tokens=kept,
                in_scratch=in_scratch, begins=jnp.full(1, begin == 0), **chunk, **common,
            )  # fmt: skip

        for number in range(SPLIT // SHIFT):
            product(s.rows, spare, 0, first=at(0), chunks=of(SHIFT), number=at(number))
        product(s.rows, spare, 0, first=at(SPLIT), chunks=of(PADDED - SPLIT), number=at(0))
        once = MosaicSum(*(x[...] for x in total)).value(config)
        rows, spare_of_others = s.rows.at[:kept].set(jnp.nan), jnp.full_like(spare, jnp.nan)
        for first, size in ((0, 256), (256, 512)):  # in chunks too
            product(rows, spare_of_others, kept, first=at(first), chunks=of(size), number=at(0))
        return once, MosaicSum(*(jax.freeze(x) for x in total)).value(config)

    values = np.asarray(jnp.asarray(values[: s.n, : s.vocab], dtype), np.float64)
    expected = values.T @ s.rows64
    for made, more in zip(run(), (0, values[kept:].T @ s.rows64[kept:]), strict=True):
        made = np.asarray(made if vocab_major else made.T, np.float64)
        assert bound / 100 < relative(made, expected + more) < bound


@pytest.mark.parametrize("number", [4, 8])
@pytest.mark.parametrize("half", [None, 0, HALF_A_PLACE])
def test_floats_of_few_digits(half, number):
    def rounded(x):
        return join(*split(jnp.asarray(x), jnp.bfloat16, number, half), number, nearest=half == HALF_A_PLACE)

    assert_rounds(lambda x: np.asarray(rounded(x)), 8 + number)


@pytest.mark.parametrize("number", [4, 8])
def test_the_first_bits_are_the_nearest(number):
    """Of what the digits stand for, with half of the last place rounded up."""
    x = np.random.default_rng(0).normal(size=10000).astype(np.float32)
    x[:3] = np.nan, np.inf, -np.inf
    first, _ = split(jnp.asarray(x), jnp.bfloat16, number, HALF_A_PLACE)
    value = join(*split(jnp.asarray(x), jnp.bfloat16, number), number)
    first, value = np.asarray(first, np.float32), np.asarray(value)
    assert np.isnan(first[0])
    np.testing.assert_array_equal(first[1:3], x[1:3])
    first, value = first[3:], value[3:]
    ties = value.view(np.uint32) & 0xFFFF == 0x8000
    nearest = np.asarray(jnp.asarray(value, jnp.bfloat16), np.float32)
    assert (first == nearest)[~ties].all()
    assert (np.abs(first) > np.abs(value))[ties].all()


@pytest.mark.parametrize(
    ("vocab_major", "hidden", "tile_n", "dtype"),
    [(True, 1152, 192, jnp.bfloat16), (True, 1024, 256, jnp.float16), (False, 1024, 256, jnp.bfloat16)],
)
def test_sums_lower(vocab_major, hidden, tile_n, dtype):
    config, vocab, tokens = replace(ADDING, stages=4, tile_n=tile_n), 2112, 512

    def run(rows, in_scratch, count):
        total = MosaicSum(
            *map(
                reference_to,
                MosaicSum.empty(jnp.zeros((vocab, hidden) if vocab_major else (hidden, vocab), dtype), config),
            )
        )
        products.weight_product(
            total, rows, count, vocab_major=vocab_major, first=at(0), chunks=of(2304), kept_tokens=0,
            in_scratch=in_scratch, begins=count > 5, config=config,
        )  # fmt: skip
        return jax.freeze(total.first), jax.freeze(total.digits)

    scratch = (2304, tokens) if vocab_major else (tokens, 2304)
    compile_only(run, ((tokens, hidden), dtype), (scratch, dtype), ((1,), jnp.int32))
