"""The oracle of cross-entropies whose targets are probabilities, in NumPy float64 with gradients."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onchip.oracle.reference import (
    Array,
    Linear,
    Logits,
    blocks,
    loss_of_lse,
    slope_of_lse,
    transform,
    with_gradients,
)


class SoftLabels(NamedTuple):
    """Probabilities of K ids for each token."""

    indices: npt.ArrayLike  # [..., K]
    probs: npt.ArrayLike  # [..., K]

    def dense(self, vocab: int) -> Array:
        """[..., V]: a probability for every entry; NaN for a token with an id outside [0, V)."""
        indices, probs = np.asarray(self.indices, np.int64), np.asarray(self.probs, np.float64)
        bad: Any = (indices < 0) | (indices >= vocab)
        made = np.zeros((*indices.shape[:-1], vocab))
        rows = np.indices(indices.shape)[:-1]
        np.add.at(made, (*rows, np.where(bad, 0, indices)), probs)
        return np.where(bad.any(-1)[..., None], np.nan, made)


def soft_cross_entropy(
    of: Linear | Logits,
    target: npt.ArrayLike | SoftLabels,  # [..., V]
    *,
    reduction: str = "mean",
    normalizer: float | None = None,
    token_weight: npt.ArrayLike | None = None,  # [...]
    class_weight: npt.ArrayLike | None = None,  # [V]
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: npt.ArrayLike = 1.0,  # a number or [...]
    grad_loss: npt.ArrayLike = 1.0,  # upstream gradient: a number, or [...] for reduction="none"
) -> Any:
    """The loss and gradients for targets that are probabilities; the options are as in the cross-entropies.

    "mean" divides by the number of tokens.  An entry without probability or weight costs nothing, even if its logit is
    -inf.
    """
    vocab = of.vocab
    probs = target.dense(vocab) if isinstance(target, SoftLabels) else np.asarray(target, np.float64)
    shape = probs.shape[:-1]
    cw = np.ones(vocab) if class_weight is None else np.asarray(class_weight, np.float64)
    q_all = probs.reshape(-1, vocab) * cw
    n_tokens = len(q_all)
    tau = np.broadcast_to(np.asarray(temperature, np.float64), shape).reshape(-1)
    tw = np.ones(n_tokens) if token_weight is None else np.asarray(token_weight, np.float64).reshape(-1)
    denominator = 1.0
    if reduction == "mean" and n_tokens > 0:
        denominator = float(n_tokens if normalizer is None else normalizer)
    upstream = np.broadcast_to(np.asarray(grad_loss, np.float64), shape if reduction == "none" else ()).reshape(-1)
    grad_token = np.broadcast_to(upstream / denominator, (n_tokens,)) * tw

    token_loss = np.zeros(n_tokens)
    for r in blocks(np.arange(n_tokens), vocab):
        z, slope = transform(of.products(r), softcap, logit_scale, tau[r])
        q, i, top = q_all[r], np.arange(len(r)), z.argmax(1)
        shift = np.maximum(z.max(1), np.finfo(np.float64).min)
        e = np.exp(z - shift[:, None])
        # log1p of the others: a log-probability of -1e-12 keeps its digits, and so does 1 - p as their sum.
        others = e.sum(1, where=np.arange(vocab) != top[:, None])
        log_total = np.log1p(others)
        log_p, lse, p = (z - shift[:, None]) - log_total[:, None], shift + log_total, e / (1 + others)[:, None]
        total, eps = q.sum(1), label_smoothing
        with np.errstate(invalid="ignore"):
            loss = -(1 - eps) * np.where(q == 0, 0, q * log_p).sum(1) if eps < 1 else np.zeros(len(r))
        if eps > 0:
            loss -= eps * (cw * np.where(cw > 0, log_p, 0)).mean(1)
        token_loss[r] = (loss + loss_of_lse(lse, z_loss)) * tw[r]

        share, more = cw.mean(), slope_of_lse(lse, z_loss)
        dz = p * ((1 - eps) * total + eps * share + more)[:, None] - (1 - eps) * q - eps / vocab * cw
        less = -others / (1 + others)
        dz[i, top] = (1 - eps) * (less * total + (total - q[i, top])) + eps * (less * share + share - cw[top] / vocab)
        dz[i, top] += more * p[i, top]
        of.backward(r, dz * slope * grad_token[r][:, None])
    made = np.asarray(token_loss.reshape(shape) if reduction == "none" else token_loss.sum() / denominator)
    return with_gradients({"loss": made}, of)
