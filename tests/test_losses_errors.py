"""Every way to call the losses over a vocabulary wrongly, in both frameworks: the exception's type, and that it names the
argument.  JAX's errors are found while tracing, so its calls are made under `jax.eval_shape` too.

Arguments of another kind are in test_refusals.py, numbers and words in test_option_errors.py.
"""

import inspect
import math
import re
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import onchip.jax
import onchip.torch
from losses import CE, LCE, LLP, LP
from onchip.frontend.jax_inputs import platform
from onchip.frontend.topk import TopK
from onchip.torch import quantize_weight
from onchip.vocab.xla import walk as jax_xla
from shared import assert_refused

OPS = {"linear_cross_entropy": LCE, "cross_entropy": CE, "linear_log_probs": LLP, "log_probs": LP}
by_op = pytest.mark.parametrize("loss", OPS.values(), ids=list(OPS))


class Cast(NamedTuple):
    """Ones of a dtype that NumPy may lack."""

    shape: tuple
    dtype: str


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


IDS, EACH = ones(2, 12, dtype=np.int32), ones(2, 12)
K = TopK(np.zeros((2, 12, 3), np.int32), ones(2, 12, 3), "probs", "truncated")
DENSE = ones(2, 12, 70) / 70
OFF = K.indices.copy()
OFF[1, 7, 2] = 70
NO_UNIT = "scratch_bytes as a text must be like '1GiB'"
SMALL = "is too small for T=24, "
SHIFT = "a sequence of S tokens; got no dimension; pass shift=False"
# Of all ops that have these arguments, in both frameworks.  ARRAY is what a framework's arrays are.
BOTH = {
    # shapes
    "weight is transposed": ({"weight": ones(16, 70)}, ValueError, {
        "torch": "hidden has H=16 but weight has H=70; weight must be [V, H]; pass weight.T, or, if hidden holds logits, the hidden states that made them",
        "jax": "hidden has H=16 but weight has H=70; weight must be [V, H]; or pass weight_layout='hv'",
    }),
    "weight of another H": ({"weight": ones(70, 17)}, ValueError, "hidden has H=16 but weight has H=17; weight must be [V, H]"),
    "weight is 1-d": ({"weight": ones(16)}, ValueError, "weight must be [V, H], V, H >= 1; got shape [16]"),
    "weight is 3-d": ({"weight": ones(2, 70, 16)}, ValueError, "weight must be [V, H]"),
    "weight has no rows": ({"weight": ones(0, 16)}, ValueError, "weight must be [V, H], V, H >= 1"),
    "H is 0": ({"hidden": ones(2, 12, 0), "weight": ones(70, 0)}, ValueError, "V, H >= 1"),
    "hidden is 0-d": ({"hidden": ones()}, ValueError, "hidden must be [..., H]"),
    "logits is 0-d": ({"logits": ones()}, ValueError, "logits must be [..., V]"),
    "V is 0": ({"logits": ones(2, 12, 0)}, ValueError, "logits must be [..., V] with V >= 1; got shape [2, 12, 0]"),
    "target too short": ({"target": IDS[:, :11]}, ValueError, "target has shape [2, 11]"),
    "target is flat": ({"target": IDS.ravel()}, ValueError, "leading dimensions, [2, 12]"),
    "labels too short": ({"target": None, "labels": IDS[:, :11]}, ValueError, {"torch": "target has shape [2, 11]", "jax": "labels has shape [2, 11]"}),
    "labels are cut off": ({"target": None, "labels": IDS[:, :11]}, ValueError, "was cut off, pass all labels with shift=True"),
    "ids too short": ({"ids": IDS[:, :11]}, ValueError, "ids has shape [2, 11]"),
    "ids are flat": ({"ids": IDS.ravel()}, ValueError, "ids has shape [24]"),
    "ids have two more": ({"ids": ones(2, 12, 3, 4, dtype=np.int32)}, ValueError, "ids has shape [2, 12, 3, 4]"),
    "no ids": ({"ids": ones(2, 12, 0, dtype=np.int32)}, ValueError, "ids has shape [2, 12, 0]; [..., K] needs K >= 1"),
    "vocabulary in dimension 1": ({"logits": ones(2, 70, 12), "target": IDS}, ValueError, "target must have logits' leading dimensions, [2, 70]; if V is their second dimension, as in F.cross_entropy, move it"),
    "ids for other logits": ({"logits": ones(2, 70, 12), "ids": IDS}, ValueError, "ids must have logits' leading dimensions, [2, 70]"),
    "bias too long": ({"bias": ones(71)}, ValueError, "bias has shape [71] but weight has V=70"),
    "bias is 2-d": ({"bias": ones(1, 70)}, ValueError, "bias must be [V]"),
    "token_weight is flat": ({"token_weight": ones(24)}, ValueError, "token_weight has shape [24]; it must have target's shape, [2, 12]"),
    "temperature is flat": ({"temperature": ones(24)}, ValueError, "temperature has shape [24]; it must "),
    "class_weight too long": ({"class_weight": ones(71)}, ValueError, "class_weight has shape [71]; it must be [V], [70]"),
    "normalizer is 1-d": ({"normalizer": ones(1)}, ValueError, "normalizer must be a number or a 0-d "),
    # dtypes and types
    "weight is None": ({"weight": None}, TypeError, "weight must be a ARRAY; got NoneType"),
    "target is None": ({"target": None}, TypeError, "target is missing or None; pass it (labels is another name for it)"),
    "target and labels": ({"target": IDS, "labels": IDS}, TypeError, "labels is another name for target; pass one of them"),
    "ids is None": ({"ids": None}, TypeError, "ids is missing or None; pass it (labels is another name for it)"),
    "ids and labels": ({"ids": IDS, "labels": IDS}, TypeError, "labels is another name for ids; pass one of them"),
    "hidden is int": ({"hidden": ones(2, 12, 16, dtype=np.int32)}, TypeError, "hidden must be float32, bfloat16, float16 or float64; got int32"),
    "logits is int": ({"logits": ones(2, 12, 70, dtype=np.int32)}, TypeError, "logits must be float32, bfloat16, float16 or float64; got int32"),
    "weight is float8": ({"weight": Cast((70, 16), "float8_e4m3fn")}, TypeError, "weight must be float32, bfloat16, float16 or float64; got float8_e4m3fn"),
    "16-bit dtypes differ": ({"hidden": Cast((2, 12, 16), "float16"), "weight": Cast((70, 16), "bfloat16")}, TypeError, "hidden is float16 but weight is bfloat16, and neither dtype holds the other's numbers; cast one of them"),
    "bias dtype differs": ({"bias": Cast((70,), "bfloat16")}, TypeError, "hidden is float32 but bias is bfloat16"),
    "target is float": ({"target": EACH}, TypeError, "target must hold integers; got float32"),
    "labels are float": ({"target": None, "labels": EACH}, TypeError, {"torch": "target must hold integers; got float32", "jax": "labels must hold integers; got float32"}),
    "target is bool": ({"target": EACH > 0}, TypeError, "target must hold integers; got bool"),
    "ids are float": ({"ids": EACH}, TypeError, "ids must hold integers; got float32"),
    "ids are bool": ({"ids": EACH > 0}, TypeError, "ids must hold integers; got bool"),
    "class_weight is float16": ({"class_weight": Cast((70,), "float16")}, TypeError, "class_weight must be float32; got float16"),
    "normalizer is a string": ({"normalizer": "12"}, TypeError, "normalizer must be a number; got str"),
    "normalizer is True": ({"normalizer": True}, TypeError, "normalizer must be a number; got bool"),
    "scratch_bytes is 1e9": ({"scratch_bytes": 1e9}, ValueError, "scratch_bytes=1000000000.0 is a float, a part of the float32 logits, and must be above 0 and at most 1; pass an int for bytes"),
    "scratch_bytes is 0.0": ({"scratch_bytes": 0.0}, ValueError, "must be above 0 and at most 1; pass an int for bytes"),
    "scratch_bytes is nan": ({"scratch_bytes": math.nan}, ValueError, "scratch_bytes=nan is a float"),
    "scratch_bytes is a list": ({"scratch_bytes": [1]}, TypeError, "scratch_bytes must be an int; got list"),
    "scratch_bytes has no unit": ({"scratch_bytes": "512"}, ValueError, f"{NO_UNIT}, '512 MiB' or '0.5 KiB'; got '512'"),
    "scratch_bytes in GB": ({"scratch_bytes": "1GB"}, ValueError, "got '1GB'; did you mean '1GiB'?"),
    "scratch_bytes in gb": ({"scratch_bytes": "1gb"}, ValueError, "got '1gb'; did you mean '1GiB'?"),
    "scratch_bytes in mib": ({"scratch_bytes": "256mib"}, ValueError, "got '256mib'; did you mean '256MiB'?"),
    "scratch_bytes in M": ({"scratch_bytes": "256 M"}, ValueError, "got '256 M'; did you mean '256 MiB'?"),
    "scratch_bytes < 0": ({"scratch_bytes": "-1 GiB"}, ValueError, NO_UNIT),
    "scratch_bytes endless": ({"scratch_bytes": "9" * 400 + "GiB"}, ValueError, "scratch_bytes must fit in 64 bits"),
    "scratch_bytes no number": ({"scratch_bytes": "nanGiB"}, ValueError, NO_UNIT),
    # ranges and options
    "normalizer 0": ({"normalizer": 0}, ValueError, "normalizer must be above 0"),
    "normalizer with sum": ({"normalizer": 3, "reduction": "sum"}, ValueError, "normalizer is what reduction='mean' divides by"),
    "scratch_bytes too small": ({"scratch_bytes": 100}, ValueError, f"scratch_bytes=100 {SMALL}"),
    "scratch_bytes too few KiB": ({"scratch_bytes": "0.1 KiB"}, ValueError, f"scratch_bytes=102 {SMALL}"),
    "scratch_bytes too small a part": ({"scratch_bytes": 0.01}, ValueError, f"scratch_bytes=67 {SMALL}"),
    "nothing to shift along": ({"hidden": ones(16), "target": ones(dtype=np.int32), "shift": True}, ValueError, f"shift=True needs target of shape [..., S], {SHIFT} for a single token"),
    "no logits to shift along": ({"logits": ones(70), "target": ones(dtype=np.int32), "shift": True}, ValueError, f"shift=True needs target of shape [..., S], {SHIFT} for a single token"),
    "no ids to shift along": ({"hidden": ones(16), "ids": ones(dtype=np.int32), "shift": True}, ValueError, f"shift=True needs hidden of shape [..., S, H], {SHIFT} for a single token"),
    # labels that are probabilities
    "soft: kind": ({"target": K._replace(kind="logits")}, ValueError, "target.kind must be 'probs' or 'log_probs'; got 'logits'; pass log-probabilities, as "),
    "soft: rest": ({"target": K._replace(rest="tail")}, ValueError, "target.rest must be 'truncated', a sum over only the K entries; got 'tail', which only linear_jsd and jsd take"),
    "soft: indices are float": ({"target": K._replace(indices=K.values)}, TypeError, "target.indices must hold integers; got float32"),
    "soft: values are integers": ({"target": K._replace(values=K.indices)}, TypeError, "target.values must be float32, bfloat16, float16 or float64; got int32"),
    "soft: values is a list": ({"target": K._replace(values=[0.5])}, TypeError, "target.values must be a ARRAY; got list"),
    "soft: shapes differ": ({"target": K._replace(values=K.values[..., :2])}, ValueError, "target.indices has shape [2, 12, 3] but values has [2, 12, 2]; they must have the same shape"),
    "soft: flat": ({"target": K._replace(indices=K.indices[0], values=K.values[0])}, ValueError, "target.indices has shape [12, 3] but"),
    "soft: no entries": ({"target": K._replace(indices=K.indices[..., :0], values=K.values[..., :0])}, ValueError, "and one more for K >= 1 entries"),
    "soft: too short": ({"target": DENSE[..., :69]}, ValueError, "target has shape [2, 12, 69]; probabilities must be [..., V], [2, 12, 70]"),
    "soft: ignore_index": ({"target": K, "ignore_index": 0}, ValueError, "ignore_index=0 is only for targets that are ids; give a token that is to be ignored a token_weight of 0"),
    "soft: class_weight too short": ({"target": DENSE, "class_weight": ones(69)}, ValueError, "class_weight has shape [69]; it must be [V], [70]"),
    "soft: class_weight's dtype": ({"target": DENSE, "class_weight": Cast((70,), "bfloat16")}, TypeError, "class_weight must be float32; got bfloat16"),
    "soft: token_weight": ({"target": K, "token_weight": ones(24)}, ValueError, "token_weight has shape [24]; it must have"),
    "soft: temperature": ({"target": DENSE, "temperature": ones(24)}, ValueError, "temperature has shape [24]; it must have"),
    "soft: normalizer": ({"target": K, "normalizer": 0}, ValueError, "normalizer must be above 0"),
    "soft: scratch": ({"target": DENSE, "scratch_bytes": 100}, ValueError, f"scratch_bytes=100 {SMALL}"),
    "soft: nothing to shift along": ({"hidden": ones(16), "target": DENSE[0, 0], "shift": True}, ValueError, f"shift=True needs hidden of shape [..., S, H], {SHIFT}"),
    "soft: stash": ({"target": K, "strategy": "stash"}, ValueError, "soft labels are computed by strategy 'recompute'; got 'stash'; pass 'auto'"),
    "soft: dtypes differ": ({"target": K, "hidden": Cast((2, 12, 16), "float16"), "weight": Cast((70, 16), "bfloat16")}, TypeError, "hidden is float16 but weight is bfloat16"),
    "soft: shifted logits": ({"logits": ones(2, 12, 70), "target": DENSE, "shift": True}, ValueError, "shift=True is only for targets that are ids; pass logits[..., :-1, :] with target[..., 1:, :], the next positions' labels"),
}  # fmt: skip
# Of PyTorch: what its tensors alone may be, values that are read, and what JAX doesn't have.
ZERO_AT_3 = torch.ones(2, 12).index_fill(1, torch.tensor(3), 0.0)
INTEGERS, OUT, FP8 = torch.zeros(2, 12, dtype=torch.int64), torch.zeros(70, 16), {"precision": "fp8"}
DOUBLE = {"hidden": torch.randn(2, 12, 16).double(), "weight": torch.randn(70, 16).double(), "bias": None}
SOFT = TopK(*(torch.from_numpy(x) for x in K[:2]), *K[2:])
WRONG_IDS, EVERY = SOFT._replace(indices=torch.from_numpy(OFF)), torch.rand(2, 12, 70)
OF_TORCH = {
    "target elsewhere": ({"target": INTEGERS.to("meta")}, ValueError, "target is on meta but"),
    "ids elsewhere": ({"ids": INTEGERS.to("meta")}, ValueError, "ids is on meta but"),
    "a token's temperature is 0": ({"temperature": ZERO_AT_3}, ValueError, "temperature must be finite and above 0 for every token; got 0.0"),
    "a token's temperature is nan": ({"temperature": torch.full((), math.nan)}, ValueError, "temperature must be finite and above 0"),
    "temperature needs a gradient": ({"temperature": torch.ones(2, 12).requires_grad_()}, ValueError, "pass temperature.detach()"),
    "backend can't": ({"backend": "triton"}, ValueError, "backend 'triton' can't run this call: it runs on CUDA tensors, not on 'cpu'"),
    "a label of -1": ({"target": torch.full((2, 12), -1)}, ValueError, "24 of 24 targets are out of range; if -1 marks tokens to ignore, pass ignore_index=-1"),
    "an id of -1": ({"ids": torch.full((2, 12), -1)}, ValueError, "24 of 24 ids are out of range; if -1 marks tokens to ignore, pass ignore_index=-1"),
    "a shifted label out of range": ({"target": INTEGERS + 70, "shift": True}, ValueError, "target[0, 1] is 70, which is neither ignore_index (-100) nor in [0, 70); 22 of 24 targets"),
    "token_weight needs a gradient": ({"token_weight": torch.ones(2, 12).requires_grad_()}, ValueError, "pass token_weight.detach()"),
    "class_weight is float64": ({"class_weight": torch.ones(70).double()}, TypeError, "class_weight must be float32; got float64"),
    "class_weight < 0": ({"class_weight": torch.linspace(-1, 1, 70)}, ValueError, "class_weight must be finite and 0 or more; got -1.0"),
    "class_weight is nan": ({"class_weight": torch.full((70,), math.nan)}, ValueError, "class_weight must be finite and 0 or more; got nan"),
    "class_weight elsewhere": ({"class_weight": torch.ones(70, device="meta")}, ValueError, "class_weight is on meta but"),
    "class_weight needs a gradient": ({"class_weight": torch.ones(70).requires_grad_()}, ValueError, "pass class_weight.detach()"),
    "normalizer elsewhere": ({"normalizer": torch.ones((), device="meta")}, ValueError, "normalizer is on meta"),
    "normalizer tensor 0": ({"normalizer": torch.zeros(())}, ValueError, "normalizer must be finite and above 0; got 0.0"),
    "normalizer needs a gradient": ({"normalizer": torch.ones((), requires_grad=True)}, ValueError, "pass normalizer.detach()"),
    "weight is float64": ({"weight": torch.randn(70, 16).double()}, TypeError, "hidden is float32 but weight is float64; cast one of them"),
    "weight elsewhere": ({"weight": torch.randn(70, 16, device="meta")}, ValueError, "weight is on meta but hidden is on cpu"),
    "hidden is a model's output": ({"hidden": SimpleNamespace(last_hidden_state=EACH)}, TypeError, "got SimpleNamespace; pass its last_hidden_state"),
    "hidden is float64": ({"hidden": torch.randn(2, 12, 16).double()}, TypeError, "hidden is float64 but weight is float32; cast one of them"),
    "bias is float64": ({"bias": torch.randn(70).double()}, TypeError, "hidden is float32 but bias is float64; cast one of them"),
    "16-bit dtypes in products": ({"hidden": torch.randn(2, 12, 16).half(), "weight": torch.randn(70, 16).bfloat16()}, TypeError, "cast one of them, or run under torch.autocast"),
    "float64's kernels of heads": (DOUBLE | {"backend": "triton"}, ValueError, "backend 'triton' can't run this call: it takes no float64; pass backend='plain', or 'auto'"),
    "float64's kernels of logits": ({"logits": torch.randn(2, 12, 70).double(), "backend": "triton"}, ValueError, "backend 'triton' can't run this call: it takes no float64; pass backend='plain', or 'auto'"),
    "weight_grad_out is bfloat16": ({"weight_grad_out": OUT.bfloat16()}, TypeError, "weight_grad_out must be float32; got bfloat16"),
    "weight_grad_out is float32": (DOUBLE | {"weight_grad_out": OUT}, TypeError, "weight_grad_out must be float64; got float32"),
    "weight_grad_out is transposed": ({"weight_grad_out": torch.zeros(16, 70)}, ValueError, "weight_grad_out must be contiguous, of weight's shape, [70, 16]; got shape [16, 70]"),
    "weight_grad_out is strided": ({"weight_grad_out": torch.zeros(16, 70).T}, ValueError, "got shape [70, 16], strides [1, 70]"),
    "weight_grad_out elsewhere": ({"weight_grad_out": OUT.to("meta")}, ValueError, "weight_grad_out is on meta but weight is on cpu"),
    "weight_grad_out needs a gradient": ({"weight_grad_out": OUT.clone().requires_grad_()}, ValueError, "pass weight_grad_out.detach()"),
    "fp8 computed again": (FP8 | {"strategy": "recompute"}, ValueError, "precision='fp8' computes logits once and keeps their gradient; pass strategy="),
    "fp8's float64": (DOUBLE | FP8, TypeError, "precision='fp8' takes no float64; pass precision='full', or cast hidden and weight"),
    "fp8's bias": (FP8 | {"reduction": "none"}, ValueError, "with precision='fp8' and reduction='none' bias gets no gradient"),
    "fp8's kernels": (FP8 | {"backend": "triton"}, ValueError, "backend 'triton' can't run this call"),
    "fp8's scratch": (FP8 | {"scratch_bytes": 1000}, ValueError, "scratch_bytes=1000 is too small for T=24, H=16, V=70 with precision='fp8'"),
    "a quantised weight": ({"target": INTEGERS, "weight": quantize_weight(torch.randn(70, 16))}, TypeError, "weight is a QuantizedWeight, which only precision='fp8' takes"),
    "in place, a leaf": ({"inplace_backward": True}, ValueError, "inplace_backward=True would overwrite logits that are a leaf"),
    "in place, a view of a leaf": ({"logits": torch.randn(2, 12, 80, requires_grad=True)[..., :70], "inplace_backward": True}, ValueError, "would overwrite logits that are a view of a leaf of shape [2, 12, 80]"),
    "in place, expanded": ({"logits": (2 * torch.randn(12, 70, requires_grad=True)).expand(2, 12, 70), "inplace_backward": True}, ValueError, "elements each have a place of their own in memory; got shape [2, 12, 70] with strides [0, 70, 1]"),
    "soft: values elsewhere": ({"target": SOFT._replace(values=SOFT.values.to("meta"))}, ValueError, "target.values is on meta but"),
    "soft: values need a gradient": ({"target": SOFT._replace(values=SOFT.values.clone().requires_grad_())}, ValueError, "target.values gets no gradient from this op; pass target.values.detach()"),
    "soft: out of range": ({"target": WRONG_IDS}, ValueError, "target.indices[1, 7, 2] is 70, which is not in [0, 70); 1 of 72 target.indices are out of range"),
    "soft: -100 is out of range": ({"target": WRONG_IDS._replace(indices=WRONG_IDS.indices - 100)}, ValueError, "target.indices[0, 0, 0] is -100, which is not in [0, 70)"),
    "soft: float64": ({"target": EVERY.double()}, TypeError, " is float32 but target is float64; cast one of them"),
    "soft: needs a gradient": ({"target": EVERY.clone().requires_grad_()}, ValueError, "target gets no gradient from this op; pass target.detach()"),
    "soft: class_weight < 0": ({"target": SOFT, "class_weight": -torch.ones(70)}, ValueError, "class_weight must be finite and 0 or more; got -1.0"),
    "soft: class_weight needs a gradient": ({"target": EVERY, "class_weight": torch.ones(70).requires_grad_()}, ValueError, "pass class_weight.detach()"),
    "soft: backend": ({"target": EVERY, "backend": "triton"}, ValueError, "backend 'triton' can't run this call: "),
    "soft: a shifted index out of range": ({"hidden": torch.randn(2, 12, 16), "target": WRONG_IDS, "shift": True}, ValueError, "target.indices[1, 7, 2] is 70, which is not in [0, 70); 1 of 66 target.indices are out of range"),
    "soft: fp8 computed again": ({"target": SOFT, "precision": "fp8", "strategy": "recompute"}, ValueError, "precision='fp8' computes logits once and keeps their gradient; pass strategy="),
    "soft: fp8's bias": ({"target": EVERY, "precision": "fp8", "reduction": "none"}, ValueError, "with precision='fp8' and reduction='none' bias gets no gradient"),
    "soft: fp8's kernels": ({"target": EVERY, "precision": "fp8", "backend": "triton"}, ValueError, "backend 'triton' can't run this call"),
    "soft: fp8's float64": ({"target": EVERY.double(), "precision": "fp8", **{n: x.double() for n, x in LCE.problem().items() if n != "target"}}, TypeError, "precision='fp8' takes no float64"),
    "soft: fp8's index out of range": ({"target": WRONG_IDS, "precision": "fp8"}, ValueError, "target.indices[1, 7, 2] is 70, which is not in [0, 70); 1 of 72 target.indices are out of range"),
    "soft: fp8's scratch": ({"target": EVERY, "precision": "fp8", "scratch_bytes": 1000}, ValueError, "scratch_bytes=1000 is too small for T=24, H=16, V=70 with precision='fp8'"),
    "soft: a quantised weight": ({"target": SOFT, "weight": quantize_weight(torch.randn(70, 16))}, TypeError, "weight is a QuantizedWeight, which only precision='fp8' takes"),
    "soft: in place": ({"target": SOFT, "inplace_backward": True}, ValueError, "inplace_backward=True takes targets that are ids; pass inplace_backward=False"),
}  # fmt: skip
OF_JAX = {
    "z_loss is 1-d": ({"z_loss": ones(24)}, ValueError, "z_loss must be a number or a 0-d array"),
    "label_smoothing is 2-d": ({"label_smoothing": EACH}, ValueError, "label_smoothing must be a number or a 0-d array"),
    "softcap is a bool array": ({"softcap": ones(dtype=bool)}, TypeError, "softcap must be a real number; got bool"),
    "layout of the transposed": ({"weight_layout": "hv"}, ValueError, "hidden has H=16 but weight has H=70; weight must be [H, V] with weight_layout='hv'; or pass weight_layout='vh'"),
    "temperature is complex": ({"temperature": Cast((2, 12), "complex64")}, TypeError, "temperature must be real"),
    "class_weight is int": ({"class_weight": ones(70, dtype=np.int32)}, TypeError, "class_weight must be float32; got int32"),
    "token_weight is complex": ({"token_weight": Cast((2, 12), "complex64")}, TypeError, "token_weight must be real"),
    "normalizer is complex": ({"normalizer": Cast((), "complex64")}, TypeError, "normalizer must be a real number"),
    "soft: backend": ({"target": K, "backend": "plain"}, ValueError, "backend must be one of 'auto', 'xla', 'mosaic_gpu', 'triton'; got 'plain'"),
}  # fmt: skip
FRAMEWORKS = {
    "torch": (onchip.torch, OF_TORCH, "torch.Tensor"),
    "jax": (onchip.jax, OF_JAX, "jax.Array or numpy.ndarray"),
}
WRONG = [
    (framework, op, name, row)
    for framework, (module, own, _) in FRAMEWORKS.items()
    for op in OPS
    for name, row in (BOTH | own).items()
    if {*row[0]} <= {*inspect.signature(getattr(module, op)).parameters}
]


def as_arrays(framework, x):
    """NumPy's arrays as the framework's, those of a `TopK` too."""
    if isinstance(x, TopK):
        return TopK(*(as_arrays(framework, y) for y in x))
    if isinstance(x, Cast):
        return torch.ones(x.shape, dtype=getattr(torch, x.dtype)) if framework == "torch" else jnp.ones(*x)
    if not isinstance(x, np.ndarray):
        return x
    return torch.from_numpy(x) if framework == "torch" else jnp.asarray(x)


def call(framework, op, **changes):
    """The op's arguments, and what calls it with them."""
    given = OPS[op].problem()
    if framework == "jax":
        given = {name: x.detach().numpy() for name, x in given.items()}
    return {name: as_arrays(framework, x) for name, x in (given | changes).items()}, getattr(
        FRAMEWORKS[framework][0], op
    )


@pytest.mark.parametrize(
    ("framework", "op", "row"), [pytest.param(f, op, row, id=f"{f}, {op}: {name}") for f, op, name, row in WRONG]
)
def test_wrong_call(framework, op, row):
    changes, kind, message = row
    message = message[framework] if isinstance(message, dict) else message
    given, function = call(framework, op, **changes)
    refused = partial(assert_refused, op, kind=kind, message=message.replace("ARRAY", FRAMEWORKS[framework][2]))
    refused(call=partial(function, **given))
    if framework == "jax":
        arrays = {name: x for name, x in given.items() if isinstance(x, jax.Array)}
        rest = {name: x for name, x in given.items() if name not in arrays}
        refused(call=lambda: jax.eval_shape(lambda arrays: function(**arrays, **rest), arrays))


def of_torch(loss, **changes):
    return loss.op(**loss.problem() | changes)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("op", OPS)
def test_an_unknown_argument(op, framework):
    given, function = call(framework, op, smoothing=0.1)
    with pytest.raises(TypeError, match="unexpected keyword"):
        function(**given)


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
            assert_refused(loss.op.__name__, partial(of_torch, loss, **{loss.ids: ids}, **options), ValueError, message)


@by_op
def test_a_device_without_a_backend_says_why(loss, monkeypatch):
    monkeypatch.setattr("onchip.frontend.torch_inputs.DEVICES", ("cuda",))
    said = re.escape("plain: it runs on cuda tensors, not on 'cpu'")
    with pytest.raises(ValueError, match=rf"{loss.op.__name__}: no backend can run this call \(.*{said}"):
        of_torch(loss)
    with pytest.raises(ValueError, match="backend 'plain' can't run this call: it runs on"):
        of_torch(loss, backend="plain")


@pytest.mark.parametrize("loss", [LCE, LLP], ids=["linear_cross_entropy", "linear_log_probs"])
def test_the_triton_backend_multiplies_in_16_bits(loss, monkeypatch):
    monkeypatch.setattr("onchip.vocab.triton.setup.device_refusal", lambda *_: None)
    reason = "backend 'triton' can't run this call: its products take bfloat16 or float16, not float32"
    assert_refused(loss.op.__name__, partial(of_torch, loss, backend="triton"), ValueError, reason)


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
        assert of_torch(loss, token_weight=torch.ones(2, 12).requires_grad_()).isfinite()


# ---------------------------------------------------------------------------------------------------------------- JAX


@pytest.mark.parametrize("strategy", ["auto", "stash", "recompute"])
def test_a_scratch_that_is_too_small_names_one_that_is_not(strategy):
    h, w, y = jnp.ones((200, 16)), jnp.ones((3000, 16)), jnp.zeros(200, jnp.int32)

    def step(budget):
        op = lambda h, w: onchip.jax.linear_cross_entropy(h, w, y, strategy=strategy, scratch_bytes=budget)  # noqa: E731
        return jax.eval_shape(jax.grad(op, (0, 1)), h, w)

    with pytest.raises(ValueError, match="raise scratch_bytes") as caught:
        step(300_000)
    for number in re.findall(r"(\d+) bytes for strategy", str(caught.value)):
        step(int(number))


def test_a_refused_backend_says_why(monkeypatch):
    monkeypatch.setattr(jax_xla, "refusal", lambda problem, platform, *_: f"not on {platform} in {problem.dtype}")
    given, function = call("jax", "linear_cross_entropy")
    said = re.escape("no backend can run this call (xla: not on cpu in float32; mosaic_gpu: ")
    with pytest.raises(ValueError, match=said):
        function(**given)
    with pytest.raises(ValueError, match="backend 'xla' can't run this call: not on cpu"):
        function(**given, backend="xla")


def test_the_platform_is_the_default_devices():
    assert platform() == jax.default_backend()
    with jax.default_device(jax.devices("cpu")[0]):
        assert platform() == "cpu"


def test_traced_values_are_not_checked():
    given, function = call("jax", "linear_cross_entropy")
    names = ("label_smoothing", "normalizer", "softcap", "temperature")
    shape = jax.eval_shape(lambda x: function(**given, **dict.fromkeys(names, x)), 2.0)
    assert shape.shape == ()
    assert shape.dtype == jnp.float32
