"""The contract of grouped_matmul in NumPy float64: the one oracle of every test.

Written for reading, not for speed; the maths is in the package's docstring.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onchip.groups.problem import GroupedOptions, check_one_of_two, check_shapes, check_values, sizes_of

Array = npt.NDArray[np.float64]


class GroupedResult(NamedTuple):
    """Output and gradients of sum(grad_out * out)."""

    out: Array  # [T, C] or [num_rows, C]; C = N, or N / 2 with an activation
    grad_x: Array  # [M, K]
    grad_weight: Array  # as the weight
    grad_bias: Array  # [G, N]
    grad_row_scale: Array  # [T]


def grouped_matmul(
    x: npt.ArrayLike,  # [T, K]; with rows [M, K]
    weight: npt.ArrayLike,  # [G, N, K], or [G, K, N] with weight_layout="gkn"
    group_sizes: npt.ArrayLike | None = None,  # [G]
    *,
    group_offsets: npt.ArrayLike | None = None,  # [G]
    bias: npt.ArrayLike | None = None,  # [G, N]
    row_scale: npt.ArrayLike | None = None,  # [T]
    rows: npt.ArrayLike | None = None,  # [T]
    scatter_rows: npt.ArrayLike | None = None,  # [T]
    grad_out: npt.ArrayLike | None = None,  # as the result; None: ones
    **words: Any,  # weight_layout, activation, gate_up, num_rows
) -> GroupedResult:
    """One group after the other."""
    options = GroupedOptions(**words)
    turned, activation, gate_up = options.weight_layout == "gkn", options.activation, options.gate_up
    which, given = check_one_of_two(group_sizes, group_offsets)
    arrays = {"x": x, "weight": weight, which: given, "bias": bias, "row_scale": row_scale, "rows": rows}
    arrays["scatter_rows"] = scatter_rows
    p = check_shapes(options, {name: np.shape(a) for name, a in arrays.items() if a is not None})
    read = None if rows is None else np.asarray(rows, np.int64)
    write = None if scatter_rows is None else np.asarray(scatter_rows, np.int64)
    check_values(p, which, np.asarray(given), read, write)
    read = np.arange(p.tokens) if read is None else read
    write = np.arange(p.tokens) if write is None else write

    source, w = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    w = w.swapaxes(1, 2) if turned else w
    b = np.zeros((p.groups, p.n)) if bias is None else np.asarray(bias, np.float64)
    c = np.ones(p.tokens) if row_scale is None else np.asarray(row_scale, np.float64)
    out = np.zeros((p.out_rows, p.columns))
    g = np.ones_like(out) if grad_out is None else np.asarray(grad_out, np.float64)
    grad_x, grad_w, grad_b, grad_c = np.zeros(source.shape), np.zeros(w.shape), np.zeros(b.shape), np.zeros(p.tokens)
    start = 0
    for i, size in enumerate(sizes_of(which, np.asarray(given).tolist())):
        mine = slice(start, start + size)
        start += size
        xi, gi, ci = source[read[mine]], g[write[mine]], c[mine, None]
        y = xi @ w[i].T + b[i]
        a = y if activation is None else swiglu(*split(y, gate_up))
        np.add.at(out, write[mine], ci * a)
        grad_c[mine] = (gi * a).sum(1)
        d = ci * gi
        if activation is not None:
            d = join(*swiglu_gradient(*split(y, gate_up), d), gate_up)
        np.add.at(grad_x, read[mine], d @ w[i])
        grad_w[i] = d.T @ xi
        grad_b[i] = d.sum(0)
    return GroupedResult(out, grad_x, grad_w.swapaxes(1, 2) if turned else grad_w, grad_b, grad_c)


def split(y: Array, gate_up: str) -> tuple[Array, Array]:
    """Gate and up, each [T, F], of y [T, 2 F]."""
    half = y.shape[1] // 2
    return (y[:, :half], y[:, half:]) if gate_up == "concatenated" else (y[:, 0::2], y[:, 1::2])


def join(gate: Array, up: Array, gate_up: str) -> Array:
    """What `split` splits."""
    if gate_up == "concatenated":
        return np.concatenate([gate, up], 1)
    return np.stack([gate, up], 2).reshape(len(gate), 2 * gate.shape[1])


def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) * up."""
    return gate * sigmoid(gate) * up


def swiglu_gradient(gate: Array, up: Array, grad: Array) -> tuple[Array, Array]:
    """The gradients of gate and up, given that of silu(gate) * up."""
    s = sigmoid(gate)
    return grad * up * s * (1 + gate * (1 - s)), grad * gate * s


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow."""
    e = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1.0, e) / (1 + e), np.float64)
