"""The contract of linear_log_probs and log_probs in NumPy float64, with gradients: the oracle of every test."""

from typing import Any

import numpy as np
import numpy.typing as npt

from onchip.ops.linear_log_probs import WantedOutputs
from onchip.oracle.reference import Linear, Logits, blocks, transform, with_gradients


def linear_log_probs(
    hidden: npt.ArrayLike,  # [..., H]
    weight: npt.ArrayLike,  # [V, H]
    ids: npt.ArrayLike,  # [...] or [..., K]
    bias: npt.ArrayLike | None = None,  # [V]
    **options: Any,
) -> Any:
    """The fields of `WantedOutputs`, and grad_hidden, grad_weight and grad_bias; the options are those of
    `_log_probs`."""
    return _log_probs(Linear(hidden, weight, bias), np.shape(hidden)[:-1], ids, **options)


def log_probs(
    logits: npt.ArrayLike,  # [..., V]
    ids: npt.ArrayLike,  # [...] or [..., K]
    **options: Any,
) -> Any:
    """The fields of `WantedOutputs`, and grad_logits; the options are those of `_log_probs`."""
    return _log_probs(Logits(logits), np.shape(logits)[:-1], ids, **options)


def _log_probs(
    of: Linear | Logits,
    shape: tuple[int, ...],
    ids: npt.ArrayLike,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: npt.ArrayLike = 1.0,  # a number or [...]
    grad_log_prob: npt.ArrayLike = 1.0,  # upstream gradients: a number or [...] or [..., K]
    grad_entropy: npt.ArrayLike = 0.0,  # a number or [...]
    grad_lse: npt.ArrayLike = 0.0,  # a number or [...]
) -> Any:
    """The values, log_prob in the ids' shape and all others in the tokens', and the gradients of sum(grad_log_prob *
    log_prob) + sum(grad_entropy * entropy) + sum(grad_lse * lse).

    An ignored id has log_prob 0 and no gradient; a token whose ids are all ignored has top1 -1 and 0 in everything
    else, whatever its other inputs hold.  An id outside [0, V) that is not ignore_index has log_prob NaN, and its
    token's gradients are NaN, as on a GPU, where raising would have to wait for the device.
    """
    ids, vocab = np.asarray(ids), of.vocab
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
        z, slope = transform(of.products(r), softcap, logit_scale, tau[r])

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
        of.backward(r, dz * slope)
    by_token = (x.reshape(shape) for x in (entropy, lse, top1, mean_logits, log_sum_sq_probs))
    return with_gradients(WantedOutputs(log_prob.reshape(ids.shape), *by_token)._asdict(), of)
