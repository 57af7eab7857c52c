"""The 'mosaic_gpu' backend: linear_cross_entropy for JAX on the Hopper kernels of kernels.py.

`forward` takes the softmax of the logits a tile at a time; where gradients are wanted it leaves the exponentials of up
to H tokens in memory that will be the weight's gradient.  `backward` makes hidden's gradient from them, then weight's
in place, chunk by chunk; logits of further tokens are recomputed.  The algorithm is that of the Triton backend,
derived in docs/internals/linear_cross_entropy.md; sizes, positions and what lies beyond the last token are explained in
kernels.py.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onchip.frontend.jax_call import vary_alike
from onchip.vocab.memory import Problem
from onchip.vocab.mosaic import memory as mosaic_spec
from onchip.vocab.mosaic import positions
from onchip.vocab.mosaic.bits import split
from onchip.vocab.mosaic.memory import (
    VOCAB_TILE,
    Group,
    MosaicPlan,
    groups,
    hidden_slices,
    split_at,
    up,
)
from onchip.vocab.mosaic.positions import (
    LOWEST,
    Operands,
    Partials,
    Positions,
    Upstream,
    after,
    bias_gradient,
    gradient_of_first,
    gradient_of_sums,
    gradient_with_last,
    rows_from,
    stored_tiles,
    unfused,
)
from onchip.vocab.xla.loss import Call
from onchip.vocab.xla.tiles import Projection, TokenStats, Wanted, cut, write_rows

Array = jax.Array
SEQUENTIAL = True
# A float16 exponential is kept times this: without it, whatever is below 6e-8 would be lost.
_FLOAT16_EXPONENTIAL = 32768.0

plan, select = mosaic_spec.plan, positions.select


def refusal(problem: Problem, platform: str, weight_layout: str, strategy: str) -> str | None:
    """Why the kernels can't serve the call, or None."""
    refused = mosaic_spec.refusal(problem, platform, weight_layout)
    if refused is not None:
        return refused
    capability = getattr(jax.devices()[0], "compute_capability", "none")
    return None if str(capability) == "9.0" else f"it is for compute capability 9.0 (Hopper); this is {capability}"


class Saved(NamedTuple):
    """What forward leaves for backward."""

    call: Call
    stats: TokenStats  # without what only the caller asked for
    base: Array | None = None  # [P] float32: what exponentials are relative to
    kept: Any = None  # `Kept` exponentials
    in_scratch: Array | None = None  # those of more tokens
    sums: Any = None  # `Sums`: gradients themselves, and nothing that is kept


class Sums(NamedTuple):
    """Gradients that are made in forward, chunk by chunk of tokens, in 20 or 24 bits; None is what isn't wanted."""

    hidden: Any  # by token, the first 16 bits and the next 8: of the softmax alone, without the tokens' factors
    weight: Any  # a `Sum` of the softmax alone, without the targets' terms, for an upstream gradient of 1
    even: Array | None = None  # [H or more]: what is to be taken from it at each entry
    inverse_grad_scale: Array | None = None  # [1]: what `weight` is multiplied by, for float16


def tiles_of(call: Call) -> dict[str, Any]:
    """How each kernel is cut."""
    from onchip.kernels.mosaic.product import MosaicConfig

    layer = call.source
    heuristic = mosaic_spec.heuristic_tiles(layer.hidden.shape[1], ("vh", "hv")[layer.vocab_axis])
    stored = stored_tiles(call, heuristic)
    return {kernel.removeprefix("mosaic_"): MosaicConfig.from_numbers(config) for kernel, config in stored.items()}


# ------------------------------------------------------------------------------------------------------------ forward


def forward(plan: MosaicPlan, wanted: Wanted, needs: Projection, call: Call) -> tuple[TokenStats, Saved | None]:
    """The statistics of each position, and what backward needs."""
    from onchip.vocab.mosaic import kernels  # Pallas takes a second to import

    if plan.by_tokens:
        return _forward_by_tokens(plan, wanted, needs, call)
    at = Positions.of(call)
    if plan.kept:
        return _keeping(plan, wanted, at, at.rows(after(call.tokens.source, call.tokens.number)))
    softmax_tiles: Any = partial(
        kernels.softmax_tiles, None, vocab_major=at.layer.vocab_axis == 0, wanted=wanted,
        config=tiles_of(call)["softmax_tiles"],
    )  # fmt: skip
    # Several parts are traced and lowered once: a kernel takes a second.
    launch = jax.jit(softmax_tiles) if len(at.parts(plan)) > 1 else softmax_tiles
    made: list[Any] = []
    for rows, part in at.in_parts(plan, made):
        made.append(at.stats(launch(at.operands(rows, part)), at.target_logit(rows, part), part))
    stats = at.joined(made)
    return stats, None if plan.strategy == "forward" else Saved(call, TokenStats(stats.lse, stats.log_prob))


def _keeping(plan: MosaicPlan, wanted: Wanted, at: Positions, rows: Array) -> tuple[TokenStats, Saved]:
    """As `forward`, with exponentials kept; of the hidden states of all positions."""
    from jax.experimental.pallas import run_state

    from onchip.vocab.mosaic import kernels, rebase
    from onchip.vocab.mosaic.blocks import REACH

    call, config = at.call, tiles_of(at.call)["softmax_tiles"]
    layer, padded, major = at.layer, len(at.label), at.layer.vocab_axis == 0
    softmax_tiles: Any = partial(kernels.softmax_tiles, vocab_major=major, wanted=wanted, config=config)
    target = at.target_logit(rows, slice(0, padded))
    # float16's exponents don't reach: there all tokens are rebased.
    far = rows.dtype == jnp.float16
    shift = jnp.where(at.there, jnp.full_like(target, -3e38) if far else target + 30.0, jnp.inf)
    scale = _exponential_scale(rows.dtype)
    # Neither hidden states nor partial results of several parts are copied.
    taken, rooms = [], _rooms(layer, plan)
    for i, (part, kept) in enumerate(rooms):
        operands = at.operands(rows, part)
        empty = Partials.empty(config.parts(layer.vocab), len(operands.label), wanted)
        keep = partial(
            softmax_tiles, operands=operands, shift=shift[part], exponential_scale=scale, first_row=part.start
        )
        kept, partials = run_state(keep)((kept, empty))
        taken.append((part, partials))
        rooms[i] = part, kept
    if plan.kept < padded:
        part = slice(plan.kept, padded)
        taken.append((part, softmax_tiles(None, at.operands(rows, part), first_row=part.start)))
    stats = at.joined([at.stats(partials, target[part], part) for part, partials in taken])
    top = jnp.where(at.there, jnp.concatenate([jnp.max(partials.maximum, 0) for _, partials in taken]), LOWEST)
    base = jnp.where(top - shift > REACH, stats.lse, shift)
    for i, (part, kept) in enumerate(rooms):
        move = partial(
            rebase.rebase_exponentials, maximum=taken[i][1].maximum, before=shift[part], after=base[part],
            count=at.number_in(part), vocab_major=major, vocab=layer.vocab, config=config,
        )  # fmt: skip
        rooms[i] = part, run_state(move)(kept)
    filled = [kept for _, kept in rooms]
    first = filled.pop(0) if plan.kept_in_gradient else None
    saved = unfused((base, first, filled[0].spare if filled else None))
    return stats, Saved(call, TokenStats(stats.lse, stats.log_prob), *saved)


def _forward_by_tokens(plan: MosaicPlan, wanted: Wanted, needs: Projection, call: Call) -> tuple[TokenStats, Saved]:
    """Chunk by chunk of positions, whose exponentials are used up at once.

    Some of the first chunk's may be in the memory of the weight's gradient: its part of the sum overwrites them.
    """
    from jax.experimental.pallas import run_state

    from onchip.vocab.mosaic import kernels
    from onchip.vocab.mosaic.sums import Sum

    at, tiles = Positions.of(call), tiles_of(call)
    layer, weight, major = at.layer, at.layer.weight, at.layer.vocab_axis == 0
    row_scale, _ = call.scaled_rows(jnp.ones(()))
    others = replace(plan, kept_in_gradient=0, kept_in_scratch=plan.token_chunk, chunk=up(layer.vocab, VOCAB_TILE))

    def chunk(start: Array | int, one: MosaicPlan, carry: tuple[TokenStats, Sums]) -> tuple[TokenStats, Sums]:
        size = one.kept
        mine = rows_from(call, start, size)
        here = Positions.of(mine)
        rows = here.rows(mine.tokens.source)
        found, kept = _keeping(one, wanted, here, rows)
        assert kept.base is not None
        in_gradient = kept.kept
        relative = jnp.where(here.there, jnp.exp(kept.base - found.lse), 0) / _exponential_scale(rows.dtype)
        stats, sums = carry
        if needs.hidden:
            if in_gradient is None:
                made = _hidden_in_slices(here, kept.in_scratch, relative)
            else:
                in_gradient, made = _hidden_of_kept(here, in_gradient, kept.in_scratch, relative)
            parts = split(made, rows.dtype)
            # No two are the same; beyond the last token there is none.
            token = jnp.where(here.there, mine.tokens.source, len(layer.hidden) + jnp.arange(size))
            written = [
                old.at[token].set(new.astype(old.dtype), mode="drop", unique_indices=True)
                for old, new in zip(sums.hidden, parts, strict=True)
            ]
            sums = sums._replace(hidden=written)
        if needs.weight:
            scale = cut(row_scale, start, size)
            factor = call.loss.gradient(found, scale, layer.vocab, mine.classes(mine.ids)).factor
            factor = relative * jnp.where(here.there, factor, 0)
            total, scaled = sums.weight, _scaled(rows, factor)
            if in_gradient is not None:
                total = total._replace(first=in_gradient.in_weight_grad)

            def add(total: Any) -> None:
                for group in groups(layer.vocab, one, recomputed=False):
                    product = partial(
                        kernels.weight_product, total, scaled, here.number, vocab_major=major,
                        first=jnp.full(1, group.first, jnp.int32), kept=in_gradient, in_spare=group.in_spare,
                        kept_tokens=one.kept_in_gradient, in_scratch=kept.in_scratch,
                        begins=jnp.reshape(start == 0, 1) if in_gradient is None else None,
                        config=tiles["weight_product"],
                    )  # fmt: skip
                    _of_chunks(group, product)

            sums = sums._replace(weight=run_state(add)(total))
        return write_rows(stats, found, start), sums

    of_weight = Sum.empty(weight, tiles["weight_product"]) if needs.weight else None
    of_hidden = [lax.empty(layer.hidden.shape, dtype) for dtype in (layer.hidden.dtype, jnp.uint8)]
    carry = TokenStats.empty(call.ids, wanted, layer.accumulator), Sums(of_hidden if needs.hidden else None, of_weight)
    carry = vary_alike(carry, at.number)
    begin, size = plan.first_chunk, plan.token_chunk
    if begin:
        carry = chunk(0, replace(plan, kept_in_scratch=begin - plan.kept_in_gradient), carry)
    number = (len(at.label) - begin) // size
    stats, sums = lax.fori_loop(0, number, lambda i, carry: chunk(begin + i * size, others, carry), carry)
    if sums.weight is not None:
        above = Upstream.of(at, stats, jnp.ones(())).apart(at, stats)
        sums = Sums(sums.hidden, sums.weight, _even_rows(at, above), above.inverse_grad_scale)
    return stats, Saved(call, TokenStats(stats.lse, stats.log_prob), sums=unfused(sums))


def _rooms(layer: Projection, plan: MosaicPlan) -> list[tuple[slice, Any]]:
    """Memory for exponentials: of the first positions in the weight's gradient, of the next in scratch."""
    from onchip.vocab.mosaic.blocks import Kept

    split, whole = split_at(layer.vocab, plan.chunk), up(layer.vocab, VOCAB_TILE)

    def scratch(entries: int, tokens: int) -> Array:
        shape = (entries, tokens) if layer.vocab_axis == 0 else (tokens, entries)
        empty: Array = lax.empty(shape, layer.weight.dtype)
        return empty

    first, rooms = slice(0, plan.kept_in_gradient), []
    if plan.kept_in_gradient:
        in_gradient = lax.empty(layer.weight.shape, layer.weight.dtype)
        rooms.append((first, Kept(in_gradient, scratch(whole - split, first.stop), plan.chunk, split)))
    if plan.kept_in_scratch:
        rooms.append((slice(first.stop, plan.kept), Kept(None, scratch(whole, plan.kept_in_scratch))))
    return rooms


def _exponential_scale(dtype: Any) -> float:
    return _FLOAT16_EXPONENTIAL if dtype == jnp.float16 else 1.0


# ----------------------------------------------------------------------------------------------------------- backward


def backward(plan: MosaicPlan, needs: Projection, saved: Saved, grad_loss: Array) -> Projection:
    """The gradients of hidden, weight and bias in their dtypes; what isn't needed is None."""
    if plan.by_tokens:
        return _backward_by_tokens(needs, saved, grad_loss)
    at = Positions.of(saved.call)
    above = Upstream.of(at, saved.stats, grad_loss)
    return gradients(plan, needs, saved, at, above.apart(at, saved.stats) if plan.kept else above)


def gradients(
    plan: MosaicPlan,
    needs: Projection,
    saved: Saved,
    at: Positions,
    above: Upstream,
    by_logits: Callable[[Operands, Array, int], Array] | None = None,
) -> Projection:
    """The gradients, of each position's factors.

    by_logits: of a chunk of the vocabulary, in the place of `gradient_tiles`: of the operands, the chunk's first entry
        [1] and its size.
    """
    from jax.experimental.pallas import run_state

    from onchip.vocab.mosaic import kernels, rebase

    tiles = tiles_of(saved.call)
    exponentials, in_scratch = unfused((saved.kept, saved.in_scratch))
    layer, weight, source = at.layer, at.layer.weight, saved.call.tokens.source
    kept, padded, major = plan.kept, at.label.shape[0], layer.vocab_axis == 0
    recomputed_rows, tail = padded - kept, slice(kept, padded)

    out, grad_hidden = None, None
    row_factor = jnp.ones(padded, jnp.float32)
    if kept:
        assert saved.base is not None
        from_base = jnp.where(at.there, jnp.exp(saved.base - above.lse), 0)[:kept]
        relative = above.factor[:kept] * from_base / _exponential_scale(weight.dtype)
        row_factor = row_factor.at[:kept].set(relative)
    if kept and exponentials is None:  # all in scratch
        if needs.hidden:
            sums = _hidden_in_slices(at, in_scratch, relative)
            grad_hidden = gradient_of_first(at, above, sums, targets=True)
    elif kept:
        if needs.hidden:
            exponentials, sums = _hidden_of_kept(at, exponentials, in_scratch, relative)
            grad_hidden = gradient_of_first(at, above, sums, targets=True)
        out = exponentials.in_weight_grad
    if out is None and needs.weight:
        out = lax.empty(weight.shape, weight.dtype)

    # Only now: hidden's float32 gradient is gone.
    source = source if grad_hidden is None else after(source, grad_hidden)
    rows = at.rows(source)
    rows = _scaled(rows, row_factor) if kept else rows
    # Their factors are 1, so these are the hidden states; a part of `rows` would be a copy.
    rest = at.operands(rows, tail)
    # Where exponentials are kept, all targets' terms and label smoothing's are added apart.
    at_target, even, even_rows = above.at_target, above.even, None
    if kept:
        at_target, even, even_rows = jnp.zeros_like(at_target[tail]), None, _even_rows(at, above)

    def of_targets(rest: Operands, begin: Array, size: int) -> Array:
        made: Array = kernels.gradient_tiles(
            rest, above.lse[tail], above.factor[tail], at_target, even=even, first=begin, size=size,
            first_row=kept, vocab_major=major, config=tiles["gradient_tiles"],
        )  # fmt: skip
        return made

    def recompute(state: dict[str, Any], begin: Array, size: int) -> Array:
        recomputed = (by_logits or of_targets)(rest, begin, size)
        if needs.hidden:
            kernels.hidden_product(
                weight, rest.number, vocab_major=major, tokens=recomputed_rows, recomputed=recomputed, first=begin,
                add_to=state["sums"], second=state.get("second sums"), halves=plan.halves,
                config=tiles["hidden_product"],
            )  # fmt: skip
        if needs.bias:
            sums = _column_sums(recomputed, at.there[tail], major)
            state["bias"][...] = lax.dynamic_update_slice(state["bias"][...], sums, begin)
        return recomputed

    def walk_group(state: dict[str, Any], group: Group, number: Array) -> None:
        begin = group.first + number * group.size
        recomputed = recompute(state, begin, group.size) if recomputed_rows else None
        if not needs.weight:
            return
        product = partial(
            kernels.weight_product, state["out"], rows, at.number, vocab_major=major, first=begin,
            kept=exponentials, in_spare=group.in_spare, kept_tokens=plan.kept_in_gradient, in_scratch=in_scratch,
            recomputed=recomputed, even=even_rows, inverse_grad_scale=above.inverse_grad_scale,
            after=grad_hidden if kept else None, config=tiles["weight_product"],
        )  # fmt: skip
        _of_chunks(group, product)

    def walk(state: dict[str, Any]) -> None:
        for group in groups(layer.vocab, plan, recomputed=recomputed_rows > 0):
            _repeat(group.times, partial(walk_group, state, group))
        if kept:
            # Each vocabulary entry's tokens together: positions are in the order of their labels, with those that have
            # none behind.
            term, source = above.unscaled(above.at_target), saved.call.tokens.source
            rebase.add_targets(state["out"], layer.hidden, source, at.sorted_label, term, vocab_major=major)

    state: dict[str, Any] = {}
    if needs.weight:
        state["out"] = out
    if recomputed_rows and needs.hidden:
        names = ("sums", "second sums") if plan.halves else ("sums",)
        state |= dict.fromkeys(names, jnp.zeros((recomputed_rows, layer.hidden.shape[1]), jnp.float32))
    if needs.bias:
        state["bias"] = jnp.zeros(up(layer.vocab, VOCAB_TILE), jnp.float32)
    state = run_state(walk)(state)
    if "sums" in state:
        sums = sum(state[name] for name in names)
        if grad_hidden is None:
            grad_hidden = gradient_of_first(at, above, sums, targets=False)
        else:
            grad_hidden = gradient_with_last(grad_hidden, at, above, sums)
    if grad_hidden is not None and saved.call.shard is not None:
        grad_hidden = saved.call.shard.summed(grad_hidden)
    grad_bias = bias_gradient(state["bias"], at, above) if needs.bias else None
    grad_hidden, grad_weight, grad_bias = unfused((grad_hidden, state.get("out"), grad_bias))
    return Projection(grad_hidden, grad_weight, grad_bias, layer.vocab_axis)


def _hidden_in_slices(at: Positions, in_scratch: Any, scale: Array) -> Array:
    """Of exponentials that are all in scratch, times each position's `scale`: [those, H] float32."""
    from onchip.vocab.mosaic import kernels

    layer, tokens = at.layer, len(scale)
    slices = hidden_slices(tokens, layer.hidden.shape[1])
    made: Any = kernels.hidden_product(
        layer.weight, at.number, vocab_major=layer.vocab_axis == 0, tokens=tokens, recomputed=in_scratch, scale=scale,
        slices=slices, config=tiles_of(at.call)["hidden_product"],
    )  # fmt: skip
    return jnp.sum(made.reshape(slices, tokens, -1), 0)


def _hidden_of_kept(at: Positions, exponentials: Any, in_scratch: Array | None, scale: Array) -> tuple[Any, Array]:
    """As `_hidden_in_slices`, where the first positions' exponentials are in the memory of the weight's gradient: with
    `exponentials` as they are after it, so that nothing is written there before.
    """
    from jax.experimental.pallas import run_state

    from onchip.vocab.mosaic import kernels

    layer, tokens = at.layer, len(scale)

    def whole(state: Any) -> None:
        kernels.hidden_product(
            layer.weight, jnp.minimum(at.number, tokens), vocab_major=layer.vocab_axis == 0, tokens=tokens,
            kept=replace(exponentials, in_weight_grad=state[0]), in_scratch=in_scratch, scale=scale,
            add_to=state[1], halves=True, config=tiles_of(at.call)["hidden_product"],
        )  # fmt: skip

    zeros = jnp.zeros((tokens, layer.hidden.shape[1]), jnp.float32)
    out, sums = run_state(whole)((exponentials.in_weight_grad, zeros))
    return replace(exponentials, in_weight_grad=out), sums


def _backward_by_tokens(needs: Projection, saved: Saved, grad_loss: Array) -> Projection:
    """Of the sums that forward has made."""
    from jax.experimental.pallas import run_state

    from onchip.vocab.mosaic import rebase

    at, sums = Positions.of(saved.call), saved.sums
    above = Upstream.of(at, saved.stats, grad_loss).apart(at, saved.stats)
    grad_hidden = gradient_of_sums(at, above, *sums.hidden) if needs.hidden else None
    grad_weight = None
    if needs.weight:
        factor = grad_loss if sums.inverse_grad_scale is None else grad_loss * sums.inverse_grad_scale[0]
        axis, hidden, source = at.layer.vocab_axis, at.layer.hidden, saved.call.tokens.source
        even = 0 if sums.even is None else jnp.expand_dims(sums.even[: hidden.shape[1]], axis)
        total = sums.weight.value(tiles_of(saved.call)["weight_product"])
        grad_weight = unfused(((total - even) * factor).astype(at.layer.weight.dtype))
        term = above.unscaled(above.at_target)
        add = partial(
            rebase.add_targets, hidden=hidden, token=source, label=at.sorted_label, term=term, vocab_major=axis == 0
        )
        grad_weight = unfused(run_state(add)(grad_weight))
    return Projection(grad_hidden, grad_weight, None, at.layer.vocab_axis)


def _even_rows(at: Positions, above: Upstream) -> Array | None:
    """[H in whole tiles]: what label smoothing takes from each entry's row of the weight's gradient."""
    if above.even is None:
        return None
    rows = jnp.sum(at.rows(at.call.tokens.source).astype(jnp.float32) * above.even[:, None], 0)
    return jnp.pad(rows, (0, -len(rows) % VOCAB_TILE))


def _scaled(rows: Array, factor: Array) -> Array:
    return (rows.astype(jnp.float32) * factor[:, None]).astype(rows.dtype)


def _repeat(times: int, do: Callable[..., None]) -> None:
    """`do` with a `number` of 0, 1, ..., each as [1] int32."""
    if times == 1:
        do(number=jnp.zeros(1, jnp.int32))
    else:
        lax.fori_loop(0, times, lambda i, _: do(number=jnp.asarray(i, jnp.int32).reshape(1)), None)


def _of_chunks(group: Group, product: Callable[..., None]) -> None:
    """The product of each chunk of a group."""
    skip = 0
    for size, times in group.chunks:
        _repeat(times, partial(product, size=size, skip=skip))
        skip += size * times


def _column_sums(recomputed: Array, there: Array, major: bool) -> Array:
    """Sums over the tokens that are there of gradients of logits as `gradient_tiles` lays them out: [size] float32.

    Tiles past the last token were left unwritten.
    """
    if not major:
        return jnp.sum(jnp.where(there[:, None], recomputed, 0), 0, dtype=jnp.float32)
    # Blocks of 64 x 64, with tokens for rows inside.
    size, tokens = recomputed.shape
    blocks = recomputed.reshape(size // 64, 64, tokens // 64, 64)
    there = there.reshape(1, tokens // 64, 64, 1).swapaxes(1, 2)
    return jnp.sum(jnp.where(there, blocks, 0), (1, 2), dtype=jnp.float32).reshape(size)
