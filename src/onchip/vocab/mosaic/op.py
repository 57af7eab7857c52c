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
import numpy as np
from jax import lax

from onchip.core.sizes import up
from onchip.frontend.jax_call import vary_alike
from onchip.frontend.jax_inputs import hopper_refusal
from onchip.vocab.memory import Problem
from onchip.vocab.mosaic import labels, positions
from onchip.vocab.mosaic import memory as mosaic_spec
from onchip.vocab.mosaic.bits import split
from onchip.vocab.mosaic.head import (
    VOCAB_TILE,
    Group,
    MosaicPlan,
    groups,
    hidden_step,
)
from onchip.vocab.mosaic.positions import (
    LOWEST,
    MosaicPartials,
    Positions,
    Upstream,
    after,
    bias_gradient,
    gradient_of_first,
    gradient_of_sums,
    gradient_with_last,
    rows_from,
    unfused,
)
from onchip.vocab.mosaic.rooms import (
    Exponentials,
    add_again,
    exponential_scale,
    hidden_in_slices,
    hidden_of_kept,
    rooms_of,
    tiles_of,
    write_gradient,
)
from onchip.vocab.xla.loss import LabelSums, LossCall
from onchip.vocab.xla.tiles import Wanted, XlaProjection, XlaTokenGradient, XlaTokenStats, cut, cut_rows, write_rows

Array = jax.Array
SEQUENTIAL = True

plan, select = mosaic_spec.plan, positions.select


def refusal(problem: Problem, platform: str, weight_layout: str, strategy: str) -> str | None:
    """Why the kernels can't serve the call, or None."""
    return mosaic_spec.refusal(problem, platform, weight_layout) or hopper_refusal()


class MosaicSaved(NamedTuple):
    """What forward leaves for backward."""

    call: LossCall
    stats: XlaTokenStats  # without what only the caller asked for
    base: Array | None = None  # float32: what the exponentials that are kept are relative to
    kept: Any = None  # `Exponentials`
    sums: Any = None  # `MosaicSums`: gradients themselves, and nothing that is kept


Saved = MosaicSaved


class MosaicSums(NamedTuple):
    """Gradients made in forward, chunk by chunk of tokens, in 20 or 24 bits; None for what isn't wanted."""

    hidden: Any  # by token, the first 16 bits and the next 8: of the softmax alone, without the tokens' factors
    weight: Any  # a `Sum` without the targets' terms, for an upstream gradient of 1; its bfloat16 bits are the nearest
    inverse_grad_scale: Array | None = None  # [1]: what `weight` is multiplied by, for float16


# ------------------------------------------------------------------------------------------------------------ forward


def forward(
    plan: MosaicPlan, wanted: Wanted, needs: XlaProjection, call: LossCall
) -> tuple[XlaTokenStats, LabelSums | None, MosaicSaved | None]:
    """The statistics of each position, the sums for labels of every entry, and what backward needs."""
    from onchip.vocab.mosaic import kernels  # Pallas takes a second to import

    # The likeliest entry's place says whether it is the target, whose logit is computed apart.
    wanted = wanted._replace(argmax=wanted.argmax or wanted.entropy)
    if labels.several(call):
        stats, sums, call = labels.statistics(plan, wanted, call)
        return stats, sums, _recomputed(plan, call, stats)
    if plan.by_tokens:
        return _forward_by_tokens(plan, wanted, needs, call)
    at = Positions.of(call)
    if plan.kept:
        return _keeping(plan, wanted, at)
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
    return stats, None, _recomputed(plan, call, stats)


def _recomputed(plan: MosaicPlan, call: LossCall, stats: XlaTokenStats) -> MosaicSaved | None:
    return None if plan.strategy == "forward" else MosaicSaved(call, stats.known)


def _keeping(
    plan: MosaicPlan, wanted: Wanted, at: Positions, memory: Any = None, begin: Array | None = None
) -> tuple[XlaTokenStats, None, MosaicSaved]:
    """As `forward`, with exponentials kept in the plan's rooms: those of the positions from `begin` [1] on; what is
    returned for positions before that means nothing.

    memory: as in `rooms_of`.
    """
    from onchip.kernels.mosaic.launch import written
    from onchip.vocab.mosaic import kernels, rebase
    from onchip.vocab.mosaic.blocks import REACH

    call, tiles = at.call, tiles_of(at.call)
    config = tiles["softmax_tiles"]
    layer, padded, major = at.layer, len(at.label), at.layer.vocab_axis == 0
    kept = min(plan.kept, padded)
    dtype, scale = layer.weight.dtype, exponential_scale(layer.weight.dtype)
    static = {"vocab_major": major, "wanted": wanted, "config": config}
    part, there = slice(0, kept), at.there[:kept]
    rooms = rooms_of(layer, plan, tiles["weight_product"], memory)
    state: Any = vary_alike((rooms, MosaicPartials.empty(config.parts(layer.vocab), kept, wanted)), at.number)
    rows = at.rows(call.tokens.source[part])
    target = at.target_logit(rows, part)
    # float16's exponents don't reach: there all tokens are rebased.
    shift = jnp.where(there, jnp.full_like(target, -3e38) if dtype == jnp.float16 else target + 30.0, jnp.inf)
    rooms, partials = written(
        kernels.softmax_tiles, static | {"exponential_scale": scale}, state, at.operands(rows, part), shift=shift,
        begin=begin,
    )  # fmt: skip
    made = [at.stats(partials, target, part)]
    if kept < padded:
        others = slice(kept, padded)
        rows = at.rows(after(call.tokens.source[others], partials.maximum))
        more: Any = kernels.softmax_tiles(None, at.operands(rows, others), **static)
        made.append(at.stats(more, at.target_logit(rows, others), others))
    stats = at.joined(made)
    top = jnp.where(there, jnp.max(partials.maximum, 0), LOWEST)
    base = jnp.where(top - shift > REACH, stats.lse[part], shift)
    static = {"vocab_major": major, "vocab": layer.vocab, "config": config}
    number = at.number_in(part)
    rooms = written(rebase.rebase_exponentials, static, rooms, partials.maximum, shift, base, number)
    # Backward waits for all statistics: XLA would leave those that only the loss needs for later, and keep their tiles.
    saved = after((base, Exponentials.of(rooms, plan)), stats)
    return stats, None, MosaicSaved(call, stats.known, *saved)


def _forward_by_tokens(
    plan: MosaicPlan, wanted: Wanted, needs: XlaProjection, call: LossCall
) -> tuple[XlaTokenStats, None, MosaicSaved]:
    """As `forward`, chunk by chunk of positions, whose exponentials are used up at once.

    A longer first chunk has all of the plan's rooms, of which some are where the weight's sum will be: its part of that
    sum overwrites what is there.  The others have the room in scratch.  Both work on as many positions as there are
    rooms for, of which those before `begin` aren't the chunk's: then their kernels are the same, and compiled once.
    (One loop for all would need inner loops whose length only the device knows: XLA's wait for the host in each turn.)
    """
    from jax.experimental.pallas import run_state

    from onchip.kernels.mosaic.launch import in_place
    from onchip.vocab.mosaic import products
    from onchip.vocab.mosaic.sums import MosaicSum, half_a_place

    at, tiles = Positions.of(call), tiles_of(call)
    layer, weight, major = at.layer, at.layer.weight, at.layer.vocab_axis == 0
    row_scale = grad_scale = even_rows = None
    if needs.weight:  # so that the upstream gradient is one number
        row_scale, grad_scale = call.scaled_rows(jnp.ones(()))
        even = call.even(row_scale)
        even_rows = _even_rows(at, None if even is None else jnp.where(at.there, even, 0))
    longer, size, rooms = plan.first_chunk, plan.token_chunk, plan.kept
    at_once = replace(plan, kept_in_gradient=0, chunk=up(layer.vocab, VOCAB_TILE))
    # The longer chunk's tiles make it 2% faster, the others' make them 5% faster.
    others = len(layer.hidden) - longer
    config = tiles_of(call, size if 3 * others >= longer else longer)["weight_product"]

    def chunk(
        start: Array | int, begin: int, end: int, carry: tuple[XlaTokenStats, MosaicSums]
    ) -> tuple[XlaTokenStats, MosaicSums]:
        """Of the positions from `begin` to `end`, of those from `start` on."""
        stats, sums = carry
        is_first = jnp.asarray(start == 0) & (begin == 0)
        mine = rows_from(call, start, rooms)
        mine = mine._replace(tokens=mine.tokens._replace(number=jnp.minimum(mine.tokens.number, end)))
        # Without tokens, the first chunk's kernels write zeros, and the others' write nothing.
        here = Positions.of(mine, jnp.where(is_first, 1, 0))
        own = jnp.arange(rooms) >= begin
        here = here._replace(there=here.there & own) if begin else here
        memory, at_begin = (sums.weight, jnp.full(1, begin, jnp.int32)) if longer else (None, None)
        found, _, saved = _keeping(plan, wanted, here, memory, at_begin)
        if begin:
            before = cut_rows(stats, start, rooms)
            found = jax.tree.map(lambda x, y: jnp.where(own.reshape(-1, *(1,) * (x.ndim - 1)), x, y), found, before)
        kept, base = saved.kept, saved.base
        assert base is not None
        relative = jnp.where(here.there, jnp.exp(base - found.lse), 0) / exponential_scale(weight.dtype)
        if needs.hidden:
            kept, left = _hidden_of_chunk(here, plan, kept, relative, sums.hidden, slice(begin, end))
            sums = sums._replace(hidden=left)
        if needs.weight:
            assert row_scale is not None
            factor = mine.gradient(found, cut(row_scale, start, rooms)).factor
            factor = relative * jnp.where(here.there, factor, 0)
            # Only now: hidden's float32 gradient is gone.
            rows = _scaled(here.rows(after(mine.tokens.source, sums.hidden)), factor)
            total = sums.weight
            if kept.gradient is not None:
                digits = total.digits if kept.digits is None else kept.digits.in_weight_grad
                total = MosaicSum(kept.gradient.in_weight_grad, digits)
            beside = kept.lying((None, None))
            static = {"vocab_major": major, "kept_tokens": plan.kept_in_gradient, "config": config}

            def add(total: Any) -> None:
                for group in groups(layer.vocab, plan if longer and not begin else at_once, recomputed=False):
                    product = partial(
                        in_place, products.weight_product, static, total, rows, here.number, begin=at_begin,
                        first=jnp.full(1, group.first, jnp.int32), kept=beside.gradient, in_digits=beside.digits,
                        in_scratch=None if beside.scratch is None else beside.scratch.spare,
                        begins=is_first.reshape(1), even=even_rows,
                        half=half_a_place(at.number <= start + end, weight.dtype),
                    )  # fmt: skip
                    _of_chunks(group, product)

            sums = sums._replace(weight=run_state(add)(total))
        return write_rows(stats, found, start), sums

    of_weight = MosaicSum.empty(weight, tiles["weight_product"]) if needs.weight else None
    of_hidden = [lax.empty(layer.hidden.shape, dtype) for dtype in (layer.hidden.dtype, jnp.uint8)]
    carry = (
        XlaTokenStats.empty(call.ids, wanted, layer.accumulator),
        MosaicSums(of_hidden if needs.hidden else None, of_weight),
    )
    carry = vary_alike(carry, at.number)
    number, begin, start = -(-(len(layer.hidden) - longer) // size), 0, 0
    if longer:
        carry = chunk(0, 0, longer, carry)
        begin = rooms - plan.kept_in_scratch
        # XLA unrolls a loop of one chunk, and would make its exponentials while the first chunk's need their memory.
        start = after(jnp.int32(longer - begin), carry) if number == 1 else longer - begin
    each = lambda i, carry: chunk(start + i * size, begin, begin + size, carry)  # noqa: E731
    stats, sums = lax.fori_loop(0, number, each, carry)
    inverse = None if grad_scale is None else (1 / grad_scale).reshape(1)
    saved = unfused(sums._replace(inverse_grad_scale=inverse))
    return stats, None, MosaicSaved(call, stats.known, sums=saved)


def _hidden_of_chunk(
    at: Positions, plan: MosaicPlan, kept: Exponentials, scale: Array, left: list[Array], own: slice
) -> tuple[Exponentials, list[Array]]:
    """Write the hidden gradient of a chunk's `own` positions, times each one's `scale`, into what is left for backward,
    by token.

    kept: exponentials in the plan's rooms; returned as of `hidden_of_kept`.
    """
    hidden = at.layer.hidden

    def write(left: list[Array], token: Array, made: Array) -> list[Array]:
        return [
            old.at[token].set(new.astype(old.dtype), mode="drop", unique_indices=True)
            for old, new in zip(left, split(made, hidden.dtype), strict=True)
        ]

    step = 0 if kept.gradient is None else hidden_step(hidden.shape[1])
    there, source = (jnp.pad(x, (0, step)) for x in (at.there, at.call.tokens.source))
    # No two are the same; beyond the last token there is none.
    token = jnp.where(there, source, len(hidden) + jnp.arange(len(there)))
    if kept.gradient is None:
        return kept, write(left, token, hidden_in_slices(at, kept.scratch.spare, scale))

    def part(number: Array, state: Any) -> Any:
        memory, left = state
        first, mine = own.start + number * step, kept.lying(memory)
        memory, made = hidden_of_kept(at, mine, plan.kept_in_gradient, scale, first, step, left)
        return memory, write(left, lax.dynamic_slice_in_dim(token, first, step), made)

    parts = -(-(own.stop - own.start) // step)
    memory, left = lax.fori_loop(0, parts, part, vary_alike((kept.memory, left), at.number))
    return kept.lying(memory), left


# ----------------------------------------------------------------------------------------------------------- backward


def backward(plan: MosaicPlan, needs: XlaProjection, saved: MosaicSaved, grad_loss: Array) -> XlaProjection:
    """The gradients of a loss."""
    call = saved.call
    gradient = call.gradient(saved.stats, call.reduction.row_scale(grad_loss, call.tokens))
    return gradients(plan, needs, saved, gradient, grad_loss)


def gradients(
    plan: MosaicPlan,
    needs: XlaProjection,
    saved: MosaicSaved,
    gradient: XlaTokenGradient,  # by the final logits
    grad_loss: Array | None = None,  # that of the loss, where forward may have made the weight's
) -> XlaProjection:
    """The gradients of hidden, weight and bias in their dtypes; what isn't needed is None."""
    at = labels.positions(saved.call)
    above, at_ids = Upstream.of(at, saved.stats, gradient)
    if plan.by_tokens:
        return _backward_by_tokens(needs, saved, at, above.apart(at, saved.stats), grad_loss)
    by_logits = labels.by_logits(at, saved.stats, above, at_ids)
    return _walk(plan, needs, saved, at, above.apart(at, saved.stats) if plan.kept else above, by_logits)


def _walk(
    plan: MosaicPlan,
    needs: XlaProjection,
    saved: MosaicSaved,
    at: Positions,
    above: Upstream,
    by_logits: labels.ByLogits | None,
) -> XlaProjection:
    """The gradients, from each position's factors.

    by_logits: replaces `gradient_tiles` for a chunk of the vocabulary; takes the operands, the chunk's first entry
        [1] and its size.
    """
    from jax.experimental.pallas import run_state

    from onchip.kernels.mosaic.launch import in_place
    from onchip.vocab.mosaic import kernels, products, rebase

    tiles = tiles_of(saved.call)
    exponentials = unfused(saved.kept)
    layer, weight, source = at.layer, at.layer.weight, saved.call.tokens.source
    kept, padded, major = plan.kept, at.label.shape[0], layer.vocab_axis == 0
    recomputed_rows, tail = padded - kept, slice(kept, padded)

    out, grad_hidden = None, None
    row_factor = jnp.ones(padded, jnp.float32)
    if kept:
        assert saved.base is not None
        from_base = jnp.where(at.there[:kept], jnp.exp(saved.base - above.lse[:kept]), 0)
        relative = from_base / exponential_scale(weight.dtype)
        if above.entropy is None:
            relative *= above.factor[:kept]
        else:
            exponentials = _with_entropy(plan, exponentials, saved.base, at, above)
        # Not by `.at[:kept]`, whose indices are a constant without elements: inside of a `jax.shard_map` over several
        # devices one ends the process in the compiler of JAX 0.11.2.
        row_factor = jnp.pad(relative, (0, padded - len(relative)), constant_values=1)
    if kept and needs.hidden:
        if exponentials.gradient is None:  # all in scratch
            sums = hidden_in_slices(at, exponentials.scratch.spare, relative)
        else:
            memory, sums = hidden_of_kept(at, exponentials, plan.kept_in_gradient, relative)
            exponentials = exponentials.lying(memory)
        grad_hidden = gradient_of_first(at, above, sums, targets=True)
    if kept and exponentials.gradient is not None:
        out = exponentials.gradient.in_weight_grad
    in_scratch = exponentials.scratch.spare if kept and exponentials.scratch is not None else None
    if out is None and needs.weight:
        out = lax.empty(weight.shape, weight.dtype)

    # Only now: hidden's float32 gradient is gone.
    source = source if grad_hidden is None else after(source, grad_hidden)
    rows = at.rows(source)
    rows = _scaled(rows, row_factor) if kept else rows
    # Their factors are 1, so these are the hidden states; a part of `rows` would be a copy.
    rest = at.operands(rows, tail)
    # If exponentials are kept, all targets' terms and label smoothing's are added apart.
    at_target, even, even_rows = above.at_target, above.even, None
    if kept:
        at_target, even, even_rows = jnp.zeros_like(at_target[tail]), None, _even_rows(at, above.even, source)

    of_vocab = groups(layer.vocab, plan, recomputed=recomputed_rows > 0)
    # Chunks are no multiple of its tiles along the vocabulary.
    of_weight = tiles["weight_at_once" if major or plan.chunk >= layer.vocab else "weight_product"]
    largest = max(group.size for group in of_vocab)
    names = ("sums", "second sums") if plan.halves else ("sums",)
    of_targets = {
        "kernel": kernels.gradient_tiles, "vocab_major": major, "size": largest, "first_row": kept,
        "config": tiles["gradient_tiles"],
    }  # fmt: skip
    of_hidden = {
        "kernel": products.hidden_product, "vocab_major": major, "tokens": recomputed_rows, "halves": plan.halves,
        "config": tiles["hidden_product"],
    }  # fmt: skip

    def recompute(state: dict[str, Any], begin: Array, size: int) -> Array:
        chunk = {"first": begin, "entries": np.array([size], np.int32)}
        if by_logits is None:
            in_place(
                write_gradient, of_targets, state["again"], rest, above.lse[tail], above.factor[tail], at_target,
                even=even, of_entropy=above.of_entropy(tail), **chunk,
            )  # fmt: skip
            recomputed: Array = state["again"][...]
        else:
            recomputed = by_logits(rest, begin, size)
        if needs.hidden:
            into = [state[name] for name in names]
            in_place(add_again, of_hidden, into, weight, rest.number, recomputed=recomputed, **chunk)
        if needs.bias:
            sums = _column_sums(recomputed[:size] if major else recomputed[:, :size], at.there[tail], major)
            state["bias"][...] = lax.dynamic_update_slice(state["bias"][...], sums, begin)
        return recomputed

    def walk_group(state: dict[str, Any], group: Group, number: Array) -> None:
        begin = group.first + number * group.size
        if recomputed_rows:  # which overwrites the last group's: XLA would copy that for products that it runs later
            begin = after(begin, *(state[name][...] for name in (*names, "out") if name in state))
        recomputed = recompute(state, begin, group.size) if recomputed_rows else None
        if not needs.weight:
            return
        static = {"vocab_major": major, "kept_tokens": plan.kept_in_gradient, "config": of_weight}
        product = partial(
            in_place, products.weight_product, static, state["out"], rows, at.number, first=begin,
            kept=exponentials.lying((None, None)).gradient if kept else None, in_scratch=in_scratch,
            recomputed=recomputed, even=even_rows, inverse_grad_scale=above.inverse_grad_scale,
            after=grad_hidden if kept else None,
        )  # fmt: skip
        _of_chunks(group, product)

    def walk(state: dict[str, Any]) -> None:
        for group in of_vocab:
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
        # Not before forward's memory is free.
        zero = after(jnp.zeros((), jnp.float32), rows)
        zeros = jnp.broadcast_to(zero, (recomputed_rows, layer.hidden.shape[1]))
        # XLA gives equal constants one buffer, and in vmap's loop made no copy for kernels that add in place to both.
        # It knows that `number` isn't below 0, but not that it is never -1.
        other = zeros + jnp.where(at.number[0] == -1, 1.0, 0.0)
        state |= dict(zip(names, (zeros, other), strict=False))
    if recomputed_rows and by_logits is None:
        # One memory for all groups: then these are one kernel.
        shape = (largest, recomputed_rows) if major else (recomputed_rows, largest)
        state["again"] = lax.empty(shape, weight.dtype)
    if needs.bias:
        state["bias"] = jnp.zeros(up(layer.vocab, VOCAB_TILE), jnp.float32)
    state = run_state(walk)(vary_alike(state, at.number))
    if "sums" in state:
        sums = sum(state[name] for name in names)
        if grad_hidden is None:
            grad_hidden = gradient_of_first(at, above, sums, targets=False)
        else:
            grad_hidden = gradient_with_last(grad_hidden, at, above, sums)
    grad_bias = bias_gradient(state["bias"], at, above) if needs.bias else None
    grad_hidden, grad_weight, grad_bias = unfused((grad_hidden, state.get("out"), grad_bias))
    if saved.call.shard is not None:
        grad_hidden = saved.call.shard.summed(grad_hidden)
    return XlaProjection(grad_hidden, grad_weight, grad_bias, layer.vocab_axis)


def _with_entropy(plan: MosaicPlan, kept: Exponentials, base: Array, at: Positions, above: Upstream) -> Exponentials:
    """Replace the kept exponentials by the gradient of logits, up to a factor for each token."""
    from onchip.kernels.mosaic.launch import written
    from onchip.vocab.mosaic import rebase

    assert above.entropy is not None
    assert above.mean is not None
    size, layer = len(base), at.layer
    static = {"vocab_major": layer.vocab_axis == 0, "vocab": layer.vocab}
    vectors = (jnp.pad(x, (0, plan.kept - size)) for x in (
        above.factor[:size], above.entropy[:size], jnp.where(at.there[:size], base - above.mean[:size], 0)
    ))  # fmt: skip
    rooms = [x for x in kept if x is not None]
    rooms = written(rebase.gradient_with_entropy, static, rooms, *vectors, at.number_in(slice(0, size)))
    return Exponentials.of(rooms, plan)


def _backward_by_tokens(
    needs: XlaProjection, saved: MosaicSaved, at: Positions, above: Upstream, grad_loss: Array | None
) -> XlaProjection:
    """The gradients, from the sums that forward has made."""
    from jax.experimental.pallas import run_state

    from onchip.vocab.mosaic import rebase
    from onchip.vocab.mosaic.sums import rounds_in_forward

    sums = saved.sums
    grad_hidden = gradient_of_sums(at, above, *sums.hidden) if needs.hidden else None
    grad_weight = None
    if needs.weight:
        assert grad_loss is not None
        term, config = above.unscaled(above.at_target), tiles_of(saved.call)["weight_product"]
        total, rounded = unfused(sums.weight), rounds_in_forward(at.layer.weight.dtype)
        if rounded:
            out = total.first
        else:
            scaled = total.value(config) * (grad_loss * sums.inverse_grad_scale[0])
            out = unfused(scaled.astype(at.layer.weight.dtype))

        def finish(out: Any) -> None:
            if rounded:
                rebase.scale_sum(out, total.digits, grad_loss, config=config)
            rebase.add_targets(
                out, at.layer.hidden, saved.call.tokens.source, at.sorted_label, term,
                vocab_major=at.layer.vocab_axis == 0,
            )  # fmt: skip

        grad_weight = unfused(run_state(finish)(out))
    return XlaProjection(grad_hidden, grad_weight, None, at.layer.vocab_axis)


def _even_rows(at: Positions, even: Array | None, *done: Array) -> Array | None:
    """[H in whole tiles]: what label smoothing takes from each entry's row of the weight's gradient, given what it
    takes from each position's logits.

    done: what must be there before.
    """
    if even is None:
        return None
    # By token: rows in the order of positions would be forward's, and kept for this.
    tokens, even = at.call.tokens, after(even, *done)
    hidden = jnp.where(tokens.kept[:, None], at.layer.hidden, 0).astype(jnp.float32)
    row = jnp.sum(hidden * tokens.spread(even)[:, None], 0)
    return jnp.pad(row, (0, -len(row) % VOCAB_TILE))


def _scaled(rows: Array, factor: Array) -> Array:
    return (rows.astype(jnp.float32) * factor[:, None]).astype(rows.dtype)


def _repeat(times: int, do: Callable[..., None]) -> None:
    """Call `do` with a `number` of 0, 1, ..., each as [1] int32."""
    if times == 1:
        do(number=jnp.zeros(1, jnp.int32))
    else:
        lax.fori_loop(0, times, lambda i, _: do(number=jnp.asarray(i, jnp.int32).reshape(1)), None)


def _of_chunks(group: Group, product: Callable[..., None]) -> None:
    """The product for each chunk of a group."""
    skip = 0
    for size, times in group.chunks:
        _repeat(times, partial(product, chunks=np.array([skip, size], np.int32)))
        skip += size * times


def _column_sums(recomputed: Array, there: Array, major: bool) -> Array:
    """Sums, over the tokens that exist, of the gradients of logits as `gradient_tiles` lays them out: [size] float32.

    Tiles past the last token are unwritten.
    """
    if not major:
        return jnp.sum(jnp.where(there[:, None], recomputed, 0), 0, dtype=jnp.float32)
    # Blocks of 64 x 64, with tokens for rows inside.
    size, tokens = recomputed.shape
    blocks = recomputed.reshape(size // 64, 64, tokens // 64, 64)
    there = there.reshape(1, tokens // 64, 64, 1).swapaxes(1, 2)
    return jnp.sum(jnp.where(there, blocks, 0), (1, 2), dtype=jnp.float32).reshape(size)
