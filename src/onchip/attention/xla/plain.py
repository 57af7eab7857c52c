"""Attention in plain JAX: tiles of queries by tiles of keys, with a running softmax, computed again in backward.

A loop goes over the tiles of keys that any query of a tile sees, so hidden tiles cost nothing.  Its bounds come from
the mask, whose values only the device knows.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onchip.attention.masks import OP
from onchip.attention.problem import XLA_COLUMNS, XLA_ROWS, AttentionOptions, AttentionProblem, xla_parts
from onchip.frontend.jax_call import vary_alike
from onchip.frontend.jax_inputs import accumulator
from onchip.frontend.jax_mesh import BY_TOKEN, Role, Roles
from onchip.frontend.jax_spread import with_gradients_on_mesh

Array = jax.Array


class AttentionStatic(NamedTuple):
    """What is known when tracing."""

    problem: AttentionProblem
    options: AttentionOptions
    scale: float
    tile: int  # of the mask's blocks
    mesh: Any = None  # an `OnMesh` for a call that is spread over devices


class Parameters(NamedTuple):
    """The arrays that can have gradients; their gradients; or which gradients are needed."""

    q: Any  # [B, Tq, Hq, D]
    k: Any  # [B, Tk, Hk, D]
    v: Any  # [B, Tk, Hk, Dv]
    sinks: Any  # [Hq], or None


class Ranges(NamedTuple):
    """A lowered mask, with as many rows as the batch."""

    start: Array  # [B, Tq] int32
    end: Array
    stop: Array | None  # [B, Tk]
    blocks: Array | None  # [B, Tq / tile, Tk / tile] bool


class AttentionSaved(NamedTuple):
    """What forward keeps for backward."""

    given: Parameters
    mask: Ranges
    out: Array
    lse: Array


def check_room(static: AttentionStatic, parts: Mapping[str, int]) -> None:
    """Raise if the bound is below a device's memory of a call.

    Raises:
        ValueError: it is.
    """
    bound, need = static.options.scratch_bytes, sum(parts.values())
    if bound is not None and bound < need:
        raise ValueError(f"{OP}: scratch_bytes={bound} is too small; the call needs {need} bytes")


class _AttentionCut(NamedTuple):
    """Where a tile is cut from an axis: the last one is as large as the others, so it may begin earlier."""

    start: Array
    new: Array  # [size] bool: not in the tile before

    @staticmethod
    def of(i: Any, size: int, length: int) -> "_AttentionCut":
        start = jnp.minimum(i * size, length - size)
        return _AttentionCut(start, start + jnp.arange(size) >= i * size)


def _cut(x: Array, at: Array, size: int, axis: int = 1) -> Array:
    return lax.dynamic_slice_in_dim(x, at, size, axis)


def _add(x: Array, part: Array, at: Array, axis: int = 1) -> Array:
    size = part.shape[axis]
    return lax.dynamic_update_slice_in_dim(x, _cut(x, at, size, axis) + part, at, axis)


def _not_finite(x: Array) -> Array:
    """[B, T] bool, from [B, T, H, D]: whether a token has a number that isn't finite."""
    return ~jnp.isfinite(x).all((2, 3))


class _Tiles(NamedTuple):
    """A call cut in tiles.

    Numbers that aren't finite are 0 in them: a product with a probability of 0 would otherwise be NaN, even for queries
    that don't see the number.  The scores of queries that do see it are NaN.
    """

    static: AttentionStatic
    given: Parameters  # finite
    mask: Ranges
    nan_queries: Array  # [B, Tq] bool
    nan_keys: Array  # [B, Tk] bool

    @staticmethod
    def of(static: AttentionStatic, given: Parameters, mask: Ranges) -> "_Tiles":
        q, k, v = (jnp.nan_to_num(x, posinf=0.0, neginf=0.0) for x in (given.q, given.k, given.v))
        keys = _not_finite(given.k) | _not_finite(given.v)
        return _Tiles(static, Parameters(q, k, v, given.sinks), mask, _not_finite(given.q), keys)

    @property
    def rows(self) -> int:
        return min(XLA_ROWS, self.static.problem.queries)

    @property
    def columns(self) -> int:
        return min(XLA_COLUMNS, self.static.problem.keys)

    @property
    def row_tiles(self) -> int:
        return -(-self.static.problem.queries // self.rows)

    def queries(self, x: Array, at: Array) -> Array:
        """A tile of x [B, Tq, Hq, ...] as [B, Hk, G, rows, ...], in the dtype of sums."""
        p, part = self.static.problem, _cut(x, at, self.rows)
        part = part.astype(accumulator(self.given.q.dtype)).reshape(
            p.batch, self.rows, p.key_heads, p.group, *x.shape[3:]
        )
        return jnp.moveaxis(part, 1, 3)

    def put(self, x: Array, part: Array, at: Array) -> Array:
        """Write a tile that is laid out as `queries` returns it."""
        part = jnp.moveaxis(part, 3, 1).reshape(x.shape[0], self.rows, *x.shape[2:])
        return lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), at, 1)

    def keys(self, x: Array, at: Array) -> Array:
        """[B, Hk, columns, D] in the dtype of sums."""
        return jnp.moveaxis(_cut(x, at, self.columns), 1, 2).astype(accumulator(self.given.q.dtype))

    def range(self, at: Array) -> tuple[Array, Array]:
        """The tiles of keys that the queries of a tile may see."""
        start, end = _cut(self.mask.start, at, self.rows), _cut(self.mask.end, at, self.rows)
        there = end > start
        first = jnp.min(jnp.where(there, start, self.static.problem.keys))
        last = jnp.max(jnp.where(there, end, 0))
        return first // self.columns, -(-last // self.columns)

    def seen(self, at: Array, keys: _AttentionCut) -> Array:
        """[B, 1, 1, rows, columns] bool."""
        i, j = (at + jnp.arange(self.rows))[None, :, None], (keys.start + jnp.arange(self.columns))[None, None]
        start, end = (_cut(x, at, self.rows)[..., None] for x in (self.mask.start, self.mask.end))
        seen = (start <= j) & (j < end) & keys.new[None, None]
        if self.mask.stop is not None:
            seen &= i < _cut(self.mask.stop, keys.start, self.columns)[:, None]
        if self.mask.blocks is not None:
            seen &= self.mask.blocks[:, i[0] // self.static.tile, j[0] // self.static.tile]
        return seen[:, None, None]

    def scores(self, q: Array, k: Array, at: Array, keys: _AttentionCut) -> tuple[Array, Array | None]:
        """[B, Hk, G, rows, columns]: final scores, and with a softcap their derivative."""
        z = jnp.einsum("bhgqd,bhkd->bhgqk", q, k, precision=lax.Precision.HIGHEST) * self.static.scale
        nan = _cut(self.nan_queries, at, self.rows)[..., None] | _cut(self.nan_keys, keys.start, self.columns)[:, None]
        z = jnp.where(nan[:, None, None], jnp.nan, z)
        if (c := self.static.options.softcap) is None:
            return z, None
        t = jnp.tanh(z / c)
        return c * t, 1 - t * t

    def sink(self) -> Array:
        """[1, Hk, G, 1]; -inf without sinks."""
        p, total = self.static.problem, accumulator(self.given.q.dtype)
        if self.given.sinks is None:
            return jnp.full((1, p.key_heads, p.group, 1), -jnp.inf, total)
        sinks: Array = self.given.sinks
        return sinks.astype(total).reshape(1, p.key_heads, p.group, 1)


def _forward(
    static: AttentionStatic, needs: Parameters, given: Parameters, mask: Ranges
) -> tuple[Any, AttentionSaved | None]:
    tiles, p, total = _Tiles.of(static, given, mask), static.problem, accumulator(given.q.dtype)
    check_room(static, xla_parts(p, total.itemsize, backward=any(needs)))
    shape = p.batch, p.queries, p.heads
    made = jnp.zeros((*shape, p.value_size), given.q.dtype), jnp.full(shape, -jnp.inf, total)
    if made[0].size == 0 and made[1].size == 0:
        return made, AttentionSaved(given, mask, *made)
    sink = tiles.sink()

    def step(n: Any, made: Any) -> Any:
        at = _AttentionCut.of(n, tiles.rows, p.queries).start
        q = tiles.queries(tiles.given.q, at)

        def absorb(m: Any, state: Any) -> Any:
            most, sums, out = state
            cut = _AttentionCut.of(m, tiles.columns, p.keys)
            z, _ = tiles.scores(q, tiles.keys(tiles.given.k, cut.start), at, cut)
            z = jnp.where(tiles.seen(at, cut), z, -jnp.inf)
            new = jnp.maximum(most, z.max(-1))
            shift = jnp.where(new == -jnp.inf, 0, new)
            e, decay = jnp.exp(z - shift[..., None]), jnp.exp(most - shift)
            v = tiles.keys(tiles.given.v, cut.start)
            product = jnp.einsum("bhgqk,bhkd->bhgqd", e, v, precision=lax.Precision.HIGHEST)
            return new, sums * decay + e.sum(-1), out * decay[..., None] + product

        most = jnp.broadcast_to(sink, q.shape[:-1])
        state = (
            most,
            jnp.where(most == -jnp.inf, 0.0, 1.0).astype(total),
            jnp.zeros((*q.shape[:-1], p.value_size), total),
        )
        if p.keys:
            first, last = tiles.range(at)
            state = lax.fori_loop(first, last, absorb, vary_alike(state, (given, mask)))
        most, sums, out = state
        nothing = sums == 0
        divisor = jnp.where(nothing, 1, sums)
        out = jnp.where(nothing[..., None], 0, out / divisor[..., None])
        lse = jnp.where(nothing, -jnp.inf, jnp.where(nothing, 0, most) + jnp.log(divisor))
        return tiles.put(made[0], out, at), tiles.put(made[1], lse, at)

    made = lax.fori_loop(0, tiles.row_tiles, step, vary_alike(made, (given, mask)))
    return made, AttentionSaved(given, mask, *made)


def _backward(static: AttentionStatic, needs: Parameters, saved: AttentionSaved, cotangents: Any) -> Parameters:
    given, mask, out, lse = saved
    tiles, p, total = _Tiles.of(static, given, mask), static.problem, accumulator(given.q.dtype)
    grad_out, grad_lse = cotangents
    grad_out = jnp.zeros_like(out) if grad_out is None else grad_out
    grad_lse = jnp.zeros_like(lse) if grad_lse is None else jnp.where(lse == -jnp.inf, 0, grad_lse)
    finite = jnp.where(lse == -jnp.inf, 0, lse)
    zeros = Parameters(
        jnp.zeros(given.q.shape, total),
        jnp.zeros((p.batch, p.key_heads, p.keys, p.size), total),
        jnp.zeros((p.batch, p.key_heads, p.keys, p.value_size), total),
        jnp.zeros((p.key_heads, p.group), total),
    )
    sink = tiles.sink()

    def step(n: Any, made: Parameters) -> Parameters:
        at, new = _AttentionCut.of(n, tiles.rows, p.queries)
        q, shift = tiles.queries(tiles.given.q, at), tiles.queries(finite, at)
        # A query that sees nothing may have any upstream gradient: its out is 0, and it takes part in no product.
        given_out, own = tiles.queries(grad_out, at), tiles.queries(out, at)
        nan = ~jnp.isfinite(given_out).all(-1)[..., None]
        do = jnp.where(nan | ~new[None, None, None, :, None], 0, given_out)
        more = tiles.queries(grad_lse, at) - jnp.where(own == 0, 0, given_out * own).sum(-1)
        more = jnp.where(new[None, None, None], more, 0)
        by_sink = made.sinks + (jnp.exp(sink - shift) * more).sum((0, 3))

        def absorb(m: Any, state: Any) -> Any:
            of_q, of_k, of_v = state
            cut = _AttentionCut.of(m, tiles.columns, p.keys)
            k, v = tiles.keys(tiles.given.k, cut.start), tiles.keys(tiles.given.v, cut.start)
            z, slope = tiles.scores(q, k, at, cut)
            seen = tiles.seen(at, cut) & new[None, None, None, :, None]
            e = jnp.where(seen, jnp.exp(jnp.where(seen, z, 0) - shift[..., None]), 0)
            dp = jnp.einsum("bhgqd,bhkd->bhgqk", do, v, precision=lax.Precision.HIGHEST) + more[..., None]
            dz = jnp.where(seen, jnp.where(nan, jnp.nan, e * dp), 0) * static.scale
            e = jnp.where(seen & nan, jnp.nan, e)
            dz = dz if slope is None else jnp.where(seen, dz * slope, 0)
            of_k = _add(of_k, jnp.einsum("bhgqk,bhgqd->bhkd", dz, q, precision=lax.Precision.HIGHEST), cut.start, 2)
            of_v = _add(of_v, jnp.einsum("bhgqk,bhgqd->bhkd", e, do, precision=lax.Precision.HIGHEST), cut.start, 2)
            return of_q + jnp.einsum("bhgqk,bhkd->bhgqd", dz, k, precision=lax.Precision.HIGHEST), of_k, of_v

        state = jnp.zeros_like(q), made.k, made.v
        if p.keys:
            first, last = tiles.range(at)
            state = lax.fori_loop(first, last, absorb, vary_alike(state, (given, mask)))
        of_q, of_k, of_v = state
        # Rows that were in the tile before are 0 here.
        before = tiles.queries(made.q, at)
        return Parameters(
            tiles.put(made.q, jnp.where(new[None, None, None, :, None], of_q, before), at), of_k, of_v, by_sink
        )

    zeros = vary_alike(zeros, (given, mask, cotangents))
    made = lax.fori_loop(0, tiles.row_tiles, step, zeros) if p.queries else zeros
    k, v = (jnp.moveaxis(x, 1, 2) for x in (made.k, made.v))
    found = Parameters(made.q, k, v, None if given.sinks is None else made.sinks.reshape(-1))
    return Parameters(*(x if need else None for x, need in zip(found, needs, strict=True)))


def roles_of(given: Parameters, heads: int) -> Roles:
    """The roles of arrays with heads at this dimension: devices may share sequences and heads."""
    by_head = Role(True, heads)
    of_sinks = None if given.sinks is None else Role(vocab=0)
    of_kept = by_head, Role(True, 1)
    return Roles(Parameters(by_head, by_head, by_head, of_sinks), BY_TOKEN, (by_head, by_head), 1, of_kept)


def on_device(static: AttentionStatic, given: Parameters, mask: Ranges) -> tuple[AttentionStatic, Parameters, Ranges]:
    """The arguments of forward, for a device's sequences and heads."""
    heads = 2 if static.mesh is None else static.mesh.roles.outputs[0].vocab
    sizes = {"batch": given.q.shape[0], "heads": given.q.shape[heads], "key_heads": given.k.shape[heads]}
    problem = static.problem if static.mesh is None else static.problem._replace(**sizes)
    return static._replace(problem=problem), given, mask


ATTENTION = with_gradients_on_mesh(OP, _forward, _backward, on_device)
