"""Every way to call PyTorch's losses wrongly: the exception's type, and that it names the argument.

Arguments of another kind are in test_refusals.py, numbers and words in test_option_errors.py.
"""

import math
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from losses import CE, LCE, LLP, LP
from onchip.torch import quantize_weight
from shared import assert_refused

OPS = {"linear_cross_entropy": LCE, "cross_entropy": CE, "linear_log_probs": LLP, "log_probs": LP}
by_op = pytest.mark.parametrize("loss", OPS.values(), ids=list(OPS))
ONES = torch.ones(2, 12)
ZERO_AT_3 = ONES.index_fill(1, torch.tensor(3), 0.0)
INTEGERS = torch.zeros(2, 12, dtype=torch.int64)


def call(loss, **changes):
    given = loss.problem() | {loss.ids if name == "IDS" else name: x for name, x in changes.items()}
    return loss.op(**given)


# Of all; IDS is what the op calls its indices.
ALL = {
    "IDS are float": ({"IDS": torch.zeros(2, 12)}, TypeError, "IDS must hold integers; got float32"),
    "IDS are bool": ({"IDS": INTEGERS.bool()}, TypeError, "IDS must hold integers; got bool"),
    "IDS too short": ({"IDS": INTEGERS[:, :11]}, ValueError, "IDS has shape [2, 11] but"),
    "IDS are flat": ({"IDS": INTEGERS.flatten()}, ValueError, "leading dimensions, [2, 12]"),
    "IDS elsewhere": ({"IDS": INTEGERS.to("meta")}, ValueError, "IDS is on meta but"),
    "temperature is flat": ({"temperature": ONES.flatten()}, ValueError, "temperature has shape [24]; it must "),
    "a token's temperature is 0": ({"temperature": ZERO_AT_3}, ValueError, "temperature must be finite and above 0 for every token; got 0.0"),
    "a token's temperature is nan": ({"temperature": torch.full((), math.nan)}, ValueError, "temperature must be finite and above 0"),
    "temperature needs a gradient": ({"temperature": ONES.clone().requires_grad_()}, ValueError, "pass temperature.detach()"),
    "scratch_bytes is 1e9": ({"scratch_bytes": 1e9}, ValueError, "scratch_bytes=1000000000.0 is a float, a part of the float32 logits, and must be above 0 and at most 1; pass an int for bytes"),
    "scratch_bytes is 0.0": ({"scratch_bytes": 0.0}, ValueError, "must be above 0 and at most 1; pass an int for bytes"),
    "scratch_bytes is nan": ({"scratch_bytes": math.nan}, ValueError, "scratch_bytes=nan is a float"),
    "scratch_bytes has no unit": ({"scratch_bytes": "512"}, ValueError, "scratch_bytes as a text must be like '1GiB', '512 MiB' or '0.5 KiB'; got '512'"),
    "scratch_bytes in GB": ({"scratch_bytes": "1GB"}, ValueError, "got '1GB'; did you mean '1GiB'?"),
    "scratch_bytes in gb": ({"scratch_bytes": "1gb"}, ValueError, "got '1gb'; did you mean '1GiB'?"),
    "scratch_bytes in mib": ({"scratch_bytes": "256mib"}, ValueError, "got '256mib'; did you mean '256MiB'?"),
    "scratch_bytes in M": ({"scratch_bytes": "256 M"}, ValueError, "got '256 M'; did you mean '256 MiB'?"),
    "scratch_bytes < 0": ({"scratch_bytes": "-1 GiB"}, ValueError, "scratch_bytes as a text must be like '1GiB'"),
    "scratch_bytes endless": ({"scratch_bytes": "9" * 400 + "GiB"}, ValueError, "scratch_bytes must fit in 64 bits"),
    "scratch_bytes no number": ({"scratch_bytes": "nanGiB"}, ValueError, "scratch_bytes as a text must be like '1GiB'"),
    "scratch_bytes too small": ({"scratch_bytes": 100}, ValueError, "scratch_bytes=100 is too small for T=24, "),
    "scratch_bytes too few KiB": ({"scratch_bytes": "0.1 KiB"}, ValueError, "scratch_bytes=102 is too small for T=24, "),
    "scratch_bytes too small a part": ({"scratch_bytes": 0.01}, ValueError, "scratch_bytes=67 is too small for T=24, "),
    "backend can't": ({"backend": "triton"}, ValueError, "backend 'triton' can't run this call: it runs on CUDA tensors, not on 'cpu'"),
}  # fmt: skip
# Of those with a target for each token.
TARGETS = {
    "target is None": ({"target": None}, TypeError, "target is missing or None; pass it (labels is another name for it)"),
    "a label of -1": ({"target": torch.full((2, 12), -1)}, ValueError, "24 of 24 targets are out of range; if -1 marks tokens to ignore, pass ignore_index=-1"),
    "target and labels": ({"labels": INTEGERS}, TypeError, "labels is another name for target; pass one of them"),
    "labels too short": ({"target": None, "labels": INTEGERS[:, :11]}, ValueError, "was cut off, pass all labels with shift=True"),
    "token_weight is flat": ({"token_weight": ONES.flatten()}, ValueError, "token_weight has shape [24]"),
    "token_weight needs a gradient": ({"token_weight": ONES.clone().requires_grad_()}, ValueError, "pass token_weight.detach()"),
    "class_weight too long": ({"class_weight": torch.ones(71)}, ValueError, "class_weight has shape [71]; it must be [V], [70]"),
    "class_weight is float64": ({"class_weight": torch.ones(70).double()}, TypeError, "class_weight must be float32; got float64"),
    "class_weight < 0": ({"class_weight": torch.linspace(-1, 1, 70)}, ValueError, "class_weight must be finite and 0 or more; got -1.0"),
    "class_weight is nan": ({"class_weight": torch.full((70,), math.nan)}, ValueError, "class_weight must be finite and 0 or more; got nan"),
    "class_weight elsewhere": ({"class_weight": torch.ones(70, device="meta")}, ValueError, "class_weight is on meta but"),
    "class_weight needs a gradient": ({"class_weight": torch.ones(70).requires_grad_()}, ValueError, "pass class_weight.detach()"),
    "normalizer is 1-d": ({"normalizer": torch.ones(1)}, ValueError, "normalizer must be a number or a 0-d tensor"),
    "normalizer is a string": ({"normalizer": "12"}, TypeError, "normalizer must be a number; got str"),
    "normalizer is True": ({"normalizer": True}, TypeError, "normalizer must be a number; got bool"),
    "normalizer elsewhere": ({"normalizer": torch.ones((), device="meta")}, ValueError, "normalizer is on meta"),
    "normalizer 0": ({"normalizer": 0}, ValueError, "normalizer must be above 0"),
    "normalizer tensor 0": ({"normalizer": torch.zeros(())}, ValueError, "normalizer must be finite and above 0; got 0.0"),
    "normalizer with sum": ({"normalizer": 3, "reduction": "sum"}, ValueError, "normalizer is what reduction='mean' divides by"),
    "normalizer needs a gradient": ({"normalizer": torch.ones((), requires_grad=True)}, ValueError, "pass normalizer.detach()"),
}  # fmt: skip
DOUBLE = {"hidden": torch.randn(2, 12, 16).double(), "weight": torch.randn(70, 16).double(), "bias": None}
# Of those with a weight.
LINEAR = {
    "weight is transposed": ({"weight": torch.randn(16, 70)}, ValueError, "hidden has H=16 but weight has H=70; weight must be [V, H]; pass weight.T, or, if hidden holds logits, the hidden states that made them"),
    "weight is 1-d": ({"weight": torch.randn(16)}, ValueError, "weight must be [V, H], V, H >= 1; got shape [16]"),
    "weight is 3-d": ({"weight": torch.randn(2, 70, 16)}, ValueError, "weight must be [V, H]"),
    "weight has no rows": ({"weight": torch.randn(0, 16)}, ValueError, "weight must be [V, H], V, H >= 1"),
    "weight is None": ({"weight": None}, TypeError, "weight must be a torch.Tensor; got NoneType"),
    "weight is float64": ({"weight": torch.randn(70, 16).double()}, TypeError, "hidden is float32 but weight is float64; cast one of them"),
    "weight elsewhere": ({"weight": torch.randn(70, 16, device="meta")}, ValueError, "weight is on meta but hidden is on cpu"),
    "H is 0": ({"hidden": torch.randn(2, 12, 0), "weight": torch.randn(70, 0)}, ValueError, "V, H >= 1"),
    "hidden is 0-d": ({"hidden": torch.randn(())}, ValueError, "hidden must be [..., H]"),
    "hidden is a model's output": ({"hidden": SimpleNamespace(last_hidden_state=ONES)}, TypeError, "got SimpleNamespace; pass its last_hidden_state"),
    "hidden is float64": ({"hidden": torch.randn(2, 12, 16).double()}, TypeError, "hidden is float64 but weight is float32; cast one of them"),
    "hidden is int": ({"hidden": torch.ones(2, 12, 16, dtype=torch.int64)}, TypeError, "hidden must be float32, bfloat16, float16 or float64; got int64"),
    "16-bit dtypes differ": ({"hidden": torch.randn(2, 12, 16).half(), "weight": torch.randn(70, 16).bfloat16()}, TypeError, "hidden is float16 but weight is bfloat16, and neither dtype holds the other's numbers; cast one of them, or run under torch.autocast"),
    "bias too long": ({"bias": torch.randn(71)}, ValueError, "bias has shape [71] but weight has V=70"),
    "bias is 2-d": ({"bias": torch.randn(1, 70)}, ValueError, "bias must be [V]"),
    "bias is float64": ({"bias": torch.randn(70).double()}, TypeError, "hidden is float32 but bias is float64; cast one of them"),
    "float64's kernels": (DOUBLE | {"backend": "triton"}, ValueError, "backend 'triton' can't run this call: it takes no float64; pass backend='plain', or 'auto'"),
    "bias dtype differs": ({"bias": torch.randn(70).bfloat16()}, TypeError, "hidden is float32 but bias is bfloat16"),
}  # fmt: skip
# Of those with logits.
LOGITS = {
    "logits is 0-d": ({"logits": torch.randn(())}, ValueError, "logits must be [..., V]"),
    "V is 0": ({"logits": torch.randn(2, 12, 0)}, ValueError, "logits must be [..., V] with V >= 1; got shape [2, 12, 0]"),
    "logits is int": ({"logits": torch.ones(2, 12, 70, dtype=torch.int64)}, TypeError, "logits must be float32, bfloat16, float16 or float64; got int64"),
    "float64's kernels": ({"logits": torch.randn(2, 12, 70).double(), "backend": "triton"}, ValueError, "backend 'triton' can't run this call: it takes no float64; pass backend='plain', or 'auto'"),
}  # fmt: skip
# Of those with ids.
IDS_OF = {
    "ids is None": ({"ids": None}, TypeError, "ids is missing or None; pass it (labels is another name for it)"),
    "ids and labels": ({"labels": INTEGERS}, TypeError, "labels is another name for ids; pass one of them"),
    "an id of -1": ({"ids": torch.full((2, 12), -1)}, ValueError, "24 of 24 ids are out of range; if -1 marks tokens to ignore, pass ignore_index=-1"),
    "ids have two more": ({"ids": INTEGERS[..., None, None].expand(2, 12, 3, 4)}, ValueError, "ids has shape [2, 12, 3, 4]"),
    "no ids": ({"ids": torch.zeros(2, 12, 0, dtype=torch.int64)}, ValueError, "ids has shape [2, 12, 0]; [..., K] needs K >= 1"),
}  # fmt: skip
OUT = torch.zeros(70, 16)
FP8 = {"precision": "fp8"}
OWN = {
    LCE: {
        "weight_grad_out is bfloat16": ({"weight_grad_out": OUT.bfloat16()}, TypeError, "weight_grad_out must be float32; got bfloat16"),
        "weight_grad_out is float32": (DOUBLE | {"weight_grad_out": OUT}, TypeError, "weight_grad_out must be float64; got float32"),
        "weight_grad_out is transposed": ({"weight_grad_out": torch.zeros(16, 70)}, ValueError, "weight_grad_out must be contiguous, of weight's shape, [70, 16]; got shape [16, 70]"),
        "weight_grad_out is strided": ({"weight_grad_out": torch.zeros(16, 70).T}, ValueError, "got shape [70, 16], strides [1, 70]"),
        "weight_grad_out elsewhere": ({"weight_grad_out": OUT.to("meta")}, ValueError, "weight_grad_out is on meta but weight is on cpu"),
        "weight_grad_out needs a gradient": ({"weight_grad_out": OUT.clone().requires_grad_()}, ValueError, "pass weight_grad_out.detach()"),
        "nothing to shift along": ({"hidden": torch.randn(16), "target": INTEGERS[0, 0], "shift": True}, ValueError, "shift=True needs target of shape [..., S], a sequence of S tokens; got no dimension; pass shift=False for a single token"),
        "a shifted label out of range": ({"target": INTEGERS + 70, "shift": True}, ValueError, "target[0, 1] is 70, which is neither ignore_index (-100) nor in [0, 70); 22 of 24 targets"),
        "fp8 computed again": (FP8 | {"strategy": "recompute"}, ValueError, "precision='fp8' computes logits once and keeps their gradient; pass strategy="),
        "fp8's float64": (DOUBLE | FP8, TypeError, "precision='fp8' takes no float64; pass precision='full', or cast hidden and weight"),
        "fp8's bias": (FP8 | {"reduction": "none"}, ValueError, "with precision='fp8' and reduction='none' bias gets no gradient"),
        "fp8's kernels": (FP8 | {"backend": "triton"}, ValueError, "backend 'triton' can't run this call"),
        "fp8's scratch": (FP8 | {"scratch_bytes": 1000}, ValueError, "scratch_bytes=1000 is too small for T=24, H=16, V=70 with precision='fp8'"),
        "a quantised weight": ({"weight": quantize_weight(torch.randn(70, 16))}, TypeError, "weight is a QuantizedWeight, which only precision='fp8' takes"),
    },
    CE: {
        "nothing to shift along": ({"logits": torch.randn(70), "target": INTEGERS[0, 0], "shift": True}, ValueError, "shift=True needs target of shape [..., S], a sequence of S tokens; got no dimension; pass shift=False for a single token"),
        "vocabulary in dimension 1": ({"logits": torch.randn(2, 70, 12)}, ValueError, "target must have logits' leading dimensions, [2, 70]; if V is their second dimension, as in F.cross_entropy, move it"),
        "in place, a leaf": ({"inplace_backward": True}, ValueError, "inplace_backward=True would overwrite logits that are a leaf"),
        "in place, a view of a leaf": ({"logits": torch.randn(2, 12, 80, requires_grad=True)[..., :70], "inplace_backward": True}, ValueError, "would overwrite logits that are a view of a leaf of shape [2, 12, 80]"),
        "in place, expanded": ({"logits": (2 * torch.randn(12, 70, requires_grad=True)).expand(2, 12, 70), "inplace_backward": True}, ValueError, "elements each have a place of their own in memory; got shape [2, 12, 70] with strides [0, 70, 1]"),
    },
    LLP: {
        "nothing to shift along": ({"hidden": torch.randn(16), "ids": INTEGERS[0, :3], "shift": True}, ValueError, "shift=True needs hidden of shape [..., S, H], a sequence of S tokens; got no dimension; pass shift=False for a single token"),
    },
    LP: {
        "ids for other logits": ({"logits": torch.randn(2, 70, 12)}, ValueError, "ids must have logits' leading dimensions, [2, 70]"),
    },
}  # fmt: skip
TABLES = {
    LCE: ALL | TARGETS | LINEAR,
    CE: ALL | TARGETS | LOGITS,
    LLP: ALL | LINEAR | IDS_OF,
    LP: ALL | LOGITS | IDS_OF,
}
WRONG = [
    pytest.param(loss, *row, id=f"{op}: {name}")
    for op, loss in OPS.items()
    for name, row in (TABLES[loss] | OWN[loss]).items()
]


@pytest.mark.parametrize(("loss", "changes", "kind", "message"), WRONG)
def test_wrong_call(loss, changes, kind, message):
    assert_refused(loss.op.__name__, partial(call, loss, **changes), kind, message.replace("IDS", loss.ids))


@by_op
@pytest.mark.parametrize("bad", [70, -1, 2**40, -101])
def test_an_id_out_of_range_is_named_with_its_position(bad, loss):
    for each, where in ((None, (1, 7)), (3, (1, 7, 2)))[: 2 if loss.of_ids else 1]:
        ids = loss.problem(ids=each)[loss.ids]
        ids[where] = bad
        place = ", ".join(map(str, where))
        message = (
            f"{loss.ids}[{place}] is {bad}, which is neither ignore_index (-100) nor in [0, 70); 1 of {ids.numel()}"
        )
        for options in [{"strategy": "stash"}, {"strategy": "recompute"}, FP8] if loss is LCE else [{}]:
            assert_refused(loss.op.__name__, partial(call, loss, IDS=ids, **options), ValueError, message)


@by_op
def test_an_unknown_argument(loss):
    with pytest.raises(TypeError, match="unexpected keyword"):
        call(loss, smoothing=0.1)


@by_op
def test_a_device_without_a_backend_says_why(loss, monkeypatch):
    monkeypatch.setattr("onchip.frontend.torch_inputs.DEVICES", ("cuda",))
    said = re.escape("plain: it runs on cuda tensors, not on 'cpu'")
    with pytest.raises(ValueError, match=rf"{loss.op.__name__}: no backend can run this call \(.*{said}"):
        call(loss)
    with pytest.raises(ValueError, match="backend 'plain' can't run this call: it runs on"):
        call(loss, backend="plain")


@pytest.mark.parametrize("loss", [LCE, LLP], ids=["linear_cross_entropy", "linear_log_probs"])
def test_the_triton_backend_multiplies_in_16_bits(loss, monkeypatch):
    monkeypatch.setattr("onchip.vocab.triton.setup.device_refusal", lambda *_: None)
    reason = "backend 'triton' can't run this call: its products take bfloat16 or float16, not float32"
    assert_refused(loss.op.__name__, partial(call, loss, backend="triton"), ValueError, reason)


def test_what_changes_memory_is_refused_by_torch_compile():
    given = LCE.problem()
    compiled = torch.compile(lambda g: LCE.op(**g, weight_grad_out=OUT), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="weight_grad_out is not supported inside torch"):
        compiled(given)
    x, y = CE.problem().values()
    compiled = torch.compile(lambda x: CE.op(x * 2, y, inplace_backward=True), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"inplace_backward is not supported inside torch\.compile"):
        compiled(x)


@pytest.mark.parametrize("loss", [LCE, CE], ids=["linear_cross_entropy", "cross_entropy"])
def test_constants_that_need_gradients_are_fine_without_autograd(loss):
    with torch.no_grad():
        assert call(loss, token_weight=ONES.clone().requires_grad_()).isfinite()
