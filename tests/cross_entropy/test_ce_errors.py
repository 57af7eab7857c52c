"""Every way to call the op wrongly: the exception's type, and that it names the argument."""

import math
import re
from functools import partial

import pytest
import torch
from ce_common import small_problem

from onchip.ops.cross_entropy.torch_op import CrossEntropyLoss, cross_entropy
from shared import assert_refused


def call(**changes):
    x, y = small_problem()
    return cross_entropy(**({"logits": x, "target": y} | changes))


def leaf():
    return torch.randn(2, 12, 70, requires_grad=True)


WRONG = {
    # shapes
    "logits is 0-d": ({"logits": torch.randn(())}, ValueError, "logits must be [..., V]"),
    "V is 0": ({"logits": torch.randn(2, 12, 0)}, ValueError, "logits must be [..., V] with V >= 1; got shape [2, 12, 0]"),
    "target too short": ({"target": torch.zeros(2, 11, dtype=torch.int64)}, ValueError, "target has shape [2, 11] but logits has shape [2, 12, 70]"),
    "target is flat": ({"target": torch.zeros(24, dtype=torch.int64)}, ValueError, "target must have logits' leading dimensions, [2, 12]"),
    "vocabulary in dimension 1": ({"logits": torch.randn(2, 70, 12)}, ValueError, "target must have logits' leading dimensions, [2, 70]"),
    "token_weight is flat": ({"token_weight": torch.ones(24)}, ValueError, "token_weight has shape [24]; it must have target's shape, [2, 12]"),
    "temperature is flat": ({"temperature": torch.ones(24)}, ValueError, "temperature has shape [24]"),
    "normalizer is 1-d": ({"normalizer": torch.ones(1)}, ValueError, "normalizer must be a number or a 0-d tensor"),
    # dtypes and types
    "logits is a list": ({"logits": [1.0]}, TypeError, "logits must be a torch.Tensor; got list"),
    "target is None": ({"target": None}, TypeError, "target must be a torch.Tensor; got NoneType"),
    "token_weight is a number": ({"token_weight": 1.0}, TypeError, "token_weight must be a torch.Tensor"),
    "logits is float64": ({"logits": torch.randn(2, 12, 70).double()}, TypeError, "logits must be float32, bfloat16 or float16; got float64"),
    "logits is int": ({"logits": torch.ones(2, 12, 70, dtype=torch.int64)}, TypeError, "logits must be float32"),
    "target is float": ({"target": torch.zeros(2, 12)}, TypeError, "target must hold integers; got float32"),
    "target is bool": ({"target": torch.zeros(2, 12, dtype=torch.bool)}, TypeError, "target must hold integers; got bool"),
    "token_weight is complex": ({"token_weight": torch.ones(2, 12, dtype=torch.complex64)}, TypeError, "token_weight must be real"),
    "normalizer is complex": ({"normalizer": torch.ones((), dtype=torch.complex64)}, TypeError, "normalizer must be a real number"),
    "normalizer is a string": ({"normalizer": "12"}, TypeError, "normalizer must be a number; got str"),
    "normalizer is True": ({"normalizer": True}, TypeError, "normalizer must be a number; got bool"),
    "softcap is a string": ({"softcap": "30"}, TypeError, "softcap must be a number"),
    "label_smoothing is None": ({"label_smoothing": None}, TypeError, "label_smoothing must be a number"),
    "ignore_index is a float": ({"ignore_index": -100.0}, TypeError, "ignore_index must be an int"),
    "scratch_bytes is a float": ({"scratch_bytes": 1e9}, TypeError, "scratch_bytes must be an int"),
    "check_inputs is 1": ({"check_inputs": 1}, TypeError, "check_inputs must be True or False"),
    "return_stats is 'yes'": ({"return_stats": "yes"}, TypeError, "return_stats must be True or False"),
    "inplace_backward is 1": ({"inplace_backward": 1}, TypeError, "inplace_backward must be True or False"),
    # devices
    "target elsewhere": ({"target": torch.zeros(2, 12, dtype=torch.int64, device="meta")}, ValueError, "target is on meta but logits is on cpu"),
    "normalizer elsewhere": ({"normalizer": torch.ones((), device="meta")}, ValueError, "normalizer is on meta"),
    # ranges
    "label_smoothing 1.1": ({"label_smoothing": 1.1}, ValueError, "label_smoothing must be in [0, 1]; got 1.1"),
    "z_loss < 0": ({"z_loss": -1e-4}, ValueError, "z_loss must be 0 or more"),
    "z_loss is nan": ({"z_loss": math.nan}, ValueError, "z_loss must be finite"),
    "softcap 0": ({"softcap": 0.0}, ValueError, "softcap must be above 0; got 0.0; pass None for no softcap"),
    "logit_scale 0": ({"logit_scale": 0}, ValueError, "logit_scale must be above 0"),
    "temperature 0": ({"temperature": 0.0}, ValueError, "temperature must be above 0"),
    "a token's temperature is 0": ({"temperature": torch.ones(2, 12).index_fill(1, torch.tensor(3), 0.0)}, ValueError, "temperature must be finite and above 0 for every token; got 0.0"),
    "normalizer 0": ({"normalizer": 0}, ValueError, "normalizer must be above 0"),
    "normalizer tensor 0": ({"normalizer": torch.zeros(())}, ValueError, "normalizer must be finite and above 0; got 0.0"),
    "scratch_bytes 0": ({"scratch_bytes": 0}, ValueError, "scratch_bytes must be positive"),
    "scratch_bytes too small": ({"scratch_bytes": 100}, ValueError, "scratch_bytes=100 is too small for T=24, V=70 in float32: one row needs 2584 bytes"),
    # options
    "reduction": ({"reduction": "avg"}, ValueError, "reduction must be one of 'mean', 'sum', 'none'; got 'avg'"),
    "backend": ({"backend": "cublas"}, ValueError, "backend must be one of 'auto', 'triton', 'torch'; got 'cublas'"),
    "normalizer with sum": ({"normalizer": 3, "reduction": "sum"}, ValueError, "normalizer is what reduction='mean' divides by"),
    # what can't be overwritten
    "in place, a leaf": ({"logits": leaf(), "inplace_backward": True}, ValueError, "inplace_backward=True would overwrite logits that are a leaf"),
    "in place, a view of a leaf": ({"logits": torch.randn(2, 12, 80, requires_grad=True)[..., :70], "inplace_backward": True}, ValueError, "would overwrite logits that are a view of a leaf of shape [2, 12, 80]"),
    "in place, expanded": ({"logits": (2 * torch.randn(12, 70, requires_grad=True)).expand(2, 12, 70), "inplace_backward": True}, ValueError, "elements each have a place of their own in memory; got shape [2, 12, 70] with strides [0, 70, 1]"),
    # what would silently get no gradient
    "token_weight needs a gradient": ({"token_weight": torch.ones(2, 12, requires_grad=True)}, ValueError, "pass token_weight.detach()"),
    "temperature needs a gradient": ({"temperature": torch.ones(2, 12, requires_grad=True)}, ValueError, "pass temperature.detach()"),
    "normalizer needs a gradient": ({"normalizer": torch.ones((), requires_grad=True)}, ValueError, "pass normalizer.detach()"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    changes, kind, message = WRONG[name]
    assert_refused("cross_entropy", partial(call, **changes), kind, message)


@pytest.mark.parametrize("label", [70, -1, 2**40, -101])
def test_a_label_out_of_range_is_named_with_its_position(label):
    y = small_problem()[1]
    y[1, 7] = label
    message = f"cross_entropy: target[1, 7] is {label}, which is neither ignore_index (-100) nor in [0, 70); 1 of 24"
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        call(target=y)


def test_the_smallest_scratch_that_the_message_names_is_enough():
    for options in ({}, {"softcap": 5.0}, {"return_stats": True}):
        with pytest.raises(ValueError, match="one row needs") as caught:
            call(scratch_bytes=100, **options)
        out = call(scratch_bytes=int(re.search(r"needs (\d+) bytes", str(caught.value))[1]), **options)
        (out[0] if "return_stats" in options else out).backward()


def test_an_unknown_argument():
    with pytest.raises(TypeError, match="unexpected keyword"):
        call(smoothing=0.1)


def test_a_device_without_a_backend_says_why(monkeypatch):
    monkeypatch.setattr("onchip.frontend.torch_inputs.DEVICES", ("cuda",))
    with pytest.raises(ValueError, match=r"cross_entropy: no backend can run this call .*; torch: it runs on cuda"):
        call()
    with pytest.raises(ValueError, match="backend 'torch' can't run this call: it runs on"):
        call(backend="torch")


@pytest.mark.parametrize(
    "options", [{"reduction": "avg"}, {"softcap": 0.0}, {"backend": "x"}, {"normalizer": 0}], ids=str
)
def test_the_module_refuses_bad_options_when_made(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        CrossEntropyLoss(**options)


def test_constants_that_need_gradients_are_fine_without_autograd():
    with torch.no_grad():
        assert call(token_weight=torch.ones(2, 12, requires_grad=True)).isfinite()
