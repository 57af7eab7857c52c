"""The 'mosaic_gpu' backend: linear_cross_entropy for JAX on the Hopper kernels of mosaic_kernels.py.

`forward` takes the softmax of the logits a tile at a time; where gradients are wanted it leaves the exponentials of up
to H tokens in memory that will be the weight's gradient.  `backward` makes hidden's gradient from them, then weight's
in place, chunk by chunk; logits of further tokens are computed again.  The algorithm is that of the Triton backend,
derived in docs/ops/linear_cross_entropy.md; sizes, positions and what lies beyond the last token are explained in
mosaic_kernels.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from onchip.ops._shared.jax_call import Needs, Static, Tensors
from onchip.ops._shared.jax_tiles import Softmax
from onchip.ops.linear_cross_entropy import jax_positions, mosaic_spec
from onchip.ops.linear_cross_entropy.jax_call import Outputs
from onchip.ops.linear_cross_entropy.jax_positions import (
    Head,
    Saved,
    Upstream,
    after,
    by_token,
    chunks,
    hidden_rows,
    is_there,
    logit_factor,
    make_head,
    merge,
    stored_tiles,
    target_logit,
    upstream,
)
from onchip.ops.linear_cross_entropy.mosaic_spec import VOCAB_TILE, MosaicPlan, split_at, up
from onchip.ops.linear_cross_entropy.spec import Problem

Array = jax.Array
# A float16 exponential is kept times this: without it, whatever is below 6e-8 would be lost.
_FLOAT16_EXPONENTIAL = 32768.0
_NO_LABEL = 2**31 - 1


def refusal(static: Static, problem: Problem) -> str | None:
    """Why the kernels can't serve the call, or None."""
    if static.platform != "gpu":
        return f"it runs on NVIDIA GPUs, not on {static.platform!r}"
    if problem.dtype == "float32":
        return "its products are of bfloat16 or float16; float32 operands would be rounded to tf32"
    # Mosaic cuts matrices in device memory into tiles of 8 rows and 128 bytes.
    vocab = 8 if static.weight_layout == "vh" else 64
    if problem.hidden % 64 or problem.vocab % vocab:
        sizes = f"this has H={problem.hidden} and V={problem.vocab}"
        return f"it needs H to be a multiple of 64, and V of 8 (of 64 with weight_layout='hv'); {sizes}"
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
    from onchip.ops._shared.mosaic_product import MosaicConfig

    stored = stored_tiles(static, tensors, mosaic_spec.heuristic_tiles())
    tiles = {kernel.removeprefix("mosaic_"): MosaicConfig.from_numbers(config) for kernel, config in stored.items()}
    return make_head(static, tensors, tiles)


def _arguments(head: Head) -> dict[str, Any]:
    return {"vocab_major": head.vocab_axis == 0, "bias": head.bias, "inner_scale": head.inner}


def _kernels() -> Any:
    """Pallas takes a second to import: only where it is used."""
    from onchip.ops.linear_cross_entropy import mosaic_kernels

    return mosaic_kernels


def _settle() -> Any:
    from onchip.ops.linear_cross_entropy import mosaic_settle

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
) -> tuple[Softmax, Array | None, Array | None, Array | None]:
    """The softmax of some positions; what their exponentials are relative to, and where those are kept."""
    kernels = _kernels()
    there = jnp.arange(label.shape[0]) < count
    target = target_logit(head, rows, label, factor)
    number = count.reshape(1)
    options = {"smoothing": smoothing, "stats": static.return_stats, "config": head.tiles["softmax_tiles"]}
    kept = config.kept
    run = partial(kernels.softmax_tiles, **_arguments(head), **options)
    if kept == 0:
        partials = run(rows, head.weight, label, factor, number)
        return merge(partials, target, label, there, head.vocab), None, None, None
    # float16's exponents don't reach: there all tokens are settled.
    far = rows.dtype == jnp.float16
    shift = jnp.where(there, jnp.full_like(target, -3e38) if far else target + 30.0, jnp.inf)
    places = _places(head, config)
    entries = up(head.vocab, VOCAB_TILE) - places.split
    number_kept = jnp.minimum(number, kept)

    def keep(state: dict[str, Any]) -> None:
        first = run(
            rows[:kept],
            head.weight,
            label[:kept],
            factor[:kept],
            number_kept,
            shift=shift[:kept],
            stash=state["stash"],
            spare=state["spare"],
            places=places,
            exponential_scale=_exponential_scale(rows.dtype),
        )
        for name, x in first._asdict().items():
            if x is not None:
                state[name][...] = x

    first_type = jax.eval_shape(
        partial(run, label=label[:kept], factor=factor[:kept], count=number), rows[:kept], head.weight
    )
    empty = {name: lax.empty(x.shape, x.dtype) for name, x in first_type._asdict().items() if x is not None}
    spare_shape = (entries, kept) if head.vocab_axis == 0 else (kept, entries)
    stash = lax.empty(head.weight.shape, head.weight.dtype)
    state = _run_state(keep, empty | {"stash": stash, "spare": lax.empty(spare_shape, head.weight.dtype)})
    partials = kernels.Partials(*(state.get(name) for name in kernels.Partials._fields))
    if kept < label.shape[0]:
        rest = run(rows[kept:], head.weight, label[kept:], factor[kept:], jnp.maximum(number - kept, 0))
        partials = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), partials, rest)
    softmax = merge(partials, target, label, there, head.vocab)
    top = jnp.max(jnp.where(there, partials.maximum, kernels.LOWEST), 0)
    base = jnp.where(top - shift > kernels.REACH, softmax.max + softmax.log_total, shift)

    def settle(state: Any) -> None:
        _settle().settle_exponentials(
            *state,
            partials.maximum,
            shift[:kept],
            base[:kept],
            number_kept,
            vocab_major=head.vocab_axis == 0,
            places=places,
            vocab=head.vocab,
            config=head.tiles["softmax_tiles"],
        )

    return softmax, base, *_run_state(settle, (state["stash"], state["spare"]))


def _exponential_scale(dtype: Any) -> float:
    return _FLOAT16_EXPONENTIAL if dtype == jnp.float16 else 1.0


# ----------------------------------------------------------------------------------------------------------- backward


def _backward(
    static: Static, config: MosaicPlan, needs: Needs, saved: Saved, grad_loss: Array
) -> tuple[Array | None, Array | None, Array | None]:
    kernels = _kernels()
    head, tokens = _head(static, saved.tensors), saved.tokens
    hidden, weight = saved.tensors.hidden, head.weight
    up_ = upstream(static, head, saved, grad_loss)
    kept, padded, major = config.kept, saved.label.shape[0], head.vocab_axis == 0
    again_rows = padded - kept
    tail = slice(kept, None)
    number = tokens.number.reshape(1)
    rest = jnp.maximum(number - kept, 0)
    factor = logit_factor(head, tokens)
    shrink = 1.0 if up_.shrink is None else up_.shrink

    out, grad_hidden, places = saved.stash, None, None
    row_factor = jnp.ones(padded, jnp.float32)
    if kept:
        assert saved.base is not None
        places = _places(head, config)
        at = jnp.where(is_there(tokens), jnp.exp(saved.base - up_.lse), 0)[:kept]
        relative = up_.scale[:kept] * at / _exponential_scale(hidden.dtype)
        row_factor = row_factor.at[:kept].set(relative)
        if needs.hidden:

            def whole(state: Any) -> None:
                kernels.hidden_product(
                    weight, jnp.minimum(number, kept), vocab_major=major, tokens=kept, stash=state[0],
                    spare=saved.spare, places=places, scale=relative, add_to=state[1], halves=True,
                    config=head.tiles["hidden_product"],
                )  # fmt: skip

            out, sums = _run_state(whole, (out, jnp.zeros((kept, hidden.shape[1]), jnp.float32)))
            grad_hidden = by_token(head, saved, up_, sums, 0, kept, jnp.zeros_like(hidden), shrink)
    elif needs.weight:
        out = lax.empty(weight.shape, weight.dtype)

    # Only now: hidden's float32 gradient is gone.
    source = tokens.source if grad_hidden is None else after(tokens.source, grad_hidden)
    rows = hidden_rows(saved.tensors, source)
    rest_rows = rows[tail]
    rows = (rows.astype(jnp.float32) * row_factor[:, None]).astype(rows.dtype) if kept else rows
    # Where exponentials are kept, all targets' terms are added apart.
    at_target = jnp.zeros_like(up_.at_target[tail]) if kept else up_.at_target

    def chunk(state: dict[str, Any], first: Any, size: int, in_spare: bool) -> None:
        again = None
        begin = jnp.asarray(first, jnp.int32).reshape(1)
        if again_rows:
            again = kernels.gradient_tiles(
                rest_rows, weight, saved.label[tail], factor[tail], up_.lse[tail], up_.scale[tail], at_target, rest,
                first=begin, size=size, even=None if up_.even is None else up_.even[tail],
                config=head.tiles["gradient_tiles"], **_arguments(head),
            )  # fmt: skip
            if needs.hidden:
                kernels.hidden_product(
                    weight, rest, vocab_major=major, tokens=again_rows, again=again, first=begin, add_to=state["sums"],
                    config=head.tiles["hidden_product"],
                )  # fmt: skip
            if needs.bias:
                state["bias"][...] = lax.dynamic_update_slice(state["bias"][...], _column_sums(again, major), begin)
        if needs.weight:
            kernels.weight_product(
                state["out"], rows, number, vocab_major=major, first=begin, size=size, places=places,
                spare=saved.spare if in_spare else None, kept_tokens=kept, again=again, shrink=up_.shrink,
                after=grad_hidden if kept else None, config=head.tiles["weight_product"],
            )  # fmt: skip

    def walk(state: dict[str, Any]) -> None:
        equal, last = chunks(head.vocab, config)
        for start, size, times in equal:
            if times == 1:
                chunk(state, start, size, False)
            else:
                lax.fori_loop(0, times, partial(_step, chunk, state, start, size), None)
        if last is not None:
            chunk(state, *last, True)
        if kept:
            _add_targets(head, saved, up_, state["out"], shrink)

    state: dict[str, Any] = {}
    if needs.weight:
        state["out"] = out
    if again_rows and needs.hidden:
        state["sums"] = jnp.zeros((again_rows, hidden.shape[1]), jnp.float32)
    if needs.bias:
        state["bias"] = jnp.zeros(up(head.vocab, VOCAB_TILE), jnp.float32)
    state = _run_state(walk, state)
    if "sums" in state:
        before = jnp.zeros_like(hidden) if grad_hidden is None else grad_hidden
        grad_hidden = by_token(head, saved, up_, state["sums"], kept, padded, before, shrink)
    grad_bias = None
    if needs.bias:
        assert saved.tensors.bias is not None
        grad_bias = (state["bias"][: head.vocab] * shrink).astype(saved.tensors.bias.dtype)
    return grad_hidden, state.get("out"), grad_bias


def _step(chunk: Callable[..., None], state: Any, start: int, size: int, i: Any, _: None) -> None:
    chunk(state, start + i * size, size, False)


def _column_sums(again: Array, major: bool) -> Array:
    """Sums over tokens of gradients of logits as `gradient_tiles` lays them out: [size] float32."""
    if not major:
        return jnp.sum(again, 0, dtype=jnp.float32)
    # Blocks of 64 x 64, with tokens for rows inside.
    size, tokens = again.shape
    return jnp.sum(again.reshape(size // 64, 64, tokens // 64, 64), (1, 2), dtype=jnp.float32).reshape(size)


def _add_targets(head: Head, saved: Saved, up_: Upstream, out: Any, shrink: Any) -> None:
    """Add the targets' terms to the weight's gradient, each vocabulary entry's tokens together."""
    positions = jnp.arange(saved.label.shape[0], dtype=jnp.int32)
    labels = jnp.where(is_there(saved.tokens) & (saved.label >= 0), saved.label, _NO_LABEL)
    labels, positions = lax.sort((labels, positions), num_keys=1, is_stable=True)
    _settle().add_targets(
        out,
        saved.tensors.hidden,
        jnp.minimum(saved.tokens.source, saved.tensors.hidden.shape[0] - 1),
        labels,
        positions,
        up_.at_target * shrink,
        vocab_major=head.vocab_axis == 0,
    )
