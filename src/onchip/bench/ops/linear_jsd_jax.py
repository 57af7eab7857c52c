"""What `onchip bench --framework jax` needs to know of this op: the names that `onchip.bench.harness.Op` lists.

Bench cases are plain: mean over all tokens, temperature 1, a teacher that is a constant; so every peer can run them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from onchip.bench import jax_steps as jax_bench
from onchip.bench.jax_steps import Reference, Step, bounds_of, in_float64, scan_rows
from onchip.bench.ops.linear_jsd_jax_peers import OWN, PEERS
from onchip.bench.peers import Implementation, Peer
from onchip.core.sizes import DTYPE_BYTES
from onchip.ops.linear_jsd import cases

CASES = cases.BENCH_CASES
DEFAULT_CASES = cases.DEFAULT_BENCH_CASES
DTYPES = tuple(DTYPE_BYTES)


@dataclass(frozen=True)
class Problem:
    """Inputs of one case, in the dtype and on the device of the run."""

    hidden: Array  # [T, Hs]
    weight: Array  # [V, Hs]
    teacher_hidden: Array  # [T, Ht]
    teacher_weight: Array  # [V, Ht]
    beta: float

    @property
    def arrays(self) -> tuple[Array, Array, Array, Array]:
        return self.hidden, self.weight, self.teacher_hidden, self.teacher_weight


def make_problem(case: cases.Case, device: str, dtype: str) -> Problem:
    """The inputs of `case` as arrays, drawn on the device: two models of their own."""
    h, w, x, v = jax_bench.drawn_on(device, partial(_draw, case, dtype))
    return Problem(h, w, x, v, float(case.options.get("beta", 0.5)))


def _draw(case: cases.Case, dtype: str) -> tuple[Array, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    draw = partial(jax_bench.draw_layer, tokens=case.tokens, vocab=case.vocab, std=case.logit_std)
    student = draw(keys[:2], hidden=case.hidden)
    teacher = draw(keys[2:], hidden=case.teacher_hidden or case.hidden)
    return tuple(x.astype(dtype) for x in (*student, *teacher))


def _steps(problem: Problem, peer: Peer) -> dict[str, Step]:
    return jax_bench.steps(partial(peer.load(), beta=problem.beta), problem.arrays, leaves=2)


IMPLEMENTATIONS = tuple(Implementation(peer, _steps) for peer in (*OWN, *PEERS))


def floor(problem: Problem, mode: str) -> Callable[[], Sequence[Array]]:
    """The matrix products alone: both models' logits, then the student's gradients."""
    h, w, x, v = problem.arrays
    return jax_bench.products(mode, h, w, (x, v))


def reference(problem: Problem) -> Reference:
    """In JAX's float64, a chunk of tokens at a time, by autodiff through the definition."""
    made = in_float64(partial(_float64, problem.beta), *problem.arrays)
    values = dict(zip(("loss", "grad_hidden", "grad_weight"), made, strict=True))
    (tokens, size), vocab = problem.hidden.shape, len(problem.weight)
    lengths = (size + vocab, size + 2 * vocab, size + vocab + tokens)
    return Reference(values, bounds_of(values, partial(_steps, problem, PEERS[0]), problem.hidden.dtype, lengths))


def _float64(
    beta: float, hidden: Array, weight: Array, teacher_hidden: Array, teacher_weight: Array
) -> tuple[Array, Array, Array]:
    w, v = (x.astype(jnp.float64) for x in (weight, teacher_weight))

    def one(carry: tuple[Array, Array], h: Array, x: Array, counts: Array) -> tuple[tuple[Array, Array], Array]:
        h, x = h.astype(jnp.float64), x.astype(jnp.float64)
        lt = jax.nn.log_softmax(x @ v.T)

        def loss(z: Array) -> Array:
            terms = _definition(jax.nn.log_softmax(z), lt, beta)
            return jnp.where(counts, terms, 0).sum() / len(hidden)

        value, g = jax.value_and_grad(loss)(h @ w.T)
        return (carry[0] + value, carry[1] + g.T @ h), g @ w

    start = (jnp.zeros((), jnp.float64), jnp.zeros(w.shape, jnp.float64))
    # Autodiff keeps more arrays of a chunk's size than the other ops' references have.
    (value, grad_weight), grad_hidden = scan_rows(one, start, (hidden, teacher_hidden), 4 * 8 * len(w))
    return value, grad_hidden, grad_weight


def _definition(ls: Array, lt: Array, beta: float) -> Array:
    """The divergence's terms, of log-probabilities."""
    s, t = jnp.exp(ls), jnp.exp(lt)
    if beta in (0.0, 1.0):
        return t * (lt - ls) if beta == 0 else s * (ls - lt)
    lm = jnp.log((1 - beta) * s + beta * t)
    return (1 - beta) * s * (ls - lm) + beta * t * (lt - lm)


check = Reference.check
