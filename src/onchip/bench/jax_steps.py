"""JAX's part of all benchmarks.  `onchip.bench.torch_steps` has the same names.

All implementations multiply float32 inputs in full float32: by default JAX rounds them to tf32 on a GPU.
"""

import gc
import itertools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from onchip.bench import timing
from onchip.bench.peers import IGNORED
from onchip.oracle.checks import plain_cross_entropy
from onchip.oracle.jax import NAME, default_device, linear, log_softmax, take, xp
from onchip.oracle.jax import constant as ids
from onchip.oracle.reference import loss_of_lse

__all__ = ["NAME", "default_device", "ids", "linear", "log_softmax", "take", "xp"]

PLAIN = "XLA, 16-bit logits"
PACKAGES = ("jax", "jaxlib", "numpy")
# Rows that are drawn at a time: random bits of a whole matrix would take eight times its bytes in bfloat16.
_DRAWN_ROWS = 1024


def drawer(device: str) -> Callable[..., Array]:
    """A function that draws matrices of normal numbers on the default device, the same ones in each run."""
    count = itertools.count(1)

    def normal(rows: int, columns: int, std: float = 1.0, mean: float = 0.0, dtype: str = "float32") -> Array:
        blocks = -(-rows // _DRAWN_ROWS)

        def some(key: Array) -> Array:
            # Of float32 numbers: bfloat16 ones would be drawn from 128 values.
            return (std * jax.random.normal(key, (-(-rows // blocks), columns)) + mean).astype(dtype)

        def whole(key: Array) -> Any:
            return lax.map(some, jax.random.split(key, blocks)).reshape(-1, columns)[:rows]

        drawn: Array = jax.jit(whole)(jax.random.fold_in(jax.random.key(0), next(count)))
        return drawn

    return normal


def constant(x: Array, dtype: str) -> Array:
    return x.astype(dtype)


def leaf(x: Array, dtype: str, columns: int | None = None) -> Array:
    """`x` in `dtype`, with all of its columns; a step that wants fewer slices them itself."""
    return x.astype(dtype)


def parameter(x: Array) -> Array:
    return x


# ------------------------------------------------------------------------------------------------------------ steps


@dataclass(frozen=True)
class JaxStep:
    """A function of arrays, compiled when it is first needed, and its arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __call__(self) -> Any:
        return self.compilation[0](*self.arguments)

    @cached_property
    def compilation(self) -> tuple[jax.stages.Compiled, float]:
        """The compiled function, and how many seconds tracing and compiling took."""
        first = jax.tree.leaves(self.arguments)[0]
        device = min(first.devices(), key=lambda device: device.id)  # several may share an array
        precision = "highest" if first.dtype == jnp.float32 else None
        start = time.perf_counter()
        with jax.default_device(device), jax.default_matmul_precision(precision):
            compiled = jax.jit(self.function).lower(*self.arguments).compile()
        return compiled, time.perf_counter() - start


def steps(
    function: Callable[..., Any], arguments: tuple[Array, ...], leaves: int, upstream: tuple[Array, ...] = ()
) -> dict[str, JaxStep]:
    """As PyTorch's."""

    def forward(*arguments: Array) -> list[Array]:
        return jax.tree.leaves(function(*arguments))

    def both(arguments: tuple[Array, ...], upstream: tuple[Array, ...]) -> list[Array]:
        first = arguments[:leaves]
        made, pullback = jax.vjp(lambda *first: forward(*first, *arguments[leaves:]), *first)
        gradients = pullback(list(upstream) or [jnp.full_like(x, 1 / x.size) for x in made])
        # As an optimizer takes them: tokamax's 'xla' returns float32 ones.
        return [*made, *(g.astype(x.dtype) for g, x in zip(gradients, first, strict=True))]

    return {"forward": JaxStep(forward, arguments), "forward+backward": JaxStep(both, (arguments, upstream))}


def gradient_alone(function: Callable[..., Any], arguments: tuple[Array, ...], which: int, upstream: Array) -> JaxStep:
    """As PyTorch's; XLA leaves out what this gradient doesn't need, including forward."""

    def alone(arguments: tuple[Array, ...], upstream: Array) -> list[Array]:
        before, own, after = arguments[:which], arguments[which], arguments[which + 1 :]
        _, pullback = jax.vjp(lambda x: function(*before, x, *after), own)
        return [pullback(upstream)[0].astype(own.dtype)]

    return JaxStep(alone, (arguments, upstream))


def without_gradients(function: Callable[..., list[Array]], *arguments: Array) -> JaxStep:
    """As PyTorch's."""
    return JaxStep(function, arguments)


def products(
    mode: str, hidden: Array, weight: Array, *constants: tuple[Array, Array], frozen: bool = False
) -> Callable[[], Sequence[Array]]:
    """As PyTorch's, each product compiled by itself."""
    logits, *others = (JaxStep(lambda h, w: h @ w.T, pair) for pair in ((hidden, weight), *constants))
    if mode == "forward":
        return lambda: [logits(), *(other() for other in others)]
    g = logits()
    to_hidden, to_weight = JaxStep(lambda g, w: g @ w, (g, weight)), JaxStep(lambda g, h: g.T @ h, (g, hidden))
    gradients = [to_hidden, *([] if frozen else [to_weight])]
    return lambda: [logits(), *(other() for other in others), *(made() for made in gradients)]


def copies(x: Array, rows: int) -> JaxStep:
    """Reads and writes the first `rows`."""
    return JaxStep(lambda x: [jnp.copy(x[:rows])], (x,))


# ------------------------------------------------------------------------------------------------- time and memory

_IN_A_ROW, _FEWEST = 30.0, 3  # milliseconds of steps, and how many at least


def time_once(step: timing.Step, device: str) -> float:
    """Milliseconds of one run, from the call until everything that it returns is there.

    On a GPU it is one of several runs in a row, so that the host is ahead of the device, as in training.
    """

    def run(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            returned = step()
        jax.block_until_ready(returned)
        elapsed = time.perf_counter() - start
        del returned  # not before the clock stops: giving the gradients back is no part of the step
        return elapsed * 1e3

    first = run(1)
    if device == "cpu":
        return first
    times = max(_FEWEST, int(_IN_A_ROW / first))
    return run(times) / times


time_interleaved = partial(timing.time_interleaved, time_once)


def peak_extra_bytes(step: JaxStep, *, device: str) -> int:
    """Peak of the step's temporary memory, as XLA has planned it."""
    planned: Any = step.compilation[0].memory_analysis()
    return int(planned.temp_size_in_bytes)


def beside(step: JaxStep, device: str) -> dict[str, Any]:
    """As PyTorch's: how long tracing and compiling took."""
    return {"compile_s": step.compilation[1]}


def release(device: str) -> None:
    """Collect the cycles that hold arrays after a step ran out of memory."""
    gc.collect()


def threads() -> int | None:
    """XLA uses all cores."""
    return None


def gpu() -> dict[str, Any]:
    """Name and CUDA version of the device that JAX runs on."""
    device = jax.devices("gpu")[0]
    found = re.search(r"cuda (\d+)", device.client.platform_version)
    version = int(found[1]) if found else None  # such as 13000
    return {"gpu": device.device_kind, "cuda": version and f"{version // 1000}.{version % 1000 // 10}"}


# ------------------------------------------------------------------------------------------------------ correctness


in_float64 = partial(jax.enable_x64, True)


def wide(x: Array) -> Array:
    return x.astype(jnp.float64)


def wide_rows(x: Array, start: int, size: int) -> Array:
    """As PyTorch's, padded with rows of zeros to a power of two, so that not every group of rows is compiled anew."""
    rows: Array = _wide_rows(x, start, size, 1 << max(0, size - 1).bit_length())
    return rows


@partial(jax.jit, static_argnames="rows")
def _wide_rows(x: Array, start: Array, size: Array, rows: int) -> Array:
    i = jnp.arange(rows)
    found = jnp.take(x, start + i, axis=0, mode="clip")
    return jnp.where((i < size)[:, None], wide(found), 0)


def wide_matrix(x: Array, i: int) -> Array:
    """As PyTorch's."""
    return wide(lax.dynamic_index_in_dim(x, i, keepdims=False))


def added(x: Array, columns: slice, y: Array) -> Array:
    """As PyTorch's."""
    return x.at[:, columns].add(y)


def gradient(function: Callable[..., Sequence[Array]], z: Array, *others: Array) -> tuple[Sequence[Array], Array]:
    """As PyTorch's."""
    values, pullback = jax.vjp(lambda z: function(z, *others), z)
    return values, pullback(jax.tree.map(jnp.ones_like, values))[0]


# ------------------------------------------------------------------------------------------------ the plain expression


def logits(hidden: Array, weight: Array, wide: bool) -> Array:
    """Logits [T, V] in float32, first rounded to hidden's dtype unless `wide`."""
    made = jnp.dot(hidden, weight.T, preferred_element_type=jnp.float32 if wide else None)
    return made.astype(jnp.float32)


def gathered(logits: Array, labels: Array) -> Array:
    """Cross-entropies [T], for labels that are all in [0, V)."""
    return jax.nn.logsumexp(logits, axis=1) - take(logits, labels[:, None])[:, 0]


def narrow(
    hidden: Array,
    weight: Array,
    labels: Array,
    *,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    **of_lse: float,
) -> Array:
    """The form that XLA compiles best: the label's logit is gathered from the 16-bit logits, and only the log-sum-exp
    reads them in float32.
    """
    z = hidden @ weight.T

    def capped(z: Array) -> Array:
        z = z.astype(jnp.float32)
        return z if softcap is None else softcap * jnp.tanh(z / softcap)

    kept = labels != IGNORED
    lse, chosen = jax.nn.logsumexp(capped(z), axis=1), capped(take(z, jnp.where(kept, labels, 0)[:, None])[:, 0])
    each = lse - (1 - label_smoothing) * chosen + loss_of_lse(lse, **of_lse)
    if label_smoothing:
        each -= label_smoothing * capped(z).mean(1)
    each = jnp.where(kept, each, 0)
    return each if reduction == "none" else each.sum() / jnp.maximum(kept.sum(), 1)


def by_optax(logits: Array, labels: Array) -> Array:
    import optax

    made: Array = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return made


def cross_entropy(
    logits: Array, labels: Array, losses: Callable[[Array, Array], Array] = gathered, **options: Any
) -> Array:
    """The float32 mean over the tokens whose label is not IGNORED."""
    if options:
        made: Array = plain_cross_entropy(logits, labels, **options)
        return made
    kept = labels != IGNORED
    each = losses(logits, jnp.where(kept, labels, 0)).astype(jnp.float32)
    return jnp.where(kept, each, 0).sum() / jnp.maximum(kept.sum(), 1)
