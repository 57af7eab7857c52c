"""A token's cross-entropy and its gradient, from the statistics of its softmax: written once for PyTorch and JAX.

With p the softmax of a token's final logits z, lse their log-sum-exp, w_v the weights of classes (1 without), q_v the
token's labels times these, S the sum of q, eps the label smoothing:

    loss = (1 - eps) sum_v q_v (lse - z_v) + eps mean_v(w_v (lse - z_v)) + z_loss lse^2
    d loss / d z_v = p_v ((1 - eps) S + eps mean(w) + 2 z_loss lse) - (1 - eps) q_v - eps w_v / V

A label that is an id is K = 1 of K ids, whose q is its class's weight, or 1.  All that isn't an id's own entry has
q_v = 0.  `xp` is the module with the functions that both frameworks have: `torch` or `jax.numpy`.  `terms` that are
None are left out.
"""

from dataclasses import replace
from typing import Any

from onchip.frontend.options import LossTerms

Array = Any


def expected(xp: Any, log_prob: Array, q: Array | None) -> Array:
    """[n]: sum_k q_k log p_k of ids' log-probabilities [n, K]; without `q` there is one id, whose q is 1.

    An id without probability costs nothing, even if its logit is -inf.
    """
    if q is None:
        return log_prob[:, 0]
    return xp.where((q == 0) & (log_prob == -float("inf")), 0, q * log_prob).sum(1)


def loss_of_lse(xp: Any, terms: LossTerms, lse: Array) -> Array:
    """[n]: the z-loss, for terms that have one."""
    return terms.z_loss * xp.square(lse)


def factor_of_lse(terms: LossTerms) -> Array:
    """The derivative of the z-loss with respect to lse, divided by lse; None for terms without."""
    return None if terms.z_loss is None else 2 * terms.z_loss


def slope_of_lse(terms: LossTerms, lse: Array) -> Array:
    """[n]: the derivative of the z-loss with respect to lse."""
    return factor_of_lse(terms) * lse


def value(xp: Any, terms: LossTerms, cost: Array, lse: Array, uniform: Array | None) -> Array:
    """[n]: the loss, from `cost`, sum_v q_v log p_v, and with smoothing from `uniform`, mean_v(w_v (lse - z_v))."""
    loss: Array = -cost
    eps = terms.label_smoothing
    if eps is not None:
        loss = _times(xp, 1 - eps, loss) + _times(xp, eps, uniform)
    return loss if terms.z_loss is None else loss + loss_of_lse(xp, terms, lse)


def _times(xp: Any, factor: Array, x: Array) -> Array:
    """A product that is 0 wherever the factor is 0: a masked logit may have an infinite loss."""
    if isinstance(factor, int | float):
        return factor * x if factor > 0 else xp.zeros_like(x)
    return xp.where(factor > 0, factor * x, 0)


def of_p(terms: LossTerms, mass: Array | None, lse: Array, share: Array | None) -> Array | float:
    """[n]: the factor of p, from `mass`, S (None: 1), and `share`, mean(w) (None: 1)."""
    eps: Array = terms.label_smoothing
    made = 1.0 if mass is None else mass
    if eps is not None and not (mass is None and share is None):
        made = (1 - eps) * made + eps * (1.0 if share is None else share)
    return made if terms.z_loss is None else made + slope_of_lse(terms, lse)


def at_entry(
    xp: Any,
    terms: LossTerms,
    log_prob: Array,
    q: Array | None,
    others: Array | None,
    lse: Array,
    vocab: int,
    own: Array | None,
    share: Array | None,
) -> Array:
    """The gradient with respect to an entry's logit, from its log-probability; all arguments may have further
    dimensions.

    q: its label (None: 1).  others: the sum of all others' (None: 0).  own: its class's weight; share: the mean weight
    of the classes (None: 1).
    """
    eps, z_loss = terms.label_smoothing, terms.z_loss
    # p - 1 as expm1(log p): 1 taken from a rounded p would lose all digits of a p near 1.
    made = xp.expm1(log_prob)
    if q is not None:
        made = q * made
    p: Array = None if eps is None and z_loss is None and others is None else xp.exp(log_prob)
    if others is not None:
        made = made + others * p
    if eps is not None:
        # The smoothing's part in one number, which is 0 for a single class.
        rest = (p if share is None else p * share) - (1 / vocab if own is None else own / vocab)
        made = (1 - eps) * made + eps * rest
    return made if z_loss is None else made + slope_of_lse(terms, lse) * p


def of_shard(options: Any, rows: int, vocab: int, *, value: bool) -> tuple[Any, float]:
    """The options with which the loss of a whole vocabulary becomes that of a shard's labels, one for each of its
    `rows`, and what it and its gradient are to be multiplied by; the `value` lacks what the lse of all shards adds.

    What an entry gets of the label smoothing is what it gets in the whole vocabulary.
    """
    spread = options.label_smoothing * rows / vocab
    factor = 1 - options.label_smoothing + spread
    z_loss = 0.0 if value else options.z_loss / factor
    return replace(options, label_smoothing=spread / factor, z_loss=z_loss), factor


def by_outputs(
    terms: LossTerms, row: Array, lse: Array, q: Array | None, vocab: int, share: Array | None
) -> tuple[Array, Array | None, Array | None]:
    """`row` [n] times the loss's gradients by the ids' log-probabilities [n, K] and by lse [n]; and `even` [n], which
    is to be subtracted from each logit's gradient, times its class's weight.
    """
    eps, even = terms.label_smoothing, None
    more: Array = None if terms.z_loss is None else slope_of_lse(terms, lse)
    if eps is None:
        by_log_prob = -row[:, None]
    else:
        of_even = eps if share is None else eps * share
        more, even = of_even if more is None else of_even + more, row * (eps / vocab)
        by_log_prob = -(1 - eps) * row[:, None]
    return by_log_prob if q is None else by_log_prob * q, None if more is None else row * more, even
