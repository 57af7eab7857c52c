"""Hopper kernels of linear_cross_entropy in Pallas Mosaic GPU that make logits, with their launchers.

Sizes: T tokens (rounded up to a multiple of 128 by the caller), H hidden, V vocab.  Tokens that are not ignored come
first: `count` of them (`number` of `Operands`), known to the device alone.  Kernels work through these, in whole tiles,
and skip the rest; with a count of 0 they leave everything as it is.
What callers must put beyond the last token, up to the next multiple of 128: 0 in `rows`, `scale`, `at_target` and
`even`, +inf in `shift` and `lse`, 1 in `factor`; then exponentials and gradients there are exact zeros.

The algorithm is that of the Triton kernels: see `onchip.vocab.triton`.  The product that all kernels here are made of
is that of `onchip.kernels.mosaic`; the products of what these leave are in products.py, where exponentials are kept
is in blocks.py, the kernels without a product in rebase.py.

Matrix operands come through TMA, which fills up with zeros outside of a matrix and writes nothing there.  It needs rows
of a multiple of 16 bytes, and Mosaic a multiple of 64 columns and 8 rows.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from onchip.kernels.mosaic.launch import Refs
from onchip.kernels.mosaic.maths import LOG2E
from onchip.kernels.mosaic.order import ceil_div
from onchip.kernels.mosaic.product import (
    BOX,
    MosaicConfig,
    Part,
    Product,
    ProductStep,
    load_block,
)
from onchip.kernels.mosaic.program import persistent_product
from onchip.kernels.mosaic.registers import Registers
from onchip.vocab.mosaic.blocks import (
    REACH,
    KeptBlocks,
    beside_labels,
    by_range,
    class_weights,
    label_strips,
    send_exponentials,
    tokens_of,
    unscaled_logits,
    vocab_of,
)
from onchip.vocab.mosaic.positions import LOWEST, MosaicLabels, MosaicPartials, Operands
from onchip.vocab.xla.tiles import Wanted


def _logits_tiles(
    operands: Operands,
    entries: int,
    epilogue: Callable[..., None],
    *,
    vocab_major: bool,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    stores: bool,
    labels: MosaicLabels | None,
    name: str,
    config: MosaicConfig,
    interpret: Any,
    first_row: int = 0,
) -> dict[str, Array]:
    """A kernel over the tiles of the logits of so many entries, or of as many as are in `entries` if that is among
    `inputs`, beginning with the one in `first` if that is; and of the positions from the one in `first_position` on,
    if that is among them.

    The hidden state of position 0 is in row `first_row`.
    """
    c = config
    tokens, hidden = len(operands.label), operands.rows.shape[1]
    assert tokens % c.tile_m == 0

    def tiles(refs: Refs) -> tuple[Any, Any, Any]:
        number = refs["number"][0]
        if "first_position" in refs:
            number = lax.max(number - refs["first_position"][0], jnp.int32(0))
        tiles_n = ceil_div(refs["entries"][0], c.tile_n) if "entries" in refs else -(-entries // c.tile_n)
        return ceil_div(number, c.tile_m), tiles_n, -(-hidden // c.tile_k)

    def copies(refs: Refs, s: ProductStep, a: Any, b: Any, barrier: Any) -> None:
        h = s.k * c.tile_k
        v = s.j * c.tile_n + (refs["first"][0] if "first" in refs else 0)
        row = refs["first_position"][0] if "first_position" in refs else first_row
        load_block(refs["rows"], row + s.i * c.tile_m, c.tile_m, h, c.tile_k, a, barrier)
        if vocab_major:
            load_block(refs["weight"], v, c.tile_n, h, c.tile_k, b, barrier)
        else:
            load_block(refs["weight"], h, c.tile_k, v, c.tile_n, b, barrier)

    dtype = operands.rows.dtype
    soft = {} if labels is None else {"labels": labels.values, "first_token": labels.first}
    p = Product(
        c,
        dtype,
        "mk",
        "nk" if vocab_major else "kn",
        tiles,
        copies,
        epilogue,
        stored=dtype if stores else None,
        **beside_labels(labels, c),
    )
    return persistent_product(
        p, inputs={**operands._asdict(), **inputs, **soft}, outputs=outputs, name=name, interpret=interpret
    )


def softmax_tiles(
    into: tuple[Sequence[KeptBlocks], MosaicPartials | None]
    | None,  # references to write to: rooms, each for the positions after
    # those of the ones before, and partials; None: the partials are returned
    operands: Operands,
    *,
    vocab_major: bool,
    wanted: Wanted,
    shift: Array | None = None,  # [T] float32: exponentials relative to it are kept
    exponential_scale: float = 1.0,
    begin: Array | None = None,  # [1] int32: the position to begin with, a multiple of 128, as rooms are; None: 0
    labels: MosaicLabels | None = None,  # soft ones, in place of `operands.label`
    config: MosaicConfig,
    interpret: Any = None,
) -> MosaicPartials | None:
    """The softmax of each tile of logits, which live in registers alone.

    The exponential that would be kept at a label's own entry is 0: `add_targets` of rebase.py sees to those.  With
    softcap exponentials are kept times its derivative.  With soft labels nothing is kept.
    """
    c, (rooms, partials) = config, into or ((), None)
    dtype, tokens = operands.rows.dtype, len(operands.label)
    vocab = vocab_of(operands.weight, vocab_major)
    shape = (c.part_m, c.part_n)
    registers = Registers(interpret)
    assert labels is None or (not rooms and wanted.argmax)
    assert begin is None or partials is not None

    def epilogue(refs: Refs, p: Part, product: Any, store: Callable[..., None]) -> None:
        t = p.m if begin is None else refs["first_position"][0] + p.m
        over = pl.ds(t, c.part_m)
        y = registers.load(refs["label"].at[over], 1)
        soft_labels = None if labels is None else label_strips(refs, p, p.n, c, registers)
        k = registers.load(refs["factor"].at[over], 1)
        x = unscaled_logits(refs, product, p.n, shape, registers)
        columns = registers.columns(shape)
        if vocab % c.tile_n:
            x = jnp.where(columns < vocab - p.n, x, -jnp.inf)
        top = jnp.maximum(jnp.max(x, axis=1), LOWEST)
        k_2 = k * LOG2E
        here = p.j if c.split == "m" else p.j * 2 + p.warpgroup
        registers.store(refs["maximum"].at[here, over], top * k)
        if wanted.argmax:
            at_top = x == registers.spread(top, shape, 1)
            first = jnp.min(jnp.where(at_top, columns, c.part_n), axis=1)
            registers.store(refs["argmax"].at[here, over], p.n + first)
            if labels is not None:
                y = p.n + first
        sums: dict[str, Any] = {}

        def add(name: str, value: Any) -> None:
            sums[name] = sums[name] + value if name in sums else value

        def add_labels(q: Any, below: Any, n: int) -> None:
            def take(q: Any, cost: str, mass: str) -> None:
                # What has no probability costs nothing, where 0 * -inf would not be 0.
                add(cost, jnp.sum(jnp.where(q == 0, 0.0, q * -below), axis=1))
                add(mass, jnp.sum(q, axis=1))

            if operands.class_weight is None:
                take(q, "cost", "mass")
                return
            take(q * class_weights(refs, p.n + n, q.shape, registers), "cost", "mass")
            if wanted.entropy:
                take(q, "plain_cost", "plain_mass")

        def exponentials(n: int, width: int) -> Any:
            """exp(z - maximum) of some columns, and 0 for the label; they enter the sums."""
            narrow = (c.part_m, width)
            x_n, column = x[:, n : n + width], columns[:, n : n + width]
            e = jnp.exp2(x_n * registers.spread(k_2, narrow, 1) - registers.spread(top * k_2, narrow, 1))
            if wanted.even or wanted.entropy or soft_labels is not None:
                below = (x_n - registers.spread(top, narrow, 1)) * registers.spread(k, narrow, 1)
            if soft_labels is not None:
                add_labels(soft_labels(n), below, n)
            if wanted.even:
                if operands.class_weight is not None:
                    w = class_weights(refs, p.n + n, narrow, registers)
                    # A class that weighs nothing counts for nothing, where 0 * -inf would not be 0.
                    inside = jnp.where(w > 0, below * w, 0.0)
                else:
                    inside = jnp.where(column < vocab - p.n, below, 0.0) if vocab % c.tile_n else below
                add("offset_sum", jnp.sum(inside, axis=1))
            if wanted.entropy:
                # p log p is 0 at p = 0, and 0 * -inf is not.
                add("moment", jnp.sum(e * jnp.maximum(below, -1e30), axis=1))
            e = jnp.where(column == registers.spread(y - p.n, narrow, 1), 0.0, e)
            add("others", jnp.sum(e, axis=1))
            if wanted.sum_sq:
                add("squares", jnp.sum(e * e, axis=1))
            return e

        if not rooms:
            width = c.part_n if labels is None else BOX
            for n in range(0, c.part_n, width):
                exponentials(n, width)
        else:
            above = top * k - registers.load(refs["shift"].at[over], 1)
            f = jnp.where(above > REACH, 1.0, jnp.exp2(above * LOG2E)) * exponential_scale

            def kept_strip(n: int, width: int) -> Any:
                e = exponentials(n, width) * registers.spread(f, (c.part_m, width), 1)
                if operands.inner_scale is not None:
                    # Of an entry that isn't there x is -inf.
                    e = e * (1 - jnp.minimum(jnp.square(x[:, n : n + width]), 1.0))
                return e.astype(dtype)

            def sender(i: int, begin: int) -> Callable[[Any, int, int], None]:
                """What sends a block to the i-th room, of positions from `begin` on."""
                room, in_room = rooms[i], t - begin if begin else t
                in_spare = send_exponentials(refs[f"spare {i}"], in_room, p.n - room.split, vocab_major)
                if room.in_weight_grad is None:
                    return in_spare

                def send(block: Any, m: int, n: int) -> None:
                    memory = refs[f"in_weight_grad {i}"]
                    in_memory = send_exponentials(memory, in_room, p.n + room.shift, vocab_major)
                    lax.cond(p.n < room.split, lambda: in_memory(block, m, n), lambda: in_spare(block, m, n))

                return send

            senders = [sender(i, begin) for i, begin in enumerate([0, *ends[:-1]])]

            def send(*block: Any) -> None:
                by_range(t, tokens, [(end, partial(x, *block)) for end, x in zip(ends, senders, strict=True)])

            store(kept_strip, send)
        for name, value in sums.items():
            registers.store(refs[name].at[here, over], value)

    ends = list(itertools.accumulate(tokens_of(room.spare, vocab_major) for room in rooms))
    assert not rooms or ends[-1] >= tokens
    inputs: dict[str, Any] = {"shift": shift}
    for i, room in enumerate(rooms):
        inputs |= {f"in_weight_grad {i}": room.in_weight_grad, f"spare {i}": room.spare}
    soft = {"labels": labels is not None, "weighed": operands.class_weight is not None}
    shapes = jax.eval_shape(lambda: MosaicPartials.empty(c.parts(vocab), tokens, wanted, **soft))
    outputs = {name: x for name, x in shapes._asdict().items() if x is not None}
    if begin is not None:
        inputs |= {"first_position": begin} | {name: getattr(partials, name) for name in outputs}
        outputs = {}
    made = _logits_tiles(
        operands,
        vocab,
        epilogue,
        vocab_major=vocab_major,
        inputs=inputs,
        outputs=outputs,
        stores=bool(rooms),
        labels=labels,
        name="softmax_tiles",
        config=c,
        interpret=interpret,
    )
    if partials is None:
        return MosaicPartials(**made)
    for name, value in made.items():
        getattr(partials, name)[...] = value
    return None


def gradient_tiles(
    operands: Operands,
    lse: Array,  # [T] float32
    scale: Array,  # [T] float32: the row's factor times what p is multiplied by
    at_target: Array,  # [T] float32: the target's entry, less that of any other token with its probability
    *,
    vocab_major: bool,
    first: Array,  # [1] int32: vocabulary entry, so that all chunks are one compiled kernel
    size: int,  # of the largest chunk, a multiple of tile_n
    entries: Array | None = None,  # [1] int32: of this one, a multiple of tile_n too; None: all of `size`
    into: Any = None,  # reference to write to
    even: Array | None = None,  # [T] float32: label smoothing's part, taken, times the class's weight if there is one,
    # from every entry but the target's
    labels: MosaicLabels
    | None = None,  # soft ones: taken, times `by_labels` and the class's weight, from the others too
    by_labels: Array | None = None,  # [T] float32
    entropy: Array | None = None,  # [T] float32: of p (z - mean), which is added
    mean: Array | None = None,  # [T] float32, with it
    first_row: int = 0,  # of the first token's hidden state, in `operands`
    config: MosaicConfig,
    interpret: Any = None,
) -> Array | None:
    """Recompute the logits' gradient for a chunk of the vocabulary: [size, T] in blocks, or [T, size]; None with
    `into`.
    """
    c = config
    dtype, tokens = operands.rows.dtype, len(operands.label)
    vocab = vocab_of(operands.weight, vocab_major)
    shape = (c.part_m, c.part_n)
    registers = Registers(interpret)
    assert size % c.tile_n == 0

    def epilogue(refs: Refs, p: Part, product: Any, store: Callable[..., None]) -> None:
        over = pl.ds(p.m, c.part_m)
        of_tokens = (refs[name] for name in ("label", "factor", "lse", "scale", "at_target"))
        y, k, log_sum, s, g_y = (registers.load(ref.at[over], 1) for ref in of_tokens)
        v = refs["first"][0] + p.n
        x, columns = unscaled_logits(refs, product, v, shape, registers), registers.columns(shape)
        evenly = None if even is None else registers.load(refs["even"].at[over], 1)
        soft_labels = None if labels is None else label_strips(refs, p, v, c, registers)
        of_labels = None if labels is None else registers.load(refs["by_labels"].at[over], 1)
        b, middle = (None if entropy is None else registers.load(refs[x].at[over], 1) for x in ("entropy", "mean"))

        def gradient(n: int, width: int) -> Any:
            narrow = (c.part_m, width)
            x_n, column = x[:, n : n + width], columns[:, n : n + width]
            g = jnp.exp2(x_n * registers.spread(k * LOG2E, narrow, 1) - registers.spread(log_sum * LOG2E, narrow, 1))
            if b is None:
                g = g * registers.spread(s, narrow, 1)
            else:
                offset = x_n * registers.spread(k, narrow, 1) - registers.spread(middle, narrow, 1)
                # p log p is 0 at p = 0, and 0 * -inf is not.
                offset = jnp.maximum(offset, -1e30)
                g = g * (registers.spread(s, narrow, 1) + registers.spread(b, narrow, 1) * offset)
            if evenly is not None:
                part = registers.spread(evenly, narrow, 1)
                if operands.class_weight is not None:
                    part = part * class_weights(refs, v + n, narrow, registers)
                g = g - part
            if soft_labels is not None:
                part = soft_labels(n) * registers.spread(of_labels, narrow, 1)
                if operands.class_weight is not None:
                    part = part * class_weights(refs, v + n, narrow, registers)
                g = g - part
            g = jnp.where(column == registers.spread(y - v, narrow, 1), registers.spread(g_y, narrow, 1), g)
            if operands.inner_scale is not None:
                g = g * (1 - x_n * x_n)
            if vocab % c.tile_n:
                g = jnp.where(column < vocab - v, g, 0.0)
            return g.astype(dtype)

        store(gradient, send_exponentials(refs["out"], p.m, p.n, vocab_major))

    out = jax.ShapeDtypeStruct((size, tokens) if vocab_major else (tokens, size), dtype)
    made = _logits_tiles(
        operands,
        size,
        epilogue,
        vocab_major=vocab_major,
        inputs={"lse": lse, "scale": scale, "at_target": at_target, "first": first, "even": even, "entries": entries}
        | {"entropy": entropy, "mean": mean, "out": into}
        | ({} if labels is None else {"by_labels": by_labels}),
        outputs={"out": out} if into is None else {},
        stores=True,
        labels=labels,
        name="gradient_tiles",
        config=c,
        interpret=interpret,
        first_row=first_row,
    )
    return made.get("out")
