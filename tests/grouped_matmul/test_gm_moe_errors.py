"""Every way to call `MoE` wrongly."""

import copy
import re

import numpy as np
import pytest
import torch

from onchip.torch import MoE

ALONE, COUNTS = MoE(8, 4, 4, 2), torch.arange(4)
CORRECTED = MoE(8, 4, 4, 2, correction_bias=True)
WRONG = {
    "a size of a float": (lambda: MoE(8.0, 4, 4, 2), TypeError, "MoE: hidden must be an int; got float"),
    "hidden of 0": (lambda: MoE(0, 4, 4, 2), ValueError, "MoE: hidden must be 1 or more; got 0"),
    "intermediate of 0": (lambda: MoE(8, 0, 4, 2), ValueError, "MoE: intermediate must be 1 or more; got 0"),
    "no experts": (lambda: MoE(8, 4, 0, 2), ValueError, "MoE: num_experts must be 1 or more; got 0"),
    "top_k of 0": (lambda: MoE(8, 4, 4, 0), ValueError, "MoE: top_k must be 1 or more; got 0"),
    "top_k above the experts": (lambda: MoE(8, 4, 4, 5), ValueError, "MoE: top_k must be at most num_experts=4; got 5"),
    "num_shared below 0": (lambda: MoE(8, 4, 4, 2, num_shared=-1), ValueError, "MoE: num_shared must be 0 or more; got -1"),
    "num_shared that is a bool": (lambda: MoE(8, 4, 4, 2, num_shared=True), TypeError, "MoE: num_shared must be an int; got bool"),
    "norm_topk of 1": (lambda: MoE(8, 4, 4, 2, norm_topk=1), TypeError, "MoE: norm_topk must be True or False; got int"),
    "bias of None": (lambda: MoE(8, 4, 4, 2, bias=None), TypeError, "MoE: bias must be True or False; got NoneType"),
    "correction_bias of 1": (lambda: MoE(8, 4, 4, 2, correction_bias=1), TypeError, "MoE: correction_bias must be True or False; got int"),
    "n_group of 0": (lambda: MoE(8, 4, 4, 2, n_group=0), ValueError, "MoE: n_group must be 1 or more; got 0"),
    "topk_group of a float": (lambda: MoE(8, 4, 4, 2, n_group=2, topk_group=1.0), TypeError, "MoE: topk_group must be an int; got float"),
    "topk_group above the groups": (lambda: MoE(8, 4, 4, 2, topk_group=2), ValueError, "MoE: topk_group must be at most n_group=1; got 2"),
    "uneven groups": (lambda: MoE(8, 4, 6, 2, n_group=4, topk_group=2), ValueError, "MoE: n_group=4 must divide the 6 experts into groups of two or more"),
    "groups of one": (lambda: MoE(8, 4, 4, 2, n_group=4, topk_group=2), ValueError, "MoE: n_group=4 must divide the 4 experts into groups of two or more"),
    "groups too small for top_k": (lambda: MoE(8, 4, 4, 3, n_group=2, topk_group=1), ValueError, "MoE: top_k=3 but topk_group=1 groups have 2 experts; raise topk_group"),
    "an update without a bias": (lambda: ALONE.update_correction_bias(COUNTS), ValueError, "MoE.update_correction_bias: the layer has no correction bias; create it with MoE(..., correction_bias=True)"),
    "counts of a list": (lambda: CORRECTED.update_correction_bias([1, 2, 3, 4]), TypeError, "MoE.update_correction_bias: counts must be a torch.Tensor; got list"),
    "counts of other experts": (lambda: CORRECTED.update_correction_bias(COUNTS[:3]), ValueError, "MoE.update_correction_bias: counts must be [E], [4], on cpu; got shape [3] on cpu"),
    "counts elsewhere": (lambda: CORRECTED.update_correction_bias(COUNTS.to("meta")), ValueError, "counts must be [E], [4], on cpu; got shape [4] on meta"),
    "counts of bools": (lambda: CORRECTED.update_correction_bias(COUNTS > 0), TypeError, "MoE.update_correction_bias: counts must be real numbers; got bool"),
    "a rate of 0": (lambda: CORRECTED.update_correction_bias(COUNTS, 0), ValueError, "MoE.update_correction_bias: rate must be above 0; got 0"),
    "a bias in 16 bits": (lambda: copy.deepcopy(CORRECTED).bfloat16().update_correction_bias(COUNTS), ValueError, "MoE.update_correction_bias: e_score_correction_bias was cast to bfloat16, which loses small steps"),
    "another scoring": (lambda: MoE(8, 4, 4, 2, scoring="tanh"), ValueError, "MoE: scoring must be one of 'softmax', 'sigmoid'; got 'tanh'"),
    "scaling_factor of 0": (lambda: MoE(8, 4, 4, 2, scaling_factor=0), ValueError, "MoE: scaling_factor must be above 0; got 0"),
    "scaling_factor in words": (lambda: MoE(8, 4, 4, 2, scaling_factor="2"), TypeError, "MoE: scaling_factor must be a number; got str"),
    "a dtype of integers": (lambda: MoE(8, 4, 4, 2, dtype=torch.int8), TypeError, "MoE: dtype must be float32, bfloat16, float16 or float64; got torch.int8"),
    "a backend that there isn't": (lambda: MoE(8, 4, 4, 2, backend="cuda"), ValueError, "MoE: backend must be one of"),
    "x that is a list": (lambda: ALONE([1.0]), TypeError, "MoE: x must be a torch.Tensor; got list"),
    "x of NumPy": (lambda: ALONE(np.ones((3, 8))), TypeError, "MoE: x is a numpy.ndarray; pass torch.from_numpy(x)"),
    "x of another size": (lambda: ALONE(torch.ones(3, 7)), ValueError, "MoE: x must be [..., H] with H=8; got shape [3, 7]"),
    "x that is a number": (lambda: ALONE(torch.tensor(1.0)), ValueError, "MoE: x must be [..., H] with H=8; got shape []"),
    "x of integers": (lambda: ALONE(torch.ones(3, 8, dtype=torch.int64)), TypeError, "MoE: x must have a floating-point dtype, like the experts; got int64"),
    "x of another dtype": (lambda: ALONE(torch.ones(3, 8, dtype=torch.bfloat16)), TypeError, "x is bfloat16 but weight is float32; cast one of them, or run under torch.autocast"),
    "return_stats of 1": (lambda: ALONE(torch.ones(3, 8), return_stats=1), TypeError, "MoE: return_stats must be True or False; got int"),
    "a backend that can't run": (lambda: MoE(8, 4, 4, 2, dtype=torch.float64, backend="triton")(torch.ones(3, 8, dtype=torch.float64)), ValueError, "grouped_matmul: backend 'triton' can't run this call: it takes no float64"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=re.escape(message)):
        call()


def test_a_second_derivative_raises():
    x = torch.randn(3, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="grouped_matmul"):
        torch.autograd.grad(ALONE(x).sum(), x, create_graph=True)[0].sum().backward()
