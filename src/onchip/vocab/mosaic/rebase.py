"""Hopper kernels of linear_cross_entropy in Pallas Mosaic GPU that multiply no matrices, with their launchers.

They work in place on what the kernels of kernels.py leave: kept exponentials, and the weight's gradient.  They
are bound by device memory, with one warpgroup per program and several programs per multiprocessor.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from onchip.kernels.mosaic.launch import Refs, launch, multiprocessors
from onchip.kernels.mosaic.maths import LOG2E
from onchip.kernels.mosaic.order import ceil_div, each
from onchip.kernels.mosaic.product import BOX, MosaicConfig, load_block, swizzled
from onchip.kernels.mosaic.ptx import store_boxes
from onchip.kernels.mosaic.registers import Registers
from onchip.kernels.mosaic.strips import THREADS, Strips
from onchip.vocab.mosaic.bits import join, to_bits
from onchip.vocab.mosaic.blocks import REACH, KeptBlocks, by_range, tokens_of, vocab_of
from onchip.vocab.mosaic.positions import NO_LABEL
from onchip.vocab.mosaic.sums import bits_of

_TOKENS = 128  # that are rebased together
_STRIP = 1024  # elements of a row that a program adds to at a time, at most
_AHEAD = 8  # rows of hidden that are on their way at a time
_SMALLEST = 2.0**-126  # of the normal numbers


def rebase_exponentials(
    rooms: Sequence[KeptBlocks],  # references, as in `softmax_tiles`
    maximum: Array,  # [parts, T] float32: of z, as in `softmax_tiles` with the same config
    before: Array,  # [T] float32: what the exponentials are relative to
    after: Array,  # [T] float32: what they are to be relative to
    count: Array,  # [1] int32
    *,
    vocab_major: bool,
    vocab: int,
    config: MosaicConfig,
    interpret: Any = None,
) -> None:
    """Make the kept exponentials of tokens with before != after relative to `after`.

    It costs next to nothing for 128 tokens of which none has moved.
    """
    (tokens,) = before.shape
    registers, shape = Registers(interpret), (BOX, BOX)
    assert config.part_n % BOX == 0
    # 0 and 0 for others: what is there past the last token may be anything.
    moved = (before != after) & (jnp.arange(tokens) < count[0])
    before, after = jnp.where(moved, before, 0), jnp.where(moved, after, 0)

    def of_tokens(refs: Refs, parts: Callable[[Any], list[Any]]) -> Callable[[Any], Callable[[Any, int], Any]]:
        old, new = parts(refs["before"]), parts(refs["after"])

        def of_entries(v: Any) -> Callable[[Any, int], Any]:
            top = parts(refs["maximum"].at[lax.div(v, jnp.int32(config.part_n))])

            def rebased(e: Any, b: int) -> Any:
                used = jnp.where(top[b] - old[b] > REACH, top[b], old[b])
                f = jnp.where(old[b] != new[b], jnp.exp2((used - new[b]) * LOG2E), 1.0)
                return e * registers.spread(f, shape, 1)

            return rebased

        return of_entries

    inputs = {"maximum": maximum, "before": before, "after": after}
    _change_kept(
        rooms, moved, of_tokens, inputs, vocab_major=vocab_major, vocab=vocab, name="rebase_exponentials",
        interpret=interpret,
    )  # fmt: skip


def gradient_with_entropy(
    rooms: Sequence[KeptBlocks],  # references, as of `softmax_tiles`, to what isn't multiplied by softcap's derivative
    factor: Array,  # [T] float32: of p
    entropy: Array,  # [T] float32: of p (z - mean)
    middle: Array,  # [T] float32: what the exponentials are relative to, less the mean
    count: Array,  # [1] int32
    *,
    vocab_major: bool,
    vocab: int,
    interpret: Any = None,
) -> None:
    """Turn e, which is p up to a factor for each token, into e (factor + entropy (z - mean)).

    z comes from the logarithm of what was kept: a relative error in that is an equally large absolute error in z, and
    moves the gradient about as far as its own rounding does.
    """
    registers, shape = Registers(interpret), (BOX, BOX)
    names = ("factor", "entropy", "middle")

    def of_tokens(refs: Refs, parts: Callable[[Any], list[Any]]) -> Callable[[Any], Callable[[Any, int], Any]]:
        vectors = [parts(refs[name]) for name in names]

        def made(e: Any, b: int) -> Any:
            a, c, m = (registers.spread(x[b], shape, 1) for x in vectors)
            # p log p is 0 at p = 0.  The GPU's logarithm of what is below the normal numbers is -inf, though e isn't 0.
            return jnp.where(e >= _SMALLEST, e * (a + c * (jnp.log(e) + m)), 0.0)

        return lambda _: made

    _change_kept(
        rooms, jnp.arange(len(factor)) < count[0], of_tokens, dict(zip(names, (factor, entropy, middle), strict=True)),
        vocab_major=vocab_major, vocab=vocab, name="gradient_with_entropy", interpret=interpret,
    )  # fmt: skip


def _change_kept(
    rooms: Sequence[KeptBlocks],
    which: Array,  # [T] bool: the tokens that change
    of_tokens: Callable[..., Callable[[Any], Callable[[Any, int], Any]]],
    inputs: Mapping[str, Any],
    *,
    vocab_major: bool,
    vocab: int,
    name: str,
    interpret: Any,
) -> None:
    """Replace what is kept for tokens, box by box, wherever some of 128 tokens change.

    of_tokens(refs, parts)(entry)(box, number) is the new value of one; `parts` loads those tokens' part of a vector.
    """
    (tokens,) = which.shape
    registers = Registers(interpret)
    assert tokens % _TOKENS == 0
    ends = list(itertools.accumulate(tokens_of(room.spare, vocab_major) for room in rooms))
    assert all(end % _TOKENS == 0 for end in ends[:-1])
    assert ends[-1] >= tokens
    any_changes = jnp.any(which.reshape(-1, _TOKENS), axis=1).astype(jnp.int32)
    programs = 4 * multiprocessors() if interpret is None else 2
    boxes = _TOKENS // BOX

    def body(refs: Refs, shared: Any, full: Any) -> None:
        program = lax.axis_index("program")
        mine = ceil_div(-(-vocab // BOX) - program, programs)

        def parts(t: Any, ref: Any) -> list[Any]:
            return [registers.load(ref.at[pl.ds(t + b * BOX, BOX)], 1) for b in range(boxes)]

        def change(t: Any) -> None:
            of_entries = of_tokens(refs, partial(parts, t))

            def entries(number: Any, _: None) -> None:
                v = (program + number * programs) * BOX

                def place(v: Any, t: Any) -> tuple[Any, Any]:
                    return (v, t) if vocab_major else (t, v)

                def load(b: Any, source: Any, v: Any, t: Any) -> None:
                    row, column = place(v, t)
                    load_block(source, row, BOX, column, BOX, shared.at[b], full)

                def send(b: Any, target: Any, v: Any, t: Any) -> None:
                    row, column = place(v, t)
                    into = target.at[pl.ds(row, BOX), pl.ds(column, BOX)]
                    plgpu.copy_smem_to_gmem(shared.at[b], into, commit_group=False)

                def in_room(f: Callable[..., None], b: Any, i: int, begin: int) -> None:
                    room, at = rooms[i], t + (b * BOX - begin)
                    in_spare = lambda: f(b, refs[f"spare {i}"], v - room.split, at)  # noqa: E731
                    if room.in_weight_grad is None:
                        in_spare()
                    else:
                        in_memory = lambda: f(b, refs[f"in_weight_grad {i}"], v + room.shift, at)  # noqa: E731
                        lax.cond(v < room.split, in_memory, in_spare)

                def where_kept(f: Callable[..., None]) -> None:
                    begins = [0, *ends]

                    def box(b: Any) -> None:
                        calls = [partial(in_room, f, b, i, begins[i]) for i in range(len(rooms))]
                        by_range(t, tokens, list(zip(ends, calls, strict=True)))

                    each(boxes, box)

                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                where_kept(load)
                new = of_entries(v)
                plgpu.barrier_wait(full)
                old = [registers.load_box(shared.at[b]) for b in range(boxes)]
                changed = [new(e.astype(jnp.float32), b).astype(e.dtype) for b, e in enumerate(old)]
                store_boxes(shared, changed, interpret)
                plgpu.commit_smem()
                where_kept(send)
                plgpu.commit_smem_to_gmem_group()

            lax.fori_loop(0, mine, entries, None)

        def tokens_from(block: Any, _: None) -> None:
            pl.when(refs["any_changes"][block] != 0)(lambda: change(block * _TOKENS))

        lax.fori_loop(0, tokens // _TOKENS, tokens_from, None)
        plgpu.wait_smem_to_gmem(0)

    scratch = [swizzled((boxes, BOX, BOX), rooms[0].spare.dtype), plgpu.Barrier(num_arrivals=boxes)]
    where: dict[str, Any] = {}
    for i, room in enumerate(rooms):
        where |= {f"in_weight_grad {i}": room.in_weight_grad, f"spare {i}": room.spare}
    given = {**where, **inputs, "any_changes": any_changes}
    launch(body, given, {}, scratch, grid={"program": programs}, warpgroups=1, name=name, interpret=interpret)


def scale_sum(
    out: Any,  # reference to the first 16 bits of a `Sum`, those of the nearest numbers; and to the products
    digits: Array,
    factor: Array,  # [] float32
    *,
    config: MosaicConfig,  # of the products that the sum is of
    interpret: Any = None,
) -> None:
    """Multiply a sum that was rounded in forward, and round it.  It costs next to nothing for a factor of 1."""
    rows, columns = out.shape
    registers, dtype = Registers(interpret), digits.dtype
    boxes, bits = config.tile_n // BOX, bits_of(dtype)
    assert boxes * bits <= 16, "the digits of a tile are in one block of words"
    tiles = -(-columns // config.tile_n)
    programs = 4 * multiprocessors() if interpret is None else 2

    def body(refs: Refs, shared: Any, full: Any) -> None:
        factor, program = refs["factor"][0], lax.axis_index("program")

        def tile(number: Any, _: None) -> None:
            at = program + number * programs
            row, j = lax.div(at, jnp.int32(tiles)) * BOX, lax.rem(at, jnp.int32(tiles))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            def load(i: Any) -> None:
                load_block(refs["out"], row, BOX, j * config.tile_n + i * BOX, BOX, shared.at[i], full)

            each(boxes, load)
            load_block(refs["digits"], row, BOX, j * BOX, BOX, shared.at[boxes], full)
            plgpu.barrier_wait(full)
            words = to_bits(registers.load_box(shared.at[boxes]))

            def scale(i: Any) -> None:
                of_box = (words >> jnp.asarray(i * bits, jnp.uint32)) & ((1 << bits) - 1)
                value = join(registers.load_box(shared.at[i]), of_box, bits, nearest=True) * factor
                store_boxes(shared.at[pl.ds(i, 1)], [value.astype(dtype)], interpret)

            each(boxes, scale)
            plgpu.commit_smem()

            def send(i: Any) -> None:
                into = refs["out"].at[pl.ds(row, BOX), pl.ds(j * config.tile_n + i * BOX, BOX)]
                plgpu.copy_smem_to_gmem(shared.at[i], into, commit_group=False)

            each(boxes, send)
            plgpu.commit_smem_to_gmem_group()

        mine = ceil_div(-(-rows // BOX) * tiles - program, programs)
        lax.fori_loop(0, jnp.where(factor == 1, 0, mine), tile, None)
        plgpu.wait_smem_to_gmem(0)

    scratch = [swizzled((boxes + 1, BOX, BOX), dtype), plgpu.Barrier(num_arrivals=boxes + 1)]
    inputs = {"out": out, "digits": digits, "factor": factor.reshape(1).astype(jnp.float32)}
    grid = {"program": programs}
    launch(body, inputs, {}, scratch, grid=grid, warpgroups=1, name="scale_sum", interpret=interpret)


def _strips(hidden: int) -> tuple[int, int]:
    """How a row is cut: the length of programs' shares, and of the strips in which they are handled.

    All shares have the same length.  A strip's length is a multiple of a warpgroup's threads, so a share's last strip
    may overlap with the one before.
    """

    def cost(share: int, strip: int) -> tuple[int, int, int]:
        length = -(-share // strip) * strip
        return max(length - _STRIP, 0), hidden // share * length, -strip

    shares = [x for x in range(THREADS, hidden + 1, 8) if hidden % x == 0]
    return min(((x, y) for x in shares for y in (128, 256, 512, 1024) if y <= x), key=lambda xy: cost(*xy))


def _sum_targets(hidden: Array, token: Array, label: Array, term: Array, out: Any, interpret: Any) -> Array | None:
    """Each label's sum, added to its row of `out`; without `out`, stored at the index of its first position, [T, H]."""
    (tokens,) = label.shape
    rows, size = hidden.shape
    share, strip = _strips(size)
    starts = [min(x, share - strip) for x in range(0, share, strip)]
    adds = out is not None
    dtype = jnp.dtype(out.dtype if adds else jnp.float32)
    of = Strips(strip, min(strip // THREADS, 16 // max(dtype.itemsize, hidden.dtype.itemsize)), interpret)
    programs = 8 * multiprocessors() if interpret is None else 2
    token = jnp.minimum(token, rows - 1)

    def body(refs: Refs) -> None:
        hidden, token, term, label, out = (refs[name] for name in ("hidden", "token", "term", "label", "out"))
        column = lax.axis_index("share") * share
        program = lax.axis_index("program")

        def strips(ref: Any, row: Any, *, constant: bool = True) -> list[Any]:
            found = [of.load(ref.at[row, pl.ds(column + x, strip)], constant=constant) for x in starts]
            return [of.floats(x) for x in found]

        def label_of(i: Any) -> Any:
            return jnp.where(i < tokens, label[lax.min(i, jnp.int32(tokens - 1))], jnp.int32(NO_LABEL))

        def segment(i: Any, y: Any) -> None:
            old = strips(out, y, constant=False) if adds else []
            first = token[i]
            total = [x * term[i] for x in strips(hidden, first)]

            def add(state: Any) -> Any:
                i, _, total = state
                # Past the end of the segment a row of it counts 0 times.
                mine = [label_of(i + x) == y for x in range(_AHEAD)]
                at = [jnp.where(x, i + n, i) for n, x in enumerate(mine)]
                found = [strips(hidden, token[x]) for x in at]
                for n, row in enumerate(found):
                    g = jnp.where(mine[n], term[at[n]], 0.0)
                    total = [a + b * g for a, b in zip(total, row, strict=True)]
                i = i + _AHEAD
                return i, jnp.where(label_of(i) == y, 0, 1), total

            end = jnp.where(label_of(i + 1) == y, jnp.int32(0), jnp.int32(1))
            _, _, total = lax.while_loop(lambda state: state[1] == 0, add, (i + 1, end, total))
            if adds:
                total = [a + b for a, b in zip(old, total, strict=True)]
            row = y if adds else i
            # All of `old` is read before the first of these, and where two strips overlap, they agree.
            for x, value in zip(starts, total, strict=True):
                out[row, pl.ds(column + x, strip)] = value.astype(dtype)

        def position(number: Any, _: None) -> None:
            i = program + number * programs
            y = label_of(i)
            begins = (i == 0) | (label_of(lax.max(i - 1, jnp.int32(0))) != y)
            pl.when(begins & (y >= 0) & (y != NO_LABEL))(lambda: segment(i, y))

        lax.fori_loop(0, ceil_div(tokens - program, programs), position, None)

    inputs = {"hidden": hidden, "token": token, "term": term, "label": label, "out": out}
    outputs = {} if adds else {"out": jax.ShapeDtypeStruct((tokens, size), jnp.float32)}
    grid = {"share": size // share, "program": programs}
    return launch(body, inputs, outputs, (), grid=grid, warpgroups=1, name="add_targets", interpret=interpret).get(
        "out"
    )


def add_targets(
    out: Any,  # reference to the weight's gradient [V, H], or [H, V]
    hidden: Array,  # [tokens, H], by token
    token: Array,  # [T] int32: each position's token; whatever is past the last one counts for nothing
    label: Array,  # [T] int32, in ascending order, NO_LABEL at the end
    term: Array,  # [T] float32: what the token's hidden state is multiplied by
    *,
    vocab_major: bool,
    interpret: Any = None,
) -> None:
    """Add the labels' terms to the weight's gradient: for each entry those of its tokens, in order and in float32.

    Under an [H, V] weight, columns are too narrow for a kernel to gain anything.  There, and with rows shorter than a
    warpgroup, the sums come from the kernel and XLA adds them.
    """
    vocab, size = vocab_of(out, vocab_major), hidden.shape[1]
    assert size % 8 == 0
    if vocab_major and size >= THREADS:
        _sum_targets(hidden, token, label, term, out, interpret)
        return
    padded = jnp.pad(hidden, ((0, 0), (0, max(0, THREADS - size))))
    sums = _sum_targets(padded, token, label, term, None, interpret)
    assert sums is not None
    sums = sums[:, :size]
    index = jnp.arange(label.size, dtype=jnp.int32)
    begins = (index == 0) | (label != jnp.roll(label, 1))
    begins &= (label >= 0) & (label < vocab)
    # What doesn't count goes to different places outside of the matrix: no two of these are the same.
    to = jnp.where(begins, label, vocab + index)
    old = out[...]
    at = old.at[to] if vocab_major else old.at[:, to]
    sums = sums if vocab_major else sums.T
    new = (at.get(mode="clip").astype(jnp.float32) + sums).astype(old.dtype)
    out[...] = at.set(new, mode="drop", unique_indices=True)
