"""The contract of both functions in NumPy float64, all ranks at once: the one oracle of every test.

An argument is a list with an array for each rank, and so are results.  The maths is in the package's docstring.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
PerRank = Sequence[npt.ArrayLike]


class CollectiveResult(NamedTuple):
    """Outputs and gradients of the sum over ranks of sum(grad_out * out)."""

    out: list[Array]
    grad_x: list[Array]
    grad_weight: list[Array]
    grad_bias: list[Array]


def all_gather_matmul(x: PerRank, weight: PerRank, bias: PerRank | None, grad_out: PerRank) -> CollectiveResult:
    """Of x [T/n, ..., K], weight [N, K], bias [N] and grad_out [T, ..., N]."""
    xs, ws, gs = _wide(x), _wide(weight), _wide(grad_out)
    bs = [np.zeros(len(w)) for w in ws] if bias is None else _wide(bias)
    gathered = np.concatenate(xs)
    grad = sum(g @ w for g, w in zip(gs, ws, strict=True))
    return CollectiveResult(
        [gathered @ w.T + b for w, b in zip(ws, bs, strict=True)],
        np.split(grad, len(xs)),
        [_rows(g).T @ _rows(gathered) for g in gs],
        [_rows(g).sum(0) for g in gs],
    )


def matmul_reduce_scatter(x: PerRank, weight: PerRank, bias: PerRank | None, grad_out: PerRank) -> CollectiveResult:
    """Of x [T, ..., K], weight [N, K], one bias [N] on all ranks, and grad_out [T/n, ..., N]."""
    xs, ws, gs = _wide(x), _wide(weight), _wide(grad_out)
    n = len(xs)
    total = sum(a @ w.T for a, w in zip(xs, ws, strict=True))
    gathered = np.concatenate(gs)
    return CollectiveResult(
        np.split(total + (0.0 if bias is None else _wide(bias)[0]), n),
        [gathered @ w for w in ws],
        [_rows(gathered).T @ _rows(a) for a in xs],
        [_rows(gathered).sum(0)] * n,
    )


def _wide(arrays: PerRank) -> list[Array]:
    return [np.asarray(a, np.float64) for a in arrays]


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])
