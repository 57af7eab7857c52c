"""What `onchip bench --framework jax` needs to know of this op: the names that `onchip.bench.harness.Op` lists.

Bench cases are plain: mean over the tokens that are not ignored, no bias, no options.  Products of float32 inputs are
products of float32 numbers for all: by default JAX rounds them to tf32 on a GPU.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import onchip
from onchip.ops._shared.cases import target_logit
from onchip.ops._shared.jax_call import Static
from onchip.ops._shared.spec import DTYPE_BYTES, MIB
from onchip.ops.linear_cross_entropy import cases, jax_op, jax_spec, spec
from onchip.ops.linear_cross_entropy.jax_checks import plain_refusals
from onchip.ops.linear_cross_entropy.jax_peers import IGNORED, PEERS, Loss, Peer, plain
from onchip.ops.linear_cross_entropy.reference import linear_cross_entropy as oracle

CASES = cases.BENCH_CASES
DEFAULT_CASES = cases.DEFAULT_BENCH_CASES
DTYPES = tuple(DTYPE_BYTES)

ScratchBytes = Callable[[spec.Problem], int | None]
"""The budget for a problem; None for the op's default."""


@dataclass(frozen=True)
class Problem:
    """Inputs of one case, in the dtype and on the device of the run."""

    hidden: Array  # [T, H]
    weight: Array  # [V, H]
    labels: Array  # [T]

    @property
    def spec(self) -> spec.Problem:
        tokens, hidden = self.hidden.shape
        device = "cpu" if _platform(self.hidden) == "cpu" else "cuda"
        vocab = self.weight.shape[0]
        return spec.Problem(tokens, hidden, vocab, dtype=self.hidden.dtype.name, device=device, compacted=True)

    @cached_property
    def weight_hv(self) -> Array:
        """The weight as [H, V], for who wants it so."""
        return self.weight.T

    @cached_property
    def some_ignored(self) -> bool:
        return bool((self.labels == IGNORED).any())


def _platform(array: Array) -> str:
    (device,) = array.devices()
    return "cpu" if device.platform == "cpu" else "gpu"


def make_problem(case: cases.Case, device: str, dtype: str) -> Problem:
    """The inputs of `case` as arrays."""
    plain_case = replace(case, logit_std=1.0, target_prob=None, zipf=False, ignored=0.0)
    assert plain_case == cases.Case(case.name, case.tokens, case.hidden, case.vocab)
    if device == "cuda":
        with jax.default_device(jax.devices("gpu")[0]):
            return Problem(*jax.jit(partial(_draw, case, dtype))())
    inputs = cases.make_inputs(case)
    with jax.default_device(jax.devices("cpu")[0]):
        hidden, weight = (jnp.asarray(x, dtype) for x in (inputs.hidden, inputs.weight))
        return Problem(hidden, weight, jnp.asarray(inputs.target, jnp.int32))


def _draw(case: cases.Case, dtype: str) -> tuple[Array, Array, Array]:
    """Hidden, weight and labels as `cases.make_inputs` has them, but drawn on the device.

    The distributions are the same and the numbers are not.  NumPy draws a billion normal numbers on one core.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (case.tokens, case.hidden))
    weight = jax.random.normal(keys[1], (case.vocab, case.hidden)) * (case.logit_std / case.hidden**0.5)
    if case.zipf:
        share = 1 / np.arange(1, case.vocab + 1)
        labels = jax.random.choice(keys[2], case.vocab, (case.tokens,), p=jnp.asarray(share / share.sum()))
    else:
        labels = jax.random.randint(keys[2], (case.tokens,), 0, case.vocab)
    if case.target_prob is not None:
        chosen = weight[labels]
        missing = target_logit(case) - (hidden * chosen).sum(1, keepdims=True)
        hidden += missing / jnp.square(chosen).sum(1, keepdims=True) * chosen
    shuffled = jax.random.permutation(keys[3], case.tokens)
    labels = labels.at[shuffled[: round(case.ignored * case.tokens)]].set(IGNORED)
    return hidden.astype(dtype), weight.astype(dtype), labels.astype(jnp.int32)


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


def _steps(loss: Loss, arguments: tuple[Array, Array, Array]) -> dict[str, Step]:
    def forward(hidden: Array, weight: Array, labels: Array) -> list[Array]:
        return [loss(hidden, weight, labels)]

    def both(hidden: Array, weight: Array, labels: Array) -> list[Array]:
        value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(hidden, weight, labels)
        # As an optimizer takes them: tokamax's 'xla' returns float32 ones.
        return [value, *(g.astype(hidden.dtype) for g in gradients)]

    return {"forward": Step(forward, arguments), "forward+backward": Step(both, arguments)}


# -------------------------------------------------------------------------------------------------- implementations


def _default(problem: spec.Problem) -> None:
    return None


def _small(problem: spec.Problem) -> int:
    return 64 * MIB + 4 * problem.tokens * problem.hidden


def _eighth_of_logits(problem: spec.Problem) -> int:
    """Of the float32 logits' bytes, or what the smallest chunk needs."""
    return max(spec.logits_bytes(problem) // 8, jax_spec.scratch_at_least(problem, "recompute"))


@dataclass(frozen=True)
class Own:
    """This package's op with one choice of backend and budget."""

    name: str
    scratch_bytes: ScratchBytes = _default
    backend: str = "auto"
    not_on_cpu: str | None = None
    """Why it doesn't run there."""

    def version(self) -> str:
        return onchip.__version__

    def unavailable(self, device: str, dtype: str) -> str | None:
        if device == "cpu":
            return self.not_on_cpu
        return None if self.backend == "auto" else plain_refusals("gpu", dtype, 128, 1024)[self.backend]

    def config(self, problem: Problem, mode: str) -> dict[str, Any]:
        p = problem.spec
        budget = self.scratch_bytes(p)
        if mode == "forward":
            p = replace(p, grad_hidden=False, grad_weight=False)
        platform = _platform(problem.hidden)
        static = Static(self.backend, platform, p.dtype, "vh", "mean", "auto", budget, return_stats=False)
        backend, plan = jax_op.planned(static, p)
        return {"backend": backend, "scratch_bytes": budget, **vars(plan)}

    def steps(self, problem: Problem) -> dict[str, Step]:
        loss = partial(
            jax_op.linear_cross_entropy, scratch_bytes=self.scratch_bytes(problem.spec), backend=self.backend
        )
        return _steps(loss, (problem.hidden, problem.weight, problem.labels))


@dataclass(frozen=True)
class Other:
    """A peer's function."""

    peer: Peer

    @property
    def name(self) -> str:
        return self.peer.name

    def version(self) -> str:
        return self.peer.version()

    def unavailable(self, device: str, dtype: str) -> str | None:
        return self.peer.unavailable(device, dtype)

    def config(self, problem: Problem, mode: str) -> dict[str, Any]:
        return self.peer.config

    def steps(self, problem: Problem) -> dict[str, Step]:
        if problem.some_ignored and not self.peer.ignores:
            raise NotImplementedError("it has no tokens that don't count")
        weight = problem.weight_hv if self.peer.weight_layout == "hv" else problem.weight
        return _steps(self.peer.load(), (problem.hidden, weight, problem.labels))


IMPLEMENTATIONS = (
    Own("onchip auto"),
    Own("onchip, 64 MiB + 4TH", _small, not_on_cpu="a budget for GPUs"),
    Own("onchip, an eighth of the logits", _eighth_of_logits),
    Own("onchip triton", backend="triton", not_on_cpu="it runs on GPUs"),
    Own("onchip xla", backend="xla", not_on_cpu="on the CPU it is the same as onchip auto"),
    *(Other(peer) for peer in PEERS),
)


def floor(problem: Problem, mode: str) -> Callable[[], Sequence[Array]]:
    """The matrix products alone, each compiled by itself: the logits, then both gradients."""
    hidden, weight = problem.hidden, problem.weight
    logits = Step(lambda h, w: h @ w.T, (hidden, weight))
    if mode == "forward":
        return lambda: [logits()]
    g = logits()
    to_hidden, to_weight = Step(lambda g, w: g @ w, (g, weight)), Step(lambda g, h: g.T @ h, (g, hidden))
    return lambda: [logits(), to_hidden(), to_weight()]


# ------------------------------------------------------------------------------------------------------ correctness


@dataclass(frozen=True)
class Reference:
    """What a step should return in 'forward+backward', in float64, and how far from it each may be."""

    values: Sequence[Any]
    bounds: Sequence[float]


def reference(problem: Problem) -> Reference:
    """The float64 oracle on the CPU, on a GPU (where that would take minutes) JAX's own float64."""
    values = _float64_on_cpu(problem) if _platform(problem.hidden) == "cpu" else _float64_on_gpu(problem)
    eps = float(jnp.finfo(problem.hidden.dtype).eps)
    if problem.hidden.dtype == jnp.float32:
        # Rounding errors of a sum add up like a random walk over all the products that it is made of.
        (tokens, hidden), vocab = problem.hidden.shape, problem.weight.shape[0]
        lengths = (hidden + vocab, hidden + 2 * vocab, hidden + vocab + tokens)
        return Reference(values, [eps * n**0.5 for n in lengths])
    # Twice the error of the plain expression with logits in this dtype.  Its loss is a single number, which may be
    # right by luck, so that counts as no better than one rounding.
    expression = plain(wide=False, one_hot=False)
    made = _steps(expression, (problem.hidden, problem.weight, problem.labels))["forward+backward"]()
    errors = [_relative_error(out, ref) for out, ref in zip(made, values, strict=True)]
    return Reference(values, [2 * max(errors[0], eps / 2), *(2 * e for e in errors[1:])])


def _float64_on_cpu(problem: Problem) -> tuple[Any, ...]:
    hidden, weight = (np.asarray(x, np.float64) for x in (problem.hidden, problem.weight))
    result = oracle(hidden, weight, np.asarray(problem.labels))
    return result.loss, result.grad_hidden, result.grad_weight


def _float64_on_gpu(problem: Problem, chunk: int | None = None) -> tuple[Any, ...]:
    """A chunk of tokens at a time and by hand: autodiff would keep more [chunk, V] arrays than the two of this."""
    if chunk is None:
        chunk = max(1, (2 << 30) // (8 * problem.weight.shape[0]))  # 2 GiB for each array
    with jax.enable_x64(True):
        return _float64(problem.hidden, problem.weight, problem.labels, chunk)  # type: ignore[no-any-return]


@partial(jax.jit, static_argnums=3)
def _float64(hidden: Array, weight: Array, labels: Array, chunk: int) -> tuple[Array, Array, Array]:
    tokens, size = hidden.shape
    chunks = -(-tokens // chunk)
    padding = chunks * chunk - tokens
    wide = weight.astype(jnp.float64)

    def one(carry: tuple[Array, Array], rows: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        h, label = rows[0].astype(jnp.float64), rows[1][:, None]
        kept = label != IGNORED
        hit = label == jnp.arange(len(wide))
        logits = h @ wide.T
        lse = jax.nn.logsumexp(logits, axis=1, keepdims=True)
        g = jnp.where(kept, jnp.exp(logits - lse) - hit, 0)
        loss = jnp.where(kept, lse - jnp.where(hit, logits, 0).sum(1, keepdims=True), 0).sum()
        return (carry[0] + loss, carry[1] + g.T @ h), g @ wide

    start = (jnp.zeros((), jnp.float64), jnp.zeros(wide.shape, jnp.float64))
    rows = (
        jnp.pad(hidden, ((0, padding), (0, 0))).reshape(chunks, chunk, size),
        jnp.pad(labels, (0, padding), constant_values=IGNORED).reshape(chunks, chunk),
    )
    (loss, grad_weight), grad_hidden = lax.scan(one, start, rows)
    count = (labels != IGNORED).sum()
    return loss / count, grad_hidden.reshape(-1, size)[:tokens] / count, grad_weight / count


def check(reference: Reference, mode: str, returned: Sequence[Array]) -> dict[str, tuple[float, float]]:
    """Relative error and bound of the loss, and in 'forward+backward' of both gradients."""
    names = ("loss",) if mode == "forward" else ("loss", "grad_hidden", "grad_weight")
    errors = [_relative_error(out, ref) for out, ref in zip(returned, reference.values[: len(names)], strict=True)]
    return dict(zip(names, zip(errors, reference.bounds, strict=False), strict=True))


def _relative_error(out: Array, ref: Any) -> float:
    """||out - ref|| / ||ref||, in float64.  A gradient of weight may also be [H, V]."""
    turned = out.shape != ref.shape
    if out.shape != (ref.shape[::-1] if turned else ref.shape):
        raise ValueError(f"a result has shape {list(out.shape)} where {list(ref.shape)} is right")
    with jax.enable_x64(True):
        error, norm = _squares(out, ref, turned)
        return math.sqrt(float(error) / float(norm))


@partial(jax.jit, static_argnums=2)
def _squares(out: Array, ref: Array, turned: bool) -> tuple[Array, Array]:
    """||out - ref||^2 and ||ref||^2."""
    difference = (out.T if turned else out).astype(jnp.float64) - ref
    return jnp.square(difference).sum(), jnp.square(ref).sum()
