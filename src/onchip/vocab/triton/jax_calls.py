"""The Triton kernels of linear_cross_entropy as functions of JAX arrays, through jax-triton.

jax-triton gives a kernel its inputs in order, then its outputs, and what is a constant by name; an output can be an
input's memory.  So each kernel has an entry here that takes its arguments in that order.  Sizes are constants: of
numbers jax-triton doesn't say which are multiples of 16, without which no load is more than an element wide.  What may
be traced is in arrays: `numbers` as in `Launch`, and `chunk`, the first tile of the vocabulary and how many follow.
"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.vocab.triton import blocks as triton_blocks
from onchip.vocab.triton import gradients as triton_gradients
from onchip.vocab.triton import softmax as triton_softmax
from onchip.vocab.triton.blocks import BufferRows

Array = jax.Array
VOCAB_TILE: int = triton_blocks.VOCAB_TILE.value


# ------------------------------------------------------------------------------------------------------------ entries


@triton.jit
def enter_softmax_tiles(
    rows,
    weight,
    bias,
    label,
    factor,
    count,
    numbers,
    maximum,
    others,
    offset_sum,
    moment,
    argmax,
    T: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SMOOTHING: tl.constexpr,
    STATS: tl.constexpr,
    RAGGED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
):
    triton_softmax.softmax_tiles(
        rows, weight, bias if BIAS else None, label, factor, count, maximum, others, offset_sum if SMOOTHING else None,
        moment if STATS else None, argmax if STATS else None, None, None, None, 0, H, H, T, H, V, T, 0,
        tl.load(numbers) if SOFTCAP else None, 1.0, RAGGED, BLOCK_T, BLOCK_K, GROUP, PROGRAMS, PARTS, False,
    )  # fmt: skip


@triton.jit
def enter_gradient_tiles(
    rows,
    weight,
    bias,
    label,
    factor,
    lse,
    row_scale,
    even,
    at_target,
    count,
    numbers,
    chunk,
    exponentials,
    T: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SMOOTHING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
):
    tiles = tl.load(chunk + 1)
    triton_gradients.gradient_tiles(
        rows, weight, bias if BIAS else None, exponentials, count, label, factor, lse, row_scale,
        even if SMOOTHING else None, at_target, None, None, BufferRows(0, 0, 0, 0, 0, 0, T), 0, tl.load(chunk), tiles,
        tiles * T, H, H, T, H, V, tl.load(numbers) if SOFTCAP else None, BLOCK_T, BLOCK_K, GROUP, PROGRAMS, PARTS,
        False,
    )  # fmt: skip


@triton.jit
def enter_hidden_gradient(
    exponentials,
    weight,
    count,
    chunk,
    sums,
    out,
    T: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """`out` is the memory of `sums`."""
    tiles = tl.load(chunk + 1)
    triton_gradients.hidden_gradient(
        exponentials, weight, out, count, None, 0, T, T, 0, tl.load(chunk), tiles, tiles * T,
        BufferRows(0, 0, 0, 0, 0, 0, T), H, H, H, V, False, BLOCK_T, BLOCK_H, BLOCK_K, GROUP, PROGRAMS, PARTS, False,
    )  # fmt: skip


@triton.jit
def enter_weight_gradient(
    exponentials,
    rows,
    count,
    numbers,
    chunk,
    before,
    out,
    T: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    SHRINK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """`out` is the memory of `before`."""
    first = tl.load(chunk)
    tiles = tl.load(chunk + 1)
    triton_gradients.weight_gradient(
        exponentials, rows, out, count, numbers + 3 if SHRINK else None, first, first, tiles, tiles * T,
        BufferRows(0, 0, 0, 0, 0, 0, T), H, H, T, H, V, False, BLOCK_V, BLOCK_H, BLOCK_K, GROUP, PROGRAMS, PARTS, False,
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- calls


class Launch(NamedTuple):
    """What the calls of one problem have in common."""

    tiles: Mapping[str, Mapping[str, int]]
    programs: int
    weight: Array  # [V, H]
    bias: Array | None  # [V or more] float32
    number: Array  # [1] int32: how many positions there are
    numbers: Array  # [4] float32: inner scale, label smoothing, z-loss, what products are multiplied by
    softcap: bool
    smoothing: bool
    z_loss: bool
    shrink: bool

    def call(self, entry: Any, name: str, inputs: Any, outputs: Any, tokens: int, **more: Any) -> Any:
        """The kernel's outputs; `tokens` is the number of positions, a multiple of 128."""
        tile = self.tiles[name]
        vocab, hidden = self.weight.shape
        sizes = {"T": tokens, "H": hidden, "V": vocab}
        cut = {"BLOCK_K": tile["depth"], "GROUP": tile["group"], "PROGRAMS": self.programs, "PARTS": tile["parts"]}
        return triton_call(
            *inputs,
            kernel=entry,
            out_shape=[jax.ShapeDtypeStruct(*x) for x in outputs],
            grid=(self.programs,),
            num_warps=tile["warps"],
            num_stages=tile["stages"],
            **sizes,
            **cut,
            **more,
        )

    @property
    def logits(self) -> dict[str, bool]:
        """What logits are made with."""
        return {"BIAS": self.bias is not None, "SOFTCAP": self.softcap, "SMOOTHING": self.smoothing}


def triton_call(*arguments: Any, **options: Any) -> Any:
    """jax_triton.triton_call; the package is imported on first use, for it needs a GPU build of JAX."""
    folder = os.environ.get("TRITON_CACHE_DIR")
    import jax_triton

    # It sets the variable to "", which would spoil Triton's cache for whoever else uses it in the process.
    if folder is None:
        os.environ.pop("TRITON_CACHE_DIR", None)
    else:
        os.environ["TRITON_CACHE_DIR"] = folder
    return jax_triton.triton_call(*arguments, **options)


class Partials(NamedTuple):
    """Per tile and position, [tiles, P]; None: not wanted."""

    maximum: Array
    others: Array
    offset_sum: Array | None
    moment: Array | None
    argmax: Array | None


def softmax_tiles(launch: Launch, rows: Array, label: Array, factor: Array, *, stats: bool) -> Partials:
    """The softmax of each tile of the logits of `rows` [P, H]."""
    shape = (-(-launch.weight.shape[0] // VOCAB_TILE), len(rows))
    wanted = (True, True, launch.smoothing, stats, stats)
    dtypes = (*[jnp.float32] * 4, jnp.int32)
    made = launch.call(
        enter_softmax_tiles,
        "softmax_tiles",
        (rows, launch.weight, _pointer(launch), label, factor, launch.number, launch.numbers),
        # What isn't wanted is one number that nobody writes.
        [(shape if want else (1,), dtype) for want, dtype in zip(wanted, dtypes, strict=True)],
        len(rows),
        BLOCK_T=launch.tiles["softmax_tiles"]["rows"],
        STATS=stats,
        RAGGED=launch.weight.shape[0] % VOCAB_TILE > 0,
        **launch.logits,
    )
    found: list[Any] = [x if want else None for x, want in zip(made, wanted, strict=True)]
    return Partials(*found)


def gradient_tiles(
    launch: Launch,
    rows: Array,
    label: Array,
    factor: Array,
    lse: Array,
    log_prob: Array,
    row: Array,
    chunk: Array,
    tiles: int,
) -> Array:
    """The logits' gradient for a chunk of so many tiles of the vocabulary: [tiles * P, 256], tile by tile; of positions
    beyond the last token 0 up to a whole block, and then whatever was there.
    """
    _, smoothing, z_loss, _ = launch.numbers
    even = row * smoothing / launch.weight.shape[0]
    more = 2 * z_loss * lse
    entry = row * (jnp.expm1(log_prob) + more * jnp.exp(log_prob)) + row * smoothing - even
    if launch.softcap:
        x = jnp.clip((log_prob + lse) / factor, -1, 1)
        entry *= 1 - x * x
    (made,) = launch.call(
        enter_gradient_tiles,
        "gradient_tiles",
        (
            rows,
            launch.weight,
            _pointer(launch),
            label,
            factor,
            lse,
            row * (1 + more),
            even,
            entry,
            launch.number,
            launch.numbers,
            chunk,
        ),
        [((tiles * len(rows), VOCAB_TILE), rows.dtype)],
        len(rows),
        BLOCK_T=launch.tiles["gradient_tiles"]["rows"],
        **launch.logits,
    )
    return made  # type: ignore[no-any-return]


def hidden_gradient(launch: Launch, exponentials: Array, sums: Array, chunk: Array) -> Array:
    """`sums` [P, H] float32 with a chunk's product added, in place."""
    tile = launch.tiles["hidden_gradient"]
    (made,) = launch.call(
        enter_hidden_gradient,
        "hidden_gradient",
        (exponentials, launch.weight, launch.number, chunk, sums),
        [(sums.shape, sums.dtype)],
        len(sums),
        input_output_aliases={4: 0},
        BLOCK_T=tile["rows"],
        BLOCK_H=tile["columns"],
    )
    return made  # type: ignore[no-any-return]


def weight_gradient(launch: Launch, exponentials: Array, rows: Array, out: Array, chunk: Array) -> Array:
    """`out` [V, H] with a chunk's rows of the weight's gradient written, in place."""
    tile = launch.tiles["weight_gradient"]
    (made,) = launch.call(
        enter_weight_gradient,
        "weight_gradient",
        (exponentials, rows, launch.number, launch.numbers, chunk, out),
        [(out.shape, out.dtype)],
        len(rows),
        input_output_aliases={5: 0},
        SHRINK=launch.shrink,
        BLOCK_V=tile["rows"],
        BLOCK_H=tile["columns"],
    )
    return made  # type: ignore[no-any-return]


def _pointer(launch: Launch) -> Array:
    """The bias, or another array of floats that is never read."""
    return launch.numbers if launch.bias is None else launch.bias
