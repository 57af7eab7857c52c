"""The oracle for n ranks compared with the one for a rank that has everything."""

import numpy as np
import pytest

from onchip.ops.collective_matmul.reference import all_gather_matmul, matmul_reduce_scatter


@pytest.mark.parametrize("n", [1, 2, 3])
def test_parts_are_those_of_the_whole(n):
    rng = np.random.default_rng(0)
    x, weight, bias, grad_out = (rng.standard_normal(s) for s in ((12, 2, 6), (18, 6), (18,), (12, 2, 18)))
    whole = [r[0] for r in all_gather_matmul([x], [weight], [bias], [grad_out])]
    np.testing.assert_allclose(whole[0], x @ weight.T + bias)
    np.testing.assert_allclose(whole[1], grad_out @ weight)
    np.testing.assert_allclose(whole[2], np.einsum("tbn,tbk->nk", grad_out, x))
    np.testing.assert_allclose(whole[3], grad_out.sum((0, 1)))

    columns = [np.split(a, n) for a in (x, weight, bias)]
    made = all_gather_matmul(*columns, np.split(grad_out, n, -1))
    for parts, dim, right in zip(made, (-1, 0, 0, 0), whole, strict=True):
        np.testing.assert_allclose(np.concatenate(parts, dim), right)

    made = matmul_reduce_scatter(np.split(x, n, -1), np.split(weight, n, 1), [bias] * n, np.split(grad_out, n))
    for parts, dim, right in zip(made[:3], (0, -1, 1), whole[:3], strict=True):
        np.testing.assert_allclose(np.concatenate(parts, dim), right)
    for part in made.grad_bias:
        np.testing.assert_allclose(part, whole[3])
