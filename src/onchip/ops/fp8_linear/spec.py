"""What every front end of fp8_linear shares: what shapes go together."""

from collections.abc import Sequence

from onchip.fp8.numbers import OP


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
