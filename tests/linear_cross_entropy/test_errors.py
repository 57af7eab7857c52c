"""Every way to call the op wrongly: the exception's type, and that it names the argument."""

import math
import re
from functools import partial

import pytest
import torch
from common import small_problem

from onchip.torch import LinearCrossEntropyLoss, linear_cross_entropy
from shared import assert_refused


def call(**changes):
    h, w, y, b = small_problem(bias=True)
    arguments = {"hidden": h, "weight": w, "target": y, "bias": b} | changes
    return linear_cross_entropy(**arguments)


WRONG = {
    # shapes
    "weight is transposed": ({"weight": torch.randn(16, 70)}, ValueError, "hidden has H=16 but weight has H=70; weight must be [V, H]"),
    "weight is 1-d": ({"weight": torch.randn(16)}, ValueError, "weight must be [V, H]"),
    "weight is 3-d": ({"weight": torch.randn(2, 70, 16)}, ValueError, "weight must be [V, H]"),
    "weight has no rows": ({"weight": torch.randn(0, 16)}, ValueError, "weight must be [V, H], V, H >= 1"),
    "H is 0": ({"hidden": torch.randn(2, 12, 0), "weight": torch.randn(70, 0)}, ValueError, "V, H >= 1"),
    "hidden is 0-d": ({"hidden": torch.randn(())}, ValueError, "hidden must be [..., H]"),
    "target too short": ({"target": torch.zeros(2, 11, dtype=torch.int64)}, ValueError, "target has shape [2, 11]"),
    "target is flat": ({"target": torch.zeros(24, dtype=torch.int64)}, ValueError, "target must have hidden's leading dimensions, [2, 12]"),
    "bias too long": ({"bias": torch.randn(71)}, ValueError, "bias has shape [71] but weight has V=70"),
    "bias is 2-d": ({"bias": torch.randn(1, 70)}, ValueError, "bias must be [V]"),
    "token_weight is flat": ({"token_weight": torch.ones(24)}, ValueError, "token_weight has shape [24]"),
    "temperature is flat": ({"temperature": torch.ones(24)}, ValueError, "temperature has shape [24]"),
    "normalizer is 1-d": ({"normalizer": torch.ones(1)}, ValueError, "normalizer must be a number or a 0-d tensor"),
    # dtypes and types
    "hidden is a list": ({"hidden": [1.0]}, TypeError, "hidden must be a torch.Tensor; got list"),
    "weight is None": ({"weight": None}, TypeError, "weight must be a torch.Tensor; got NoneType"),
    "target is None": ({"target": None}, TypeError, "target must be a torch.Tensor"),
    "bias is a number": ({"bias": 1.0}, TypeError, "bias must be a torch.Tensor; got float"),
    "token_weight is a number": ({"token_weight": 1.0}, TypeError, "token_weight must be a torch.Tensor"),
    "hidden is float64": ({"hidden": torch.randn(2, 12, 16).double()}, TypeError, "hidden must be float32, bfloat16 or float16; got float64"),
    "hidden is int": ({"hidden": torch.ones(2, 12, 16, dtype=torch.int64)}, TypeError, "hidden must be float32"),
    "weight is float64": ({"weight": torch.randn(70, 16).double()}, TypeError, "weight must be float32"),
    "dtypes differ": ({"weight": torch.randn(70, 16).bfloat16()}, TypeError, "hidden is float32 but weight is bfloat16; cast one of them, or run under torch.autocast"),
    "bias dtype differs": ({"bias": torch.randn(70).bfloat16()}, TypeError, "hidden is float32 but bias is bfloat16"),
    "target is float": ({"target": torch.zeros(2, 12)}, TypeError, "target must hold integers; got float32"),
    "target is bool": ({"target": torch.zeros(2, 12, dtype=torch.bool)}, TypeError, "target must hold integers; got bool"),
    "token_weight is complex": ({"token_weight": torch.ones(2, 12, dtype=torch.complex64)}, TypeError, "token_weight must be real"),
    "normalizer is complex": ({"normalizer": torch.ones((), dtype=torch.complex64)}, TypeError, "normalizer must be a real number"),
    "normalizer is a string": ({"normalizer": "12"}, TypeError, "normalizer must be a number; got str"),
    "normalizer is True": ({"normalizer": True}, TypeError, "normalizer must be a number; got bool"),
    "softcap is a string": ({"softcap": "30"}, TypeError, "softcap must be a number"),
    "label_smoothing is None": ({"label_smoothing": None}, TypeError, "label_smoothing must be a number"),
    "ignore_index is a float": ({"ignore_index": -100.0}, TypeError, "ignore_index must be an int"),
    "ignore_index is True": ({"ignore_index": True}, TypeError, "ignore_index must be an int"),
    "scratch_bytes is a float": ({"scratch_bytes": 1e9}, TypeError, "scratch_bytes must be an int"),
    "check_inputs is 1": ({"check_inputs": 1}, TypeError, "check_inputs must be True or False"),
    "return_stats is 'yes'": ({"return_stats": "yes"}, TypeError, "return_stats must be True or False"),
    # devices
    "weight elsewhere": ({"weight": torch.randn(70, 16, device="meta")}, ValueError, "weight is on meta but hidden is on cpu"),
    "target elsewhere": ({"target": torch.zeros(2, 12, dtype=torch.int64, device="meta")}, ValueError, "target is on meta"),
    "normalizer elsewhere": ({"normalizer": torch.ones((), device="meta")}, ValueError, "normalizer is on meta"),
    # ranges
    "label_smoothing 1.1": ({"label_smoothing": 1.1}, ValueError, "label_smoothing must be in [0, 1]; got 1.1"),
    "label_smoothing -0.1": ({"label_smoothing": -0.1}, ValueError, "label_smoothing must be in [0, 1]"),
    "z_loss < 0": ({"z_loss": -1e-4}, ValueError, "z_loss must be 0 or more"),
    "z_loss is nan": ({"z_loss": math.nan}, ValueError, "z_loss must be finite"),
    "softcap 0": ({"softcap": 0.0}, ValueError, "softcap must be above 0; got 0.0; pass None for no softcap"),
    "softcap inf": ({"softcap": math.inf}, ValueError, "softcap must be finite"),
    "logit_scale 0": ({"logit_scale": 0}, ValueError, "logit_scale must be above 0"),
    "logit_scale < 0": ({"logit_scale": -1.0}, ValueError, "logit_scale must be above 0"),
    "temperature 0": ({"temperature": 0.0}, ValueError, "temperature must be above 0"),
    "a token's temperature is 0": ({"temperature": torch.ones(2, 12).index_fill(1, torch.tensor(3), 0.0)}, ValueError, "temperature must be finite and above 0 for every token; got 0.0"),
    "a token's temperature is nan": ({"temperature": torch.full((), math.nan)}, ValueError, "temperature must be finite and above 0"),
    "normalizer 0": ({"normalizer": 0}, ValueError, "normalizer must be above 0"),
    "normalizer tensor 0": ({"normalizer": torch.zeros(())}, ValueError, "normalizer must be finite and above 0; got 0.0"),
    "scratch_bytes 0": ({"scratch_bytes": 0}, ValueError, "scratch_bytes must be positive"),
    "scratch_bytes too small": ({"scratch_bytes": 100}, ValueError, "scratch_bytes=100 is too small"),
    # options
    "reduction": ({"reduction": "avg"}, ValueError, "reduction must be one of 'mean', 'sum', 'none'; got 'avg'"),
    "strategy": ({"strategy": "fast"}, ValueError, "strategy must be one of 'auto', 'stash', 'recompute'"),
    "backend": ({"backend": "cublas"}, ValueError, "backend must be one of 'auto', 'triton', 'torch'; got 'cublas'"),
    "normalizer with sum": ({"normalizer": 3, "reduction": "sum"}, ValueError, "normalizer is what reduction='mean' divides by"),
    "backend can't": ({"backend": "triton"}, ValueError, "backend 'triton' can't run this call: it runs on CUDA tensors, not on 'cpu'"),
    # weight_grad_out
    "weight_grad_out is a list": ({"weight_grad_out": [0.0]}, TypeError, "weight_grad_out must be a torch.Tensor; got list"),
    "weight_grad_out is True": ({"weight_grad_out": True}, TypeError, "weight_grad_out must be a torch.Tensor; got bool"),
    "weight_grad_out is bfloat16": ({"weight_grad_out": torch.zeros(70, 16, dtype=torch.bfloat16)}, TypeError, "weight_grad_out must be float32; got bfloat16"),
    "weight_grad_out is float64": ({"weight_grad_out": torch.zeros(70, 16).double()}, TypeError, "weight_grad_out must be float32; got float64"),
    "weight_grad_out is transposed": ({"weight_grad_out": torch.zeros(16, 70)}, ValueError, "weight_grad_out must be contiguous, of weight's shape, [70, 16]; got shape [16, 70]"),
    "weight_grad_out is flat": ({"weight_grad_out": torch.zeros(1120)}, ValueError, "of weight's shape, [70, 16]; got shape [1120]"),
    "weight_grad_out is strided": ({"weight_grad_out": torch.zeros(16, 70).T}, ValueError, "got shape [70, 16], strides [1, 70]"),
    "weight_grad_out elsewhere": ({"weight_grad_out": torch.zeros(70, 16, device="meta")}, ValueError, "weight_grad_out is on meta but weight is on cpu"),
    "weight_grad_out needs a gradient": ({"weight_grad_out": torch.zeros(70, 16, requires_grad=True)}, ValueError, "pass weight_grad_out.detach()"),
    # what would silently get no gradient
    "token_weight needs a gradient": ({"token_weight": torch.ones(2, 12, requires_grad=True)}, ValueError, "pass token_weight.detach()"),
    "temperature needs a gradient": ({"temperature": torch.ones(2, 12, requires_grad=True)}, ValueError, "pass temperature.detach()"),
    "normalizer needs a gradient": ({"normalizer": torch.ones((), requires_grad=True)}, ValueError, "pass normalizer.detach()"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    changes, kind, message = WRONG[name]
    assert_refused("linear_cross_entropy", partial(call, **changes), kind, message)


@pytest.mark.parametrize("label", [70, -1, 2**40, -101])
@pytest.mark.parametrize("strategy", ["stash", "recompute"])
def test_a_label_out_of_range_is_named_with_its_position(label, strategy):
    y = small_problem()[2]
    y[1, 7] = label
    message = f"target[1, 7] is {label}, which is neither ignore_index (-100) nor in [0, 70); 1 of 24 targets"
    with pytest.raises(ValueError, match=re.escape(message)):
        call(target=y, strategy=strategy)


def test_an_unknown_argument():
    with pytest.raises(TypeError, match="unexpected keyword"):
        call(smoothing=0.1)


def test_a_device_without_a_backend_says_why(monkeypatch):
    h, w, y, _ = small_problem()
    monkeypatch.setattr("onchip.frontend.torch_inputs.DEVICES", ("cuda",))
    with pytest.raises(
        ValueError,
        match=re.escape(
            "no backend can run this call (triton: it runs on CUDA tensors, not on 'cpu'; "
            "torch: it runs on cuda tensors, not on 'cpu')"
        ),
    ):
        linear_cross_entropy(h, w, y)
    with pytest.raises(ValueError, match="backend 'torch' can't run this call: it runs on"):
        linear_cross_entropy(h, w, y, backend="torch")


def test_the_triton_backend_multiplies_in_16_bits(monkeypatch):
    monkeypatch.setattr("onchip.vocab.triton.plan.device_refusal", lambda *_: None)
    reason = "backend 'triton' can't run this call: its products are of bfloat16 or float16, not of float32"
    assert_refused("linear_cross_entropy", partial(call, backend="triton"), ValueError, reason)


def test_weight_grad_out_is_refused_by_torch_compile():
    h, w, y, _ = small_problem()
    out = torch.zeros(70, 16)
    compiled = torch.compile(
        lambda h, w, y: linear_cross_entropy(h, w, y, weight_grad_out=out), fullgraph=True, backend="eager"
    )
    with pytest.raises(Exception, match="weight_grad_out is not supported inside torch"):
        compiled(h, w, y)


@pytest.mark.parametrize(
    "options", [{"reduction": "avg"}, {"softcap": 0.0}, {"strategy": "x"}, {"backend": "x"}, {"normalizer": 0}], ids=str
)
def test_the_module_refuses_bad_options_when_made(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        LinearCrossEntropyLoss(**options)


def test_constants_that_need_gradients_are_fine_without_autograd():
    with torch.no_grad():
        assert call(token_weight=torch.ones(2, 12, requires_grad=True)).isfinite()
