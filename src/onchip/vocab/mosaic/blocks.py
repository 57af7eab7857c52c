"""What the Mosaic kernels of linear_cross_entropy share: where exponentials are kept, and common parts of epilogues.

Exponentials are kept in memory of the shape of `weight`, so that they can live in the gradient that will replace them.
Under a [V, H] weight that is 64 x 64 blocks: the block of tokens from t on and vocabulary entries from v on is at row v
and column t, with tokens for rows inside.  Under an [H, V] one it is a [tokens, vocab] matrix.  Both have room for H
tokens.  Exponentials of vocabulary entry v are kept `shift` entries further on, as far as there is room, and from entry
`split` on in a spare matrix: so weight's gradient of a chunk of up to `shift` entries overwrites none that is still to
be read.

Exponentials of more tokens than H are kept in another matrix in scratch, laid out alike.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from onchip.kernels.mosaic.launch import Refs
from onchip.kernels.mosaic.maths import tanh
from onchip.kernels.mosaic.product import BOX, MosaicConfig, Part, load_block
from onchip.kernels.mosaic.registers import Registers
from onchip.vocab.mosaic.positions import MosaicLabels

# Logits up to so much above a token's shift are stored relative to it.
REACH = 60.0


@partial(jax.tree_util.register_dataclass, data_fields=["in_weight_grad", "spare"], meta_fields=["shift", "split"])
@dataclass(frozen=True)
class KeptBlocks:
    """Exponentials of some tokens, or references to where they are kept.

    `shift` and `split` are multiples of all tiles along the vocabulary.
    """

    in_weight_grad: Any  # of the shape and dtype of weight; None: all are in `spare`, whole
    spare: Any  # [entries from `split` on, T], or [T, those]
    shift: int = 0
    split: int = 0


def vocab_of(weight: Any, vocab_major: bool) -> int:
    size: int = weight.shape[0 if vocab_major else 1]
    return size


def tokens_of(exponentials: Any, vocab_major: bool) -> int:
    """How many tokens a matrix has room for."""
    size: int = exponentials.shape[1 if vocab_major else 0]
    return size


def unscaled_logits(refs: Refs, x: Any, v: Any, shape: Any, registers: Registers) -> Any:
    """The logits of entries from v on, without a factor for each token: x with z = x * factor."""
    if "bias" in refs:
        x = x + registers.spread(registers.load(refs["bias"].at[pl.ds(v, shape[1])], 0), shape, 0)
    if "inner_scale" in refs:
        x = tanh(x * refs["inner_scale"][0])
    return x


def class_weights(refs: Refs, v: Any, shape: tuple[int, int], registers: Registers) -> Any:
    """The weights of the classes from v on, as a matrix."""
    return registers.spread(registers.load(refs["class_weight"].at[pl.ds(v, shape[1])], 0), shape, 0)


def beside_labels(labels: MosaicLabels | None, config: MosaicConfig) -> dict[str, Any]:
    """What `label_strips` needs beside a product's own memory: shared memory for two strips per warpgroup, and their
    barriers.
    """
    if labels is None:
        return {}
    assert config.part_m == BOX
    buffers: Mapping[str, Any] = {"label_strips": ((2, 2, BOX, BOX), labels.values.dtype)}
    return {"scratch": buffers, "barriers": {"label_barriers": 4}}


def label_strips(refs: Refs, p: Part, v: Any, config: MosaicConfig, registers: Registers) -> Callable[[int], Any]:
    """Returns a function that gives the labels of a part's columns [n, n + BOX) in float32, to be called for each n in
    order; the part begins with entry v.

    The labels come by way of shared memory; copies fill what is outside of the matrix with zeros.  The next strip is on
    its way while one is used.
    """

    def at(ref: Any, i: int) -> Any:
        return ref.at[p.warpgroup * 2 + i % 2]

    def copy(i: int) -> None:
        into, barrier = refs["label_strips"].at[p.warpgroup, i % 2], at(refs["label_barriers"], i)
        load_block(refs["labels"], refs["first_token"][0] + p.m, BOX, v + i * BOX, BOX, into, barrier)

    strips = config.part_n // BOX
    plgpu.commit_smem()  # all threads have read what is there of the tile before
    for i in range(min(2, strips)):
        copy(i)

    def strip(n: int) -> Any:
        i = n // BOX
        plgpu.barrier_wait(at(refs["label_barriers"], i))
        value = registers.load_rows(refs["label_strips"].at[p.warpgroup, i % 2]).astype(jnp.float32)
        if i + 2 < strips:
            plgpu.commit_smem()
            copy(i + 2)
        return value

    return strip


def send_exponentials(target: Any, t: Any, v: Any, vocab_major: bool) -> Callable[[Any, int, int], None]:
    """Returns a function that copies blocks of a part to `target`, where tokens from t on and entries from v on are
    kept.
    """

    def send(block: Any, m: int, n: int) -> None:
        row, column = (v + n, t + m) if vocab_major else (t + m, v + n)
        plgpu.copy_smem_to_gmem(block, target.at[pl.ds(row, BOX), pl.ds(column, BOX)], commit_group=False)

    return send


def by_range(t: Any, tokens: int, ranges: Sequence[tuple[int, Callable[[], None]]]) -> None:
    """Call the function for token t: that of the first (end, function) with t < end; empty ranges are left out."""
    used, begin = [], 0
    for end, function in ranges:
        if min(end, tokens) > begin:
            used.append((end, function))
            begin = end
    *others, (_, call) = used
    for end, function in reversed(others):
        call = partial(lax.cond, t < end, function, call)
    call()
