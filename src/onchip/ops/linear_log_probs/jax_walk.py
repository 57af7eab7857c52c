"""linear_log_probs and log_probs for JAX: the operator, and the gradients of their results with respect to logits.

`with_gradients_on_mesh` gives the operator its derivatives and spreads it over devices.  The computation is in
`onchip.vocab.jax_ways`; the package's docstring has the maths.
"""

import math
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onchip.core.backends import choose_backend
from onchip.frontend.jax_call import IGNORED, OUT_OF_RANGE, Planned, Static
from onchip.frontend.jax_mesh import BY_TOKEN, WHOLE
from onchip.frontend.jax_spread import Between, with_gradients_on_mesh
from onchip.ops.linear_log_probs import LOGITS_OP, OP, LogProbsOptions, WantedOutputs
from onchip.vocab import jax_ways
from onchip.vocab.memory import Problem
from onchip.vocab.rows.memory import RowsProblem
from onchip.vocab.xla import parallel
from onchip.vocab.xla.loss import LossCall
from onchip.vocab.xla.tiles import (
    VANISHED,
    CountedTokens,
    Transform,
    Wanted,
    XlaProjection,
    XlaTokenGradient,
    XlaTokenStats,
    shares,
)


class GivenToLogProbs(NamedTuple):
    """The arrays of a public function's call that get no gradient."""

    ids: Any  # [...] or [..., K] int32 in [0, V), IGNORED or OUT_OF_RANGE
    temperature: Any  # [...], if each token has one
    numbers: Any  # the other numbers, by name, []

    def by_token(self, tokens: int) -> tuple[jax.Array, Transform]:
        """The ids, [T, K], and the numbers."""
        numbers = dict(self.numbers)
        if self.temperature is not None:
            numbers["temperature"] = self.temperature.reshape(-1)
        return self.ids.reshape(tokens, self.ids.size // tokens), Transform(**numbers)


OF_GIVEN = GivenToLogProbs(BY_TOKEN, BY_TOKEN, WHOLE)
"""Which of them are indexed by token."""


def on_device(static: Static, of: XlaProjection | jax.Array, given: GivenToLogProbs) -> tuple[Static, Any, Any]:
    """The arguments of `forward`, made from a layer with hidden [..., H], or from logits [..., V]."""
    if isinstance(of, XlaProjection):
        static, layer = parallel.split_as(static, of.vocab), of.flat()
        constants = given.by_token(len(layer.hidden))
        problem = problem_of(static, layer, constants, XlaProjection(True, True, layer.bias is not None))
        refused = jax_ways.refusals(problem, static.platform, layer.layout, shard=static.shard)
        elsewhere = () if static.shard else ("triton",)
        return static._replace(backend=choose_backend(OP, static.backend, refused, elsewhere)), layer, constants
    tokens, vocab = math.prod(of.shape[:-1]), of.shape[-1]
    static, constants = parallel.split_as(static, vocab), given.by_token(tokens)
    logits = of.reshape(tokens, vocab)
    refused = jax_ways.row_refusals(_rows(static, logits, constants, True), static.platform)
    return static._replace(backend=choose_backend(LOGITS_OP, static.backend, refused)), logits, constants


def forward(
    static: Static, needs: Any, of: XlaProjection | jax.Array, constants: tuple[jax.Array, Transform]
) -> tuple[WantedOutputs, Planned | None]:
    """The outputs for a layer, or for logits [T, V], and what backward needs."""
    if static.shard is not None:
        static.shard.refuse_untracked(OP if isinstance(of, XlaProjection) else LOGITS_OP, needs)
    backend, plan, call = _planned(static, needs, of, constants)
    stats, _, saved = jax_ways.each(backend, partial(backend.forward, plan, wanted_of(static.options), needs))(call)
    # Logits are kept as the caller gave them: for 16-bit ones `call.source` may be a copy.
    return outputs_of(stats, call.tokens), None if saved is None else _saved(of, saved, plan)


def _saved(of: Any, saved: Any, plan: Any) -> Planned:
    return Planned((of, saved._replace(call=saved.call._replace(source=None))), plan)


def problem_of(
    static: Static, layer: XlaProjection, constants: tuple[jax.Array, Transform], needs: XlaProjection
) -> Problem:
    """The problem, which plans and refusals depend on, given which gradients are needed."""
    asked = {"per_token_loss": True, "split": static.shard is not None} | _asked(static.options, constants)
    asked["stats"] = static.options.entropy or static.options.top1
    return layer.problem(needs, static.platform, op=OP, **asked)


def _asked(options: LogProbsOptions, constants: tuple[jax.Array, Transform]) -> dict[str, Any]:
    ids, transform = constants
    return {
        "ids": ids.shape[1],
        "stats": options.entropy,
        "more_stats": options.mean_logits + options.log_sum_sq_probs,
        "softcap": transform.softcap is not None,
    }


def _planned(
    static: Static, needs: Any, of: XlaProjection | jax.Array, constants: tuple[jax.Array, Transform]
) -> tuple[ModuleType, Any, LossCall]:
    """The backend, its plan, and the call in the form that it takes."""
    (ids, transform), options = constants, static.options
    backend, source = jax_ways.way_to(static.backend, of)
    plan: Any
    if isinstance(of, XlaProjection):
        strategy = "recompute" if static.recompute else "auto"
        plan = backend.plan(problem_of(static, of, constants, needs), strategy, options.scratch_bytes)
    else:
        problem = _rows(static, of, constants, any(jax.tree.leaves(needs)))
        plan = jax_ways.row_plan(problem, static.backend, options.scratch_bytes)
    one = ids.shape[1] == 1
    selected = backend.select(plan, ids[:, 0] if one else jnp.where((ids != IGNORED).any(1), 0, IGNORED))
    own = selected.take(ids, IGNORED)
    return backend, plan, LossCall(source, transform.by_row(selected), selected, own, shard=static.shard)


def _rows(static: Static, logits: jax.Array, constants: tuple[jax.Array, Transform], needed: bool) -> RowsProblem:
    """The problem of a call with logits [T, V]."""
    on, (tokens, vocab) = "cpu" if static.platform == "cpu" else "cuda", logits.shape
    asked = _asked(static.options, constants)
    return RowsProblem(tokens, vocab, logits.dtype.name, on, needed, op=LOGITS_OP, **asked)


def backward(static: Static, needs: Any, saved: Planned, upstream: WantedOutputs) -> Any:
    of, known = saved.arrays
    backend, source = jax_ways.way_to(static.backend, of)
    known = known._replace(call=known.call._replace(source=source))
    gradient = gradient_by_outputs(known.call.tokens, known.call.ids, known.stats, upstream)
    return jax_ways.each(backend, partial(backend.gradients, saved.plan, needs))(known, gradient)


def keep(static: Static, saved: Planned, *_: Any) -> XlaTokenStats:
    _, known = saved.arrays
    return known.stats.by_token(known.call.tokens)  # type: ignore[no-any-return]


def resume(static: Static, needs: Any, kept: XlaTokenStats, of: Any, constants: Any) -> Planned:
    backend, plan, call = _planned(static, needs, of, constants)
    return _saved(of, backend.Saved(call, kept.by_row(call.tokens)), plan)


BETWEEN = Between(resumable=lambda static: static._replace(recompute=True), keep=keep, resume=resume)
OPERATOR = with_gradients_on_mesh(f"{OP}, {LOGITS_OP}", forward, backward, on_device, BETWEEN)


def of_no_tokens(dtype: Any) -> WantedOutputs:
    none = jnp.zeros(0, dtype)
    return WantedOutputs(none, none, none, jnp.zeros(0, jnp.int32), none, none)


def wanted_of(options: LogProbsOptions) -> Wanted:
    return Wanted(options.entropy, options.top1, options.mean_logits, options.log_sum_sq_probs)


def outputs_of(stats: XlaTokenStats, tokens: CountedTokens) -> WantedOutputs:
    """The outputs, indexed by token, from statistics that are indexed by row."""

    def spread(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else tokens.spread(x)

    return WantedOutputs(
        spread(stats.log_prob),
        spread(stats.entropy),
        spread(stats.lse),
        None if stats.argmax is None else jnp.where(tokens.kept, tokens.spread(stats.argmax), -1),
        spread(lax.stop_gradient(stats.mean_logits)),
        spread(lax.stop_gradient(stats.log_sum_sq)),
    )


def gradient_by_outputs(
    tokens: CountedTokens, ids: jax.Array, stats: XlaTokenStats, upstream: WantedOutputs
) -> XlaTokenGradient:
    """The gradient of each token's logits; None in `upstream` means zero."""
    dtype = stats.lse.dtype

    def rows(grad: Any) -> jax.Array | None:
        return None if grad is None else tokens.take(grad.astype(dtype), 0)

    g, g_entropy, g_lse = map(rows, (upstream.log_prob, upstream.entropy, upstream.lse))
    g = jnp.zeros(ids.shape, dtype) if g is None else g
    g = jnp.where(ids == IGNORED, 0, jnp.where(ids == OUT_OF_RANGE, jnp.nan, g))
    same, rest = shares(ids, g)
    common = jnp.sum(g, 1)
    if g_lse is not None:
        common, rest = common - g_lse, rest - g_lse[:, None]
    if g_entropy is not None and stats.entropy is not None:
        rest += g_entropy[:, None] * jnp.maximum(stats.log_prob + stats.entropy[:, None], VANISHED[dtype])
    # 1 - p as -expm1(log p): 1 minus a rounded p would lose all digits of a p near 1.
    at_ids = -same * jnp.expm1(stats.log_prob) - jnp.exp(stats.log_prob) * rest
    return XlaTokenGradient(-common, at_ids, None if g_entropy is None else -g_entropy)
