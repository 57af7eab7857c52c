"""The 'mosaic_gpu' backend: linear_cross_entropy for JAX on the Hopper kernels of mosaic_kernels.py.

`forward` takes the softmax of the logits a tile at a time; where gradients are wanted it leaves the exponentials of up
to H tokens in memory that will be the weight's gradient.  `backward` makes hidden's gradient from them, then weight's
in place, chunk by chunk; logits of further tokens are computed again.  The algorithm is that of the Triton backend,
derived in docs/ops/linear_cross_entropy.md; sizes, positions and what lies beyond the last token are explained in
mosaic_kernels.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onchip.frontend.jax_call import Needs, Static, Tensors
from onchip.vocab.memory import Problem
from onchip.vocab.mosaic import memory as mosaic_spec
from onchip.vocab.mosaic import positions as jax_positions
from onchip.vocab.mosaic.memory import VOCAB_TILE, Group, MosaicPlan, groups, split_at, up
from onchip.vocab.mosaic.positions import (
    LOWEST,
    Head,
    Saved,
    Upstream,
    after,
    alone,
    gradient_of_first,
    gradient_with_last,
    hidden_rows,
    is_there,
    logit_factor,
    make_head,
    merge,
    stored_tiles,
    target_logit,
    upstream,
)
from onchip.vocab.xla.call import Outputs
from onchip.vocab.xla.tiles import Softmax

Array = jax.Array
# A float16 exponential is kept times this: without it, whatever is below 6e-8 would be lost.
_FLOAT16_EXPONENTIAL = 32768.0
_NO_LABEL = 2**31 - 1


def refusal(static: Static, problem: Problem) -> str | None:
    """Why the kernels can't serve the call, or None."""
    refused = mosaic_spec.refusal(problem, static.platform, static.weight_layout)
    if refused is not None:
        return refused
    capability = getattr(jax.devices()[0], "compute_capability", "none")
    return None if str(capability) == "9.0" else f"it is for compute capability 9.0 (Hopper); this is {capability}"


def plan(problem: Problem, strategy: str, budget: int | None) -> MosaicPlan:
    """The plan; raises ValueError where the budget is too small."""
    return mosaic_spec.plan(problem, strategy, budget)


def forward(static: Static, config: MosaicPlan, tensors: Tensors, needs: Needs) -> tuple[Outputs, Any]:
    """The loss with its statistics, and what backward needs."""
    run = partial(_forward, static, config)
    return jax.custom_batching.sequential_vmap(run)(tensors)  # type: ignore[no-any-return]


def backward(
    static: Static, config: MosaicPlan, residuals: Any, grad_loss: Array, needs: Needs
) -> tuple[Array | None, Array | None, Array | None]:
    """The gradients of hidden, weight and bias in their dtypes; what isn't needed is None."""
    run = partial(_backward, static, config, needs)
    return jax.custom_batching.sequential_vmap(run)(residuals, grad_loss)  # type: ignore[no-any-return]


# -------------------------------------------------------------------------------------------------------------- parts


def _head(static: Static, tensors: Tensors) -> Head:
    from onchip.kernels.mosaic.product import MosaicConfig

    stored = stored_tiles(static, tensors, mosaic_spec.heuristic_tiles())
    tiles = {kernel.removeprefix("mosaic_"): MosaicConfig.from_numbers(config) for kernel, config in stored.items()}
    return make_head(static, tensors, tiles)


def _arguments(head: Head) -> dict[str, Any]:
    return {"vocab_major": head.vocab_axis == 0, "bias": head.bias, "inner_scale": head.inner}


def _kernels() -> Any:
    """Pallas takes a second to import: only where it is used."""
    from onchip.vocab.mosaic import kernels as mosaic_kernels

    return mosaic_kernels


def _settle() -> Any:
    from onchip.vocab.mosaic import settle as mosaic_settle

    return mosaic_settle


def _run_state(body: Callable[[Any], None], state: Any) -> Any:
    """`state` after `body` has worked on references to it."""
    from jax.experimental import pallas as pl

    return pl.run_state(body)(state)


def _places(head: Head, config: MosaicPlan) -> Any:
    return _kernels().Places(config.chunk, split_at(head.vocab, config.chunk))


# ------------------------------------------------------------------------------------------------------------ forward


def _forward(static: Static, config: MosaicPlan, tensors: Tensors) -> tuple[Outputs, Any]:
    head = _head(static, tensors)
    smoothing = tensors.label_smoothing is not None
    take_softmax = partial(_softmax, static, config, head, smoothing=smoothing)
    return jax_positions.forward(static, config, head, tensors, take_softmax)


class _Kept(NamedTuple):
    """Where the exponentials of some positions are kept: in all of `spare`, or with a `stash` as `places` says."""

    part: slice
    places: Any
    stash: Array | None
    spare: Array


def _softmax(
    static: Static,
    config: MosaicPlan,
    head: Head,
    rows: Array,
    label: Array,
    factor: Array,
    count: Array,
    *,
    smoothing: bool,
) -> tuple[Softmax, tuple[Array | None, ...]]:
    """The softmax of some positions; what their exponentials are relative to, and where those are kept."""
    padded, kept, held = label.shape[0], config.kept, config.held
    there = jnp.arange(padded) < count
    target = target_logit(head, rows, label, factor)
    options = {"smoothing": smoothing, "stats": static.return_stats, "config": head.tiles["softmax_tiles"]}

    def take(part: slice, **keep: Any) -> Any:
        some = (rows[part], head.weight, label[part], factor[part], _count(part, count))
        return _kernels().softmax_tiles(*some, **_arguments(head), **options, **keep)

    if kept == 0:
        return merge(take(slice(0, padded)), target, label, there, head.vocab), ()
    # float16's exponents don't reach: there all tokens are settled.
    far = rows.dtype == jnp.float16
    shift = jnp.where(there, jnp.full_like(target, -3e38) if far else target + 30.0, jnp.inf)
    made, rooms = [], []
    for room in _rooms(head, config):
        exponential = {"shift": shift[room.part], "exponential_scale": _exponential_scale(rows.dtype)}
        partials, room = _take_and_keep(partial(take, room.part, places=room.places, **exponential), room)
        made.append(partials)
        rooms.append(room)
    if held < padded:
        made.append(take(slice(held, padded)))
    partials = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1) if len(x) > 1 else x[0], *made)
    softmax = merge(partials, target, label, there, head.vocab)
    top = jnp.where(there, jnp.max(partials.maximum, 0), LOWEST)
    base = jnp.where(top - shift > _kernels().REACH, softmax.max + softmax.log_total, shift)
    rooms = [
        _settled(head, room, x.maximum, shift[room.part], base[room.part], _count(room.part, count))
        for room, x in zip(rooms, made, strict=False)
    ]
    return softmax, alone((base, rooms[0].stash, rooms[0].spare, rooms[1].spare if held > kept else None))


def _count(part: slice, count: Array) -> Array:
    """[1]: how many of these positions are there."""
    return jnp.clip(count - part.start, 0, part.stop - part.start).reshape(1)


def _rooms(head: Head, config: MosaicPlan) -> list[_Kept]:
    """Memory for exponentials: of the first positions in the weight's gradient, of the next in scratch."""
    places, whole = _places(head, config), up(head.vocab, VOCAB_TILE)

    def scratch(entries: int, tokens: int) -> Array:
        shape = (entries, tokens) if head.vocab_axis == 0 else (tokens, entries)
        empty: Array = lax.empty(shape, head.weight.dtype)
        return empty

    stash = lax.empty(head.weight.shape, head.weight.dtype)
    rooms = [_Kept(slice(0, config.kept), places, stash, scratch(whole - places.split, config.kept))]
    if config.overflow:
        whole_vocab = _kernels().Places(shift=0, split=0)
        rooms.append(_Kept(slice(config.kept, config.held), whole_vocab, None, scratch(whole, config.overflow)))
    return rooms


def _take_and_keep(take: Callable[..., Any], room: _Kept) -> tuple[Any, _Kept]:
    """What `take(stash=..., spare=...)` returns, and the room after it."""
    results = jax.eval_shape(take, spare=room.spare)
    state = jax.tree.map(lambda x: lax.empty(x.shape, x.dtype), results)

    def body(refs: Any) -> None:
        out, stash, spare = refs
        jax.tree.map(lambda ref, x: ref.__setitem__(..., x), out, take(stash=stash, spare=spare))

    partials, stash, spare = _run_state(body, (state, room.stash, room.spare))
    return partials, room._replace(stash=stash, spare=spare)


def _settled(head: Head, room: _Kept, maximum: Array, before: Array, base: Array, count: Array) -> _Kept:
    """The room with exponentials relative to `base`."""

    def body(refs: Any) -> None:
        _settle().settle_exponentials(
            *refs, maximum, before, base, count, vocab_major=head.vocab_axis == 0, places=room.places,
            vocab=head.vocab, config=head.tiles["softmax_tiles"],
        )  # fmt: skip

    stash, spare = _run_state(body, (room.stash, room.spare))
    return room._replace(stash=stash, spare=spare)


def _exponential_scale(dtype: Any) -> float:
    return _FLOAT16_EXPONENTIAL if dtype == jnp.float16 else 1.0


# ----------------------------------------------------------------------------------------------------------- backward


def _backward(
    static: Static, config: MosaicPlan, needs: Needs, saved: Saved, grad_loss: Array
) -> tuple[Array | None, Array | None, Array | None]:
    kernels = _kernels()
    stash, spare, overflow = alone((saved.stash, saved.spare, saved.overflow))
    saved = saved._replace(stash=stash, spare=spare, overflow=overflow)
    head, tokens = _head(static, saved.tensors), saved.tokens
    hidden, weight = saved.tensors.hidden, head.weight
    up_ = upstream(static, head, saved, grad_loss)
    kept, held, padded, major = config.kept, config.held, saved.label.shape[0], head.vocab_axis == 0
    again_rows = padded - held
    tail = slice(held, None)
    count = tokens.number.reshape(1)
    rest = jnp.maximum(count - held, 0)
    factor = logit_factor(head, tokens)
    shrink = 1.0 if up_.shrink is None else up_.shrink

    out, grad_hidden, places = saved.stash, None, None
    row_factor = jnp.ones(padded, jnp.float32)
    if kept:
        assert saved.base is not None
        places = _places(head, config)
        at = jnp.where(is_there(tokens), jnp.exp(saved.base - up_.lse), 0)[:held]
        relative = up_.scale[:held] * at / _exponential_scale(hidden.dtype)
        row_factor = row_factor.at[:held].set(relative)
        if needs.hidden:

            def whole(state: Any) -> None:
                kernels.hidden_product(
                    weight, jnp.minimum(count, held), vocab_major=major, tokens=held, stash=state[0],
                    spare=saved.spare, places=places, overflow=saved.overflow, scale=relative, add_to=state[1],
                    halves=True, config=head.tiles["hidden_product"],
                )  # fmt: skip

            out, sums = _run_state(whole, (out, jnp.zeros((held, hidden.shape[1]), jnp.float32)))
            grad_hidden = gradient_of_first(head, saved, up_, sums, shrink)
    elif needs.weight:
        out = lax.empty(weight.shape, weight.dtype)

    # Only now: hidden's float32 gradient is gone.
    source = tokens.source if grad_hidden is None else after(tokens.source, grad_hidden)
    rows = hidden_rows(saved.tensors, source)
    # Gathered apart: a part of `rows` would keep those in memory beside what is made of them.
    rest_rows = hidden_rows(saved.tensors, source[tail])
    rows = (rows.astype(jnp.float32) * row_factor[:, None]).astype(rows.dtype) if kept else rows
    # Where exponentials are kept, all targets' terms are added apart.
    at_target = jnp.zeros_like(up_.at_target[tail]) if kept else up_.at_target

    def made_again(state: dict[str, Any], begin: Array, size: int) -> Array:
        again: Array = kernels.gradient_tiles(
            rest_rows, weight, saved.label[tail], factor[tail], up_.lse[tail], up_.scale[tail], at_target, rest,
            first=begin, size=size, even=None if up_.even is None else up_.even[tail],
            config=head.tiles["gradient_tiles"], **_arguments(head),
        )  # fmt: skip
        if needs.hidden:
            kernels.hidden_product(
                weight, rest, vocab_major=major, tokens=again_rows, again=again, first=begin, add_to=state["sums"],
                second=state.get("second sums"), halves=config.halves, config=head.tiles["hidden_product"],
            )  # fmt: skip
        if needs.bias:
            state["bias"][...] = lax.dynamic_update_slice(state["bias"][...], _column_sums(again, major), begin)
        return again

    def walk_group(state: dict[str, Any], group: Group, number: Array) -> None:
        begin = group.first + number * group.size
        again = made_again(state, begin, group.size) if again_rows else None
        if not needs.weight:
            return
        skip = 0
        for size, times in group.chunks:
            product = partial(
                kernels.weight_product, state["out"], rows, count, vocab_major=major, first=begin, size=size,
                skip=skip, places=places, spare=saved.spare if group.in_spare else None, kept_tokens=kept,
                overflow=saved.overflow, again=again, shrink=up_.shrink, after=grad_hidden if kept else None,
                config=head.tiles["weight_product"],
            )  # fmt: skip
            _repeat(times, product)
            skip += size * times

    def walk(state: dict[str, Any]) -> None:
        for group in groups(head.vocab, config, again=again_rows > 0):
            _repeat(group.times, partial(walk_group, state, group))
        if kept:
            _add_targets(head, saved, up_, state["out"], shrink)

    state: dict[str, Any] = {}
    if needs.weight:
        state["out"] = out
    if again_rows and needs.hidden:
        names = ("sums", "second sums") if config.halves else ("sums",)
        state |= dict.fromkeys(names, jnp.zeros((again_rows, hidden.shape[1]), jnp.float32))
    if needs.bias:
        state["bias"] = jnp.zeros(up(head.vocab, VOCAB_TILE), jnp.float32)
    state = _run_state(walk, state)
    if "sums" in state:
        sums = sum(state[name] for name in names)
        if grad_hidden is None:
            grad_hidden = gradient_of_first(head, saved, up_, sums, shrink)
        else:
            grad_hidden = gradient_with_last(grad_hidden, head, saved, up_, sums, shrink)
    grad_bias = None
    if needs.bias:
        assert saved.tensors.bias is not None
        grad_bias = (state["bias"][: head.vocab] * shrink).astype(saved.tensors.bias.dtype)
    gradients: tuple[Array | None, Array | None, Array | None] = alone((grad_hidden, state.get("out"), grad_bias))
    return gradients


def _repeat(times: int, do: Callable[..., None]) -> None:
    """`do` with a `number` of 0, 1, ..., each as [1] int32."""
    if times == 1:
        do(number=jnp.zeros(1, jnp.int32))
    else:
        lax.fori_loop(0, times, lambda i, _: do(number=jnp.asarray(i, jnp.int32).reshape(1)), None)


def _column_sums(again: Array, major: bool) -> Array:
    """Sums over tokens of gradients of logits as `gradient_tiles` lays them out: [size] float32."""
    if not major:
        return jnp.sum(again, 0, dtype=jnp.float32)
    # Blocks of 64 x 64, with tokens for rows inside.
    size, tokens = again.shape
    return jnp.sum(again.reshape(size // 64, 64, tokens // 64, 64), (1, 2), dtype=jnp.float32).reshape(size)


def _add_targets(head: Head, saved: Saved, up_: Upstream, out: Any, shrink: Any) -> None:
    """Add the targets' terms to the weight's gradient, each vocabulary entry's tokens together."""
    # Positions are in the order of their labels, with those that have none behind.
    label = jnp.where(is_there(saved.tokens) & (saved.label >= 0), saved.label, _NO_LABEL)
    term = up_.at_target * shrink
    vocab_major = head.vocab_axis == 0
    _settle().add_targets(out, saved.tensors.hidden, saved.tokens.source, label, term, vocab_major=vocab_major)
