r"""Linear layer in blockwise FP8 whose three products, for the output and both gradients, multiply FP8 numbers.

A group of numbers whose largest magnitude is a is divided by its scale s = a / 448 and rounded to E4M3 (on request
gradients take a / 57344 and E5M2); s = 1 for a group of zeros.  Groups are 1x128 along the contraction for activations
and gradients, and 128x128 for weights.  With Q for quantising, and products of dequantised values in float32:

    y  = Q_1x128(x) Q_128x128(w)^T + b
    dx = Q_1x128(dy) Q_128x128(w)
    dw = Q_128x1(dy)^T Q_128x1(x)         db = sum of dy over rows, of the unquantised numbers

Products are summed in float32 over 128 elements first, then scaled and added up.  All three are written as A B^T on
copies that the quantiser has transposed, since Hopper's FP8 instructions read operands along the contraction only.

Sources: the recipe is that of DeepSeek-V3 (arXiv:2412.19437); E4M3 and E5M2 are those of arXiv:2209.05433.

The computation is in `onchip.fp8`; docs/architecture.md shows what lives where.
"""

from collections.abc import Sequence
from typing import Any

from onchip.fp8.numbers import OP
from onchip.frontend.warm_up import Make, Sizes, WarmUpCall


def check_shapes(x: Sequence[int], weight: Sequence[int], bias: Sequence[int] | None) -> None:
    """Raise ValueError unless the shapes are [..., K], [N, K] and [N], with N, K >= 1."""
    x, weight = tuple(x), tuple(weight)
    if len(weight) != 2 or weight[0] < 1 or weight[1] < 1:
        raise ValueError(f"{OP}: weight must be [N, K] with N, K >= 1; got shape {list(weight)}")
    if len(x) < 1:
        raise ValueError(f"{OP}: x must be [..., K]; got a 0-d tensor")
    if x[-1] != weight[1]:
        raise ValueError(f"{OP}: x has K={x[-1]} but weight has K={weight[1]}; weight must be [N, K]")
    if bias is not None and tuple(bias) != weight[:1]:
        raise ValueError(f"{OP}: bias has shape {list(bias)} but weight has N={weight[0]}; bias must be [N]")


def _arguments(s: Sizes, make: Make) -> dict[str, Any]:
    return {"x": make(s.tokens, s.in_features), "weight": make(s.out_features, s.in_features, of_weight=True)}


CALLS = {"fp8_linear": WarmUpCall(("in_features", "out_features"), _arguments)}
