"""The softmax of logits, and cross-entropy from it, in NumPy float64: for the oracles of several ops.

Written for reading, not for speed.  Tokens are taken in blocks, so that their logits in float64 fit in memory.
"""

from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
_BLOCK_LOGITS = 1 << 24  # 128 MiB of float64


class Linear:
    """A linear layer's products, and its gradients, which follow from those of the products."""

    names = "grad_hidden", "grad_weight", "grad_bias"

    def __init__(self, hidden: npt.ArrayLike, weight: npt.ArrayLike, bias: npt.ArrayLike | None) -> None:
        given = np.asarray(hidden, np.float64)
        self.weight = np.asarray(weight, np.float64)
        self.vocab, size = self.weight.shape
        self.hidden = given.reshape(-1, size)
        self.bias = np.zeros(self.vocab) if bias is None else np.asarray(bias, np.float64)
        self.grad_hidden, self.grad_weight = np.zeros(given.shape), np.zeros(self.weight.shape)
        self.grad_bias = np.zeros(self.vocab)

    def products(self, rows: Any) -> Array:
        """[n, V]: the products of these tokens."""
        return np.asarray(self.hidden[rows] @ self.weight.T + self.bias)

    def backward(self, rows: Any, gradient: Array) -> None:
        """Take in the gradient of these tokens' products."""
        self.grad_hidden.reshape(self.hidden.shape)[rows] = gradient @ self.weight
        self.grad_weight += gradient.T @ self.hidden[rows]
        self.grad_bias += gradient.sum(0)

    @property
    def gradients(self) -> tuple[Array, Array, Array]:
        """The gradients of hidden, weight and bias."""
        return self.grad_hidden, self.grad_weight, self.grad_bias


class Logits:
    """Logits that are given, and their gradient."""

    names = ("grad_logits",)

    def __init__(self, logits: npt.ArrayLike) -> None:
        given = np.asarray(logits, np.float64)
        self.rows = given.reshape(-1, given.shape[-1])
        self.vocab, self.grad = given.shape[-1], np.zeros(given.shape)

    def products(self, rows: Any) -> Array:
        """[n, V]: the logits of these tokens."""
        return np.asarray(self.rows[rows])

    def backward(self, rows: Any, gradient: Array) -> None:
        """Take in the gradient of these tokens' logits."""
        self.grad.reshape(self.rows.shape)[rows] = gradient

    @property
    def gradients(self) -> tuple[Array]:
        return (self.grad,)


def with_gradients(values: Mapping[str, Any], of: Linear | Logits) -> Any:
    """A named tuple of values and of the gradients that were taken in, `grad_` and what they are of."""
    made = {**values, **dict(zip(of.names, of.gradients, strict=True))}
    return namedtuple("Oracle", made)(**made)


class Loss(NamedTuple):
    """Loss and statistics.  The per-token fields have the shape of the target."""

    loss: Array
    lse: Array
    log_prob: Array
    entropy: Array
    correct: npt.NDArray[np.bool_]
    argmax: Indices
    target_logit: Array


def blocks(tokens: Indices, vocab: int) -> Iterator[Indices]:
    """`tokens` in blocks whose logits fit in memory."""
    size = max(1, _BLOCK_LOGITS // vocab)
    for start in range(0, tokens.size, size):
        yield tokens[start : start + size]


def transform(
    products: Array,  # [n, V]
    softcap: float | None,
    logit_scale: float,
    temperature: Array,  # [n]
) -> tuple[Array, Array]:
    """[n, V] logits, and their derivatives with respect to the products."""
    a = products * logit_scale
    slope = np.ones_like(a)
    if softcap is not None:
        tanh = np.tanh(a / softcap)
        a, slope = softcap * tanh, 1 - tanh**2
    return a / temperature[:, None], slope * logit_scale / temperature[:, None]


def loss_of_lse(lse: Any, z_loss: float = 0.0) -> Any:
    """The part of a loss that depends on the log-sum-exp alone, in any framework."""
    return z_loss * lse**2


def slope_of_lse(lse: Any, z_loss: float) -> Any:
    """The derivative of `loss_of_lse`."""
    return 2 * z_loss * lse


def cross_entropy(
    products: Callable[[Indices], Array],
    backward: Callable[[Indices, Array], None],
    vocab: int,
    target: npt.ArrayLike,  # [...]
    *,
    ignore_index: int = -100,
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
) -> Loss:
    """Loss and statistics of logits [..., V], block by block.

    `products(rows)` gives [n, V] for these tokens: the logits before their transform.  `backward(rows, grad)` receives
    the gradient of sum(grad_loss * loss) with respect to them.

    Ignored tokens are in no block and give 0 (False, in argmax -1) everywhere.  A target outside [0, V) that is not
    ignore_index gives NaN for its loss, log_prob, target_logit and gradient, as on a GPU, where raising would need a
    synchronisation.
    """
    target = np.asarray(target)
    shape = target.shape
    labels = target.reshape(-1).astype(np.int64)
    n_tokens = labels.size
    tau = np.broadcast_to(np.asarray(temperature, np.float64), shape).reshape(-1)
    tw = np.ones(n_tokens) if token_weight is None else np.asarray(token_weight, np.float64).reshape(-1)
    cw = np.ones(vocab) if class_weight is None else np.asarray(class_weight, np.float64)
    kept = labels != ignore_index

    denominator = 1.0
    if reduction == "mean" and kept.any():
        counted = cw[np.clip(labels[kept], 0, vocab - 1)].sum()
        denominator = float((counted or 1.0) if normalizer is None else normalizer)
    upstream = np.broadcast_to(np.asarray(grad_loss, np.float64), shape if reduction == "none" else ()).reshape(-1)
    grad_token = np.broadcast_to(upstream / denominator, (n_tokens,)) * tw

    token_loss, lse, log_prob, entropy, target_logit = (np.zeros(n_tokens) for _ in range(5))
    correct, argmax = np.zeros(n_tokens, bool), np.full(n_tokens, -1)
    for r in blocks(np.flatnonzero(kept), vocab):
        y, i = labels[r], np.arange(len(r))
        in_range = (y >= 0) & (y < vocab)
        y = np.where(in_range, y, 0)
        nan_if_bad = np.where(in_range, 0.0, np.nan)
        z, slope = transform(products(r), softcap, logit_scale, tau[r])

        shift = np.maximum(z.max(1), np.finfo(np.float64).min)
        e = np.exp(z - shift[:, None])
        total = e.sum(1)
        p = e / total[:, None]
        log_total = np.log(total)
        lse[r] = shift + log_total
        log_prob[r] = (z[i, y] - shift) - log_total + nan_if_bad
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy[r] = -np.where(p > 0, p * np.log(p), 0.0).sum(1)
        argmax[r] = z.argmax(1)
        correct[r] = (argmax[r] == y) & in_range
        target_logit[r] = z[i, y] + nan_if_bad

        loss_r = -(1 - label_smoothing) * cw[y] * log_prob[r] if label_smoothing < 1 else nan_if_bad.copy()
        if label_smoothing > 0:
            below = (log_total + shift)[:, None] - z
            loss_r += label_smoothing / vocab * (cw * np.where(cw > 0, below, 0)).sum(1)  # 0 * inf is not 0
        token_loss[r] = (loss_r + loss_of_lse(lse[r], z_loss)) * tw[r]

        each = label_smoothing / vocab
        factor = (1 - label_smoothing) * cw[y] + each * cw.sum()
        more = slope_of_lse(lse[r], z_loss)
        dz = p * (factor + more)[:, None] - each * cw
        # p_y - 1 as -(sum of the others), which keeps its digits where p_y is nearly 1.
        others = e.sum(1, where=np.arange(vocab) != y[:, None]) / total
        dz[i, y] = -others * factor + more * p[i, y] + each * (cw.sum() - cw[y])
        backward(r, dz * slope * (grad_token[r] + nan_if_bad)[:, None])

    loss = token_loss.reshape(shape) if reduction == "none" else token_loss.sum() / denominator
    return Loss(
        np.asarray(loss),
        lse.reshape(shape),
        log_prob.reshape(shape),
        entropy.reshape(shape),
        correct.reshape(shape),
        argmax.reshape(shape),
        target_logit.reshape(shape),
    )
