"""Attention by the kernels for Hopper: their calls, and the derivative."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onchip.attention.masks import OP, Intervals
from onchip.attention.mosaic import backward, forward, fused, problem
from onchip.attention.mosaic.backward import BY_KEY, BY_QUERY, GradientInputs
from onchip.attention.mosaic.forward import FORWARD
from onchip.attention.mosaic.fused import FUSED
from onchip.attention.mosaic.products import Scores
from onchip.attention.mosaic.work import ALL_TILES, key_items, query_items
from onchip.attention.xla.plain import AttentionStatic, Parameters, Ranges, check_room, on_device
from onchip.frontend.jax_spread import Between, with_gradients_on_mesh
from onchip.kernels.mosaic.maths import LOG2E

Array = jax.Array


class ForwardInputs(NamedTuple):
    """What forward's kernel reads; the first dimension of each array is the batch."""

    q: Array  # [B, Tq, Hq, D], or with layout "bhtd" [B, Hq, Tq, D]
    k: Array
    v: Array
    mask: Ranges
    sinks: Array | None  # [B, Hq] float32


class KernelSaved(NamedTuple):
    """What forward keeps for backward."""

    given: Parameters
    mask: Ranges
    out: Array
    lse: Array  # [B, Hq, Tq rounded up] float32


def _folded(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, a function of trees of arrays [B, ...]; vmap makes the elements sequences of one batch."""
    mapped = jax.custom_batching.custom_vmap(run)

    @mapped.def_vmap
    def fold(size: int, are_mapped: Any, *given: Any) -> Any:
        def put(x: Array, is_mapped: bool) -> Array:
            x = x if is_mapped else jnp.broadcast_to(x[None], (size, *x.shape))
            return x.reshape(size * x.shape[1], *x.shape[2:])

        made = mapped(*jax.tree.map(put, given, tuple(are_mapped)))
        split = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), made)
        return split, jax.tree.map(lambda _: True, split)

    return mapped


def _filled(x: Array, axis: int, size: int, value: Any = 0) -> Array:
    """x, padded with `value` to this size along the axis."""
    widths = [(0, size - x.shape[axis] if n == axis % x.ndim else 0) for n in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value) if any(w for _, w in widths) else x


def _up(tokens: int, to: int = ALL_TILES) -> int:
    return -(-tokens // to) * to


def _for_copies(static: AttentionStatic, interpret: Any, q: Array, k: Array, *of_values: Array) -> list[Array]:
    """The arrays, padded to sizes that kernels have and to a multiple of 8 tokens, as Mosaic's copies need; on the CPU
    to whole tiles, since the interpreter writes no part of a block."""
    axis, (size, value_size) = _token_axis(static), _sizes(static)
    filled = *(_filled(x, -1, size) for x in (q, k)), *(_filled(x, -1, value_size) for x in of_values)
    return [_filled(x, axis, _up(x.shape[axis], 8 if interpret is None else ALL_TILES)) for x in filled]


def _cut(static: AttentionStatic, x: Array, tokens: int, size: int) -> Array:
    """The part of x that `_for_copies` didn't pad."""
    return lax.slice_in_dim(x[..., :size], 0, tokens, axis=_token_axis(static))


def _token_axis(static: AttentionStatic) -> int:
    return 1 if static.options.layout == "bthd" else 2


def _sizes(static: AttentionStatic) -> tuple[int, int]:
    return problem.sizes_of(static.problem)


def _how(static: AttentionStatic) -> dict[str, Any]:
    p, options = static.problem, static.options
    return {
        "layout": options.layout,
        "heads": (p.heads, p.key_heads),
        "scores": Scores(static.scale, options.softcap),
    }


def _limits(static: AttentionStatic, mask: Ranges) -> tuple[Intervals, Array, Array, Array | None]:
    """The mask, and its arrays as kernels read them: padding tokens see nothing and aren't seen."""
    p = static.problem
    start, end = (_filled(x, 1, _up(p.queries)) for x in (mask.start, mask.end))
    stop = None if mask.stop is None else _filled(mask.stop, 1, _up(p.keys))
    return Intervals(mask.start, mask.end, mask.stop), start, end, stop


def _forward_kernel(static: AttentionStatic, interpret: Any, x: ForwardInputs) -> tuple[Array, Array]:
    """out, and lse [B, Hq, Tq rounded up]."""
    p, config = static.problem, FORWARD[_sizes(static)]
    q, k, v = _for_copies(static, interpret, x.q, x.k, x.v)
    mask, start, end, stop = _limits(static, x.mask)
    items = query_items(mask, static.problem.keys, config.block, config.tile)
    out, lse = forward.forward(
        q, k, v, start, end, stop, x.sinks, items, **_how(static), config=config, interpret=interpret
    )
    return _cut(static, out, p.queries, p.value_size), lse


def _backward_kernels(
    static: AttentionStatic,
    wanted: tuple[bool, bool],
    interpret: Any,
    x: ForwardInputs,
    grad_out: Array,
    numbers: Array,
) -> tuple[Any, Any, Any]:
    """The gradients of q, and of k and v, where they are wanted."""
    p, how = static.problem, {**_how(static), "interpret": interpret}
    q, k, v, grad_out = _for_copies(static, interpret, x.q, x.k, x.v, grad_out)
    mask, start, end, stop = _limits(static, x.mask)
    given = GradientInputs(q, k, v, grad_out, start, end, stop, numbers)

    def of_keys(grad_k: Array, grad_v: Array) -> tuple[Array, Array]:
        return _cut(static, grad_k, p.keys, p.size), _cut(static, grad_v, p.keys, p.value_size)

    if _is_fused(static, wanted, x):
        of_q, *others = fused.all_gradients(given, mask, p.keys, config=FUSED[_sizes(static)], **how)
        return _cut(static, of_q, p.queries, p.size), *of_keys(*others)
    grad_q = grad_k = grad_v = None
    if wanted[0]:
        config = BY_QUERY[_sizes(static)]
        made = backward.by_query(given, query_items(mask, p.keys, config.block), config=config, **how)
        grad_q = _cut(static, made, p.queries, p.size)
    if wanted[1]:
        config = BY_KEY[_sizes(static)]
        items = key_items(mask, p.keys, config.block, config.tile)
        grad_k, grad_v = of_keys(*backward.by_key(given, items, config=config, **how))
    return grad_q, grad_k, grad_v


def _is_fused(static: AttentionStatic, wanted: tuple[bool, bool], x: ForwardInputs) -> bool:
    """Whether one kernel makes all gradients.  Under vmap there are more sequences than the call's."""
    p = static.problem._replace(batch=len(x.q))
    return all(wanted) and x.mask.stop is None and problem.fits_one_kernel(p, static.options.scratch_bytes)


def _heads_first(static: AttentionStatic, x: Array) -> Array:
    """[B, Hq, Tq], from numbers for queries in the layout."""
    return x if static.options.layout == "bhtd" else jnp.swapaxes(x, 1, 2)


def attend(
    static: AttentionStatic, given: Parameters, mask: Ranges, interpret: Any = None
) -> tuple[tuple[Array, Array], KernelSaved]:
    """(out, lse) in the layout, and what backward is given."""
    sinks = None
    if given.sinks is not None:
        sinks = jnp.broadcast_to(given.sinks.astype(jnp.float32), (len(given.q), len(given.sinks)))
    run = _folded(partial(_forward_kernel, static, interpret))
    out, lse = run(ForwardInputs(given.q, given.k, given.v, mask, sinks))
    return (out, _heads_first(static, lse[..., : static.problem.queries])), KernelSaved(given, mask, out, lse)


def gradients(
    static: AttentionStatic, needs: Parameters, saved: KernelSaved, cotangents: Any, interpret: Any = None
) -> Parameters:
    """The gradients that are needed."""
    given, mask, out, lse = saved
    grad_out, grad_lse = cotangents
    tokens = static.problem.queries
    lse = lse[..., :tokens]
    nothing = (mask.start >= mask.end)[:, None] | (lse == -jnp.inf)  # [B, Hq, Tq]
    if grad_out is None:
        grad_out, more = jnp.zeros_like(out), jnp.zeros_like(lse)
    else:
        # The barriers: XLA rounds the upstream gradient, so that delta is made from the same numbers that kernels get;
        # and it sums delta in a kernel of its own, which is six times as fast as in one that writes `numbers`.
        grad_out = lax.optimization_barrier(grad_out)
        delta = lax.optimization_barrier((grad_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1))
        more = jnp.where(nothing, 0, _heads_first(static, delta))
    if grad_lse is not None:
        more = more - jnp.where(lse == -jnp.inf, 0, _heads_first(static, grad_lse))
    log_sum = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E)
    numbers = jnp.stack([_filled(log_sum, -1, _up(tokens), jnp.inf), _filled(more, -1, _up(tokens))], 2)
    wanted = bool(needs.q), bool(needs.k or needs.v)
    grads: tuple[Any, Any, Any] = None, None, None
    if any(wanted):
        run = _folded(partial(_backward_kernels, static, wanted, interpret))
        grads = run(ForwardInputs(given.q, given.k, given.v, mask, None), grad_out, numbers)
    sinks = None
    if given.sinks is not None and needs.sinks:
        by_sink = jnp.exp(given.sinks.astype(jnp.float32)[None, :, None] - jnp.where(lse == -jnp.inf, jnp.inf, lse))
        sinks = -(by_sink * more).sum((0, 2))
    return Parameters(*(x if need else None for x, need in zip((*grads, sinks), needs, strict=True)))


def _forward(static: AttentionStatic, needs: Parameters, given: Parameters, mask: Ranges) -> tuple[Any, KernelSaved]:
    check_room(static, problem.memory_parts(static.problem, backward=any(needs)))
    return attend(static, given, mask)


def _backward(static: AttentionStatic, needs: Parameters, saved: KernelSaved, cotangents: Any) -> Parameters:
    return gradients(static, needs, saved, cotangents)


def _keep(static: AttentionStatic, saved: KernelSaved, *_: Any) -> tuple[Array, Array]:
    return saved.out, saved.lse


def _resume(
    static: AttentionStatic, needs: Parameters, kept: tuple[Array, Array], given: Parameters, mask: Ranges
) -> KernelSaved:
    return KernelSaved(given, mask, *kept)


ATTENTION = with_gradients_on_mesh(OP, _forward, _backward, on_device, Between(keep=_keep, resume=_resume))
