"""What the tests of single Mosaic GPU kernels share: a small problem, the interpreter, and lowering for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.experimental.pallas import mosaic_gpu as plgpu

from onchip.kernels.mosaic.product import MosaicConfig
from onchip.vocab.mosaic.positions import Operands

CONFIG = MosaicConfig(tile_m=128, tile_n=128, stages=2, group=2)
TOKENS, COUNT, HIDDEN, SHIFT, SPLIT = 256, 150, 192, 128, 256
PADDED = 512  # vocabulary entries


class Small:
    """Tensors with `COUNT` tokens that count, and what is to come out, in float64."""

    def __init__(self, vocab_major, vocab, dtype=jnp.bfloat16):
        rng = np.random.default_rng(0)
        self.vocab_major, self.vocab, self.dtype = vocab_major, vocab, dtype
        n = self.n = COUNT

        def padded(x, fill):
            return np.concatenate([x, np.full((TOKENS - n, *x.shape[1:]), fill)])

        def narrow(x):
            return jnp.asarray(x, dtype)

        rows = narrow(padded(rng.normal(size=(n, HIDDEN)), 0))
        weight = narrow(rng.normal(size=(vocab, HIDDEN)) * 0.3)
        self.rows, self.weight = rows, weight if vocab_major else weight.T
        self.rows64, self.weight64 = (np.asarray(x, np.float64) for x in (rows[:n], weight))
        self.label = padded(rng.integers(0, vocab, n), -1).astype(np.int32)
        self.factor = padded(rng.uniform(0.5, 1.5, n), 1).astype(np.float32)
        self.bias = np.pad(rng.normal(size=vocab), (0, PADDED - vocab)).astype(np.float32)
        self.class_weight = np.pad(rng.permutation(np.linspace(0, 2, vocab)), (0, PADDED - vocab)).astype(np.float32)
        self.x = self.rows64 @ self.weight64.T
        z = self.x * self.factor[:n, None]
        self.z = np.pad(z, ((0, 0), (0, PADDED - vocab)), constant_values=-np.inf)
        target = z[np.arange(n), self.label[:n]]
        self.shift = padded(target + 30, np.inf).astype(np.float32)
        self.count = jnp.asarray([n], jnp.int32)
        self.operands = Operands(self.rows, self.weight, self.label, self.factor, self.count)
        self.exponentials = np.exp(self.z - self.shift[:n, None])
        self.scale = padded(rng.uniform(0.5, 1.5, n), 0).astype(np.float32)

    def matrix(self, values, shape, first):
        """`values` [tokens, entries] as they are kept, from entry `first` of a matrix of that shape on."""
        out = np.full(shape if self.vocab_major else shape[::-1], np.nan)
        for t in range(0, min(len(values), shape[1]), 64):
            for v in range(0, values.shape[1], 64):
                row, column = (first + v, t) if self.vocab_major else (t, first + v)
                out[row : row + 64, column : column + 64] = values[t : t + 64, v : v + 64]
        return jnp.asarray(out, self.dtype)

    def values(self, matrix, first, entries, tokens):
        """The reverse."""
        out = np.zeros((tokens, entries))
        for t in range(0, tokens, 64):
            for v in range(0, entries, 64):
                row, column = (first + v, t) if self.vocab_major else (t, first + v)
                out[t : t + 64, v : v + 64] = matrix[row : row + 64, column : column + 64]
        return out

    def kept(self, stash, spare):
        """Exponentials of the tokens that there is room for."""
        stashed = self.values(np.asarray(stash, np.float64), SHIFT, SPLIT, HIDDEN)
        spared = self.values(np.asarray(spare, np.float64), 0, PADDED - SPLIT, HIDDEN)
        return np.concatenate([stashed, spared], 1)


def relative(value, expected):
    return np.linalg.norm(np.asarray(value, np.float64) - expected) / np.linalg.norm(expected)


# What TMA does outside of a matrix: read zeros.
INTERPRETER = InterpretGPUParams(detect_races=True, out_of_bounds_reads="uninitialized", uninitialized_memory="zero")


def reference_to(x):
    return jax.new_ref(x, memory_space=plgpu.GMEM)  # the interpreter wants to know where


def compile_only(f, *shapes):
    """StableHLO of f for CUDA; shapes: (shape, dtype) of each argument."""
    arguments = [jax.ShapeDtypeStruct(*x) for x in shapes]
    return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def at(entry):
    return jnp.full(1, entry, jnp.int32)


def of(size, skip=0):
    """What tells a kernel which chunk it is."""
    return jnp.array([skip, size], jnp.int32)
