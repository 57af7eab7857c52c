"""linear_log_probs and log_probs for JAX: what their operator (`onchip.vocab.jax_loss`) is made of.

The package's docstring has the maths.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onchip.frontend.jax_call import IGNORED, OUT_OF_RANGE, Static
from onchip.frontend.jax_mesh import BY_TOKEN, WHOLE
from onchip.ops.linear_log_probs import LOGITS_OP, OP, WantedOutputs
from onchip.vocab.jax_loss import JaxLoss
from onchip.vocab.xla.loss import LossCall
from onchip.vocab.xla.tiles import (
    VANISHED,
    Transform,
    Wanted,
    XlaTokenGradient,
    XlaTokenStats,
    shares,
)


class GivenToLogProbs(NamedTuple):
    """The arrays of a public function's call that get no gradient."""

    ids: Any  # [...] or [..., K] int32 in [0, V), IGNORED or OUT_OF_RANGE
    temperature: Any  # [...], if each token has one
    numbers: Any  # the other numbers, by name, []


OF_GIVEN = GivenToLogProbs(BY_TOKEN, BY_TOKEN, WHOLE)
"""Which of them are indexed by token."""


def of_no_tokens(dtype: Any) -> WantedOutputs:
    none = jnp.zeros(0, dtype)
    return WantedOutputs(none, none, none, jnp.zeros(0, jnp.int32), none, none)


def _by_token(
    static: Static, given: GivenToLogProbs, tokens: int, dtype: Any, axes: tuple[str, ...]
) -> tuple[jax.Array, Transform]:
    """The ids, [T, K], and the numbers."""
    numbers = dict(given.numbers)
    if given.temperature is not None:
        numbers["temperature"] = given.temperature.reshape(-1)
    return given.ids.reshape(tokens, given.ids.size // tokens), Transform(**numbers)


def _problem(static: Static, constants: tuple[jax.Array, Transform], of_layer: bool) -> dict[str, Any]:
    options, (ids, transform) = static.options, constants
    known = {
        "op": OP if of_layer else LOGITS_OP,
        "ids": ids.shape[1],
        "stats": options.entropy or (of_layer and options.top1),
        "more_stats": options.mean_logits + options.log_sum_sq_probs,
        "softcap": transform.softcap is not None,
    }
    return known | ({"per_token_loss": True} if of_layer else {})


def _call(static: Static, constants: tuple[jax.Array, Transform], source: Any, select: Any) -> LossCall:
    ids, transform = constants
    one = ids.shape[1] == 1
    tokens = select(ids[:, 0] if one else jnp.where((ids != IGNORED).any(1), 0, IGNORED))
    return LossCall(source, transform.by_row(tokens), tokens, tokens.take(ids, IGNORED), shard=static.shard)


def _wanted(static: Static, constants: Any) -> Wanted:
    options = static.options
    return Wanted(options.entropy, options.top1, options.mean_logits, options.log_sum_sq_probs)


def _outputs(static: Static, call: LossCall, stats: XlaTokenStats, sums: Any) -> WantedOutputs:
    """The outputs, indexed by token, from statistics that are indexed by row."""
    tokens = call.tokens

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


def _gradient(static: Static, known: Any, upstream: WantedOutputs) -> XlaTokenGradient:
    """The gradient of each token's logits; None in `upstream` means zero."""
    tokens, ids, stats = known.call.tokens, known.call.ids, known.stats
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


OPERATOR = JaxLoss(
    OP,
    _by_token,
    _problem,
    _call,
    _wanted,
    _outputs,
    _gradient,
    LOGITS_OP,
).operator(resumable=lambda static: static._replace(recompute=True))
