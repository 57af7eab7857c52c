"""What `onchip bench --framework jax` needs to know of this op: the names that `onchip.bench.harness.Op` lists.

Bench cases are plain: mean over the tokens that are not ignored, no options; so every peer can run them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from onchip.bench import jax_steps as jax_bench
from onchip.bench.jax_peers import IGNORED
from onchip.bench.jax_steps import Reference, Step, bounds_of, in_float64, scan_rows
from onchip.bench.ops.cross_entropy_jax_peers import OWN, PEERS, PLAIN
from onchip.bench.peers import Implementation, Peer
from onchip.core.sizes import DTYPE_BYTES
from onchip.ops.cross_entropy import cases

CASES = cases.BENCH_CASES
DEFAULT_CASES = cases.DEFAULT_BENCH_CASES
DTYPES = tuple(DTYPE_BYTES)


@dataclass(frozen=True)
class Problem:
    """Inputs of one case, in the dtype and on the device of the run."""

    logits: Array  # [T, V], or where the case is sliced, [T, V and more]: a step cuts the rest off
    labels: Array  # [T]
    vocab: int


def make_problem(case: cases.Case, device: str, dtype: str) -> Problem:
    """The inputs of `case` as arrays, drawn on the device."""
    assert not case.options
    logits, labels = jax_bench.drawn_on(device, partial(_draw, case, dtype))
    return Problem(logits, labels, case.vocab)


def _draw(case: cases.Case, dtype: str) -> tuple[Array, Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    logits = jax.random.normal(keys[0], (case.tokens, case.vocab + case.sliced)) * case.logit_std + case.logit_offset
    return logits.astype(dtype), jax_bench.ignore_some(case, jax_bench.draw_labels(case, keys[1]), keys[2])


def _steps(problem: Problem, peer: Peer) -> dict[str, Step]:
    loss, vocab = peer.load(), problem.vocab
    return jax_bench.steps(
        lambda logits, labels: loss(logits[:, :vocab], labels), (problem.logits, problem.labels), leaves=1
    )


IMPLEMENTATIONS = tuple(Implementation(peer, _steps) for peer in (*OWN, *PEERS))


def floor(problem: Problem, mode: str) -> Callable[[], Sequence[Array]]:
    """A copy that moves the same bytes: the logits read once, and in 'forward+backward' written once too."""
    # In forward half of them are read, and as much is written.
    rows = (len(problem.logits) + 1) // 2 if mode == "forward" else len(problem.logits)
    return Step(lambda x: [jnp.copy(x[:rows])], (problem.logits,))


def reference(problem: Problem) -> Reference:
    """In JAX's float64, a chunk of rows at a time; the gradient is kept in float32 beside 16-bit logits."""
    logits, labels, vocab = problem.logits, problem.labels, problem.vocab
    made = in_float64(partial(_float64, vocab), logits, labels)
    values = dict(zip(("loss", "grad_logits"), made, strict=True))
    lengths = (vocab + len(labels), 2 * vocab)
    return Reference(values, bounds_of(values, partial(_steps, problem, PLAIN[0]), logits.dtype, lengths))


def _float64(vocab: int, logits: Array, labels: Array) -> tuple[Array, Array]:
    wide = jnp.float64 if logits.dtype == jnp.float32 else jnp.float32
    count = jnp.maximum((labels != IGNORED).sum(), 1)
    padding = ((0, 0), (0, logits.shape[1] - vocab))

    def one(loss: Array, z: Array, label: Array, counts: Array) -> tuple[Array, Any]:
        kept = counts & (label[:, None] != IGNORED)
        hit = label[:, None] == jnp.arange(vocab)
        log_p = jax.nn.log_softmax(z[:, :vocab].astype(jnp.float64))
        g = jnp.where(kept, jnp.exp(log_p) - hit, 0) / count
        return loss - jnp.where(kept & hit, log_p, 0).sum(), jnp.pad(g.astype(wide), padding)

    loss, gradient = scan_rows(one, jnp.zeros((), jnp.float64), (logits, labels), 8 * vocab)
    return loss / count, gradient


check = Reference.check
