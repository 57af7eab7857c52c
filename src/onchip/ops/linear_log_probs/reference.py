"""The contract of linear_log_probs and log_probs in NumPy float64, with gradients: the oracle of every test."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onchip.oracle.reference import Array, Indices, Linear, blocks, transform


class LogProbsResult(NamedTuple):
    """log_prob has the shape of the ids, all other values that of hidden without its last dimension."""

    log_prob: Array
    entropy: Array
    lse: Array
    top1: npt.NDArray[np.int64]
    mean_logits: Array
    log_sum_sq_probs: Array
    grad_hidden: Array
    grad_weight: Array
    grad_bias: Array


class LogitsResult(NamedTuple):
    """As `LogProbsResult`, of given logits."""

    log_prob: Array
    entropy: Array
    lse: Array
    top1: npt.NDArray[np.int64]
    mean_logits: Array
    log_sum_sq_probs: Array
    grad_logits: Array


def linear_log_probs(
    hidden: npt.ArrayLike,  # [..., H]
    weight: npt.ArrayLike,  # [V, H]
    ids: npt.ArrayLike,  # [...] or [..., K]
    bias: npt.ArrayLike | None = None,  # [V]
    **options: Any,
) -> LogProbsResult:
    """Values and gradients; the options are those of `_log_probs`."""
    layer = Linear(hidden, weight, bias)
    made = _log_probs(layer.products, layer.backward, np.shape(hidden)[:-1], layer.vocab, ids, **options)
    return LogProbsResult._make((*made, *layer.gradients))


def log_probs(
    logits: npt.ArrayLike,  # [..., V]
    ids: npt.ArrayLike,  # [...] or [..., K]
    **options: Any,
) -> LogitsResult:
    """Values and the gradient; the options are those of `_log_probs`."""
    given = np.asarray(logits, np.float64)
    x = given.reshape(-1, given.shape[-1])
    grad = np.zeros_like(x)

    def backward(rows: Indices, gradient: Array) -> None:
        grad[rows] = gradient

    made = _log_probs(lambda rows: x[rows], backward, given.shape[:-1], x.shape[1], ids, **options)
    return LogitsResult._make((*made, grad.reshape(given.shape)))


def _log_probs(
    products: Callable[[Indices], Array],
    backward: Callable[[Indices, Array], None],
    shape: tuple[int, ...],
    vocab: int,
    ids: npt.ArrayLike,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: npt.ArrayLike = 1.0,  # a number or [...]
    grad_log_prob: npt.ArrayLike = 1.0,  # upstream gradients: a number or [...] or [..., K]
    grad_entropy: npt.ArrayLike = 0.0,  # a number or [...]
    grad_lse: npt.ArrayLike = 0.0,  # a number or [...]
) -> tuple[Any, ...]:
    """The values of a `LogProbsResult`, and the gradients of sum(grad_log_prob * log_prob) + sum(grad_entropy *
    entropy) + sum(grad_lse * lse).

    `products(rows)` returns [n, V], these tokens' logits before their transform.  `backward(rows, grad)` receives their
    gradient.

    An ignored id has log_prob 0 and no gradient; a token whose ids are all ignored has top1 -1 and 0 in everything
    else, whatever its other inputs hold.  An id outside [0, V) that is not ignore_index has log_prob NaN, and its
    token's gradients are NaN, as on a GPU, where raising would have to wait for the device.
    """
    ids = np.asarray(ids)
    n_tokens = int(np.prod(shape))
    y = ids.reshape(n_tokens, -1 if n_tokens else 1).astype(np.int64)
    tau, g_entropy, g_lse = (
        np.broadcast_to(np.asarray(x, np.float64), shape).reshape(-1) for x in (temperature, grad_entropy, grad_lse)
    )
    g_log_prob = np.broadcast_to(np.asarray(grad_log_prob, np.float64), ids.shape).reshape(y.shape)

    log_prob = np.zeros(y.shape)
    entropy, lse, mean_logits, log_sum_sq_probs = (np.zeros(n_tokens) for _ in range(4))
    top1 = np.full(n_tokens, -1)
    for r in blocks(np.flatnonzero((y != ignore_index).any(1)), vocab):
        counted = y[r] != ignore_index
        in_range = (y[r] >= 0) & (y[r] < vocab)
        column = np.where(in_range, y[r], 0)
        z, slope = transform(products(r), softcap, logit_scale, tau[r])

        shift = np.maximum(z.max(1), np.finfo(np.float64).min)
        e = np.exp(z - shift[:, None])
        p = e / e.sum(1)[:, None]
        # log1p of the others: a log-probability of -1e-12 keeps its digits.
        others = e.sum(1, where=np.arange(vocab) != z.argmax(1)[:, None])
        log_total = np.log1p(others)
        log_p = (z - shift[:, None]) - log_total[:, None]
        safe_log_p = np.where(p > 0, log_p, 0)
        lse[r] = shift + log_total
        top1[r] = z.argmax(1)
        entropy[r] = -(p * safe_log_p).sum(1)
        mean_logits[r] = z.mean(1)
        # In the same way.
        square = np.square(e).sum(1, where=np.arange(vocab) != z.argmax(1)[:, None])
        log_sum_sq_probs[r] = np.log1p(square) - 2 * log_total
        picked = np.take_along_axis(log_p, column, 1)
        log_prob[r] = np.where(counted, np.where(in_range, picked, np.nan), 0)

        g = np.where(counted, np.where(in_range, g_log_prob[r], np.nan), 0)
        dz = np.zeros_like(z)
        np.add.at(dz, (np.arange(len(r))[:, None], column), np.where(counted, g, 0))
        dz += p * (g_lse[r] - g.sum(1))[:, None] - g_entropy[r, None] * p * (safe_log_p + entropy[r, None])
        backward(r, dz * slope)
    by_token = (x.reshape(shape) for x in (entropy, lse, top1, mean_logits, log_sum_sq_probs))
    return log_prob.reshape(ids.shape), *by_token
