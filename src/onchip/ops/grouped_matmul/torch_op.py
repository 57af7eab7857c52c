"""grouped_matmul for PyTorch: the public function.

It checks its inputs without reading a value, chooses a backend and calls its operator, from `onchip.groups.torch` or
`onchip.groups.triton`.  The package's docstring has the maths.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from onchip.core.backends import choose_backend, named_backend
from onchip.frontend.options import require_bool, shapes_of
from onchip.frontend.torch_inputs import (
    LOSS_DTYPES,
    check_kinds,
    check_weight_grad_out,
    dtype_name,
    one_dtype,
    require_tensors,
)
from onchip.frontend.torch_register import Operator, inside_operator, needed
from onchip.frontend.torch_repeat import repeatable
from onchip.frontend.torch_types import Backend
from onchip.groups.problem import (
    OP,
    Activation,
    GateUp,
    GroupedOptions,
    Precision,
    WeightLayout,
    check_one_of_two,
    check_shapes,
)
from onchip.groups.torch import loop
from onchip.groups.torch.call import GroupedCall, GroupedOutputs
from onchip.groups.triton import op as kernels

# Best first: "auto" asks them in this order.
BACKENDS = ("triton", "plain")
_INTEGERS = (torch.int32, torch.int64)


@repeatable
def grouped_matmul(
    x: Tensor,  # [T, K]; with rows [M, K]
    weight: Tensor,  # [G, N, K], or [G, K, N] with weight_layout="gkn"
    group_sizes: Tensor | None = None,  # [G]
    *,
    group_offsets: Tensor | None = None,  # [G]
    weight_layout: WeightLayout = "gnk",
    bias: Tensor | None = None,  # [G, N]
    row_scale: Tensor | None = None,  # [T]
    activation: Activation | None = None,
    gate_up: GateUp = "concatenated",
    rows: Tensor | None = None,  # [T]
    scatter_rows: Tensor | None = None,  # [T]
    num_rows: int | None = None,
    weight_grad_out: Tensor | None = None,  # as the weight, float32
    backend: Backend = "auto",
    check_inputs: bool = False,
    precision: Precision = "full",
) -> Tensor:
    r"""One linear layer for each group of rows, as for the experts of a mixture of experts.

    Rows are sorted by group, and group g has group_sizes[g] of them.  For row i of group g::

        y[i]   = weight[g] @ x[rows[i]] + bias[g]            # rows[i] is i without rows
        a[i]   = y[i], or silu(gate[i]) * up[i]              # activation="swiglu": halves of y[i]
        out[i] = row_scale[i] * a[i]

    With `scatter_rows`, row i is added to row `scatter_rows[i]` of the result instead.

    Args:
        x: [T, K] float32, bfloat16 or float16, with "plain" float64 too.  With `rows` it is [M, K], in any order.
        weight: [G, N, K], of x's dtype, any strides; read in place, without a copy.
        group_sizes: [G] int32 or int64: how many rows each group has.  Any may be 0, and their sum may be less than T.
            Rows past it aren't read, even if they are NaN, and are 0 in the result and in x's gradient.
        group_offsets: [G] int32 or int64, instead of group_sizes: where each group ends, their cumulative sums.
        weight_layout: "gnk", or "gkn" for a weight [G, K, N].
        bias: [G, N] of any of the dtypes, added in float32.
        row_scale: [T] of any of the dtypes: each row of the result is multiplied by its number, in float32.
        activation: None, or "swiglu" for silu(gate) * up of the float32 sums: N = 2 F, and the result has F columns.
        gate_up: for the activation: "concatenated" (F rows of each weight for gate, then F for up) or "interleaved"
            (gate, up, gate, up, ...).
        rows: [T] int32 or int64: row i of the product reads x[rows[i]].  A row of x may be read any number of times.
        scatter_rows: [T] int32 or int64: the row of the result that each row is added to.  The sums are in float32 and
            in the same order every time.  Needs `num_rows`.
        num_rows: the number of rows of the result with scatter_rows.  Rows that nothing is added to are 0.
        weight_grad_out: float32, contiguous, of weight's shape: backward adds the weight's gradient to it, and leaves
            weight.grad alone.  Use it to accumulate a float32 main gradient over micro-batches.
        backend: "triton" (kernels for NVIDIA GPUs of compute capability 8.0 or later; no float64), "plain" (plain
            PyTorch, one group after the other) or "auto": "plain" on the CPU, "triton" on GPUs.  "plain" reads sizes
            and indices on the host, which waits for the device, so name it if you need it on a GPU: for float64, or on
            older GPUs.
        check_inputs: check sizes and indices with "triton" too, which waits for the device.  On the CPU, and with
            "plain", they are always checked.
        precision: "full": products in the inputs' dtype.  "fp8": an approximation by three products of numbers that are
            quantised to FP8 in blocks, each group as `fp8_linear` for its rows.  "triton" then needs compute capability
            8.9, and multiples of 128 for N and K; it copies a weight that isn't contiguous.

    Returns:
        [T, N] ([T, F] with an activation), or with scatter_rows num_rows rows, of x's dtype.  Under autocast x and
        weight are cast to its dtype first, which is then the result's.  Gradients have the dtypes of their inputs.
        Sums are in float32 and rounded once; with scatter_rows the rows that are added up may be rounded too.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape, device or option is wrong; the backend can't run the call; or, where values are checked, a
            size is negative, the sizes' sum passes T, or an index is out of range.
        RuntimeError: the result is differentiated twice, or the call is inside a torch.func transform.

    On a GPU without check_inputs wrong sizes and indices make results NaN, and nothing outside the tensors is read or
    written.  If a size is negative, or the sum up to it passes T, these are NaN: all rows from that group on, in the
    result and in the gradients of x and row_scale, and the gradients of these groups' weights and biases; earlier
    groups are right.  Tensors in which rows are added up, the result with scatter_rows and x's gradient with rows, are
    NaN as a whole.  An index out of range makes the whole result and all gradients NaN.

    Memory: x and the weight (under autocast, their copies) are kept for backward, and with an activation, or if
    row_scale needs a gradient, the product y, T * N numbers of x's dtype.  "triton" also needs

    - in forward, with scatter_rows, T rows of the result;
    - in backward the gradient of y, T * N numbers, with an activation, a row scale or scatter_rows; with rows T rows of
      x's gradient and, on Hopper in 16 bits, before or after them, the T rows of x that are read;
    - 4 * (3 * (T / 128 + G) + 2 * G + 6) bytes for the plan of tiles.

    With precision="fp8" x and the weight are kept in FP8: (T + 128 * G) * K bytes and 1/32 more for scales, and
    G * N * K bytes.  Forward needs as many bytes again; backward needs the gradient of y in FP8 twice, and with rows
    the T rows of x that are read.  "plain" needs a group's weight and rows in float32, and results and gradients in
    float32 until they are rounded.

    Example:
        >>> import torch
        >>> from onchip.torch import grouped_matmul
        >>> tokens, experts = torch.randn(6, 16), torch.randn(3, 32, 16, requires_grad=True)
        >>> expert_of = torch.tensor([2, 0, 0, 2, 0, 2])
        >>> order = expert_of.argsort(stable=True)
        >>> sizes = torch.bincount(expert_of, minlength=3)
        >>> out = grouped_matmul(tokens, experts, sizes, rows=order, scatter_rows=order, num_rows=6)
        >>> torch.testing.assert_close(out[0], experts[2] @ tokens[0])
        >>> out.sum().backward()
        >>> experts.grad.shape
        torch.Size([3, 32, 16])

    Source: MegaBlocks (arXiv:2211.15841) and its JAX kernel megablox, for one product whose tiles each belong to one
    group.
    """
    options = GroupedOptions(weight_layout, activation, gate_up, num_rows, precision)
    require_bool(OP, "check_inputs", check_inputs)
    which, groups = check_one_of_two(group_sizes, group_offsets)
    named = {"x": x, "weight": weight, which: groups, "bias": bias, "row_scale": row_scale, "rows": rows}
    named["scatter_rows"] = scatter_rows
    tensors = require_tensors(OP, named, ("bias", "row_scale", "rows", "scatter_rows"))
    _check_dtypes(tensors, which)
    problem = check_shapes(options, shapes_of(tensors))
    check_weight_grad_out(OP, weight_grad_out, weight)
    dtype = one_dtype(OP, {"x": x, "weight": weight})
    most = max(problem.tokens, problem.source_rows, problem.out_rows)
    fp8_sizes = None
    if precision == "fp8":
        if dtype == torch.float64:
            raise TypeError(f"{OP}: precision='fp8' takes no float64; pass precision='full', or cast x and weight")
        fp8_sizes = problem.n, problem.k
    reasons = refusals(x.device, dtype, problem.groups, most, fp8_sizes, named=named_backend(backend) == "plain")
    chosen = choose_backend(OP, backend, reasons)
    cast_x, cast_weight = (a if a.dtype == dtype else a.detach().to(dtype) for a in (x, weight))
    grads = needed(x, weight, bias, row_scale)
    call = GroupedCall(
        x, weight, cast_x, cast_weight, groups, bias, row_scale, rows, scatter_rows, weight_grad_out, options, problem,
        which, check_inputs, grads,
    )  # fmt: skip
    operator: Operator[GroupedCall, Any] = kernels.GROUPED if chosen == "triton" else loop.GROUPED
    # `operator(call)`, with one function less on the stack.
    if operator.is_plain(call):
        with inside_operator(x):
            made = operator.forward(call)
        made = operator.attach(call, made)
    else:
        made = operator.registered(call)
    outputs: GroupedOutputs = made.of_call if chosen == "triton" else made
    return outputs.out


def _check_dtypes(tensors: Mapping[str, Tensor], which: str) -> None:
    integers = (which, "rows", "scatter_rows")
    check_kinds(OP, tensors, integers=integers, dtypes=LOSS_DTYPES)
    for name in integers:
        if name in tensors and tensors[name].dtype not in _INTEGERS:
            raise TypeError(f"{OP}: {name} must be int32 or int64; got {dtype_name(tensors[name].dtype)}")


def refusals(
    device: torch.device,
    dtype: torch.dtype,
    groups: int = 1,
    rows: int = 1,
    fp8_sizes: tuple[int, int] | None = None,  # N and K, with precision='fp8'
    *,
    named: bool = False,
) -> dict[str, str | None]:
    """Why each backend, best first, can't serve a call, or None; `named`: where the caller names it."""
    triton = kernels.refusal(device, dtype, groups, rows, fp8_sizes)
    return {"triton": triton, "plain": loop.refusal(device, named=named)}
