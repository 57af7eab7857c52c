"""The contract of attention in NumPy float64: the one oracle of every test.

Written for reading, not for speed; the maths is in the package's docstring.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class AttentionResult(NamedTuple):
    """Outputs and gradients of sum(grad_out * out) + sum(grad_lse * lse)."""

    out: Array  # [B, Tq, Hq, Dv]
    lse: Array  # [B, Tq, Hq]
    grad_q: Array
    grad_k: Array
    grad_v: Array
    grad_sinks: Array  # [Hq]


def dense(
    start: npt.ArrayLike,  # [B, Tq]
    end: npt.ArrayLike,  # [B, Tq]
    stop: npt.ArrayLike | None,  # [B, Tk]
    keys: int,
    blocks: npt.ArrayLike | None = None,  # [B, Tq / tile, Tk / tile] bool
    tile: int = 0,
) -> npt.NDArray[np.bool_]:
    """[B, Tq, Tk]: what each query sees under a mask's normal form."""
    first, last, j = np.asarray(start)[..., None], np.asarray(end)[..., None], np.arange(keys)
    i = np.arange(first.shape[1])
    seen = (first <= j) & (j < last)
    if stop is not None:
        seen = seen & (i[:, None] < np.asarray(stop)[:, None, :])
    if blocks is not None:
        seen = seen & np.asarray(blocks)[:, i[:, None] // tile, j // tile]
    return seen


def attention(
    q: npt.ArrayLike,  # [B, Tq, Hq, D]
    k: npt.ArrayLike,  # [B, Tk, Hk, D]
    v: npt.ArrayLike,  # [B, Tk, Hk, Dv]
    seen: npt.ArrayLike,  # [B or 1, Tq, Tk] bool
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: npt.ArrayLike | None = None,  # [Hq]
    grad_out: npt.ArrayLike | None = None,  # as out; None: ones
    grad_lse: npt.ArrayLike | None = None,  # as lse; None: zeros
) -> AttentionResult:
    """One sequence and head after the other."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, queries, heads, size = q.shape
    group, by = heads // k.shape[2], 1 / np.sqrt(size) if scale is None else scale
    mask = np.broadcast_to(np.asarray(seen), (batch, queries, k.shape[1]))
    sink = np.full(heads, -np.inf) if sinks is None else np.asarray(sinks, np.float64)
    out, lse = np.zeros((batch, queries, heads, v.shape[3])), np.full((batch, queries, heads), -np.inf)
    d_out = np.ones_like(out) if grad_out is None else np.asarray(grad_out, np.float64)
    d_lse = np.zeros_like(lse) if grad_lse is None else np.asarray(grad_lse, np.float64)
    grad_q, grad_k, grad_v, grad_sinks = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), np.zeros(heads)
    for b in range(batch):
        for h in range(heads):
            g = h // group
            z = by * q[b, :, h] @ k[b, :, g].T
            slope = np.ones_like(z)
            if softcap is not None:
                t = np.tanh(z / softcap)
                z, slope = softcap * t, 1 - t * t
            z = np.where(mask[b], z, -np.inf)
            most = np.maximum(z.max(1, initial=-np.inf), sink[h])
            most = np.where(np.isfinite(most), most, 0.0)
            e, of_sink = np.exp(z - most[:, None]), np.exp(sink[h] - most)
            total = e.sum(1) + of_sink
            there = total > 0
            share = 1 / np.where(there, total, 1.0)
            p = e * share[:, None]
            out[b, :, h] = p @ v[b, :, g]
            lse[b, :, h] = np.where(there, most + np.log(np.where(there, total, 1.0)), -np.inf)
            d_o, d_l = d_out[b, :, h], d_lse[b, :, h]
            more = np.where(there, d_l - (d_o * out[b, :, h]).sum(1), 0.0)
            dz = p * (d_o @ v[b, :, g].T + more[:, None]) * slope * by
            grad_v[b, :, g] += p.T @ d_o
            grad_q[b, :, h] = dz @ k[b, :, g]
            grad_k[b, :, g] += dz.T @ q[b, :, h]
            grad_sinks[h] += (of_sink * share * more).sum()
    return AttentionResult(out, lse, grad_q, grad_k, grad_v, grad_sinks)
