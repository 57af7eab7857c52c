"""Hopper kernels of linear_cross_entropy in Pallas Mosaic GPU that multiply exponentials, or gradients of logits, by
the weight or by hidden states, with their launchers.

The sizes, and what lies beyond the last token, are explained in kernels.py.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from onchip.kernels.mosaic.launch import Refs
from onchip.kernels.mosaic.order import ceil_div
from onchip.kernels.mosaic.product import (
    BOX,
    Addends,
    MosaicConfig,
    Part,
    Product,
    ProductStep,
    load_block,
    send_to,
)
from onchip.kernels.mosaic.program import persistent_product
from onchip.kernels.mosaic.registers import Registers
from onchip.vocab.mosaic.blocks import KeptBlocks, by_range, tokens_of, vocab_of
from onchip.vocab.mosaic.sums import MosaicSum, added, blocks_of, store_sum, word_columns


def weight_product(
    out: Any,  # reference to the weight's gradient [V, H], or [H, V], and to the exponentials kept in its memory; or a
    # `Sum` of references, which the product begins, with exponentials in the memory of both, or is added to
    rows: Array,  # [T, H]
    count: Array,  # [1] int32
    *,
    vocab_major: bool,
    begin: Array | None = None,  # [1] int32: the token to begin with, a multiple of tile_k; None: 0
    first: Array,  # [1] int32: vocabulary entry with which a group of chunks begins
    chunks: Array,  # [2] int32: entries of the group before the chunks alike, and of each, a multiple of the tile
    number: Array | None = None,  # [1] int32: how many of these are before the chunk
    kept: KeptBlocks | None = None,  # with `out` for the memory of the weight's gradient
    kept_tokens: int,  # tokens whose exponentials are kept there, a multiple of tile_k
    in_digits: KeptBlocks | None = None,  # those of the next, with the `Sum`'s digits for the memory of the gradient
    in_scratch: Array
    | None = None,  # exponentials of the next, of all of the vocabulary: [V', those or more], or turned
    recomputed: Array | None = None,  # the others' gradients of logits, of `gradient_tiles` for the group
    begins: Array | None = None,  # [1] bool: the product is added to that `Sum`, unless nothing of it is written yet;
    # some tokens' exponentials may be in its memory then
    half: Array | None = None,  # [1] int32: that of `split`, for the `Sum`
    even: Array | None = None,  # [H or more, in whole tiles] float32: what is taken from each entry's row before, and
    # of a `Sum` where it begins
    inverse_grad_scale: Array | None = None,  # [1] float32: what the product is multiplied by
    after: Array | None = None,  # what must have been computed before: it reads what this overwrites
    config: MosaicConfig,
    interpret: Any = None,
) -> None:
    """out[chunk] = exponentials.T @ rows over the tokens from `begin` on, each element rounded once, or with `begins`
    added.

    The kernel reads which chunk it has: one compiled kernel serves chunks of all sizes, counted by a loop.  A chunk
    below `split` of `kept` has its exponentials in the memory of the gradient, one from there on in `spare`; none has
    both.  A chunk longer than `shift` would overwrite exponentials that it reads.
    """
    c = config
    tokens, hidden = rows.shape
    total = out if isinstance(out, MosaicSum) else None
    out = out if total is None else total.first
    vocab = vocab_of(out, vocab_major)
    digits_end = kept_tokens + (0 if in_digits is None else tokens_of(in_digits.spare, vocab_major))
    last_kept = digits_end + (0 if in_scratch is None else tokens_of(in_scratch, vocab_major))
    tile_v, tile_h = (c.tile_m, c.tile_n) if vocab_major else (c.tile_n, c.tile_m)
    shape = (c.part_m, c.part_n)
    registers = Registers(interpret)
    assert kept_tokens % c.tile_k == digits_end % c.tile_k == last_kept % c.tile_k == 0
    assert kept is not None or digits_end == 0

    def before(refs: Refs) -> Any:
        """Entries of the group before the chunk."""
        skipped = refs["chunks"][0]
        return skipped if number is None else skipped + refs["number"][0] * refs["chunks"][1]

    def of_digits(column: Any) -> Any:
        """Where those of a tile begin, of the column that it begins with."""
        return lax.div(column, jnp.int32(c.tile_n)) * width

    def tiles(refs: Refs) -> tuple[Any, Any, Any]:
        steps = ceil_div(refs["count"][0], c.tile_k)
        if begin is not None:
            steps = lax.max(steps - lax.div(refs["begin"][0], jnp.int32(c.tile_k)), jnp.int32(0))
        there = lax.min(vocab - refs["first"][0] - before(refs), refs["chunks"][1])
        tiles_v, tiles_h = jnp.where(steps > 0, ceil_div(there, tile_v), 0), -(-hidden // tile_h)
        return (tiles_v, tiles_h, steps) if vocab_major else (tiles_h, tiles_v, steps)

    def copies(refs: Refs, s: ProductStep, a: Any, b: Any, barrier: Any) -> None:
        t = s.k * c.tile_k + (0 if begin is None else refs["begin"][0])
        v, h = (s.i, s.j) if vocab_major else (s.j, s.i)
        v, h = v * tile_v, h * tile_h
        first = refs["first"][0] + before(refs)

        def exponentials(source: Any, v: Any, t: Any) -> None:
            if vocab_major:
                for box in range(tile_v // BOX):
                    load_block(source, v + box * BOX, BOX, t, BOX, a[box], barrier)
            else:
                load_block(source, t, c.tile_k, v, tile_v, b, barrier)

        def from_kept(where: KeptBlocks | None, memory: str, spare: str, t: Any) -> None:
            assert where is not None
            lax.cond(
                first < where.split,
                lambda: exponentials(refs[memory], first + where.shift + v, t),
                lambda: exponentials(refs[spare], first - where.split + v, t),
            )

        def from_scratch() -> None:
            exponentials(refs["in_scratch"], first + v, t - digits_end)

        def from_recomputed() -> None:
            exponentials(refs["recomputed"], before(refs) + v, t - last_kept)

        ends = (kept_tokens, digits_end, last_kept, tokens)
        places = (
            lambda: from_kept(kept, "out", "spare", t),
            lambda: from_kept(in_digits, "digits", "digits_spare", t - kept_tokens),
            from_scratch,
            from_recomputed,
        )
        by_range(t, tokens, list(zip(ends, places, strict=True)))
        load_block(refs["rows"], t, c.tile_k, h, tile_h, b if vocab_major else a, barrier)

    def epilogue(refs: Refs, p: Part, product: Any, store: Callable[..., None]) -> None:
        first = refs["first"][0] + before(refs)
        v = (p.m if vocab_major else p.n) + first

        row, column = (v, p.n) if vocab_major else (p.m, v)
        send = send_to(refs["out"], row, column, BOX)
        if total is not None:
            blocks = product if begins is not None else blocks_of(product)
            if even is not None:
                blocks = [x - of_even(refs, p, n * BOX, (BOX, BOX)) for n, x in enumerate(blocks)]
            rounding = None if half is None else refs["half"][0]
            store_sum(blocks, send, send_to(refs["digits"], row, of_digits(column), BOX), rows.dtype, rounding, store)
            return
        if even is not None:
            product = product - of_even(refs, p, 0, shape)
        if inverse_grad_scale is not None:
            product = product * refs["inverse_grad_scale"][0]
        store(lambda n, width: product[:, n : n + width].astype(out.dtype), send)

    def of_even(refs: Refs, p: Part, n: int, shape: tuple[int, int]) -> Any:
        """What `even` takes from the part's columns from n on."""
        h, over = (p.n + n, 0) if vocab_major else (p.m, 1)
        taken = registers.load(refs["even"].at[pl.ds(h, shape[1 - over])], over)
        taken = taken if begins is None else jnp.where(refs["begins"][0] != 0, taken, 0.0)
        return registers.spread(taken, shape, over)

    def copy_sum(refs: Refs, s: ProductStep, w: int, a: Any, b: Any, barrier: Any) -> None:
        """A warpgroup's part of a tile of the sum, in the places of the operands."""
        v = refs["first"][0] + before(refs)
        row, column = s.i * c.tile_m + w * BOX, s.j * c.tile_n
        row, column = (row + v, column) if vocab_major else (row, column + v)
        load_block(refs["out"], row, BOX, column, c.tile_n, b, barrier)
        if not vocab_major:
            # A copy fills all columns: where words have fewer, the next tile's come with them.
            load_block(refs["digits"], row, BOX, of_digits(column), c.tile_m, a, barrier)
            return
        # As many copies as a step has, of whole blocks of words or of halves of one.
        rows_at_once = BOX * width // c.tile_m
        for i in range(c.tile_m // BOX):
            block, r = divmod(i * rows_at_once, BOX)
            into = a[block].at[pl.ds(r, rows_at_once)]
            load_block(refs["digits"], row + r, rows_at_once, of_digits(column) + block * BOX, BOX, into, barrier)

    def add_sum(refs: Refs, product: Any, a: Any, b: Any) -> list[Any]:
        block = lambda i: a[i] if vocab_major else a.at[:, pl.ds(i * BOX, BOX)]  # noqa: E731
        return added(product, b, block, registers)

    addends, width = None, word_columns(rows.dtype)
    if total is not None:
        assert (c.tile_m, c.part_m, c.tile_k) == (2 * BOX, BOX, BOX)
        assert inverse_grad_scale is None
        addends = None if begins is None else Addends(copy_sum, add_sum, blocks_of, lambda refs: refs["begins"][0] == 0)
    inputs: dict[str, Any] = {"out": out, "rows": rows, "count": count, "first": first}
    inputs |= {"chunks": chunks, "number": number, "begin": begin}
    inputs |= {"spare": kept and kept.spare, "digits_spare": in_digits and in_digits.spare}
    inputs |= {"in_scratch": in_scratch, "recomputed": recomputed, "inverse_grad_scale": inverse_grad_scale}
    inputs |= {"even": even, "digits": None if total is None else total.digits}
    inputs |= {"begins": None if begins is None else begins.astype(jnp.int32), "half": half}
    p = Product(
        c,
        rows.dtype,
        "km boxes" if vocab_major else "km",
        "kn",
        tiles,
        copies,
        epilogue,
        stored=out.dtype,
        addends=addends,
    )
    persistent_product(p, inputs=inputs | {"after": after}, outputs={}, name="weight_product", interpret=interpret)


def hidden_product(
    weight: Array,  # [V, H], or [H, V]
    count: Array,  # [1] int32
    *,
    vocab_major: bool,
    tokens: int,  # T
    first_token: Array | None = None,  # [1] int32: the T tokens begin there; `count` and `scale` are of all then
    kept: KeptBlocks | None = None,  # of the first tokens, `in_weight_grad` a reference
    kept_tokens: int = 0,
    in_digits: KeptBlocks | None = None,  # those of the next
    in_scratch: Array | None = None,  # and of the last ones, of all of the vocabulary: [V', those], or [those, V']
    recomputed: Array | None = None,  # in place of all these: gradients of logits of `gradient_tiles`
    first: Array | None = None,  # [1] int32: vocabulary entry, of `recomputed`
    entries: Array | None = None,  # [1] int32: of these as many; None: all
    scale: Array | None = None,  # [T] float32: what rows of the product are multiplied by, or [all] with `first_token`
    add_to: Any = None,  # reference to [T, H] float32 that the product is added to
    second: Any = None,  # the same for second halves of tiles
    halves: bool = False,  # cut tiles; without `second`, what is added to are zeros
    slices: int = 1,  # of the vocabulary, without `add_to`: each has a product of its own
    config: MosaicConfig,
    interpret: Any = None,
) -> Array | None:
    """exponentials @ weight over all of the vocabulary, or a chunk of it.  Returns None with `add_to`; otherwise
    [slices * T, H] float32, one slice below the other, in which tiles past the last token are not written.

    With `halves` the tiles of the last wave are cut in two along the vocabulary if that fills the device better, as in
    the Triton kernel: two blocks then add to a tile of zeros, and 0 + a + b has the same bits in either order.  If sums
    aren't zeros, each half has its own.
    """
    c = config
    vocab = vocab_of(weight, vocab_major)
    hidden = weight.shape[1 if vocab_major else 0]
    dtype = weight.dtype
    shape = (c.part_m, c.part_n)
    registers = Registers(interpret)
    size = vocab if recomputed is None else recomputed.shape[0 if vocab_major else 1]
    digits_end = kept_tokens + (0 if in_digits is None else tokens_of(in_digits.spare, vocab_major))
    end = tokens
    if first_token is not None:
        end = digits_end + (0 if in_scratch is None else tokens_of(in_scratch, vocab_major))
    assert all(x % c.tile_m == 0 or x >= end for x in (kept_tokens, digits_end))
    adds = add_to is not None
    assert not adds or (interpret is None and slices == 1)  # the interpreter has no copies that add
    assert slices == 1 or tokens % c.tile_m == 0

    def tiles_and_steps(refs: Refs) -> tuple[Any, Any]:
        """Of the rows of one slice; past the last entry operands are 0."""
        most = refs["entries"][0] if "entries" in refs else jnp.int32(size)
        there = lax.min(vocab - refs["first"][0], most)
        number = refs["count"][0]
        if first_token is not None:
            number = lax.clamp(jnp.int32(0), number - refs["first_token"][0], jnp.int32(tokens))
        return ceil_div(number, c.tile_m), ceil_div(there, c.tile_k * slices)

    def token_of(refs: Refs, row: Any) -> Any:
        return row if first_token is None else refs["first_token"][0] + row

    def tiles(refs: Refs) -> tuple[Any, Any, Any]:
        tiles_m, steps = tiles_and_steps(refs)
        return tiles_m * slices, -(-hidden // c.tile_n), steps

    def copies(refs: Refs, s: ProductStep, a: Any, b: Any, barrier: Any) -> None:
        tiles_m, steps = tiles_and_steps(refs)
        v = (lax.div(s.i, tiles_m) * steps + s.k) * c.tile_k
        t, h = lax.rem(s.i, tiles_m) * c.tile_m, s.j * c.tile_n

        def exponentials(source: Any, v: Any, t: Any) -> None:
            if vocab_major:
                for box in range(c.tile_m // BOX):
                    load_block(source, v, BOX, t + box * BOX, BOX, a[box], barrier)
            else:
                load_block(source, t, c.tile_m, v, c.tile_k, a, barrier)

        def from_kept(where: KeptBlocks | None, memory: str, spare: str, t: Any) -> None:
            assert where is not None
            lax.cond(
                v < where.split,
                lambda: exponentials(refs[memory], v + where.shift, t),
                lambda: exponentials(refs[spare], v - where.split, t),
            )

        if recomputed is not None:
            exponentials(refs["recomputed"], v, t)
        else:
            t = token_of(refs, t)
            places = (
                (kept_tokens, lambda: from_kept(kept, "in_weight_grad", "spare", t)),
                (digits_end, lambda: from_kept(in_digits, "in_digits", "digits_spare", t - kept_tokens)),
                (end, lambda: exponentials(refs["in_scratch"], v, t - digits_end)),
            )
            by_range(t, end, places)
        first = refs["first"][0]
        if vocab_major:
            load_block(refs["weight"], first + v, c.tile_k, h, c.tile_n, b, barrier)
        else:
            load_block(refs["weight"], h, c.tile_n, first + v, c.tile_k, b, barrier)

    def epilogue(refs: Refs, p: Part, product: Any, store: Callable[..., None]) -> None:
        tiles_m, _ = tiles_and_steps(refs)
        of_slice = lax.div(p.i, tiles_m)
        row = p.m - of_slice * tiles_m * c.tile_m
        if scale is not None:
            factor = registers.load(refs["scale"].at[pl.ds(token_of(refs, row), c.part_m)], 1)
            product = product * registers.spread(factor, shape, 1)
        strip = lambda n, width: product[:, n : n + width]  # noqa: E731
        send = send_to(refs["out"], of_slice * tokens + row, p.n, BOX // 2, "add" if adds else None)
        if second is None:
            store(strip, send)
            return
        send_second = send_to(refs["second"], row, p.n, BOX // 2, "add")
        store(strip, lambda *block: lax.cond(p.step == 0, lambda: send(*block), lambda: send_second(*block)))

    first = jnp.zeros(1, jnp.int32) if first is None else first
    inputs: dict[str, Any] = {"weight": weight, "count": count, "first": first, "entries": entries}
    inputs["first_token"] = first_token
    for where, memory, spare in ((kept, "in_weight_grad", "spare"), (in_digits, "in_digits", "digits_spare")):
        inputs |= {} if where is None else {memory: where.in_weight_grad, spare: where.spare}
    inputs |= {"in_scratch": in_scratch, "recomputed": recomputed, "scale": scale, "second": second}
    inputs |= {"out": add_to} if adds else {}
    p = Product(
        c,
        dtype,
        "mk boxes" if vocab_major else "mk",
        "kn" if vocab_major else "nk",
        tiles,
        copies,
        epilogue,
        stored=jnp.float32,
        halves=halves,
    )
    made = persistent_product(
        p,
        inputs=inputs,
        outputs={} if adds else {"out": jax.ShapeDtypeStruct((slices * tokens, hidden), jnp.float32)},
        name="hidden_product",
        interpret=interpret,
    )
    return made.get("out")
