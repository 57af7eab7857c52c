"""Every way to call the op wrongly: the exception's type, and that it names the argument."""

import math
import re
from functools import partial

import pytest
import torch
from common_llp import small_problem

from onchip.ops.linear_log_probs.torch_op import linear_log_probs
from shared import assert_refused


def call(**changes):
    h, w, ids, b = small_problem()
    return linear_log_probs(**({"hidden": h, "weight": w, "ids": ids, "bias": b} | changes))


WRONG = {
    # shapes
    "weight is transposed": ({"weight": torch.randn(16, 70)}, ValueError, "hidden has H=16 but weight has H=70; weight must be [V, H]"),
    "weight is 1-d": ({"weight": torch.randn(16)}, ValueError, "weight must be [V, H], V, H >= 1; got shape [16]"),
    "weight has no rows": ({"weight": torch.randn(0, 16)}, ValueError, "weight must be [V, H], V, H >= 1"),
    "hidden is 0-d": ({"hidden": torch.randn(())}, ValueError, "hidden must be [..., H]"),
    "ids too short": ({"ids": torch.zeros(2, 11, dtype=torch.int64)}, ValueError, "ids has shape [2, 11] but hidden has shape [2, 12, 16]; ids must have hidden's leading dimensions, [2, 12], or those and one more"),
    "ids are flat": ({"ids": torch.zeros(24, dtype=torch.int64)}, ValueError, "ids has shape [24]"),
    "ids have two more": ({"ids": torch.zeros(2, 12, 3, 4, dtype=torch.int64)}, ValueError, "ids has shape [2, 12, 3, 4]"),
    "no ids": ({"ids": torch.zeros(2, 12, 0, dtype=torch.int64)}, ValueError, "ids has shape [2, 12, 0]; [..., K] needs K >= 1"),
    "bias too long": ({"bias": torch.randn(71)}, ValueError, "bias has shape [71] but weight has V=70"),
    "temperature is flat": ({"temperature": torch.ones(24)}, ValueError, "temperature has shape [24]; it must be a number or have hidden's leading dimensions, [2, 12]"),
    # dtypes and types
    "hidden is a list": ({"hidden": [1.0]}, TypeError, "hidden must be a torch.Tensor; got list"),
    "weight is None": ({"weight": None}, TypeError, "weight must be a torch.Tensor; got NoneType"),
    "ids is None": ({"ids": None}, TypeError, "ids must be a torch.Tensor; got NoneType"),
    "bias is a number": ({"bias": 1.0}, TypeError, "bias must be a torch.Tensor; got float"),
    "hidden is float64": ({"hidden": torch.randn(2, 12, 16).double()}, TypeError, "hidden must be float32, bfloat16 or float16; got float64"),
    "weight is float64": ({"weight": torch.randn(70, 16).double()}, TypeError, "weight must be float32"),
    "dtypes differ": ({"weight": torch.randn(70, 16).bfloat16()}, TypeError, "hidden is float32 but weight is bfloat16; cast one of them, or run under torch.autocast"),
    "bias dtype differs": ({"bias": torch.randn(70).bfloat16()}, TypeError, "hidden is float32 but bias is bfloat16"),
    "ids are float": ({"ids": torch.zeros(2, 12)}, TypeError, "ids must hold integers; got float32"),
    "ids are bool": ({"ids": torch.zeros(2, 12, dtype=torch.bool)}, TypeError, "ids must hold integers; got bool"),
    "temperature is complex": ({"temperature": torch.ones(2, 12, dtype=torch.complex64)}, TypeError, "temperature must be real"),
    "temperature is None": ({"temperature": None}, TypeError, "temperature must be a number; got NoneType"),
    "softcap is a string": ({"softcap": "30"}, TypeError, "softcap must be a number"),
    "logit_scale is True": ({"logit_scale": True}, TypeError, "logit_scale must be a number; got bool"),
    "ignore_index is a float": ({"ignore_index": -100.0}, TypeError, "ignore_index must be an int"),
    "scratch_bytes is a float": ({"scratch_bytes": 1e9}, TypeError, "scratch_bytes must be an int"),
    "check_inputs is 1": ({"check_inputs": 1}, TypeError, "check_inputs must be True or False"),
    "entropy is 1": ({"entropy": 1}, TypeError, "entropy must be True or False"),
    "lse is None": ({"lse": None}, TypeError, "lse must be True or False"),
    "top1 is 'yes'": ({"top1": "yes"}, TypeError, "top1 must be True or False"),
    # devices
    "weight elsewhere": ({"weight": torch.randn(70, 16, device="meta")}, ValueError, "weight is on meta but hidden is on cpu"),
    "ids elsewhere": ({"ids": torch.zeros(2, 12, dtype=torch.int64, device="meta")}, ValueError, "ids is on meta"),
    # ranges
    "softcap 0": ({"softcap": 0.0}, ValueError, "softcap must be above 0; got 0.0; pass None for no softcap"),
    "softcap inf": ({"softcap": math.inf}, ValueError, "softcap must be finite"),
    "logit_scale 0": ({"logit_scale": 0}, ValueError, "logit_scale must be above 0"),
    "temperature 0": ({"temperature": 0.0}, ValueError, "temperature must be above 0"),
    "a token's temperature is 0": ({"temperature": torch.ones(2, 12).index_fill(1, torch.tensor(3), 0.0)}, ValueError, "temperature must be finite and above 0 for every token; got 0.0"),
    "scratch_bytes 0": ({"scratch_bytes": 0}, ValueError, "scratch_bytes must be positive"),
    "scratch_bytes too small": ({"scratch_bytes": 100}, ValueError, "scratch_bytes=100 is too small for T=24, H=16, V=70 in float32: the smallest chunk needs"),
    # options
    "backend": ({"backend": "cublas"}, ValueError, "backend must be one of 'auto', 'triton', 'torch'; got 'cublas'"),
    # what would silently get no gradient
    "temperature needs a gradient": ({"temperature": torch.ones(2, 12, requires_grad=True)}, ValueError, "pass temperature.detach()"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    changes, kind, message = WRONG[name]
    assert_refused("linear_log_probs", partial(call, **changes), kind, message)


@pytest.mark.parametrize("bad", [70, -1, 2**40, -101])
def test_an_id_out_of_range_is_named_with_its_position(bad):
    for each, where, position in ((None, (1, 7), "1, 7"), (3, (1, 7, 2), "1, 7, 2")):
        ids = small_problem(each)[2]
        ids[where] = bad
        message = (
            f"linear_log_probs: ids[{position}] is {bad}, which is neither ignore_index (-100) nor in [0, 70); 1 of"
        )
        with pytest.raises(ValueError, match=re.escape(message)):
            call(ids=ids)


def test_a_device_without_a_backend_says_why(monkeypatch):
    monkeypatch.setattr("onchip.frontend.torch_inputs.DEVICES", ("cuda",))
    with pytest.raises(ValueError, match=r"no backend can run this call .*; torch: it runs on cuda tensors"):
        call()
