r"""One linear layer for each group of rows: the products of a mixture of experts.

Rows are sorted by group.  Group g has the rows [e_{g-1}, e_g) with e_g = s_0 + ... + s_g, its weight W_g [N, K] and its
bias b_g [N].  For row i of group g

    y_i = W_g x_i + b_g
    a_i = y_i, or with activation="swiglu" silu(gate_i) * up_i, halves of y_i
    out_i = c_i a_i

with c the row scales.  Row i reads x_i, or x_{r_i} with `rows`, and goes to row i of the result, or is added to row
q_i with `scatter_rows`.  Rows past e_{G-1} belong to no group: they are not read, and what they would write is 0.

With d_i the gradient of y_i, backward is

    dx_i = W_g^T d_i        dW_g = sum over the group's rows of d_i x_i^T        db_g = sum of d_i
    dc_i = a_i . dout_i

If several rows of the product read a row of x, its dx is the sum over these.

Source: megablox, the grouped product of MegaBlocks (arXiv:2211.15841) on dense tiles: one product over all rows, whose
tiles each belong to one group; the device finds out which tiles there are.

The computation is in `onchip.groups`; docs/architecture.md shows what lives where.
"""

from typing import Any

from onchip.frontend.warm_up import Make, Sizes, WarmUpCall


def _arguments(s: Sizes, make: Make) -> dict[str, Any]:
    sizes = make(s.experts, dtype="int32")
    sizes[0] = s.tokens
    weight = make(s.experts, s.out_features, s.in_features, of_weight=True)
    return {"x": make(s.tokens, s.in_features), "weight": weight, "group_sizes": sizes}


CALLS = {"grouped_matmul": WarmUpCall(("in_features", "out_features", "experts"), _arguments)}
