"""What the Mosaic kernels of linear_cross_entropy share: where exponentials are kept, and common parts of epilogues.

Exponentials are kept in memory of the shape of `weight`, so that they can live in the gradient that will replace them.
Under a [V, H] weight that is 64 x 64 blocks: the block of tokens from t on and vocabulary entries from v on is at row v
and column t, with tokens for rows inside.  Under an [H, V] one it is a [tokens, vocab] matrix.  Both have room for H
tokens.  Exponentials of vocabulary entry v are kept `shift` entries further on, as far as there is room, and from entry
`split` on in a spare matrix: so weight's gradient of a chunk of up to `shift` entries overwrites none that is still to
be read.

Exponentials of more tokens than H are kept in another matrix in scratch, laid out alike, the overflow.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from onchip.ops.linear_cross_entropy.mosaic_product import BOX, MosaicConfig, Step

LOG2E = 1.4426950408889634
# Where every logit so far is -inf, the maximum is this: finite, even times a scale, so that no difference is NaN.
LOWEST = -1.0e30
# Logits up to so much above a token's shift are stored relative to it.
REACH = 60.0
# What stands for the label of a position that has none, where labels are sorted.
NO_LABEL = 2**31 - 1
# Before jax 0.11 plgpu.load wants an index beside the reference; from then on it warns about one.
_LOAD_INDEX = ((),) if inspect.signature(plgpu.load).parameters["idx"].default is inspect.Parameter.empty else ()


class Registers:
    """Layouts of values in registers: rows' and columns' vectors beside a WGMMA accumulator.

    The CPU interpreter knows no layouts.
    """

    def __init__(self, interpret: Any) -> None:
        self.interpreted = interpret is not None

    def _cast(self, x: Any, layout: Any) -> Any:
        return x if self.interpreted else plgpu.layout_cast(x, layout)

    def load(self, ref: Any, over: int) -> Any:
        """A vector [rows] of device memory with a value per row (over=1) or per column (over=0)."""
        if self.interpreted:
            return ref[...]
        return plgpu.load(ref, *_LOAD_INDEX, layout=plgpu.Layout.WGMMA.reduce(over), optimized=False)

    def load_box(self, ref: Any) -> Any:
        """A matrix of shared memory, as in an accumulator."""
        if self.interpreted:
            return ref[...]
        return plgpu.load(ref, *_LOAD_INDEX, layout=plgpu.Layout.WGMMA)

    def load_strip(self, ref: Any, vector: int) -> Any:
        """A vector of device memory, of which each thread has so many elements in a row."""
        if self.interpreted:
            return ref[...]
        layout = plgpu.Layout.WG_STRIDED(ref.shape, vec_size=vector)
        return plgpu.load(ref, *_LOAD_INDEX, layout=layout, optimized=False)

    def spread(self, x: Any, shape: tuple[int, int], over: int) -> Any:
        """The vector of `load`, or of a reduction, as a matrix."""
        return self._cast(lax.broadcast_in_dim(x, shape, (1 - over,)), plgpu.Layout.WGMMA)

    def columns(self, shape: tuple[int, int]) -> Any:
        """Each element's column."""
        return self._cast(lax.broadcasted_iota(jnp.int32, shape, 1), plgpu.Layout.WGMMA)


@dataclass(frozen=True)
class Places:
    """Where exponentials are kept, in vocabulary entries; both are multiples of all tiles along the vocabulary."""

    shift: int
    split: int


def vocab_of(weight: Any, vocab_major: bool) -> int:
    size: int = weight.shape[0 if vocab_major else 1]
    return size


def load_block(source: Any, row: Any, rows: int, column: Any, columns: int, into: Any, barrier: Any) -> None:
    plgpu.copy_gmem_to_smem(source.at[pl.ds(row, rows), pl.ds(column, columns)], into, barrier)


def tanh(x: Any) -> Any:
    # The approximate instruction has 11 bits; this has 22, and its own limits at both ends.
    return 1 - 2 / (jnp.exp2(x * (2 * LOG2E)) + 1)


def logits_copies(c: MosaicConfig, vocab_major: bool, first: int | None = None) -> Callable[..., None]:
    """Copies of a product of the first reference [T, H] and the second, a weight.

    From the vocabulary entry on that is in the reference with the number `first`.
    """

    def copies(refs: Sequence[Any], s: Step, a: Any, b: Any, barrier: Any) -> None:
        h = s.k * c.tile_k
        v = s.j * c.tile_n + (0 if first is None else refs[first][0])
        load_block(refs[0], s.i * c.tile_m, c.tile_m, h, c.tile_k, a, barrier)
        if vocab_major:
            load_block(refs[1], v, c.tile_n, h, c.tile_k, b, barrier)
        else:
            load_block(refs[1], h, c.tile_k, v, c.tile_n, b, barrier)

    return copies


def unscaled_logits(x: Any, bias: Any, v: Any, inner_scale: Any, shape: Any, registers: Registers) -> Any:
    """The logits up to a factor of each token: x with z = x * factor.  `bias`, `inner_scale`: references, or None."""
    if bias is not None:
        x = x + registers.spread(registers.load(bias.at[pl.ds(v, shape[1])], 0), shape, 0)
    if inner_scale is not None:
        x = tanh(x * inner_scale[0])
    return x


def send_exponentials(target: Any, t: Any, v: Any, vocab_major: bool) -> Callable[[Any, int, int], None]:
    """What copies blocks of a part to `target`, where tokens from t on and entries from v on are kept."""

    def send(block: Any, m: int, n: int) -> None:
        row, column = (v + n, t + m) if vocab_major else (t + m, v + n)
        plgpu.copy_smem_to_gmem(block, target.at[pl.ds(row, BOX), pl.ds(column, BOX)], commit_group=False)

    return send


def send_to(
    target: Any, row: Any, column: Any, columns: int, reduction: Literal["add"] | None = None
) -> Callable[[Any, int, int], None]:
    """What copies blocks of a part that begins at (row, column) of target, or adds them to what is there."""

    def send(block: Any, m: int, n: int) -> None:
        into = target.at[pl.ds(row + m, BOX), pl.ds(column + n, columns)]
        plgpu.copy_smem_to_gmem(block, into, commit_group=False, reduction_op=reduction)

    return send
