"""The Mosaic GPU kernels for rows of logits that exist already: `statistics` reads each once, `gradients` makes its
gradient from them.

A program is a warpgroup with one row.  It walks through the row's V logits a tile at a time, several strips of
`onchip.kernels.mosaic.strips`; the last tile begins early, so that it ends with the row, and takes no logit twice.
Each thread has a maximum and sums of its own, so that threads meet only at the end of a row, and what a larger maximum
makes of older sums costs little.

x is a logit, or with a softcap its tanh; z = x * k is the final logit, and k2 = k * log2(e).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from onchip.kernels.mosaic.launch import Refs, launch
from onchip.kernels.mosaic.maths import LOG2E, tanh
from onchip.kernels.mosaic.strips import THREADS, Strips, store_number
from onchip.vocab.xla.tiles import Wanted

# The largest number while every logit so far is -inf: finite, even times a scale, so that no difference is NaN.
LOWEST = -1.0e30
# The logarithm of what is as good as 0: finite, so that its product with 0 is 0.
NOTHING = -1.0e30
# Above this a probability is the largest of its row, and no other is.
LEADING = 0.75
NO_COLUMN = 2**31 - 1
_WORD = 16  # bytes that a thread moves at a time, at most
# Numbers of a tile that a thread has, at most, and whether tiles are read ahead.  Of logits of 16 bits the fastest that
# were tried on an H200.
_TILES = {
    "statistics": (32, False),
    "statistics with entropy": (32, True),
    "statistics with labels": (16, False),  # beside the logits
    "gradients": (16, True),
    "32 bits": (32, False),
    "32 bits with labels": (16, False),
}


class RowWalk(NamedTuple):
    """How a row is walked through."""

    unit: int
    """Elements that a thread reads side by side."""
    strips: int
    """Strips in a tile."""
    ahead: bool = False
    """Whether the next tile is on its way while one is worked on."""

    @staticmethod
    def of(kernel: str, vocab: int, dtype: Any, *, soft: bool = False, entropy: bool = False) -> "RowWalk":
        """Of "statistics" or "gradients", for rows of so many logits, which may have labels beside them."""
        size = jnp.dtype(dtype).itemsize
        kernel = kernel if size == 2 else "32 bits"
        further = f"{kernel} with labels" if soft else f"{kernel} with entropy" if entropy else kernel
        unit, (tile, ahead) = _WORD // size, _TILES.get(further, _TILES[kernel])
        while vocab % unit or vocab < THREADS * unit:
            unit //= 2
        return RowWalk(unit, max(1, min(tile // unit, vocab // (THREADS * unit))), ahead)


def statistics(
    logits: Array,  # [T, V] float32, bfloat16 or float16
    kept: Array,  # [T] int32: rows with 0 aren't read, and nothing is written for them
    factor: Array,  # [T] or [1] float32: k
    inner_scale: Array | None,  # [1] float32, with softcap: of the logits before tanh
    class_weight: Array | None,  # [V] float32: of `offset_sum`, and of labels; 0 for padding
    *,
    wanted: Wanted,
    labels: Array | None = None,  # [T, V] float32, bfloat16 or float16: soft ones
    end: Array | None = None,  # [1] int32: entries from this one on are padding
    tiles: RowWalk | None = None,
    interpret: Any = None,
) -> dict[str, Array]:
    """The softmax of each row, [T] each, as fields of `onchip.vocab.xla.tiles.Softmax`; and `best`, the largest x.

    With labels q also `cost`, sum(q (largest z - z)), and `mass`, sum(q), both weighed by class; with the entropy and
    weights of classes `plain_cost` and `plain_mass` too, which are not.
    """
    tokens, vocab = logits.shape
    t = tiles or RowWalk.of("statistics", vocab, logits.dtype, soft=labels is not None, entropy=wanted.entropy)
    strips = Strips(THREADS * t.unit, t.unit, interpret)
    kinds = {"best": True, "total": True, "below": True, "offset_sum": wanted.even, "moment": wanted.entropy}
    kinds |= {"argmax": wanted.argmax, "squares": wanted.sum_sq, "squares_below": wanted.sum_sq}
    costs = [] if labels is None else ["", "plain_"] if wanted.entropy and class_weight is not None else [""]
    kinds |= {f"{which}{name}": True for which in costs for name in ("cost", "mass")}
    names = [name for name, there in kinds.items() if there]
    outputs = {x: jax.ShapeDtypeStruct((tokens,), jnp.int32 if x == "argmax" else jnp.float32) for x in names}

    def of_row(refs: Refs, row: Any) -> None:
        k2 = refs["factor"][row if factor.size > 1 else 0] * LOG2E
        of, each, entries = _unscaled(refs, strips), strips.of_threads, refs.get("labels")
        reference = None
        if wanted.even:
            # Sums relative to a logit of the row keep their digits, if that is a number.
            first = refs["logits"][row, 0].astype(jnp.float32)
            first = first if inner_scale is None else tanh(first * refs["inner_scale"][0])
            reference = jnp.where((first > LOWEST) & (first < -LOWEST), first, 0.0)

        def weighed(x: Any, start: Any, i: int) -> Any:
            """A class that weighs nothing counts for nothing, where 0 * -inf would not be 0."""
            if class_weight is None:
                return x
            w = strips.load(refs["class_weight"].at[pl.ds(start + i * strips.size, strips.size)])
            return jnp.where(w > 0, x * w, 0.0)

        def found(start: Any, skip: int, raw: Sequence[Any]) -> tuple[list[Any], list[Callable[[Any, float], Any]]]:
            """x of a tile, -inf where an entry doesn't count, and what replaces others' numbers there."""
            inside = _inside(refs, strips, start, skip, len(raw))
            return [counted(of(x), -jnp.inf) for counted, x in zip(inside, raw, strict=True)], inside

        def absorb(start: Any, skip: int, raw: list[Any], state: dict[str, Any]) -> dict[str, Any]:
            """The state with a tile in it, whose first `skip` logits were in others."""
            logits, labels = (raw, raw) if entries is None else zip(*raw, strict=True)
            xs, inside = found(start, skip, logits)
            top, new = state["best"], {}
            if reference is not None:
                offsets = [
                    counted(weighed(of(x) - reference, start, i), 0.0)
                    for i, (counted, x) in enumerate(zip(inside, logits, strict=True))
                ]
                new["offset_sum"] = state["offset_sum"] + strips.sum(offsets)
            new["best"] = best = jnp.maximum(top, strips.most(xs))
            if wanted.argmax:
                new["argmax"] = jnp.where(best > top, start + each.full(0, jnp.int32), state["argmax"])
            drop = (top - best) * k2
            decay, at, further = jnp.exp2(drop), strips.spread(best), jnp.maximum(drop, NOTHING)
            new["total"] = state["total"] * decay
            new["below"] = jnp.where(drop < 0, state["total"], state["below"]) * decay
            if wanted.entropy:
                new["moment"] = decay * (state["moment"] + state["total"] * further)
            if wanted.sum_sq:
                new["squares"] = state["squares"] * (decay * decay)
                new["squares_below"] = jnp.where(drop < 0, state["squares"], state["squares_below"]) * (decay * decay)
            for which in costs:
                new[f"{which}mass"] = state[f"{which}mass"]
                new[f"{which}cost"] = state[f"{which}cost"] - state[f"{which}mass"] * further

            def add(name: str, x: Any) -> None:
                new[name] = new[name] + strips.sum([x])

            for i, x in enumerate(xs):
                d = (x - at) * k2
                e = jnp.exp2(d)
                others = jnp.where(e > LEADING, 0.0, e)
                add("total", e)
                add("below", others)
                if wanted.entropy:
                    # p log p is 0 at p = 0, and 0 * -inf is not.
                    add("moment", e * jnp.maximum(d, NOTHING))
                if wanted.sum_sq:
                    add("squares", e * e)
                    add("squares_below", others * others)
                for which in costs:
                    q = strips.floats(labels[i])
                    q = inside[i](weighed(q, start, i) if which == costs[0] else q, 0.0)
                    # What has no probability costs nothing, where 0 * -inf would not be 0.
                    add(f"{which}cost", jnp.where(q == 0, 0.0, q * -d))
                    add(f"{which}mass", q)
            return new

        state = {name: each.full({"best": LOWEST, "argmax": NO_COLUMN}.get(name, 0), outputs[name].dtype)
                 for name in names}  # fmt: skip
        sources = [refs["logits"]] if entries is None else [refs["logits"], entries]
        state = _walk(sources, row, vocab, t, strips, absorb, state)
        best = jnp.max(state["best"])
        drop = (state["best"] - best) * k2
        decay = jnp.exp2(drop)
        led, total = drop < 0, state["total"]
        sums = {"total": total * decay, "below": jnp.where(led, total, state["below"]) * decay}
        if wanted.even:
            sums["offset_sum"] = state["offset_sum"]
        if wanted.entropy:
            sums["moment"] = decay * (state["moment"] + total * jnp.maximum(drop, NOTHING))
        if wanted.sum_sq:
            sums["squares"] = state["squares"] * (decay * decay)
            sums["squares_below"] = jnp.where(led, state["squares"], state["squares_below"]) * (decay * decay)
        for which in costs:
            mass = state[f"{which}mass"]
            sums |= {f"{which}cost": state[f"{which}cost"] - mass * jnp.maximum(drop, NOTHING), f"{which}mass": mass}
        made = {"best": best} | {name: jnp.sum(x) for name, x in sums.items()}
        k = k2 * (1 / LOG2E)
        for name in {"moment", "cost", "plain_cost"} & made.keys():
            made[name] = made[name] * (1 / LOG2E)
        if reference is not None:
            share = float(vocab) if end is None else refs["end"][0].astype(jnp.float32)
            share = share if class_weight is None else refs["class_total"][0]
            made["offset_sum"] = (made["offset_sum"] + (reference - best) * share) * k
        if wanted.argmax:
            # The first tile that has it is read once more.
            tile = jnp.min(jnp.where(led, NO_COLUMN, state["argmax"]))
            start = jnp.minimum(tile, vocab - t.strips * strips.size)
            xs, _ = found(start, 0, _read([refs["logits"]], row, start, t.strips, strips))
            first = strips.full(NO_COLUMN, jnp.int32)
            for i, x in enumerate(xs):
                columns = start + i * strips.size + strips.places()
                first = jnp.minimum(first, jnp.where(x == best, columns, NO_COLUMN))
            made["argmax"] = jnp.where(tile == NO_COLUMN, NO_COLUMN, jnp.min(first))
        for name, value in made.items():
            store_number(refs[name].at[pl.ds(row, 1)], value, interpret)

    def body(refs: Refs) -> None:
        row = lax.axis_index("row")
        pl.when(refs["kept"][row] != 0)(lambda: of_row(refs, row))

    inputs = {"logits": logits, "kept": kept, "factor": factor, "inner_scale": inner_scale}
    inputs |= {"class_weight": class_weight, "labels": labels, "end": end}
    if wanted.even and class_weight is not None:
        inputs["class_total"] = jnp.sum(class_weight).reshape(1)
    return launch(
        body, inputs, outputs, (), grid={"row": tokens}, warpgroups=None, name="row_statistics", interpret=interpret
    )


class RowGradient(NamedTuple):
    """What the gradient of each row is made of, [T] float32; None for what isn't there."""

    factor: Array  # what p is multiplied by
    center: Array  # the mean logit where the entropy has an upstream gradient, else lse
    width: Array | None = None  # the entropy, if it has one
    entropy: Array | None = None  # and what p (z - mean) is multiplied by
    even: Array | None = None  # what each entry lacks, times its class's weight
    labels: Array | None = None  # and what it lacks of its label, times that weight
    at_id: Array | None = None  # the id's entry, but for the softcap's derivative


def gradients(
    logits: Array,  # as in `statistics`
    kept: Array,  # [T] int32: rows with 0 get zeros
    factor: Array,
    inner_scale: Array | None,
    class_weight: Array | None,  # [V] float32: of `gradient.even` and labels
    ids: Array | None,  # [T] int32, with `gradient.at_id`
    gradient: RowGradient,
    *,
    labels: Array | None = None,  # as in `statistics`, with `gradient.labels`
    end: Array | None = None,  # as in `statistics`; the gradient of padding is 0
    tiles: RowWalk | None = None,
    interpret: Any = None,
) -> Array:
    """The gradient of each row of logits, [T, V] in their dtype."""
    tokens, vocab = logits.shape
    t = tiles or RowWalk.of("gradients", vocab, logits.dtype, soft=labels is not None)
    strips = Strips(THREADS * t.unit, t.unit, interpret)
    vectors = {name: x for name, x in gradient._asdict().items() if x is not None}

    def write(refs: Refs, row: Any, start: Any, x: Any) -> None:
        strips.store(refs["out"].at[row, pl.ds(start, strips.size)], x.astype(logits.dtype))

    def clear(refs: Refs, row: Any) -> None:
        def tile(start: Any, skip: int, raw: list[Any], state: Any) -> Any:
            for i in range(len(raw)):
                write(refs, row, start + i * strips.size, strips.full(0.0))
            return state

        _walk([], row, vocab, t, strips, tile, jnp.int32(0))

    def of_row(refs: Refs, row: Any) -> None:
        k = refs["factor"][row if factor.size > 1 else 0]
        of, a = _unscaled(refs, strips), {name: refs[f"by {name}"][row] for name in vectors}
        y = None if ids is None else refs["ids"][row]
        of_rows = [refs["logits"]] if labels is None else [refs["logits"], refs["labels"]]

        def tile(start: Any, skip: int, raw: list[Any], state: Any) -> Any:
            inside = _inside(refs, strips, start, 0, len(raw))
            for i, each in enumerate(raw):
                each, q = (each, None) if labels is None else each
                x, first = of(each), start + i * strips.size
                offset = x * k - a["center"]
                if "entropy" in a:
                    g = jnp.exp2((offset - a["width"]) * LOG2E)
                    # exp of -128 is 0 in float32, and 0 * -inf is not.
                    g = g * (a["factor"] + a["entropy"] * jnp.maximum(offset, -128.0))
                else:
                    g = jnp.exp2(offset * LOG2E) * a["factor"]
                lacks = a.get("even")
                if labels is not None:
                    q = strips.floats(q) * a["labels"]
                    lacks = q if lacks is None else q + lacks
                if lacks is not None:
                    if class_weight is not None:
                        lacks = lacks * strips.load(refs["class_weight"].at[pl.ds(first, strips.size)])
                    g = g - lacks
                if y is not None:
                    g = jnp.where(strips.places() == y - first, a["at_id"], g)
                if inner_scale is not None:
                    g = g * (1 - x * x)
                write(refs, row, first, inside[i](g, 0.0))
            return state

        _walk(of_rows, row, vocab, t, strips, tile, jnp.int32(0))

    def body(refs: Refs) -> None:
        row = lax.axis_index("row")
        lax.cond(refs["kept"][row] != 0, partial(of_row, refs, row), partial(clear, refs, row))

    inputs: dict[str, Any] = {"logits": logits, "kept": kept, "factor": factor, "inner_scale": inner_scale}
    inputs |= {f"by {name}": x for name, x in vectors.items() if name != "at_id" or ids is not None}
    lacking = gradient.even is not None or labels is not None
    inputs |= {"ids": ids, "class_weight": class_weight if lacking else None, "labels": labels, "end": end}
    made: Array = launch(
        body, inputs, {"out": jax.ShapeDtypeStruct(logits.shape, logits.dtype)}, (), grid={"row": tokens},
        warpgroups=None, name="row_gradients", interpret=interpret,
    )["out"]  # fmt: skip
    return made


def _unscaled(refs: Mapping[str, Any], strips: Strips) -> Callable[[Any], Any]:
    """The function that makes x of a strip as it was read."""
    if "inner_scale" not in refs:
        return strips.floats
    inner = refs["inner_scale"][0]
    return lambda raw: tanh(strips.floats(raw) * inner)


def _inside(refs: Refs, strips: Strips, start: Any, skip: int, count: int) -> list[Callable[[Any, float], Any]]:
    """For each strip of a tile, the function that replaces the numbers of entries that don't count: the first `skip` of
    the tile, and padding."""

    def of(i: int) -> Callable[[Any, float], Any]:
        counts = [strips.places() >= skip] if skip and not i else []
        counts += [strips.places() < refs["end"][0] - (start + i * strips.size)] if "end" in refs else []

        def counted(x: Any, instead: float) -> Any:
            for each in counts:
                x = jnp.where(each, x, instead)
            return x

        return counted

    return [of(i) for i in range(count)]


def _read(sources: Sequence[Any], row: Any, start: Any, count: int, strips: Strips) -> list[Any]:
    """Strips of a row: as they are stored, or of several sources together; None without any."""

    def strip(i: int) -> Any:
        raw = [strips.load(x.at[row, pl.ds(start + i * strips.size, strips.size)]) for x in sources]
        return (raw[0] if len(raw) == 1 else tuple(raw)) if raw else None

    return [strip(i) for i in range(count)]


def _walk(
    sources: Sequence[Any],  # [T, V] each
    row: Any,
    vocab: int,
    t: RowWalk,
    strips: Strips,
    take: Callable[[Any, int, list[Any], Any], Any],
    state: Any,
) -> Any:
    """What take(first column, how many of it were in other tiles, strips as `_read` returns them, state) makes of
    `state`, tile by tile of a row."""
    size = t.strips * strips.size
    loops, rest = divmod(vocab, size)
    last = -(-rest // strips.size)

    def read(start: Any, count: int) -> list[Any]:
        return _read(sources, row, start, count, strips)

    if t.ahead and sources and loops > 1:

        def following(i: Any, carry: Any) -> Any:
            raw, state = carry
            # Past the last tile it is read again.
            more = read(jnp.minimum(i + 1, loops - 1) * size, t.strips)
            return more, take(i * size, 0, raw, state)

        _, state = lax.fori_loop(0, loops, following, (read(0, t.strips), state))
    elif loops == 1:
        state = take(0, 0, read(0, t.strips), state)
    elif loops:
        state = lax.fori_loop(0, loops, lambda i, x: take(i * size, 0, read(i * size, t.strips), x), state)
    if last:
        start = vocab - last * strips.size
        state = take(start, loops * size - start, read(start, last), state)
    return state
