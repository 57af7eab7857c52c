"""What `onchip bench --framework jax` needs to know of this op: the names that `onchip.bench.harness.Op` lists.

A loss is made of what is returned, so that backward has one: the mean of the log-probabilities, and of the entropies
where the case asks for them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from onchip.bench import jax_steps as jax_bench
from onchip.bench.jax_steps import Reference, Step, bounds_of, in_float64, scan_rows
from onchip.bench.ops.linear_log_probs_jax_peers import OWN, PEERS
from onchip.bench.peers import Implementation, Peer
from onchip.core.sizes import DTYPE_BYTES
from onchip.ops.linear_log_probs import cases

CASES = cases.BENCH_CASES
DEFAULT_CASES = cases.DEFAULT_BENCH_CASES
DTYPES = tuple(DTYPE_BYTES)


@dataclass(frozen=True)
class Problem:
    """Inputs of one case, in the dtype and on the device of the run."""

    hidden: Array  # [T, H]
    weight: Array  # [V, H]
    ids: Array  # [T]
    entropy: bool


def make_problem(case: cases.Case, device: str, dtype: str) -> Problem:
    """The inputs of `case` as arrays, drawn on the device."""
    hidden, weight, ids = jax_bench.drawn_on(device, partial(_draw, case, dtype))
    return Problem(hidden, weight, ids, bool(case.options.get("entropy")))


def _draw(case: cases.Case, dtype: str) -> tuple[Array, Array, Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    hidden, weight = jax_bench.draw_layer(keys, case.tokens, case.hidden, case.vocab, case.logit_std)
    return hidden.astype(dtype), weight.astype(dtype), jax_bench.draw_labels(case, keys[2])


def _steps(problem: Problem, peer: Peer) -> dict[str, Step]:
    values = partial(peer.load(), entropy=problem.entropy)
    return jax_bench.steps(values, (problem.hidden, problem.weight, problem.ids), leaves=2)


IMPLEMENTATIONS = tuple(Implementation(peer, _steps) for peer in (*OWN, *PEERS))


def floor(problem: Problem, mode: str) -> Callable[[], Sequence[Array]]:
    """The matrix products alone: the logits, then both gradients."""
    return jax_bench.products(mode, problem.hidden, problem.weight)


def reference(problem: Problem) -> Reference:
    """In JAX's float64, a chunk of tokens at a time."""
    hidden, weight = problem.hidden, problem.weight
    made = in_float64(partial(_float64, problem.entropy), hidden, weight, problem.ids)
    forward = ("log_prob", "entropy") if problem.entropy else ("log_prob",)
    values = dict(zip((*forward, "grad_hidden", "grad_weight"), made, strict=True))
    (tokens, size), vocab = hidden.shape, len(weight)
    lengths = (*[size + vocab] * len(forward), size + 2 * vocab, size + vocab + tokens)
    plain = partial(_steps, problem, PEERS[0])
    bounds = bounds_of(values, plain, hidden.dtype, lengths, forward=len(forward))
    return Reference(values, bounds, len(forward))


def _float64(with_entropy: bool, hidden: Array, weight: Array, ids: Array) -> tuple[Array, ...]:
    wide = weight.astype(jnp.float64)

    def one(grad_weight: Array, h: Array, own: Array, counts: Array) -> tuple[Array, tuple[Array, ...]]:
        h = h.astype(jnp.float64)
        hit = own[:, None] == jnp.arange(len(wide))
        log_p = jax.nn.log_softmax(h @ wide.T)
        p = jnp.exp(log_p)
        values = [jnp.where(hit, log_p, 0).sum(1)]
        g = hit - p
        if with_entropy:
            entropy = -(p * log_p).sum(1)
            values.append(entropy)
            g -= p * (log_p + entropy[:, None])
        g = jnp.where(counts, g, 0) / len(ids)
        return grad_weight + g.T @ h, (*values, g @ wide)

    grad_weight, made = scan_rows(one, jnp.zeros(wide.shape, jnp.float64), (hidden, ids), 8 * len(wide))
    return *made, grad_weight


check = Reference.check
