"""What the benchmarks of several ops in JAX share: inputs, compiled steps, the floor, the comparison with a reference.

Products of float32 inputs are products of float32 numbers for all: by default JAX rounds them to tf32 on a GPU.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from onchip.bench.jax_peers import IGNORED
from onchip.bench.peers import bounds
from onchip.oracle.jax import platform_of

# ----------------------------------------------------------------------------------------------------------- inputs


def drawn_on(device: str, draw: Callable[[], Any]) -> Any:
    """What `draw` returns, compiled for "cpu" or "cuda"."""
    with jax.default_device(jax.devices(platform_of(device))[0]):
        return jax.jit(draw)()


def draw_layer(keys: Array, tokens: int, hidden: int, vocab: int, std: float) -> tuple[Array, Array]:
    """float32 hidden [T, H] ~ N(0, 1), and weight [V, H] that makes logits ~ N(0, std) of it."""
    weight = jax.random.normal(keys[1], (vocab, hidden)) * (std / hidden**0.5)
    return jax.random.normal(keys[0], (tokens, hidden)), weight


def draw_labels(case: Any, key: Array) -> Array:
    """[T] vocabulary indices: uniform, or as Zipf's law has them."""
    if not case.zipf:
        return jax.random.randint(key, (case.tokens,), 0, case.vocab)
    share = 1 / np.arange(1, case.vocab + 1)
    return jax.random.choice(key, case.vocab, (case.tokens,), p=jnp.asarray(share / share.sum()))


def ignore_some(case: Any, labels: Array, key: Array) -> Array:
    """The labels as int32, IGNORED in the part of the tokens that the case says."""
    shuffled = jax.random.permutation(key, case.tokens)
    return labels.at[shuffled[: round(case.ignored * case.tokens)]].set(IGNORED).astype(jnp.int32)


# ------------------------------------------------------------------------------------------------------------ steps


@dataclass(frozen=True)
class Step:
    """A function of arrays, compiled when it is first needed, and its arguments."""

    function: Callable[..., Any]
    arguments: tuple[Array, ...]

    def __call__(self) -> Any:
        return self.compiled(*self.arguments)

    @property
    def compiled(self) -> jax.stages.Compiled:
        return self._compiled[0]

    @property
    def compile_seconds(self) -> float:
        return self._compiled[1]

    @cached_property
    def _compiled(self) -> tuple[jax.stages.Compiled, float]:
        (device,) = self.arguments[0].devices()
        start = time.perf_counter()
        with jax.default_device(device), _products_of(self.arguments[0]):
            compiled = jax.jit(self.function).lower(*self.arguments).compile()
        return compiled, time.perf_counter() - start


def _products_of(array: Array) -> AbstractContextManager[Any]:
    """Where products of arrays of this dtype are not rounded further."""
    return jax.default_matmul_precision("highest") if array.dtype == jnp.float32 else nullcontext()


def steps(function: Callable[..., Any], arguments: tuple[Array, ...], leaves: int) -> dict[str, Step]:
    """The steps of `function`, which returns a loss or several arrays (None among them is dropped): 'forward' returns
    these; 'forward+backward' these and the gradients of the first so many `leaves`, of the sum of the arrays' means."""

    def forward(*arguments: Array) -> list[Array]:
        return jax.tree.leaves(function(*arguments))

    def both(*arguments: Array) -> list[Array]:
        def loss(*first: Array) -> tuple[Any, list[Array]]:
            made = forward(*first, *arguments[leaves:])
            return sum(x.astype(jnp.float32).mean() for x in made), made

        first = arguments[:leaves]
        gradients, made = jax.grad(loss, argnums=tuple(range(leaves)), has_aux=True)(*first)
        # As an optimizer takes them: tokamax's 'xla' returns float32 ones.
        return [*made, *(g.astype(x.dtype) for g, x in zip(gradients, first, strict=True))]

    return {"forward": Step(forward, arguments), "forward+backward": Step(both, arguments)}


def products(mode: str, hidden: Array, weight: Array, *constants: tuple[Array, Array]) -> Callable[[], Sequence[Array]]:
    """The matrix products alone, each compiled by itself: the logits of (hidden, weight) and of each pair of
    `constants`, then both gradients of the first."""
    logits, *others = (Step(lambda h, w: h @ w.T, pair) for pair in ((hidden, weight), *constants))
    if mode == "forward":
        return lambda: [logits(), *(other() for other in others)]
    g = logits()
    to_hidden, to_weight = Step(lambda g, w: g @ w, (g, weight)), Step(lambda g, h: g.T @ h, (g, hidden))
    return lambda: [logits(), *(other() for other in others), to_hidden(), to_weight()]


# ------------------------------------------------------------------------------------------------------ correctness


@dataclass(frozen=True)
class Reference:
    """What a step should return in 'forward+backward', by name, and how far from it each may be."""

    values: Mapping[str, Any]
    bounds: Mapping[str, float]
    forward: int = 1
    """So many of them are what 'forward' returns."""

    def check(self, mode: str, returned: Sequence[Array]) -> dict[str, tuple[float, float]]:
        """Relative error and bound of each thing that a step returned."""
        names = list(self.values)[: self.forward if mode == "forward" else None]
        pairs = zip(names, returned, strict=True)
        return {name: (relative_error(out, self.values[name]), self.bounds[name]) for name, out in pairs}


def relative_error(out: Array, ref: Any) -> float:
    """||out - ref|| / ||ref||, in float64."""
    if out.shape != ref.shape:
        raise ValueError(f"a result has shape {list(out.shape)} where {list(ref.shape)} is right")
    with jax.enable_x64(True):
        error, norm = _squares(out, ref)
        return math.sqrt(float(error) / float(norm))


@jax.jit
def _squares(out: Array, ref: Array) -> tuple[Array, Array]:
    """||out - ref||^2 and ||ref||^2."""
    wide = ref.astype(jnp.float64)
    return jnp.square(out.astype(jnp.float64) - wide).sum(), jnp.square(wide).sum()


def bounds_of(
    values: Mapping[str, Any],
    plain: Callable[[], Mapping[str, Step]],
    dtype: Any,
    lengths: Sequence[int],
    *,
    forward: int = 1,
) -> dict[str, float]:
    """As `bench_peers.bounds`; `plain` makes the steps of the plain expression, and isn't called in float32."""
    errors = None
    if dtype != jnp.float32:
        made = plain()["forward+backward"]()
        errors = [relative_error(out, ref) for out, ref in zip(made, values.values(), strict=True)]
    return bounds(list(values), lengths, errors, float(jnp.finfo(dtype).eps), forward=forward)


def in_float64(function: Callable[..., Any], *arguments: Array) -> Any:
    """What `function`, compiled, makes of `arguments`; float64 exists inside."""
    with jax.enable_x64(True):
        return jax.jit(function)(*arguments)


def scan_rows(
    one: Callable[..., tuple[Any, Any]], start: Any, arrays: tuple[Array, ...], row_bytes: int, chunk: int | None = None
) -> tuple[Any, Any]:
    """`lax.scan` of `one(carry, *rows of the arrays, counts)` over chunks of rows; return the carry and all made rows.

    `counts` [rows, 1] is False for the zeros that fill up the last chunk.  A chunk's rows, of `row_bytes` each, are
    1 GiB, unless it is told otherwise.
    """
    tokens = len(arrays[0])
    chunks = -(-tokens // (chunk or max(1, (1 << 30) // row_bytes)))
    size = -(-tokens // chunks)  # the most even ones need the least filling

    def cut(x: Array) -> Array:
        filled = jnp.pad(x, ((0, chunks * size - tokens), *[(0, 0)] * (x.ndim - 1)))
        return filled.reshape(chunks, size, *x.shape[1:])

    counts = (jnp.arange(chunks * size) < tokens).reshape(chunks, size, 1)
    carry, made = lax.scan(lambda carry, rows: one(carry, *rows), start, (*map(cut, arrays), counts))
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:tokens], made)
