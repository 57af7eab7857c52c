"""What the Mosaic kernels of linear_cross_entropy share: where exponentials are kept, and common parts of epilogues.

Exponentials are kept in memory of the shape of `weight`, so that they can live in the gradient that will replace them.
Under a [V, H] weight that is 64 x 64 blocks: the block of tokens from t on and vocabulary entries from v on is at row v
and column t, with tokens for rows inside.  Under an [H, V] one it is a [tokens, vocab] matrix.  Both have room for H
tokens.  Exponentials of vocabulary entry v are kept `shift` entries further on, as far as there is room, and from entry
`split` on in a spare matrix: so weight's gradient of a chunk of up to `shift` entries overwrites none that is still to
be read.

Exponentials of more tokens than H are kept in another matrix in scratch, laid out alike.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from onchip.kernels.mosaic.product import BOX, MosaicConfig, Refs, Step, load_block
from onchip.kernels.mosaic.registers import Registers

LOG2E = 1.4426950408889634
# Where every logit so far is -inf, the maximum is this: finite, even times a scale, so that no difference is NaN.
LOWEST = -1.0e30
# Logits up to so much above a token's shift are stored relative to it.
REACH = 60.0
# What stands for the label of a position that has none, where labels are sorted.
NO_LABEL = 2**31 - 1


@dataclass(frozen=True)
class LogitBuffer:
    """Where exponentials are kept, in vocabulary entries; both are multiples of all tiles along the vocabulary."""

    shift: int
    split: int


def vocab_of(weight: Any, vocab_major: bool) -> int:
    size: int = weight.shape[0 if vocab_major else 1]
    return size


def tanh(x: Any) -> Any:
    """To a relative error of 2.4e-7 in float32; onchip.kernels.triton.maths says how."""
    q = x * x
    series = x + x * q * (-0.33331882 + q * (0.13277629 + q * -0.047794219))
    return jnp.where(q < 0.16, series, 1 - 2 / (jnp.exp2(x * (2 * LOG2E)) + 1))


def logits_copies(c: MosaicConfig, vocab_major: bool) -> Callable[..., None]:
    """Copies of the product of `rows` [T, H] and `weight`, from the vocabulary entry in `first` on if there is one."""

    def copies(refs: Refs, s: Step, a: Any, b: Any, barrier: Any) -> None:
        h = s.k * c.tile_k
        v = s.j * c.tile_n + (refs["first"][0] if "first" in refs else 0)
        load_block(refs["rows"], s.i * c.tile_m, c.tile_m, h, c.tile_k, a, barrier)
        if vocab_major:
            load_block(refs["weight"], v, c.tile_n, h, c.tile_k, b, barrier)
        else:
            load_block(refs["weight"], h, c.tile_k, v, c.tile_n, b, barrier)

    return copies


def unscaled_logits(refs: Refs, x: Any, v: Any, shape: Any, registers: Registers) -> Any:
    """The logits of entries from v on up to a factor of each token: x with z = x * factor."""
    if "bias" in refs:
        x = x + registers.spread(registers.load(refs["bias"].at[pl.ds(v, shape[1])], 0), shape, 0)
    if "inner_scale" in refs:
        x = tanh(x * refs["inner_scale"][0])
    return x


def send_exponentials(target: Any, t: Any, v: Any, vocab_major: bool) -> Callable[[Any, int, int], None]:
    """What copies blocks of a part to `target`, where tokens from t on and entries from v on are kept."""

    def send(block: Any, m: int, n: int) -> None:
        row, column = (v + n, t + m) if vocab_major else (t + m, v + n)
        plgpu.copy_smem_to_gmem(block, target.at[pl.ds(row, BOX), pl.ds(column, BOX)], commit_group=False)

    return send
