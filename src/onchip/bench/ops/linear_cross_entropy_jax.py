"""What `onchip bench --framework jax` needs to know of this op: the names that `onchip.bench.harness.Op` lists.

Bench cases are plain: mean over the tokens that are not ignored, no bias, no options.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import onchip
from onchip.bench import jax_steps as jax_bench
from onchip.bench.jax_peers import IGNORED
from onchip.bench.jax_steps import Reference, Step, bounds_of, in_float64, scan_rows
from onchip.bench.ops.linear_cross_entropy_jax_peers import PEERS, Loss, plain
from onchip.bench.peers import Implementation
from onchip.core.sizes import DTYPE_BYTES, MIB
from onchip.frontend.jax_call import Static
from onchip.ops.linear_cross_entropy import cases, jax_op
from onchip.ops.linear_cross_entropy.checks import plain_refusals
from onchip.ops.linear_cross_entropy.reference import linear_cross_entropy as oracle
from onchip.oracle.cases import target_logit
from onchip.vocab import memory
from onchip.vocab.mosaic import memory as mosaic_spec
from onchip.vocab.xla import memory as jax_spec

CASES = cases.BENCH_CASES
DEFAULT_CASES = cases.DEFAULT_BENCH_CASES
DTYPES = tuple(DTYPE_BYTES)

ScratchBytes = Callable[[memory.Problem], int | None]
"""The budget for a problem; None for the op's default."""


@dataclass(frozen=True)
class Problem:
    """Inputs of one case, in the dtype and on the device of the run."""

    hidden: Array  # [T, H]
    weight: Array  # [V, H]
    labels: Array  # [T]

    @property
    def spec(self) -> memory.Problem:
        tokens, hidden = self.hidden.shape
        device = "cpu" if _platform(self.hidden) == "cpu" else "cuda"
        vocab = self.weight.shape[0]
        return memory.Problem(tokens, hidden, vocab, dtype=self.hidden.dtype.name, device=device, compacted=True)

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
        return Problem(*jax_bench.drawn_on(device, partial(_draw, case, dtype)))
    inputs = cases.make_inputs(case)
    with jax.default_device(jax.devices("cpu")[0]):
        hidden, weight = (jnp.asarray(x, dtype) for x in (inputs.hidden, inputs.weight))
        return Problem(hidden, weight, jnp.asarray(inputs.target, jnp.int32))


def _draw(case: cases.Case, dtype: str) -> tuple[Array, Array, Array]:
    """Hidden, weight and labels as `cases.make_inputs` has them, but drawn on the device.

    The distributions are the same and the numbers are not.  NumPy draws a billion normal numbers on one core.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    hidden, weight = jax_bench.draw_layer(keys, case.tokens, case.hidden, case.vocab, case.logit_std)
    labels = jax_bench.draw_labels(case, keys[2])
    if case.target_prob is not None:
        chosen = weight[labels]
        missing = target_logit(case) - (hidden * chosen).sum(1, keepdims=True)
        hidden += missing / jnp.square(chosen).sum(1, keepdims=True) * chosen
    return hidden.astype(dtype), weight.astype(dtype), jax_bench.ignore_some(case, labels, keys[3])


def _steps(loss: Loss, arguments: tuple[Array, Array, Array]) -> dict[str, Step]:
    return jax_bench.steps(loss, arguments, leaves=2)


# -------------------------------------------------------------------------------------------------- implementations


def _default(problem: memory.Problem) -> None:
    return None


def _small(problem: memory.Problem) -> int:
    """As the name says; or with many more tokens than H what the kernels need for a useful chunk."""
    return max(64 * MIB + 4 * problem.tokens * problem.hidden, mosaic_spec.useful_scratch(problem, "auto"))


def _eighth_of_logits(problem: memory.Problem) -> int:
    """Of the float32 logits' bytes, or what the smallest chunk needs."""
    return max(memory.logits_bytes(problem) // 8, jax_spec.scratch_at_least(problem, "recompute"))


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
        return None if self.backend == "auto" else plain_refusals("cuda", dtype, "jax")[self.backend]

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


def _peer_steps(problem: Problem, peer: Any) -> dict[str, Step]:
    """`peer` is a `jax_peers.Peer`."""
    if problem.some_ignored and not peer.ignores:
        raise NotImplementedError("it has no tokens that don't count")
    weight = problem.weight_hv if peer.weight_layout == "hv" else problem.weight
    return _steps(peer.load(), (problem.hidden, weight, problem.labels))


IMPLEMENTATIONS = (
    Own("onchip auto"),
    Own("onchip, 64 MiB + 4TH", _small, not_on_cpu="a budget for GPUs"),
    Own("onchip, an eighth of the logits", _eighth_of_logits),
    Own("onchip triton", backend="triton", not_on_cpu="it runs on GPUs"),
    Own("onchip xla", backend="xla", not_on_cpu="on the CPU it is the same as onchip auto"),
    *(Implementation(peer, _peer_steps) for peer in PEERS),
)


def floor(problem: Problem, mode: str) -> Callable[[], Sequence[Array]]:
    """The matrix products alone: the logits, then both gradients."""
    return jax_bench.products(mode, problem.hidden, problem.weight)


# ------------------------------------------------------------------------------------------------------ correctness


def reference(problem: Problem) -> Reference:
    """The float64 oracle on the CPU, on a GPU (where that would take minutes) JAX's own float64."""
    made = _float64_on_cpu(problem) if _platform(problem.hidden) == "cpu" else _float64_on_gpu(problem)
    values = dict(zip(("loss", "grad_hidden", "grad_weight"), made, strict=True))
    (tokens, hidden), vocab = problem.hidden.shape, problem.weight.shape[0]
    lengths = (hidden + vocab, hidden + 2 * vocab, hidden + vocab + tokens)
    plain_steps = partial(_steps, plain(wide=False), (problem.hidden, problem.weight, problem.labels))
    return Reference(values, bounds_of(values, plain_steps, problem.hidden.dtype, lengths))


def _float64_on_cpu(problem: Problem) -> tuple[Any, ...]:
    hidden, weight = (np.asarray(x, np.float64) for x in (problem.hidden, problem.weight))
    result = oracle(hidden, weight, np.asarray(problem.labels))
    return result.loss, result.grad_hidden, result.grad_weight


def _float64_on_gpu(problem: Problem, chunk: int | None = None) -> tuple[Any, ...]:
    """A chunk of tokens at a time and by hand: autodiff would keep more [chunk, V] arrays than the two of this."""
    return in_float64(partial(_float64, chunk), problem.hidden, problem.weight, problem.labels)  # type: ignore[no-any-return]


def _float64(chunk: int | None, hidden: Array, weight: Array, labels: Array) -> tuple[Array, Array, Array]:
    wide = weight.astype(jnp.float64)

    def one(carry: tuple[Array, Array], h: Array, label: Array, counts: Array) -> tuple[tuple[Array, Array], Array]:
        h, label = h.astype(jnp.float64), label[:, None]
        kept = counts & (label != IGNORED)
        hit = label == jnp.arange(len(wide))
        logits = h @ wide.T
        lse = jax.nn.logsumexp(logits, axis=1, keepdims=True)
        g = jnp.where(kept, jnp.exp(logits - lse) - hit, 0)
        loss = jnp.where(kept, lse - jnp.where(hit, logits, 0).sum(1, keepdims=True), 0).sum()
        return (carry[0] + loss, carry[1] + g.T @ h), g @ wide

    start = (jnp.zeros((), jnp.float64), jnp.zeros(wide.shape, jnp.float64))
    (loss, grad_weight), grad_hidden = scan_rows(one, start, (hidden, labels), 8 * len(wide), chunk)
    count = (labels != IGNORED).sum()
    return loss / count, grad_hidden / count, grad_weight / count


def check(reference: Reference, mode: str, returned: Sequence[Array]) -> dict[str, tuple[float, float]]:
    """As `Reference.check`; the gradient of a weight [H, V] is [H, V]."""
    shapes = [ref.shape for ref in reference.values.values()]
    turned = [x.T if x.shape != s and x.shape[::-1] == s else x for x, s in zip(returned, shapes, strict=False)]
    return reference.check(mode, turned)
