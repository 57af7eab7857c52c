"""The FP8 operands of grouped_matmul's Triton kernels, which fp8_linear's quantiser makes from rows and weights.

Rows are quantised tile by tile: 128 rows of the copies for each tile of the plan, those past a group's end 0.  So the
128 rows that share a scale in the weight's gradient belong to one group, as if it were alone.
"""

from typing import NamedTuple

from torch import Tensor

from onchip.fp8.torch_quantize import TorchQuantized, empty
from onchip.groups.problem import GroupedOptions, GroupedProblem
from onchip.groups.triton.tiles import PLAN_HEAD, padded_rows

SCALE = "float32"


class Weight(NamedTuple):
    """A weight [G, N, K] in FP8, or its transpose."""

    data: Tensor  # [G, N, K]; K has stride 1, the others any
    scales: Tensor  # [G, N / 128, K / 128]


def empty_rows(p: GroupedProblem, columns: int, like: Tensor) -> TorchQuantized:
    """Memory for quantised rows, scaled along their columns."""
    return empty(padded_rows(p), columns, "e4m3", like)


def empty_columns(p: GroupedProblem, columns: int, like: Tensor) -> TorchQuantized:
    """Memory for their transpose, scaled along the rows."""
    return empty(columns, padded_rows(p), "e4m3", like)


def quantize_rows(
    p: GroupedProblem, x: Tensor, plan: Tensor, rows: TorchQuantized | None, columns: TorchQuantized | None
) -> None:
    """Quantise the rows of x [T, C] that have a group into `rows` and `columns`, except one that is None."""
    from onchip.fp8.triton_launches import quantize_launch

    tiles = plan[PLAN_HEAD + 2 * (p.groups + 1) :].view(-1, 3)
    quantize_launch(x, rows, columns, "e4m3", SCALE, tiles=tiles).run()


def empty_weight(p: GroupedProblem, options: GroupedOptions, like: Tensor, *, turned: bool) -> TorchQuantized:
    """Memory for all groups' quantised weights; `turned` for x's gradient.

    The quantiser takes the weight as one matrix, group below group, and makes that and its transpose.
    """
    height, width = (p.n, p.k) if options.weight_layout == "gnk" else (p.k, p.n)
    if turned == (options.weight_layout == "gnk"):
        return empty(width, p.groups * height, "e4m3", like, by_block=True)
    return empty(p.groups * height, width, "e4m3", like, by_block=True)


def quantize_weight(
    weight: Tensor, options: GroupedOptions, forward: TorchQuantized, backward: TorchQuantized | None
) -> None:
    """Quantise a weight, in its own layout, for the result and for x's gradient."""
    from onchip.fp8.triton_launches import quantize_launch

    rows, columns = (forward, backward) if options.weight_layout == "gnk" else (backward, forward)
    quantize_launch(weight.reshape(-1, weight.shape[2]), rows, columns, "e4m3", SCALE, by_block=True).run()


def by_group(made: TorchQuantized, groups: int, rows: int, columns: int) -> Weight:
    """The result of `quantize_weight`, whose groups lie below each other or side by side, as [G, rows, columns]."""
    data, scales = made
    across = columns // 128
    if len(data) == groups * rows:
        return Weight(data.view(groups, rows, columns), scales.view(groups, rows // 128, -1)[..., :across])
    side_by_side = scales[:, : groups * across].unflatten(1, (groups, across))
    return Weight(data.view(rows, groups, columns).transpose(0, 1), side_by_side.transpose(0, 1))


def refusal(n: int, k: int) -> str | None:
    """Why the kernels can't multiply such weights, or None."""
    if n % 128 == k % 128 == 0:
        return None
    return f"with precision='fp8' N and K must be multiples of 128; got N={n}, K={k}"
